//! Large random partial sums, by seed: over 2 to 1,024 devices on up to 128 hosts, 64 MiB and more.

use crate::seed::Seed;

/// Source and destination of a large sum, in our notation. One in three stays on its mesh, one in six moves to a mesh
/// that shares devices with it.
pub fn pair(seed: u64) -> (String, String) {
    let mut seed = Seed(seed.wrapping_mul(0x5851_f42d_4c95_7f2d));
    let most = 1 << (1 + seed.below(10));
    let (hosts, devices, summed) = loop {
        let devices = 1 + seed.below(8);
        let hosts = 1 + seed.below((most / devices).clamp(1, 128));
        let summed: Vec<usize> = (0..2).filter(|_| !seed.one_in(3)).collect();
        let parts: usize = summed.iter().map(|&axis| [hosts, devices][axis]).product();
        if parts > 1 && hosts * devices <= most {
            break (hosts, devices, summed);
        }
    };
    let shape: Vec<u64> = match seed.one_in(2) {
        true => vec![(16 << 20) + seed.draw() % (16 << 20)],
        false => {
            let rows = 1024 + seed.draw() % 8192;
            vec![rows, ((16 << 20) + seed.draw() % (16 << 20)).div_ceil(rows)]
        }
    };
    let text: Vec<String> = shape.iter().map(u64::to_string).collect();
    let tensor = format!("f32[{}]", text.join(","));
    let mesh_a = format!("A{{a0:{hosts},a1:{devices}}}");
    let free: Vec<usize> = (0..2).filter(|a| !summed.contains(a)).collect();
    let names: Vec<String> = summed.iter().map(|a| format!("a{a}")).collect();
    let op = seed.pick(&["sum", "sum", "max"]);
    let src =
        format!("{tensor}@{mesh_a}({} | {op} {})", splits(&mut seed, shape.len(), &free), names.join("+"));
    let (b_hosts, b_devices) = (1 + seed.below(8), 1 + seed.below(8));
    let mesh_b = match seed.below(6) {
        0 | 1 => mesh_a,
        2 => {
            let first = seed.below(hosts * devices);
            format!("B{{a0:{b_hosts},a1:{b_devices}}}={first}-{}", first + b_hosts * b_devices - 1)
        }
        _ => format!("B{{a0:{b_hosts},a1:{b_devices}}}"),
    };
    let dst = format!("{tensor}@{mesh_b}({})", splits(&mut seed, shape.len(), &[0, 1]));
    (src, dst)
}

/// Each of these axes splits a dim, or with a chance of a quarter none.
fn splits(seed: &mut Seed, num_dims: usize, axes: &[usize]) -> String {
    let mut terms: Vec<Vec<String>> = vec![vec![]; num_dims];
    for axis in axes {
        if !seed.one_in(4) {
            terms[seed.below(num_dims)].push(format!("a{axis}"));
        }
    }
    let terms = terms.into_iter().map(|t| if t.is_empty() { "_".into() } else { t.join("+") });
    terms.collect::<Vec<String>>().join(",")
}
