//! What a person who trains expects of a run: that nothing good is lost, nothing is overwritten, and nothing changes silently.

mod common;
mod tiny;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use common::Said;
use tiny::{Run, trained};

fn refused(said: &Said) -> &str {
    assert_eq!(said.code, 2, "{}{}", said.stdout, said.stderr);
    assert!(!said.stderr.contains("panicked"), "{}", said.stderr);
    &said.stderr
}

fn checkpoints(run: &Run) -> Vec<String> {
    let folder = std::fs::read_dir(run.scratch.path().join("runs/tiny/checkpoints")).unwrap();
    let mut names: Vec<String> = folder.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// `--set` of every key.
fn sets<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    sets.iter().flat_map(|set| ["--set", *set]).collect()
}

/// Weights explode, the run stops, and the last checkpoint from before can be gone on from.
#[test]
fn a_step_that_is_not_finite_stops_the_run_and_reaches_no_checkpoint() {
    let run = Run::new();
    let every = sets(&["checkpoint.every=10", "checkpoint.keep=1", "train.dtype=f32"]);
    trained(&run.train(&every));
    assert_eq!(checkpoints(&run), ["step-00000012"], "the last step is saved");
    let wild = sets(&["optimizer.learning_rate=1e9", "optimizer.schedule=constant", "train.steps=400"]);
    let said = run.train(&[&every[..], &wild, &["--resume"]].concat());
    let error = refused(&said).lines().find(|l| l.starts_with("error: ")).unwrap();
    let last = run.metrics().pop().unwrap();
    let step = last["step"].as_u64().unwrap();
    let what = last["not_finite"].as_str().unwrap();
    assert!(error.starts_with(&format!("error: step {step} has a {what} (learning rate 1e9): ")), "{error}");
    assert!(said.stderr.contains("--set train.nonfinite=skip"), "{}", said.stderr);
    assert!(
        said.stderr.contains("the last checkpoint is of step 12: crossmesh train tiny.toml "),
        "{}",
        said.stderr
    );
    assert!(said.stdout.is_empty(), "{}", said.stdout);
    assert_eq!(checkpoints(&run), ["step-00000012"]);
    let calm = run.train(&[&every[..], &sets(&["train.steps=14"]), &["--resume", "--json"]].concat());
    trained(&calm);
    assert_eq!(calm.json()["resumed_at"], 12, "it loads");
}

/// Whoever wants to go on without such steps can; what was saved before them stays.
#[test]
fn steps_that_are_not_finite_can_be_skipped() {
    let run = Run::new();
    let every = sets(&["checkpoint.every=10", "checkpoint.keep=1", "train.dtype=f32"]);
    trained(&run.train(&every));
    let wild = sets(&[
        "optimizer.learning_rate=1e9",
        "optimizer.schedule=constant",
        "train.steps=24",
        "train.nonfinite=skip",
    ]);
    let said = run.train(&[&every[..], &wild, &["--resume", "--json"]].concat());
    trained(&said);
    let summary = said.json();
    let skipped = run.metrics().iter().filter(|m| m["not_finite"].is_string()).count() as u64;
    assert!(skipped > 0 && summary["skipped"] == skipped, "{summary}");
    assert_eq!((run.metrics().len(), &summary["steps"]), (24, &24.into()));
    assert!(checkpoints(&run).contains(&"step-00000012".to_string()), "{:?}", checkpoints(&run));
}

#[test]
fn a_second_start_overwrites_nothing() {
    let run = Run::new();
    let none = sets(&["checkpoint.last=false"]);
    trained(&run.train(&none));
    assert!(!run.scratch.path().join("runs/tiny/checkpoints").exists(), "told not to save");
    let before = run.metrics();
    let again = run.train(&none);
    let error = refused(&again);
    assert!(
        error.starts_with("error: runs/tiny has an earlier run") && error.contains("--resume"),
        "{error}"
    );
    assert_eq!(run.metrics(), before);
    // Nor does somebody who goes on from another run's checkpoint.
    let other = Run::new();
    trained(&other.train(&[]));
    let from = other.scratch.at("runs/tiny/checkpoints/step-00000012");
    let error = run.train(&["--resume", &from, "--set", "train.steps=14"]);
    assert!(refused(&error).starts_with("error: runs/tiny has an earlier run"), "{}", error.stderr);
    assert_eq!(run.metrics(), before);
}

#[test]
fn what_would_silently_be_another_model_is_refused() {
    let run = Run::new();
    trained(&run.train(&[]));
    let files = checkpoints(&run);
    let config = run.scratch.path().join("runs/tiny/config.toml");
    let before = std::fs::read_to_string(&config).unwrap();
    let more = |set: &str| run.train(&["--resume", "--set", "train.steps=20", "--set", set]);
    for (set, key) in [
        ("model.layers=1", "model.layers is 1 and not 2: "),
        ("model.tied=false", "model.tied is false and not true: "),
        ("model.epsilon=1e-3", "model.epsilon is 0.001 and not 0.00001: "),
        ("model.width=32", "model.hidden is 128 and not 64, model.width is 32 and not 16: "),
        ("optimizer.kind=sgd", "exp_avg"),
        ("train.dtype=f32", "it holds f64, and f32 is wanted"),
        ("model.residual=ladder", "model.residual is \"ladder\" and not \"serial\": "),
    ] {
        let said = more(set);
        assert!(refused(&said).contains(key), "{set}: {}", said.stderr);
        assert_eq!(checkpoints(&run), files, "{set}");
        assert!(
            std::fs::read_to_string(&config).unwrap() == before,
            "{set}: the run's config is another one"
        );
    }
}

/// Of a model with a head of its own, whoever goes on with one that shares the table would drop the head: refused, by name, and nothing is rotated away.
#[test]
fn a_head_of_its_own_is_not_dropped() {
    let run = Run::new();
    let untied = sets(&["model.tied=false", "checkpoint.every=1", "checkpoint.keep=1"]);
    trained(&run.train(&untied));
    let files = checkpoints(&run);
    let tied = sets(&["model.tied=true", "train.steps=20", "checkpoint.every=1", "checkpoint.keep=1"]);
    let said = run.train(&[&tied[..], &["--resume"]].concat());
    assert!(refused(&said).contains("model.tied is true and not false: "), "{}", said.stderr);
    assert_eq!((checkpoints(&run), run.metrics().len()), (files, 12));
    // Nor as weights alone.
    let from = run.scratch.at("runs/tiny/checkpoints/step-00000012");
    let other = Run::new();
    let said = other.train(&["--from", &from, "--set", "model.tied=true"]);
    assert!(refused(&said).contains("tied"), "{}", said.stderr);
    assert!(!other.scratch.path().join("runs/tiny/metrics.jsonl").exists());
    let more = sets(&["model.tied=false", "train.steps=14"]);
    trained(&run.train(&[&more[..], &["--resume"]].concat()));
}

/// What is computed again to stay within a budget changes no bit of what is learnt, and what ranks held stays within it, down to the least that the job can do with.
#[test]
fn a_budget_is_kept_and_changes_no_bit() {
    let bits = |run: &Run| -> Vec<u64> {
        let of = |m: &serde_json::Value| ["loss", "grad_norm"].map(|key| m[key].as_f64().unwrap().to_bits());
        run.metrics().iter().flat_map(of).collect()
    };
    let held =
        |run: &Run| run.metrics().iter().map(|m| m["activation_bytes"].as_u64().unwrap()).max().unwrap();
    for kind in [&["model.kind=gpt"][..], &["model.kind=llama", "model.kv_heads=1"]] {
        let common = sets(&[kind, &["model.dropout=0.1", "train.steps=3", "optimizer.zero=1"]].concat());
        let train = |more: &[&str]| {
            let run = Run::new();
            let said = run.train(&[&common[..], more].concat());
            (run, said)
        };
        let (plain, said) = train(&[]);
        trained(&said);
        let most = held(&plain);
        let (_, said) = train(&["--set", "train.activation_budget=1B"]);
        let error = refused(&said);
        let least = error.split("hint: use \"").nth(1).and_then(|rest| rest.split("B\"").next());
        let mut least: u64 = least.unwrap_or_else(|| panic!("{error}")).parse().unwrap();
        // Another stage may need more, and says so.
        let budget = |bytes: u64| format!("train.activation_budget={bytes}B");
        while let (_, said) = train(&["--dry-run", "--set", &budget(least)])
            && said.code == 2
        {
            let hint = said.stderr.split("hint: use \"").nth(1).and_then(|rest| rest.split("B\"").next());
            least = hint.unwrap_or_else(|| panic!("{}", said.stderr)).parse().unwrap();
        }
        assert!(least < most * 3 / 4, "{kind:?}: {least} of {most}");
        let mut helds = vec![];
        for limit in [least, (least + most) / 2, most] {
            let (run, said) = train(&["--set", &budget(limit)]);
            trained(&said);
            assert!(held(&run) <= limit, "{kind:?}: {} within {limit}", held(&run));
            assert!(bits(&run) == bits(&plain), "{kind:?}, {limit}");
            helds.push(held(&run));
        }
        assert!(helds[0] < helds[2] && helds[2] <= most, "{kind:?}: {helds:?} of {most}");
    }
}

/// A model whose branches are on a ladder goes on as one, and to nobody who would compute something else from its weights.
#[test]
fn a_ladder_stays_a_ladder() {
    let run = Run::new();
    let ladder = sets(&["model.residual=ladder"]);
    trained(&run.train(&ladder));
    let more = sets(&["train.steps=14"]);
    let serial = run.train(&[&more[..], &["--resume"]].concat());
    let error = refused(&serial);
    assert!(error.contains("model.residual is \"serial\" and not \"ladder\": "), "{error}");
    assert!(error.contains("--set model.residual=\"ladder\"") && !error.contains("model.kind"), "{error}");
    let from = run.scratch.at("runs/tiny/checkpoints/step-00000012");
    let out = run.scratch.at("out");
    let error = common::refused(&["checkpoint", "export", &from, "-o", &out]);
    assert!(error.contains("its branches are on a ladder (model.residual = \"ladder\")"), "{error}");
    assert!(error.contains("hint: "), "{error}");
    assert!(!std::path::Path::new(&out).exists());
    // As files for whoever knows it, it keeps our names, and no config.json says that it is a GPT-2.
    trained(&common::crossmesh(&["checkpoint", "convert", &from, "--to", "hf", "-o", &out]));
    assert!(!std::path::Path::new(&out).join("config.json").exists());
    trained(&run.train(&[&ladder[..], &more, &["--resume"]].concat()));
}

/// Weights of bf16 are rounded from f32, which is what a checkpoint holds: nobody takes them for f64 unasked, and whoever asks can go on.
#[test]
fn a_bf16_checkpoint_goes_on_in_f64_only_when_asked() {
    let run = Run::new();
    trained(&run.train(&sets(&["train.dtype=bf16", "train.steps=6"])));
    let files = checkpoints(&run);
    let more = run.train(&[&sets(&["train.dtype=f64", "train.steps=8"])[..], &["--resume"]].concat());
    let error = refused(&more);
    assert!(
        error.contains("runs/tiny/checkpoints/step-00000006: it holds f32, and f64 is wanted"),
        "{error}"
    );
    assert_eq!(checkpoints(&run), files);
    let (from, wide) = (run.scratch.at("runs/tiny/checkpoints/step-00000006"), run.scratch.at("wide"));
    let convert = ["checkpoint", "convert", &from, "--to", "crossmesh", "--dtype", "f64", "-o", &wide];
    trained(&common::crossmesh(&convert));
    let other = sets(&["train.dtype=f64", "train.steps=8", "log.folder=runs/wide"]);
    let said = run.train(&[&other[..], &["--resume", &wide, "--json"]].concat());
    trained(&said);
    assert_eq!(said.json()["resumed_at"], 6);
}

/// Twice as many samples a step: none comes twice, none is left out, and it is said.
#[test]
fn a_run_goes_on_at_the_sample_where_it_stopped() {
    let run = Run::new();
    trained(&run.train(&sets(&["train.steps=4"])));
    let changed = sets(&[
        "train.steps=6",
        "train.batch=16",
        "stage.0.mesh=1",
        "train.seed=9",
        "optimizer.fixed_order=true",
    ]);
    let said = run.train(&[&changed[..], &["--resume"]].concat());
    trained(&said);
    for told in [
        "it goes on behind step 4 of runs/tiny/checkpoints/step-00000004, at sample 32\n",
        "train.batch is 16, and was 8: the run goes on at the sample where it stopped",
        "train.seed is 9, and was 1: dropout draws other numbers",
        "the learning rate follows another schedule from here on: ",
        "it ran on dp 2 → 1, and goes on on 1 → 1: ",
    ] {
        assert!(said.stderr.contains(told), "{told}: {}", said.stderr);
    }
    // In which order sums are taken teaches nothing else.
    assert!(!said.stderr.contains("fixed_order"), "{}", said.stderr);
    let manifest = run.scratch.path().join("runs/tiny/checkpoints/step-00000006/manifest.json");
    let saved: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(manifest).unwrap()).unwrap();
    assert_eq!((&saved["step"], &saved["samples"]), (&6.into(), &(4 * 8 + 2 * 16).into()));
}

#[test]
fn nobody_goes_back_to_an_older_checkpoint_unasked() {
    let run = Run::new();
    trained(&run.train(&sets(&["checkpoint.every=6"])));
    assert_eq!(checkpoints(&run), ["step-00000006", "step-00000012"]);
    let file = run.scratch.path().join("runs/tiny/checkpoints/step-00000012/rank-000.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let more = sets(&["train.steps=14"]);
    let said = run.train(&[&more[..], &["--resume"]].concat());
    let older = "an older one has to be asked for: --resume runs/tiny/checkpoints/step-00000006";
    assert!(refused(&said).starts_with("error: the newest checkpoint cannot be used: "), "{}", said.stderr);
    assert!(said.stderr.contains(older), "{}", said.stderr);
    trained(&run.train(&[&more[..], &["--resume", "runs/tiny/checkpoints/step-00000006"]].concat()));
}

/// The weights of one run, and nothing else of it.
#[test]
fn a_run_may_start_from_weights() {
    let run = Run::new();
    trained(&run.train(&[]));
    let from = run.scratch.at("runs/tiny/checkpoints/step-00000012");
    let other = Run::new();
    let said = other.train(&["--from", &from, "--set", "optimizer.kind=sgd", "--json"]);
    trained(&said);
    assert_eq!(said.json()["resumed_at"], 0);
    assert!(said.stderr.contains("it starts with the weights of "), "{}", said.stderr);
    let fresh = Run::new();
    trained(&fresh.train(&["--set", "optimizer.kind=sgd"]));
    assert!(other.losses()[0] < fresh.losses()[0] - 0.1, "{:?} and {:?}", other.losses(), fresh.losses());
}

/// Ctrl-C reaches the launcher, which asks its ranks.
#[test]
fn ctrl_c_saves_and_says_how_to_go_on() {
    let run = Run::new();
    let endless = sets(&["train.steps=1000000", "log.every=5", "log.folder=runs/tiny", "data.groups= 1"]);
    let mut command = run.command(&endless);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step      20 ")), "it does not come to step 20");
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let rest: Vec<String> = lines.collect();
    let rest = rest.join("\n");
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{rest}");
    let saved = checkpoints(&run);
    let step: u64 = saved.last().and_then(|name| name.strip_prefix("step-")).unwrap().parse().unwrap();
    assert!(rest.contains(&format!("it was asked to end, and saved step {step}")), "{rest}");
    let go_on = "to go on: crossmesh train tiny.toml --set train.steps=1000000 --set log.every=5 --set log.folder=runs/tiny --set 'data.groups= 1' --resume";
    assert!(rest.contains(go_on), "{rest}");
}

/// Sizes that no machine holds, and values that fit together with nothing: named with their key, before anything is made of them.
#[test]
fn impossible_values_are_errors_with_their_key() {
    let run = Run::new();
    for (set, key) in [
        ("model.width=1000000000000", "model.width: 1000000000000: a tensor of "),
        ("model.layers=4294967296", "model.layers: 4294967296: deeper than any model there is"),
        ("model.context=99999999999", "model.context: 99999999999: a tensor of "),
        ("model.hidden=9999999999999999", "model.hidden: 9999999999999999: a tensor of "),
        ("train.batch=4000000000000000", "train.batch: 4000000000000000 samples of "),
        ("train.threads=100000000", "train.threads: 100000000 threads are more than any machine has"),
        ("train.strands=4294967298", "train.strands: a microbatch runs in one strand or in two, not in "),
        (
            "cluster.devices_per_host=4294967297",
            "cluster.devices_per_host: no host has more than 4294967295 devices",
        ),
    ] {
        let said = run.train(&["--dry-run", "--set", set]);
        assert!(refused(&said).starts_with(&format!("error: --set {set}: {key}")), "{}", said.stderr);
        assert!(said.stderr.contains("\nhint: "), "{}", said.stderr);
    }
    let blocking =
        sets(&["pipeline.schedule=dualpipev", "model.layers=6", "train.microbatches=8", "train.batch=16"]);
    let said = run.train(&[&blocking[..], &["--dry-run", "--set", "train.overlap=false"]].concat());
    assert!(
        refused(&said).contains("the passes of dualpipev wait for each other in a cycle"),
        "{}",
        said.stderr
    );
    let said = run.train(&[&blocking[..], &["--dry-run"]].concat());
    trained(&said);
}

#[test]
fn a_report_that_could_not_be_written_is_refused_before_training() {
    let run = Run::new();
    for flag in ["--html", "--svg"] {
        let said = run.train(&[flag, "no/such/file"]);
        assert!(
            refused(&said)
                .starts_with("error: cannot write no/such/file: there is no folder no/such\nhint: "),
            "{}",
            said.stderr
        );
    }
    assert!(!run.scratch.path().join("runs").exists(), "nothing was run");
}

/// Bytes have one token behind a document, or none.
#[test]
fn the_end_of_documents_is_honoured_for_bytes() {
    let run = Run::new();
    run.scratch.file("a.txt", "to be or not to be, that is the question. ".repeat(40));
    run.scratch.file("tiny.toml", "[model]\ncontext = 8\nwidth = 16\nlayers = 1\nheads = 2\n[data]\nkind = \"text\"\npath = \"a.txt\"\n");
    let vocab = |args: &[&str]| {
        let said = run.train(&[&["--print-config"], args].concat());
        trained(&said);
        said.stdout.lines().find(|l| l.starts_with("vocab = ")).unwrap().to_string()
    };
    assert_eq!(vocab(&[]), "vocab = 257");
    assert_eq!(vocab(&["--set", "data.end=none"]), "vocab = 256");
    let said = run.train(&["--print-config", "--set", "data.end=</s>"]);
    assert!(refused(&said).contains("data.end: </s>: bytes have no such token"), "{}", said.stderr);
}

/// nanoGPT's and Megatron-LM's files, two of them by weight; and what is wrong with one is said.
#[test]
fn token_files_of_others_are_trained_on_by_weight() {
    let run = Run::new();
    let model = "[model]\ncontext = 8\nwidth = 16\nlayers = 1\nheads = 2\n[train]\nsteps = 3\n[data]\nkind = \"tokens\"\n";
    let bytes = |of: &dyn Fn(u16) -> u16| (0..600).flat_map(|i| of(i).to_le_bytes()).collect::<Vec<u8>>();
    run.scratch.file("a.bin", bytes(&|i| i % 7));
    run.scratch.file("b.bin", bytes(&|i| i % 11));
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(
        [&1u64.to_le_bytes()[..], &[8], &1u64.to_le_bytes(), &2u64.to_le_bytes(), &600u32.to_le_bytes()]
            .concat(),
    );
    index.extend([0u64, 0, 1].map(u64::to_le_bytes).concat());
    run.scratch.file("b.idx", &index);
    run.scratch.file("tiny.toml", format!("{model}path = [\"a.bin\", \"b\"]\n"));
    assert!(
        refused(&run.train(&[])).contains("data.path: these are 2 token files, and nobody says how often")
    );
    run.scratch.file("tiny.toml", format!("{model}path = [\"a.bin\", \"b\"]\nweights = [3, 1]\n"));
    let said = run.train(&[]);
    trained(&said);
    assert!(said.stderr.contains("3 of 4 from a.bin, 1 of 4 from b.bin"), "{}", said.stderr);
    let config = std::fs::read_to_string(run.scratch.path().join("runs/tiny/config.toml")).unwrap();
    assert!(config.contains("vocab = 11\n"), "{config}");
    run.scratch.file("b.idx", &index[..20]);
    assert!(refused(&run.train(&["--dry-run"])).contains("b.idx is no token file: it does not start"));
    assert!(
        refused(&run.train(&["--dry-run", "--set", "data.weights=[1, 2, 3]"]))
            .contains("these are 3 weights, and there are 2 files")
    );
}
