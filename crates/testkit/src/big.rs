//! Large random reshards, by seed: meshes of up to 4 hosts with up to 8 devices, 1 to 3 dims that do not divide
//! evenly, axes left over for replicas, 64 MiB and more.

/// SplitMix64: small, seeded, and the same everywhere.
#[derive(Debug, Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in `low..=high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next_u64() % (high - low + 1)
    }
}

/// Source and destination of a large reshard, in our notation. Hosts are as the notation's defaults give them.
pub fn pair(seed: u64) -> (String, String) {
    let mut rng = Rng(seed);
    let dims = rng.within(1, 3) as usize;
    let shape = shape(&mut rng, dims);
    let src = layout(&mut rng, "A", &shape, None);
    // One in five stays on the same devices, one in five on some of them.
    let same = rng.within(0, 4);
    let dst = match same {
        0 => src.clone(),
        _ => layout(&mut rng, "B", &shape, None),
    };
    if same == 0 {
        let (mesh, axes) = (src.split('@').nth(1).expect("a mesh"), src.matches(':').count());
        let mesh = mesh.split('(').next().expect("a mesh before the splits");
        let splits = splits(&mut rng, dims, axes);
        return (src.clone(), format!("{}@{mesh}({splits})", src.split('@').next().expect("a dtype")));
    }
    (src, dst)
}

/// Lengths that multiply to at least 16 Mi elements, none of them round.
fn shape(rng: &mut Rng, dims: usize) -> Vec<u64> {
    let target: u64 = (16 << 20) + rng.within(0, 16 << 20);
    let mut shape = vec![];
    let mut left = target;
    for dim in (1..dims).rev() {
        let even = (left as f64).powf(1.0 / (dim as f64 + 1.0)) as u64;
        let len = rng.within(even / 8 + 1, even * 2);
        shape.push(len);
        left = left.div_ceil(len);
    }
    shape.push(left);
    shape
}

fn layout(rng: &mut Rng, name: &str, shape: &[u64], devices_per_host: Option<u64>) -> String {
    let hosts = rng.within(1, 4);
    let devices = devices_per_host.unwrap_or_else(|| rng.within(1, 8));
    let lens: Vec<u64> = shape.to_vec();
    let shape: Vec<String> = lens.iter().map(u64::to_string).collect();
    let splits = splits(rng, lens.len(), 2);
    format!("f32[{}]@{name}{{a0:{hosts},a1:{devices}}}({splits})", shape.join(","))
}

/// Each axis splits a dim, or with a chance of a quarter none.
fn splits(rng: &mut Rng, dims: usize, axes: usize) -> String {
    let mut terms: Vec<Vec<String>> = vec![vec![]; dims];
    for axis in 0..axes {
        if rng.within(0, 3) > 0 {
            let dim = rng.within(0, dims as u64 - 1) as usize;
            let at = rng.within(0, terms[dim].len() as u64) as usize;
            terms[dim].insert(at, format!("a{axis}"));
        }
    }
    let terms: Vec<String> =
        terms.into_iter().map(|t| if t.is_empty() { "_".into() } else { t.join("+") }).collect();
    terms.join(",")
}
