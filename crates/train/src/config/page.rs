//! docs/train-config.md, made from the list of keys.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::keys::{SECTIONS, keys_of};

const HEAD: &str = "# Training configs

Made from the list of keys; change `crates/train/src/config/keys.rs`, then `UPDATE_DOCS=1 cargo test -p crossmesh-train page`.

A config is a TOML file: `crossmesh train my.toml`. Every key may be left out. `--set train.steps=10` goes over what the file says,
`--set stage.0.mesh='dp 2'` over one of several stages; `crossmesh train my.toml --print-config` shows what comes of it. A key that does not
exist, or a value that it cannot be, is an error that names the line, the key, the reason and the nearest key there is.

A model may be named: with `preset = \"llama3-8b\"` the other keys of `[model]` are that model's, and each may still be given.
`crossmesh train my.toml --dry-run` then says what ranks would hold and how long a step would take.

Three stages on three different meshes:

```toml
[model]
kind = \"gpt\"
width = 96
layers = 6
heads = 6

[[stage]]
mesh = \"dp 2, tp 2\"

[[stage]]
mesh = \"dp 4\"

[[stage]]
mesh = \"tp 3\"
```
";

const TAIL: &str = "
## metrics.jsonl

A line of JSON for every step, in `log.folder`:

| field | |
|---|---|
| `step` | steps done: the first one is 1 |
| `loss` | mean over the step's batch |
| `validation_loss` | mean over what is held out, behind this step; where it was looked at |
| `grad_norm` | of all gradients together, before clipping |
| `learning_rate` | that the step was made with |
| `not_finite` | what was not finite, such as `loss NaN`: the step changed no weight |
| `samples_per_s` | of the batch, over `step_s` |
| `tokens_per_s` | the same in tokens, where the data has tokens |
| `mfu` | operations that the model needs (two for every multiplication with a weight, forward and twice backward; causal attention by half; nothing that is computed again) over `cluster.flops` of all threads of all ranks |
| `step_s` | from the step's start to its end, on the slowest rank |
| `compute_s` | passes, a mean over ranks |
| `exposed_comm_s` | a device stood still while something it needed was on its way, a mean over ranks |
| `bubble_s` | it stood still for another reason: nobody had made what it needed, a mean over ranks |
| `optimizer_s` | weights were updated, a mean over ranks |
| `bytes_sent` | by all ranks together |
| `activation_bytes` | the most that a rank held of its microbatches at once |

The same numbers go into an event file (`events.out.tfevents…`) for TensorBoard: `tensorboard --logdir runs`. report.html is written every ten
seconds while it trains.

A run that goes on from a checkpoint drops the lines of steps after it, and goes on behind the others.
";

fn render() -> String {
    let mut text = HEAD.to_string();
    for section in SECTIONS {
        let name = if section.many { format!("[[{}]]", section.name) } else { format!("[{}]", section.name) };
        let _ = write!(
            text,
            "\n## `{name}`\n\n{}\n\n| key | wants | default | |\n|---|---|---|---|\n",
            section.about
        );
        for key in keys_of(section.name) {
            let default = if key.default.is_empty() { "–".into() } else { format!("`{}`", key.default) };
            let kinds: Vec<String> = key.only.iter().map(|kind| format!("`{kind}`")).collect();
            let only = if kinds.is_empty() { String::new() } else { format!("{}: ", kinds.join(", ")) };
            let _ = writeln!(
                text,
                "| `{}` | {} | {default} | {only}{} |",
                key.name,
                key.kind.wanted(),
                key.about
            );
        }
    }
    text + TAIL
}

#[test]
fn page_is_fresh() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/train-config.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, render()).unwrap();
    }
    let page = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        page == render(),
        "docs/train-config.md is stale\nhint: UPDATE_DOCS=1 cargo test -p crossmesh-train page"
    );
}

#[test]
fn the_page_shows_a_config_that_works() {
    let example = HEAD.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let config = super::Config::read("page.toml", example, &[]).unwrap();
    let resolved = super::resolve(&config, Some(64), None).unwrap();
    assert_eq!(resolved.job.ranks().len(), 11);
}
