//! Whole configs: what they resolve to, and how they are refused.

use super::*;
use crate::job::Job;

const THREE: &str = "[model]\nwidth = 96\nlayers = 6\nheads = 6\n[train]\nbatch = 16\nmicrobatches = 4\n\
    [[stage]]\nmesh = \"dp 2, tp 2\"\n[[stage]]\nmesh = \"dp 4\"\n[[stage]]\nmesh = \"tp 3\"\n";

fn job(text: &str, sets: &[&str]) -> Result<Job, String> {
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    let config = Config::read("a.toml", text, &sets).map_err(|e| e.to_string())?;
    let resolved = resolve(&config, Some(64), None).map_err(|e| e.to_string())?;
    resolved.job.check(resolved.work.len()).map_err(|e| e.to_string())?;
    Ok(resolved.job)
}

fn refused(text: &str, sets: &[&str]) -> String {
    job(text, sets).expect_err("should be refused")
}

#[test]
fn nothing_at_all_is_a_config() {
    let job = job("", &[]).unwrap();
    assert_eq!((job.ranks().len(), job.stages.len(), job.stages[0].clone(), job.samples), (1, 1, 0..6, 4));
    assert_eq!(job.schedule.num_microbatches(), 4);
    assert_eq!(job.update.clip, Some(1.0));
}

#[test]
fn three_unequal_meshes_are_an_ordinary_config() {
    let job = job(THREE, &[]).unwrap();
    let meshes: Vec<String> = job.teams.iter().map(|t| t.mesh.to_string()).collect();
    assert_eq!(meshes, ["S0{dp:2,tp:2}", "S1{dp:4}", "S2{tp:3}"]);
    let ranks: Vec<Vec<u32>> = job.teams.iter().map(|t| t.ranks.iter().map(|r| r.0).collect()).collect();
    assert_eq!(ranks, [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9, 10]]);
    let hosts: Vec<u32> = job.cluster.hosts.iter().map(|h| h.devices).collect();
    assert_eq!(hosts, [2, 2, 4, 3]);
    assert_eq!(job.stages.len(), 3);
}

#[test]
fn given_layers_are_kept_and_the_ends_come_with_them() {
    let set = ["stage.0.layers=1", "stage.1.layers=3", "stage.2.layers=2"];
    assert_eq!(job(THREE, &set).unwrap().stages, [0..2, 2..5, 5..8]);
    assert!(
        refused(THREE, &set[..2]).contains("stage.2.layers: 2 of 3 stages say how many layers they have")
    );
    let sum = refused(THREE, &["stage.0.layers=1", "stage.1.layers=3", "stage.2.layers=3"]);
    assert!(sum.contains("the stages have 7 blocks together, and the model has 6"), "{sum}");
    let none = refused(THREE, &["stage.0.layers=3", "stage.1.layers=0", "stage.2.layers=3"]);
    assert!(none.contains("stage.1.layers: stage 1 of the model would have nothing to compute"), "{none}");
}

#[test]
fn what_is_dealt_out_is_by_stage_or_by_axes() {
    use crate::job::{Dealt, Over};
    let two = "[train]\nbatch = 16\nmicrobatches = 2\n[[stage]]\nmesh = \"dpo 2, dpi 2, tp 2\"\n";
    let dealt = |sets: &[&str]| job(two, sets).unwrap().update.dealt;
    assert_eq!(dealt(&["optimizer.zero=2"]), Dealt::zero(2));
    let inner = Over::Axes(vec!["dpi".into()]);
    let wanted = Dealt { parameters: inner.clone(), ..Dealt::zero(1) };
    assert_eq!(dealt(&["optimizer.zero=1", "optimizer.parameters_over=dpi"]), wanted);
    let error = refused(two, &["optimizer.gradients_over=dpo", "optimizer.states_over=dpi"]);
    assert!(error.contains("optimizer.gradients_over: gradients would be dealt out over `dpo`"), "{error}");
    assert!(error.contains("hint: a rank updates what it keeps states of"), "{error}");
    let error = refused(THREE, &["optimizer.states_over=dpi"]);
    assert!(error.contains("optimizer.states_over: no stage's mesh has the axis `dpi`"), "{error}");
    let error = refused(two, &["optimizer.states_over=ep"]);
    assert!(error.contains("`ep` is no data axis"), "{error}");
    let mixed = format!("{two}[[stage]]\nmesh = \"dp 2\"\n");
    assert!(job(&mixed, &["optimizer.states_over=dpi"]).is_ok(), "the second stage deals nothing out");
    assert!(refused(two, &["optimizer.zero=4"]).contains("from 0 to 3"));
}

#[test]
fn a_budget_becomes_limits_of_stages() {
    use crate::stage::Recompute;
    let text = "[model]\nkind = \"llama\"\nlayers = 4\n[train]\nbatch = 16\nmicrobatches = 4\n[[stage]]\n[[stage]]\nmesh = \"tp 2\"\n";
    let (plain, rich) = (job(text, &[]).unwrap(), job(text, &["train.activation_budget=1GiB"]).unwrap());
    assert_eq!(rich.times, plain.times, "nothing is computed again");
    let poor = job(text, &["train.activation_budget=4100KiB"]).unwrap();
    let limits = |job: &Job| -> Vec<u64> {
        let of = |r: &Recompute| if let Recompute::Within(limit) = r { *limit } else { panic!("{r:?}") };
        job.recompute.iter().map(of).collect()
    };
    let (few, many) = (limits(&poor), limits(&rich));
    // The first stage has two microbatches under way.
    assert!(2 * few[0] <= 4100 << 10 && few[1] <= 4100 << 10, "{few:?} {many:?}");
    assert!(few.iter().zip(&many).any(|(few, many)| few < many), "{few:?} {many:?}");
    let slower = |s: usize| poor.times[s].b_ns > plain.times[s].b_ns;
    assert!((0..2).all(|s| (few[s] < many[s]) == slower(s)), "{:?}", poor.times);
    let error = refused(text, &["train.activation_budget=1KiB"]);
    assert!(error.contains("train.activation_budget: a rank of stage 0 remembers"), "{error}");
    let error = refused(text, &["train.activation_budget=1GiB", "train.recompute=full"]);
    assert!(error.contains("leave one of them out"), "{error}");
}

#[test]
fn chunks_share_a_device() {
    let text = "[model]\nlayers = 6\n[pipeline]\nschedule = \"interleaved\"\n[[stage]]\nrepeat = 2\n";
    let four = job(text, &[]).unwrap();
    assert_eq!((four.stages.len(), four.teams.len()), (4, 2));
    let v = job(text, &["pipeline.schedule=zbv", "stage.layers=3"]).unwrap();
    assert_eq!(v.stages, [0..3, 3..5, 5..6, 6..8], "device 0 has the ends of the V");
    let lists = job(text, &["pipeline.schedule=zbv", "stage.layers=[1, 2]"]).unwrap();
    assert_eq!(lists.stages, [0..2, 2..3, 3..5, 5..8]);
    let three = refused(text, &["stage.layers=[1, 1, 1]"]);
    assert!(three.contains("these are 3 numbers, and the device has 2 chunks"), "{three}");
    assert!(refused(text, &["train.microbatches=3", "train.batch=3"]).contains("train.microbatches: "));
    assert!(refused(text, &["pipeline.schedule=1f1b", "pipeline.chunks=2"]).contains("pipeline.chunks: "));
}

#[test]
fn every_named_schedule_can_be_asked_for() {
    for name in crossmesh_core::schedule::Name::ALL {
        let set =
            [format!("pipeline.schedule={name}"), "train.microbatches=8".into(), "train.batch=16".into()];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let job =
            job("[model]\nlayers = 8\n[[stage]]\nrepeat = 4", &set).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(job.schedule.name(), name.name());
    }
}

#[test]
fn impossible_values_are_named_with_their_line() {
    let heads = refused("[model]\nwidth = 96\nheads = 5", &[]);
    assert!(
        heads.starts_with("a.toml:3: model.heads: 5: 96 columns do not divide among them\nhint: "),
        "{heads}"
    );
    let batch = refused("[train]\nbatch = 15\nmicrobatches = 4", &[]);
    assert_eq!(
        batch,
        "a.toml:2: train.batch: 15 samples do not divide among 4 microbatches\nhint: use 12 or 16"
    );
    let dp = refused("[[stage]]\nmesh = \"dp 8\"", &[]);
    assert!(dp.starts_with("a.toml:2: stage.0.mesh: stage 0 splits the 4 samples"), "{dp}");
    assert!(dp.contains("hint: train.batch = 32 gives every rank one"), "{dp}");
    let llama = "[model]\nkind = \"llama\"\nwidth = 96\nheads = 12\nkv_heads = 3\n[[stage]]\nmesh = \"tp 4\"";
    let shared = refused(llama, &[]);
    assert_eq!(
        shared,
        "a.toml:7: stage.0.mesh: model.kv_heads = 3: 4 ranks along tp are more than there are heads, and no multiple of them\nhint: use up to 3 ranks along tp, or a multiple such as 6"
    );
    let odd = refused(&llama.replace("kv_heads = 3", "kv_heads = 5"), &[]);
    assert!(odd.starts_with("a.toml:5: model.kv_heads: 5: 12 heads of queries do not divide"), "{odd}");
    let mesh = job(llama, &["stage.0.mesh=tp 6"]).unwrap().teams[0].mesh.to_string();
    assert!(mesh.ends_with("{kv:3,g:2}"), "{mesh}");
    let vocab = refused("[model]\nvocab = 8", &[]);
    assert!(vocab.starts_with("a.toml:2: model.vocab: the data has 64 tokens"), "{vocab}");
    let other = refused("[model]\nkind = \"u-transformer\"\ntied = true", &[]);
    assert_eq!(
        other,
        "a.toml:3: model.tied: model of kind \"u-transformer\" has no such key\nhint: it is for the kind gpt and llama"
    );
    let many = refused("[model]\nlayers = 1\n[[stage]]\nrepeat = 9", &[]);
    assert!(many.contains("the model has 3 units, too few for 9 stages"), "{many}");
    let warmup = refused("[optimizer]\nwarmup = 200", &[]);
    assert!(
        warmup.contains("a.toml:2: optimizer.warmup: the rate would still rise after 100 steps"),
        "{warmup}"
    );
    let floor = refused("[optimizer]\nschedule = \"constant\"\nfloor = 0.1", &[]);
    assert!(floor.contains("a.toml:3: optimizer.floor: a constant rate does not fall"), "{floor}");
    let text = refused("[data]\nkind = \"text\"", &[]);
    assert!(text.starts_with("a.toml:1: data.path: data of kind \"text\" comes from files"), "{text}");
}

#[test]
fn a_printed_config_reads_back_as_the_same_one() {
    let unet = "[model]\nkind = \"u-transformer\"\nbase = 16\n[[stage]]\nmesh = \"tp 2\"\n[log]\nfolder = \"x \\\"y\\\"\"";
    for text in ["", THREE, unet] {
        let config = Config::read("runs/a.toml", text, &["optimizer.clip=0.5".to_string()]).unwrap();
        let printed = config.to_toml(&[("model.vocab", "64".into())]);
        let again = Config::read("b/a.toml", &printed, &[]).unwrap_or_else(|e| panic!("{e}\n{printed}"));
        assert_eq!(again.to_toml(&[]), printed);
        assert_eq!(
            (again.train, again.optimizer, again.stages.len()),
            (config.train, config.optimizer, config.stages.len())
        );
        assert_eq!((again.log, again.saving, again.pipeline), (config.log, config.saving, config.pipeline));
    }
    let config = Config::read("runs/mini.toml", "", &[]).unwrap();
    assert_eq!(
        (config.log.folder.as_str(), config.saving.folder.as_str()),
        ("runs/mini", "runs/mini/checkpoints")
    );
}

#[test]
fn rates_follow_the_words() {
    let rate = |text: &str| Config::read("a.toml", text, &[]).unwrap().optimizer.update.rate;
    let constant = rate("[optimizer]\nschedule = \"constant\"\nlearning_rate = 0.5\nwarmup = 3");
    assert_eq!([0, 3, 99].map(|step| constant.at(step)), [0.125, 0.5, 0.5]);
    let cosine = rate("[optimizer]\nlearning_rate = 1.0");
    assert_eq!((cosine.at(0), cosine.at(100)), (1.0, 0.1));
}

#[test]
fn weights_may_be_shared_out_instead_of_work() {
    // A vocabulary that weighs more than the blocks, and is only looked up in the first stage.
    let text = "[model]\nvocab = 20000\nwidth = 64\nlayers = 6\ntied = false\n[[stage]]\nrepeat = 2";
    let by = |balance: &str| job(text, &[&format!("pipeline.balance={balance}")]).unwrap().stages;
    assert!(by("work")[0].len() > by("parameters")[0].len(), "{:?} {:?}", by("work"), by("parameters"));
}
