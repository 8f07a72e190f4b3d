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

/// B takes as much longer as the derived passes compute again: of attention also the products that make queries, keys and values.
#[test]
fn what_is_computed_again_is_charged_to_b() {
    use crate::chain::Outline;
    use crate::kernels::cpu::Cpu;
    let layers = ["stage.0.layers=1", "stage.1.layers=3", "stage.2.layers=2"];
    let with = |recompute: &str| {
        let sets: Vec<String> = layers
            .iter()
            .map(|s| s.to_string())
            .chain([format!("train.recompute=\"{recompute}\"")])
            .collect();
        let config = Config::read("a.toml", THREE, &sets).unwrap();
        let rate = config.operations_per_s();
        (resolve(&config, Some(64), None).unwrap(), rate)
    };
    let (plain, rate) = with("none");
    let config = |r: &Resolved| match &r.model {
        AnyModel::Gpt(gpt) => gpt.config().clone(),
        AnyModel::Unet(_) => unreachable!("a GPT"),
    };
    let gpt = config(&plain);
    for recompute in ["attention", "full"] {
        let (resolved, _) = with(recompute);
        let model = resolved.model.with_kernels::<Cpu<f32>>();
        for (stage, units) in resolved.job.schedule.placement().stages().zip(&resolved.job.stages) {
            let setup = crate::wiring::setup(&resolved.job, stage, 0).unwrap();
            let outline = Outline::new(&*model, units.clone(), &setup).unwrap();
            let [before, now] = [&plain, &resolved].map(|r| r.job.times[stage.index()]);
            let wanted = (outline.again / rate * 1e9).round();
            let more = now.b_ns as f64 - before.b_ns as f64;
            assert!((more - wanted).abs() <= 1.0 && wanted > 0.0, "{recompute} {stage}: {more} for {wanted}");
            assert_eq!((now.f_ns, now.w_ns), (before.f_ns, before.w_ns));
            if (recompute, stage.0) == ("attention", 0) {
                // One block, on a rank with half of the samples of a microbatch and half of the heads: products and attention, two operations
                // each, and 8 for each of the 4 d elements that are made.
                let (rows, s, d) = (2.0 * gpt.context as f64, gpt.context as f64, gpt.width as f64);
                assert_eq!(outline.again, rows * (2.0 * 3.0 * d * d + 2.0 * s * d + 8.0 * 4.0 * d) / 2.0);
            }
        }
    }
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
    let error =
        refused(two, &["optimizer.zero=1", "optimizer.states_over=dpi", "optimizer.parameters_over=dpo"]);
    assert!(
        error.contains("optimizer.parameters_over: parameters would be dealt out over `dpo` of stage 0, and states are not"),
        "{error}"
    );
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
    // The bytes that it names are enough, and one less is not.
    let least = error.split("hint: use \"").nth(1).unwrap().split("B\"").next().unwrap();
    let least: u64 = least.parse().unwrap();
    assert!(error.contains(&format!(" {least} B at least")), "{error}");
    let with = |bytes: u64| job(text, &[&format!("train.activation_budget={bytes}B")]);
    assert!(with(least - 1).is_err());
    // Another stage may need more than the first, and says so.
    let enough = match with(least) {
        Ok(_) => least,
        Err(error) => {
            error.split("hint: use \"").nth(1).unwrap().split("B\"").next().unwrap().parse().unwrap()
        }
    };
    with(enough).unwrap();
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
    let scaling =
        |numbers: &str| refused(&llama.replace("tp 4", "tp 3"), &[&format!("model.rope_scaling={numbers}")]);
    assert!(scaling("[8, 1, 4]").contains("model.rope_scaling: 3 numbers are given\nhint: there are four: "));
    let falling = scaling("[8, 4, 1, 8192]");
    assert!(
        falling.contains("model.rope_scaling: 8, 4, 1, 8192: ") && falling.contains("hint: "),
        "{falling}"
    );
    let residual = refused(llama, &["model.residual=sideways"]);
    assert!(residual.contains("model.residual: ") && residual.contains("ladder"), "{residual}");
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

#[test]
fn a_preset_says_what_other_keys_are_without() {
    let parameters = |text: &str, sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        let config = Config::read("a.toml", text, &sets).unwrap();
        // Printed and read again it is the same model.
        let again = Config::read("a.toml", &config.to_toml(&[]), &[]).unwrap();
        assert_eq!(again.model, config.model);
        resolve(&config, Some(64), None).unwrap().parameters()
    };
    assert_eq!(parameters("[model]\npreset = \"llama3-8b\"", &[]), 8_030_261_248);
    for name in preset::NAMES {
        // As published.
        let count = match *name {
            "gpt2" => 124_439_808,
            "gpt2-medium" => 354_823_168,
            "gpt2-large" => 774_030_080,
            "gpt2-xl" => 1_557_611_200,
            name => crossmesh_core::models::Model::preset(name).unwrap().parameters(),
        };
        assert_eq!(parameters(&format!("[model]\npreset = \"{name}\""), &[]), count, "{name}");
    }
    let small = ["model.width=64", "model.layers=2", "model.heads=8", "model.vocab=100", "model.hidden=32"];
    let of_block = 64 * (2 * 64 + 2 * 64 + 3 * 32 + 2);
    assert_eq!(parameters("[model]\npreset = \"llama3-8b\"", &small), 2 * of_block + (2 * 100 + 1) * 64);
    let error = refused("[model]\npreset = \"llama3-9b\"", &[]);
    assert!(error.contains("a.toml:2: model.preset: \"llama3-9b\" is none of \"gpt2\""), "{error}");
    assert!(error.contains("did you mean \"llama3-8b\"?"), "{error}");
    let error = refused("[model]\npreset = \"llama3-8b\"\nkind = \"gpt\"", &[]);
    assert!(error.contains("model.kind: the preset \"llama3-8b\" is of kind \"llama\""), "{error}");
}

#[test]
fn an_axis_that_no_mesh_can_have_is_refused() {
    let error = refused("[train]\nsteps = 1\n[[stage]]\nmesh = \"dp 2, cp 2\"\n", &[]);
    assert!(error.starts_with("a.toml:4: stage.mesh: \"dp 2, cp 2\" has an axis `cp`"), "{error}");
    assert!(error.contains("a stage's mesh has `dp` (or `dpo` and `dpi`) and `tp`"), "{error}");
    assert!(error.contains("hint: write \"dp 2, tp 4\""), "{error}");
}

const POLICIES: &str = "[model]\nlayers = 3\n[train]\noffload = \"/tmp/x\"\n\
    [[policy]]\nunits = \"block 1-2\"\nops = [\"attention\", \"norm\"]\naction = \"recompute\"\n\
    [[policy]]\nops = \"input\"\naction = \"offload\"\n[[policy]]\naction = \"keep\"\n";

#[test]
fn policies_are_rules_of_units() {
    use crate::graph::{Action, Rule};
    let policies = job(POLICIES, &[]).unwrap().policies;
    let rule = |ops: &[&'static str], action| Rule { ops: ops.to_vec(), action };
    let all = [rule(&["input"], Action::Offload), rule(&[], Action::Keep)];
    let again = rule(&["attention", "norm"], Action::Recompute);
    for unit in 0..5 {
        let first = [2, 3].contains(&unit).then(|| again.clone());
        assert_eq!(policies.of(unit), first.into_iter().chain(all.clone()).collect::<Vec<_>>(), "{unit}");
    }
    let config = Config::read("a.toml", POLICIES, &[]).unwrap();
    assert_eq!(Config::read("a.toml", &config.to_toml(&[]), &[]).unwrap().policies, config.policies);
    assert!(!Config::read("a.toml", "", &[]).unwrap().to_toml(&[]).contains("[[policy]]"));
    let images = "[model]\nkind = \"u-transformer\"\n[[policy]]\nunits = [\"piece 0\", \"piece 2\"]\naction = \"recompute\"\n";
    let policies = job(images, &[]).unwrap().policies;
    assert_eq!([0, 1, 2, 3].map(|unit| policies.of(unit).len()), [1, 0, 1, 0]);
}

#[test]
fn policies_that_say_nothing_known_are_refused() {
    let refused = |set: &str| refused(POLICIES, &[set]);
    let error = refused("policy.0.ops=atention");
    assert!(
        error.starts_with("--set policy.0.ops=atention: policy.0.ops: there is no op \"atention\""),
        "{error}"
    );
    assert!(
        error.contains("hint: did you mean \"attention\"? ops are activate, add per sample, attention"),
        "{error}"
    );
    let error = refused("policy.0.ops=reshard");
    assert!(error.contains("policy.0.ops: \"reshard\" is never computed again"), "{error}");
    let error = refused("policy.0.units=blok");
    assert!(error.contains("policy.0.units: there is no unit \"blok\""), "{error}");
    assert!(error.contains("did you mean \"block\"? this model has embed, block, head"), "{error}");
    let error = refused("policy.0.units=block 1-3");
    assert!(error.contains("\"block 1-3\" names no block there is: they go from 0 to 2"), "{error}");
    assert!(refused("policy.0.units=block 2-1").contains("names no block"));
    assert!(refused("policy.0.units=block x").contains("names no block"));
    let error = refused("policy.2.action=drop");
    assert!(
        error.contains("`drop` is none of \"keep\", \"recompute\", \"offload\"")
            || error.contains("\"drop\" is none of"),
        "{error}"
    );
    let error = refused("train.activation_budget=1MiB");
    assert!(
        error.contains("policy.0.action: what is computed again follows from `train.activation_budget`"),
        "{error}"
    );
    let text = "[[policy]]\naction = \"offload\"\n";
    let error = job(text, &[]).unwrap_err();
    assert!(error.contains("a.toml:2: policy.0.action: there is no folder to offload to"), "{error}");
    let error = job(text, &["policy.0.action=recompute", "train.recompute=full"]).unwrap_err();
    assert!(error.contains("policy.0.action: with `train.recompute = \"full\"`"), "{error}");
    let error = job("[[policy]]\nops = \"norm\"\n", &[]).unwrap_err();
    assert!(error.contains("policy.0.action: nothing is said to be done"), "{error}");
}
