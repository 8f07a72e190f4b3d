//! Large random reshards, by seed: meshes of up to 4 hosts with up to 8 devices, 1 to 3 dims that do not divide
//! evenly, axes left over for replicas, 64 MiB and more.

use crate::seed::Seed;

/// Source and destination of a large reshard, in our notation. Hosts are as the notation's defaults give them. One in
/// five stays on its mesh, one in five moves to a mesh that shares devices with it.
pub fn pair(seed: u64) -> (String, String) {
    let mut seed = Seed(seed);
    let num_dims = within(&mut seed, 1, 3) as usize;
    let shape: Vec<String> = shape(&mut seed, num_dims).iter().map(u64::to_string).collect();
    let tensor = format!("f32[{}]", shape.join(","));
    let mut draw_mesh = |name: &str| {
        let (hosts, devices) = (within(&mut seed, 1, 4), within(&mut seed, 1, 8));
        (format!("{name}{{a0:{hosts},a1:{devices}}}"), hosts * devices)
    };
    let (a, len_a) = draw_mesh("A");
    let (b, len_b) = draw_mesh("B");
    let b = match within(&mut seed, 0, 4) {
        0 => a.clone(),
        1 => {
            let first = within(&mut seed, 0, len_a - 1);
            format!("{b}={first}-{}", first + len_b - 1)
        }
        _ => b,
    };
    let src = format!("{tensor}@{a}({})", splits(&mut seed, num_dims));
    let dst = format!("{tensor}@{b}({})", splits(&mut seed, num_dims));
    (src, dst)
}

fn within(seed: &mut Seed, low: u64, high: u64) -> u64 {
    low + seed.draw() % (high - low + 1)
}

/// Lengths that multiply to at least 16 Mi elements, none of them round.
fn shape(seed: &mut Seed, num_dims: usize) -> Vec<u64> {
    let mut left: u64 = (16 << 20) + within(seed, 0, 16 << 20);
    let mut shape = vec![];
    for dim in (1..num_dims).rev() {
        let even = (left as f64).powf(1.0 / (dim as f64 + 1.0)) as u64;
        let len = within(seed, even / 8 + 1, even * 2);
        shape.push(len);
        left = left.div_ceil(len);
    }
    shape.push(left);
    shape
}

/// Each of the two axes splits a dim, or with a chance of a quarter none.
fn splits(seed: &mut Seed, num_dims: usize) -> String {
    let mut terms: Vec<Vec<String>> = vec![vec![]; num_dims];
    for axis in 0..2 {
        if !seed.one_in(4) {
            let dim = seed.below(num_dims);
            let at = seed.below(terms[dim].len() + 1);
            terms[dim].insert(at, format!("a{axis}"));
        }
    }
    let terms = terms.into_iter().map(|t| if t.is_empty() { "_".into() } else { t.join("+") });
    terms.collect::<Vec<String>>().join(",")
}
