//! One plain function per parser: any bytes go in, nothing panics, and what parses prints and parses again to the same.
//!
//! ```text
//! bytes --parse--> value --print--> text --parse--> the same value
//!          \--> error --print--> text
//! ```
//!
//! `fuzz/` drives them with libFuzzer for as long as one likes; `tests/fuzz_smoke.rs` runs each for a moment on stable
//! with [`Mutator`], which starts from the seeds beside the functions.

use crossmesh_core::cluster::{Cluster, Topology};
use crossmesh_core::layout::{Layout, Rule};
use crossmesh_core::mesh::Mesh;
use crossmesh_core::program::doc::ProgramDoc;
use crossmesh_core::reshard::doc::{Figures, PlanDoc};
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{PlanOptions, Problem, Strategy, lower, plan};
use crossmesh_core::schedule::megatron::Layers;
use crossmesh_core::schedule::torch_csv::{self, Cells};
use crossmesh_core::schedule::{Costs, check, time};
use crossmesh_core::units::{Bytes, Rate, Seconds, parse_bytes, parse_rate, parse_seconds};
use crossmesh_core::verify::verify_program;

/// Beyond this many devices a case only parses and prints: the time is better spent on other cases.
const MAX_DEVICES_TO_VISIT: usize = 1 << 12;

pub const LAYOUT_SEEDS: &[&str] = &[
    "f32[8,6]@A{dp:2,tp:4}(tp,_)",
    "bf16[12,5,7]@A{dp:2,tp:3,sp:2}=0-3,11,9,4-9(dp+tp,_,sp)",
    "f32[8,6]@A{dp:2,tp:2}(tp[0,3,8],_ | sum dp)",
    "f8e4m3[6144,8]@B{tp:4}(tp of 4096+1024+1024,_)",
    "i64[]@A{tp:2}(| max tp)",
    "u8[18446744073709551615]@A{tp:4}(tp)",
    "f32[1024,1024,512]@A:2x4 S0RS1",
    "f32[8,6]@A:2x4=8-15 S01R",
    "f32[8,6]@A{dp:2,tp:4}[Shard(0), Partial(sum)]",
    "f32[8,6]@A{dp:2,tp:4}(Shard(dim=-1), Replicate())",
    "f32[8,6]@A{dp:2,tp:4}S(0)RP(max)",
    "f32[8,6]@A{dp:2,tp:4}P('dp', ('tp',), None)",
    "bool[0,1,2,3]@A{}(_,_,_,_)",
    "f32[8,6]@A{x:2}{0: [0:4, 0:6]; 1: [4:8, 0:3] [4:8, 3:6]}",
    "f32[8,6]@A{x:2,d:2}=4-7{0-1: [0:8, 0:3] by 6,1; 2,3: [0:8, 3:6] at 3 by 6,1 | sum d}",
    "u8[18446744073709551615]@A{x:2}{0: [0:9] at 18446744073709551600; 1: [0:2] by 9223372036854775807}",
    "f32[]@A{tp:2}{0: []; 1:}",
    "f32[4]@A{x:3}=0-2+64{0: [0:4] at 2 by 3}",
];

pub const MESH_SEEDS: &[&str] = &[
    "A{dp:2,tp:4}",
    "A{}",
    "B{tp:3}=4,6-7",
    "C:2x4",
    "C:2x2=3,0,1-2",
    "D{a:1024,b:1024}",
    "E{tp:2}=4294967293-4294967294",
    "F{tp:2}=0-1+64",
    "G{tp:2}=+4294967290",
];

pub const CLUSTER_SEEDS: &[&str] = &[
    "[[host]]\ndevices = 8\n",
    "latency = \"10us\"\nlocal_latency = '1us'\n[[host]]\ncount = 3\ndevices = 8\nnics = 4\nnic = \"400Gbit\"\nlocal = \"450GB/s\"\nmemory = \"80GiB\"\n",
    "[[host]]\ndevices = 1\nnics = 3\nnic_out = '25Gbit'\nnic_in = '10Gbit'\n[[host]]\ndevices = 3\nnics = 2\n",
    "[[host]]\ncount = 5\ndevices = 2\n[[tier]]\nname = 'leaf'\nhosts_per_group = 2\noversubscription = 2.0\n[[tier]]\ngroups = [[0,1],[4]]\nuplink = '1Gbit'\n",
];

pub const SCHEDULE_SEEDS: &[&str] = &[
    "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "0F0,,0I0,0W0\r\n,1F0,1I0,1W0\r\n",
    "0F0,3F0,(0F1;3B0)OVERLAP_F_B,3F1,0B0,3B1,0B1\n1F0,2F0,1F1,2B0,(2F1;1B0)OVERLAP_F_B,2B1,1B1\n",
    "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n",
    "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
];

pub const LAYERS_SEEDS: &[&str] =
    &["Et*3|(tt|)*29,m|L", "E||t|L", "Et|(t|)*30tL", "E(t|tt)*2,L", "Et*16|t*16|t*12,m,L"];

pub const UNITS_SEEDS: &[&str] = &[
    "10Gbit",
    "400mbit/s",
    "10 Gbps",
    "450GB/s",
    "1.5GiB/s",
    "256M",
    "64MiB",
    "1048576",
    "10us",
    "1.5 ms",
    "0",
];

pub fn layout(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<Layout>() {
        Ok(layout) => {
            let printed = layout.to_string();
            assert_eq!(printed.parse().as_ref(), Ok(&layout), "{text:?} prints as {printed:?}");
            visit_shards(&layout);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A layout that exists is a good one: every device has its boxes in places of their own, and where axes split the tensor
/// they hold each copy once together.
fn visit_shards(layout: &Layout) {
    let devices = layout.mesh().len();
    let boxes = match layout.by_axes() {
        Some(split) => split
            .splits()
            .iter()
            .map(|s| if let Rule::Parts(parts) = &s.rule { parts.len() } else { 1 })
            .product(),
        None => 1,
    };
    if usize::saturating_mul(boxes, devices) > MAX_DEVICES_TO_VISIT {
        return;
    }
    let mut held = 0u128;
    for position in 0..devices {
        let coord = layout.mesh().coord(position);
        assert!(layout.contribution_at(&coord) < layout.num_contributions());
        let shard = layout.shard_at(&coord);
        visit_memory(layout, &coord, shard.iter().filter(|r| !r.is_empty()).count());
        held += shard.iter().map(|r| u128::from(r.volume())).sum::<u128>();
    }
    if let Some(split) = layout.by_axes() {
        let parts: usize = (0..layout.shape().len()).map(|dim| split.num_parts(dim)).product();
        assert_eq!(held, u128::from(layout.volume()) * (devices / parts) as u128, "{layout}");
    }
    // Listed box by box, it is the same layout.
    let listed = layout.to_boxes().unwrap_or_else(|e| panic!("{layout} cannot be listed: {e}"));
    let printed = listed.to_string();
    assert_eq!(printed.parse().as_ref(), Ok(&listed), "{layout} is listed as {printed:?}");
}

fn visit_memory(layout: &Layout, coord: &[u32], boxes: usize) {
    let held = layout.held_at(coord);
    assert_eq!(held.len(), boxes, "{layout}");
    assert!(held.is_sorted_by_key(|h| h.offset_elements), "{layout}");
    let end = held.iter().map(|h| h.end_elements()).max().unwrap_or(0);
    assert_eq!(layout.shard_elements(coord), end, "{layout}");
    assert!(end.checked_mul(layout.dtype().bytes()).is_some(), "{layout}");
}

pub fn mesh(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<Mesh>() {
        Ok(mesh) => {
            let printed = mesh.to_string();
            assert_eq!(printed.parse().as_ref(), Ok(&mesh), "{text:?} prints as {printed:?}");
            assert!(mesh.listed_ranks().is_none_or(|ranks| ranks.len() == mesh.len()));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Nothing of ours writes cluster files; what parses must be a cluster that can be used.
pub fn cluster_toml(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let cluster = match Cluster::from_toml(text) {
        Ok(cluster) => cluster,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let good = |rate: f64| rate.is_finite() && rate > 0.0;
    for host in &cluster.hosts {
        assert!(host.devices > 0 && host.nics > 0 && good(host.local_bytes_per_s));
        assert!(good(host.out_bytes_per_s()) && good(host.in_bytes_per_s()));
    }
    assert!(
        !cluster.hosts.is_empty() && cluster.latency_s.is_finite() && cluster.local_latency_s.is_finite()
    );
    for group in cluster.tiers.iter().flat_map(|t| &t.groups) {
        assert!(!group.hosts.is_empty() && good(group.out_bytes_per_s) && good(group.in_bytes_per_s));
    }
    if cluster.num_devices() <= MAX_DEVICES_TO_VISIT {
        let topology = Topology::new(&cluster);
        assert_eq!(topology.num_ranks(), cluster.num_devices());
        assert!(topology.ports.iter().all(|p| good(p.out_bytes_per_s) && good(p.in_bytes_per_s)));
    }
}

/// A schedule in torch's CSV: what is read is written and read again to the same, and the checkers and the clock agree on it.
pub fn schedule_csv(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let schedule = match torch_csv::read("fuzz", text) {
        Ok(schedule) => schedule,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let written = torch_csv::write(&schedule, Cells::Compute).expect("what was read can be written");
    assert_eq!(torch_csv::read("fuzz", &written).expect("what was written can be read"), schedule);
    let checked = check(&schedule);
    let costs = Costs::even(schedule.placement().num_stages(), 1.0, 1.0, 1.0, 0.5).expect("costs are good");
    match (checked, time(&schedule, &costs)) {
        (Ok(()), timed) => assert!(timed.is_ok(), "{written}"),
        (Err(error), _) => assert!(!error.to_string().is_empty()),
    }
}

/// Megatron's layout strings: what unrolls, unrolls again to the same.
pub fn layers(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<Layers>() {
        Ok(layers) => assert_eq!(layers.stages().join("|").parse::<Layers>().as_ref(), Ok(&layers)),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// What prints is rounded to three digits; it reads back as near as that.
pub fn units(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let near = |again: f64, value: f64| {
        assert!((again - value).abs() <= 0.0056 * value, "{text:?} reads {value}, which prints as {again}");
    };
    match parse_bytes(text) {
        // A fraction of a unit rounds down to whole bytes, so add the one that may be lost.
        Ok(n) if n < 1024 => assert_eq!(parse_bytes(&Bytes(n).to_string()), Ok(n)),
        Ok(n) => near(parse_bytes(&Bytes(n).to_string()).expect("a printed size") as f64 + 0.5, n as f64),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    match parse_rate(text) {
        Ok(rate) => near(parse_rate(&Rate(rate).to_string()).expect("a printed rate"), rate),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    match parse_seconds(text) {
        // There is no smaller unit: half a nanosecond prints as `0.50 ns`, a thousandth as `0.00 ns`.
        Ok(time) if time < 1e-9 => assert!(parse_seconds(&Seconds(time).to_string()).is_ok()),
        Ok(time) => near(parse_seconds(&Seconds(time).to_string()).expect("a printed time"), time),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Plan files to start from: a plain plan, several tensors, partial sums, tiers.
pub fn plan_seeds() -> Vec<String> {
    let cluster = Cluster::from_toml(CLUSTER_SEEDS[3]).expect("a good seed");
    let cases = [
        (Strategy::Flow, Hosts::default(), vec![("f32[8,6]@A{tp:2}(tp,_)", "f32[8,6]@B{tp:3}(_,tp)")]),
        (
            Strategy::SendRecv,
            Hosts::default(),
            vec![("u8[5]@A{tp:2}(tp)", "u8[5]@A{tp:2}(_)"), ("f32[]@A{tp:2}()", "f32[]@B{}()")],
        ),
        (
            Strategy::Flow,
            Hosts::Described(cluster),
            vec![("f32[4]@A{dp:4}(_ | sum dp)", "f32[4]@B{tp:2}=6,7(tp)")],
        ),
        (
            Strategy::Flow,
            Hosts::default(),
            vec![("f32[8]@A{x:2}{0: [0:5]; 1: [3:8] by 2}", "f32[8]@B{x:2}{0: [0:2] [6:8] at 4; 1: [1:7]}")],
        ),
    ];
    cases.into_iter().map(|(strategy, hosts, pairs)| plan_seed(strategy, hosts, pairs)).collect()
}

fn plan_seed(strategy: Strategy, hosts: Hosts, pairs: Vec<(&str, &str)>) -> String {
    let parse = |text: &str| text.parse::<Layout>().expect("a good seed");
    let pairs = pairs.into_iter().map(|(src, dst)| (String::new(), parse(src), parse(dst))).collect();
    let problem = Problem::new(pairs, hosts).expect("a good seed");
    let plan = plan(&problem, &PlanOptions { strategy, ..PlanOptions::default() }).expect("a good seed");
    PlanDoc::new(&plan, Figures::default()).to_json()
}

/// A document may say less than a plan prints; the plan it gives must survive being printed.
pub fn plan_json(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let doc = match PlanDoc::parse(text) {
        Ok(doc) => doc,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let read = |doc: &PlanDoc| doc.to_plan().map(|plan| PlanDoc::new(&plan, Figures::default()));
    match read(&doc) {
        Ok(printed) => {
            let again = PlanDoc::parse(&printed.to_json()).expect("a printed plan parses");
            assert_eq!(again, printed, "{text}");
            assert_eq!(read(&again).expect("a printed plan is a plan"), printed, "{text}");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Programs of the plans above.
pub fn program_seeds() -> Vec<String> {
    let program = |text: String| {
        let plan = PlanDoc::parse(&text).and_then(|doc| doc.to_plan()).expect("a good seed");
        ProgramDoc::new(&lower(&plan), None).to_json()
    };
    plan_seeds().into_iter().map(program).collect()
}

/// A program survives being printed, and the verifier has an answer for whatever can be read.
pub fn program_json(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let program = match ProgramDoc::parse(text).and_then(|doc| doc.to_program()) {
        Ok(program) => program,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let printed = ProgramDoc::new(&program, None);
    let again = ProgramDoc::parse(&printed.to_json()).expect("a printed program parses");
    assert_eq!(again, printed, "{text}");
    if let Err(error) = verify_program(&program) {
        assert!(!error.to_string().is_empty());
    }
}

/// Spoils seeds, the same way every time: a xorshift generator and a handful of edits.
pub struct Mutator<'a> {
    seeds: &'a [&'a str],
    state: u64,
}

/// Pieces of every notation, and numbers at the edges.
const TOKENS: &[&str] = &[
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "@",
    ":",
    ",",
    "+",
    "-",
    "=",
    "|",
    "_",
    "x",
    "S",
    "R",
    "P",
    "'",
    "\"",
    " ",
    "\n",
    ".",
    " of ",
    "| sum ",
    ";",
    " at ",
    " by ",
    "[0:4]",
    "1: ",
    "{0: [0:1]}",
    "S01",
    "Shard(",
    "None",
    "0",
    "1",
    "255",
    "1048576",
    "1048577",
    "4294967295",
    "4294967296",
    "18446744073709551615",
    "18446744073709551616",
    "\u{0}",
    "é",
    "\u{2028}",
    "inf",
    "nan",
    "GiB",
    "Gbit",
    "us",
    "[[host]]\n",
    "[[tier]]\n",
    "groups = [[0]]\n",
    "uplink = '1bit'\n",
    "count = 2\n",
];

const NUMBERS: &[&str] = &[
    "0",
    "1",
    "2",
    "3",
    "7",
    "65535",
    "65536",
    "131072",
    "1048576",
    "4294967294",
    "4294967295",
    "18446744073709551615",
    "1e300",
    "-1",
    "0.1",
];

impl<'a> Mutator<'a> {
    pub fn new(seeds: &'a [&'a str], seed: u64) -> Self {
        Self { seeds, state: seed.max(1) }
    }

    fn next(&mut self, below: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % below.max(1) as u64) as usize
    }

    /// A seed with up to five edits.
    pub fn draw(&mut self) -> Vec<u8> {
        let mut data = self.seeds[self.next(self.seeds.len())].as_bytes().to_vec();
        for _ in 0..self.next(6) {
            self.edit(&mut data);
        }
        data
    }

    fn edit(&mut self, data: &mut Vec<u8>) {
        let at = self.next(data.len() + 1);
        let end = at + self.next((data.len() - at).min(8) + 1);
        match self.next(7) {
            0 => drop(data.drain(at..end)),
            1 => {
                let token = TOKENS[self.next(TOKENS.len())];
                data.splice(at..at, token.bytes());
            }
            2 => {
                let token = TOKENS[self.next(TOKENS.len())];
                data.splice(at..end, token.bytes());
            }
            3 => {
                let copy = data[at..end].to_vec();
                data.splice(at..at, copy);
            }
            4 => {
                let other = self.seeds[self.next(self.seeds.len())].as_bytes();
                let from = self.next(other.len() + 1);
                data.splice(at.., other[from..].iter().copied());
            }
            5 => {
                // The next number becomes another one: what is well-formed stays so.
                let digit = |b: &u8| b.is_ascii_digit();
                let start = at + data[at..].iter().take_while(|b| !digit(b)).count();
                let len = data[start..].iter().take_while(|b| digit(b)).count();
                let number = NUMBERS[self.next(NUMBERS.len())];
                data.splice(start..start + len, number.bytes());
            }
            _ => {
                let byte = self.next(256) as u8;
                data.splice(at..end.min(at + 1), [byte]);
            }
        }
    }
}
