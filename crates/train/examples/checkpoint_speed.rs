//! How long a checkpoint takes: the copy that training waits for, writing beside it, checking and loading.
//!
//! ```text
//! cargo run --release -p crossmesh-train --example checkpoint_speed -- FOLDER [MEBIBYTES]
//! ```
//!
//! One rank saves parameters and two moments, so many MiB in all, in weights of 4 MiB; then it loads them, and then half of them as a rank of two along
//! `tp` and ZeRO. A plain copy, a plain hash and a plain write of as many bytes stand beside it.
#![allow(clippy::print_stdout, clippy::disallowed_methods)]

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Instant;

use crossmesh_core::id::Rank;
use crossmesh_train::checkpoint::{
    Checkpoint, Convert, Facts, Moments, OptimizerFacts, Snapshot, StageState, StageTarget, Store,
};
use crossmesh_train::deal::{Deal, Share};
use crossmesh_train::parameter::{Declaration, Init, Parameter, Parameters};
use crossmesh_train::stage_rank::StageRank;

const NAMES: &[&str] = &["exp_avg", "exp_avg_sq"];

fn parameters(place: &StageRank, count: usize) -> Vec<Parameter> {
    let mut parameters = Parameters::new::<f32>(place);
    for i in 0..count {
        let (name, init) = (format!("h.{i}.weight"), Init::Zeros);
        let (shape, split) = (&[1024, 1024][..], [(i % 2, "tp")]);
        let (decay, summed_over) = (true, &[][..]);
        parameters.declare(Declaration { name, shape, split: &split, init, decay, summed_over });
    }
    parameters.into_list()
}

fn timed<T>(what: &str, bytes: u64, f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = f();
    let seconds = start.elapsed().as_secs_f64();
    println!("{what:44} {seconds:8.3} s  {:6.2} GB/s", bytes as f64 / seconds / 1e9);
    result
}

fn save(store: &Store, count: usize) -> u64 {
    let place = StageRank::alone();
    let parameters = parameters(&place, count);
    let values: Vec<f32> = (0..count << 20).map(|i| i as f32).collect();
    let bytes = 3 * size_of_val(&values[..]) as u64;
    timed("plain copy", bytes, || std::hint::black_box([values.clone(), values.clone(), values.clone()]));
    let raw: &[u8] = bytemuck::cast_slice(&values);
    timed("plain hash, one thread", bytes, || {
        (0..3).for_each(|_| _ = std::hint::black_box(blake3::hash(raw)))
    });
    let path = store.folder().join("plain");
    std::fs::create_dir_all(store.folder()).expect("a folder");
    timed("plain write and fsync", bytes, || {
        let mut file = std::fs::File::create(&path).expect("a file");
        (0..3).for_each(|_| file.write_all(raw).expect("room"));
        file.sync_all().expect("a disk");
    });
    std::fs::remove_file(&path).expect("the file");
    for _ in 0..2 {
        let moments = Moments {
            names: NAMES,
            values: vec![&values[..], &values[..]],
            share: Share::whole(values.len()),
        };
        let (parameters, values, elsewhere) = (&parameters[..], &values[..], &[][..]);
        let share = Share::whole(values.len());
        let state = StageState { parameters, place: &place, values, share, moments, elsewhere };
        let snapshot = timed("snapshot", bytes, || Snapshot::take(1, Rank(0), &[state]).expect("a snapshot"));
        let report = timed("write beside training", bytes, || store.write(snapshot).report());
        let moments = NAMES.iter().map(|n| n.to_string()).collect();
        let optimizer = Some(OptimizerFacts { kind: "adamw".into(), steps: 1, moments });
        let (model, run) = (serde_json::Value::Null, serde_json::Value::Null);
        let facts = Facts { step: 1, samples: 1, seed: 1, model, run, optimizer };
        timed("commit", bytes, || store.commit(&facts, &[report]).expect("a checkpoint"));
    }
    bytes
}

fn load(checkpoint: &Checkpoint, what: &str, place: &StageRank, count: usize, zero: bool) {
    let parameters = parameters(place, count);
    let len = parameters.last().map_or(0, |p| p.range.end);
    let axes = if zero { place.data_axes() } else { vec![] };
    let share = Deal::new(place.clone(), &[0, len]).share(&axes);
    let kept = share.runs.len();
    let mut values = vec![0.0f32; len];
    let mut moments = [vec![0.0; kept], vec![0.0; kept]];
    let bytes = 4 * (len + 2 * kept) as u64;
    let restored = timed(what, bytes, || {
        let values_of = moments.iter_mut().map(Vec::as_mut_slice).collect();
        let moments = Some(Moments { names: NAMES, values: values_of, share });
        let target = StageTarget { moments, ..StageTarget::of_weights(&parameters, place, &mut values) };
        checkpoint.load(&mut [target], Convert::No).unwrap_or_else(|error| panic!("{error}"))
    });
    println!("{:44} {:8.2} of what it needs", "  read", restored.bytes_read as f64 / bytes as f64);
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let folder = args.first().expect("a folder");
    let mebibytes: usize = args.get(1).map_or(768, |n| n.parse().expect("a number"));
    let count = mebibytes / 12;
    let store = Store::new(Path::new(folder).join("checkpoint-speed"), NonZeroUsize::MIN);
    let bytes = save(&store, count);
    let path = store.latest().expect("a folder").expect("a checkpoint");
    let open = || Checkpoint::open(&path).unwrap_or_else(|error| panic!("{error}"));
    let checkpoint = timed("open", bytes, open);
    timed("verify, all cores", bytes, || checkpoint.verify().unwrap_or_else(|error| panic!("{error}")));
    load(&checkpoint, "load, same layout", &StageRank::alone(), count, false);
    let place = StageRank::new("A{dp:2,tp:2}".parse().expect("a mesh"), 1).expect("a place");
    load(&checkpoint, "load, dp 2 tp 2 zero", &place, count, true);
    std::fs::remove_dir_all(store.folder()).expect("the folder");
}
