//! Every key of a training config: what it wants, what it is without, what it does.
//!
//! The one list. Reading, errors, `--print-config` and docs/train-config.md all come from it, so a key that is not here does not exist, and one
//! that is cannot go undocumented.

use super::preset;
use super::value::Kind;
use crate::graph::Action;
use crate::models::gpt::Residual;

/// See the module.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    pub section: &'static str,
    pub name: &'static str,
    pub kind: Kind,
    /// As TOML; empty where there is none, or where it follows from other keys (`about` says from which).
    pub default: &'static str,
    /// Which `kind`s of the section have the key; all of them where this is empty.
    pub only: &'static [&'static str],
    pub about: &'static str,
}

/// A table of the file.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    pub name: &'static str,
    /// Whether there may be several: `[[stage]]`.
    pub many: bool,
    pub about: &'static str,
}

pub const SECTIONS: &[Section] = &[
    one("model", "What is trained."),
    one("data", "What it is trained on."),
    one("train", "How much of it, and in which numbers."),
    one("optimizer", "How weights become the next step's."),
    one("pipeline", "In which order stages run their passes, and where the model is cut."),
    Section {
        name: "stage",
        many: true,
        about: "One for every device of the pipeline, in model order: a mesh of ranks that runs one stage, or with `pipeline.chunks` several. Ranks are numbered stage by stage.",
    },
    Section {
        name: "policy",
        many: true,
        about: "What becomes of what units keep of a microbatch from its forward pass to its backward pass: the first policy that names a unit and an op decides; where none does, `train.recompute` and `train.offload` do. Bits are the same whatever is said here. There need not be any.",
    },
    one("cluster", "What the ranks run on: for plans, predictions and `--emulate`."),
    one("evaluate", "How the run is judged by what it is not trained on."),
    one("checkpoint", "What is kept on disk, to go on from."),
    one("log", "What is written down for people."),
];

const fn one(name: &'static str, about: &'static str) -> Section {
    Section { name, many: false, about }
}

const fn key(
    section: &'static str,
    name: &'static str,
    kind: Kind,
    default: &'static str,
    about: &'static str,
) -> Key {
    Key { section, name, kind, default, only: &[], about }
}

impl Key {
    const fn only(mut self, kinds: &'static [&'static str]) -> Self {
        self.only = kinds;
        self
    }

    /// `train.steps`.
    pub fn path(&self) -> String {
        format!("{}.{}", self.section, self.name)
    }
}

const COUNT: Kind = Kind::Count { least: 1 };
const MAYBE: Kind = Kind::Count { least: 0 };
const POSITIVE: Kind = Kind::Number { least: 0.0, most: f64::INFINITY };

const DECODER: &[&str] = &["gpt", "llama"];
const LLAMA: &[&str] = &["llama"];
const UNET: &[&str] = &["u-transformer"];
const LANGUAGE: &[&str] = &["language"];
const TEXT: &[&str] = &["text"];
const TOKENS: &[&str] = &["tokens"];
const FILES: &[&str] = &["text", "tokens"];
const IMAGES: &[&str] = &["images"];
const ADAMW: &[&str] = &["adamw"];
const SGD: &[&str] = &["sgd"];

/// All of them, in the order in which they are printed.
pub const KEYS: &[Key] = &[
    key("model", "preset", Kind::Choice(preset::NAMES), "", "A model that is known by name: what the other keys are where they are not given.").only(DECODER),
    key("model", "kind", Kind::Choice(&["gpt", "llama", "u-transformer"]), "\"gpt\"", "GPT-2's architecture, Llama's, or a U-Net with attention that predicts noise."),
    key("model", "vocab", COUNT, "", "Tokens that the model knows. Without it: as many as the data has.").only(DECODER),
    key("model", "context", COUNT, "64", "Tokens of a sample.").only(DECODER),
    key("model", "width", COUNT, "128", "Columns of the hidden state.").only(DECODER),
    key("model", "layers", COUNT, "4", "Transformer blocks.").only(DECODER),
    key("model", "hidden", COUNT, "", "Columns inside a feed-forward branch. Without it: four times the width; of a Llama eight thirds of it, rounded up to a multiple of 32.").only(DECODER),
    key("model", "kv_heads", COUNT, "", "Heads of keys and values, a divisor of `heads`. `tp` has up to as many ranks, or a multiple of them, which share heads. Without it: as many as `heads`.").only(LLAMA),
    key("model", "rope_theta", POSITIVE, "1e4", "How fast rotary positions turn: the base of their frequencies.").only(LLAMA),
    key("model", "rope_scaling", Kind::Counts { least: 1 }, "", "Llama 3.1's scaling of slow turns: factor, low and high number of turns, and the old context. `[8, 1, 4, 8192]` is its own. Without it: none.").only(LLAMA),
    key("model", "residual", Kind::Choice(Residual::NAMES), "\"serial\"", "What every branch reads: all of the residual stream, or on a ladder all but what the branch just before it adds, whose sum over tp is then under way beside it. A ladder is another model: it cannot be exported.").only(DECODER),
    key("model", "tied", Kind::Flag, "", "Whether logits come from the token table itself. Without it: of a GPT they do, of a Llama not.").only(DECODER),
    key("model", "dropout", Kind::Number { least: 0.0, most: 0.999 }, "0.0", "The share of elements that training drops.").only(DECODER),
    key("model", "image", COUNT, "16", "Height and width of an image.").only(UNET),
    key("model", "image_channels", COUNT, "4", "Channels of an image.").only(UNET),
    key("model", "base", COUNT, "32", "Channels of the first level.").only(UNET),
    key("model", "multipliers", Kind::Counts { least: 1 }, "[1, 2, 4, 4]", "For every level, its channels as a multiple of `base`.").only(UNET),
    key("model", "blocks", COUNT, "1", "Residual blocks of a level on the way down; one more on the way up.").only(UNET),
    key("model", "attention", Kind::Flags, "", "For every level, whether it has attention. Without it: all but the last.").only(UNET),
    key("model", "groups", COUNT, "8", "Groups of a norm.").only(UNET),
    key("model", "context_rows", COUNT, "16", "Rows of what cross-attention looks at.").only(UNET),
    key("model", "context_width", COUNT, "", "Columns of it. Without it: `base`.").only(UNET),
    key("model", "heads", COUNT, "4", "Attention heads."),
    key("model", "epsilon", POSITIVE, "1e-5", "Added to a variance before it divides."),
    key("data", "kind", Kind::Choice(&["language", "text", "tokens", "images"]), "", "A synthetic language of known entropy, text files, a packed token file, or synthetic images. Without it: `language` for a GPT, `images` for a U-Transformer."),
    key("data", "vocab", COUNT, "64", "Tokens of the language.").only(LANGUAGE),
    key("data", "groups", COUNT, "2", "What may follow a token depends also on which of so many groups the one before it is in.").only(LANGUAGE),
    key("data", "branching", COUNT, "8", "Tokens that may follow.").only(LANGUAGE),
    key("data", "path", Kind::Texts, "", "Files, or folders of files; every line of a .jsonl is a document, its member `text`. Of tokens: files of `crossmesh data pack`, of nanoGPT (.bin) or Megatron-LM (.bin and .idx). Relative paths start where the program was started.").only(FILES),
    key("data", "weights", Kind::Counts { least: 1 }, "", "Of several token files, how often each is drawn from: [7, 3] has seven samples of the first in every ten.").only(TOKENS),
    key("data", "tokenizer", Kind::Text, "\"bytes\"", "`bytes`, or the path of a Hugging Face tokenizer.json.").only(TEXT),
    key("data", "end", Kind::Text, "", "The tokenizer's token behind every document, or `none`. Without it: the one that the tokenizer is known for.").only(TEXT),
    key("data", "validation_share", Kind::Number { least: 0.0, most: 0.99 }, "0.05", "The share of the tokens that is kept from training.").only(FILES),
    key("data", "seed", MAYBE, "0", "Of the order of samples, and of synthetic data."),
    key("data", "waves", COUNT, "2", "Waves along each side of an image: more are harder to tell from noise.").only(IMAGES),
    key("data", "classes", COUNT, "8", "Kinds of images; the context tells which.").only(IMAGES),
    key("train", "steps", COUNT, "100", "Steps of the whole run; a resumed one goes on to the same number."),
    key("train", "batch", COUNT, "16", "Samples of a step, over all ranks."),
    key("train", "microbatches", COUNT, "4", "Parts of a batch that go through the pipeline one behind the other; the batch has to divide among them."),
    key("train", "dtype", Kind::Choice(&["f32", "f64", "bf16"]), "\"f32\"", "Numbers of weights, activations and gradients; with bf16, gradients of weights, what weights are rounded from and the optimizer's numbers are f32."),
    key("train", "device", Kind::Choice(&["cpu", "cuda", "auto"]), "\"cpu\"", "What ranks compute with: the host's processor, an NVIDIA GPU each (docs/cuda.md), or a GPU where there is one for every rank."),
    key("train", "deterministic", Kind::Flag, "false", "Whether every run on a GPU takes the same algorithms, so that the same bits come out; else the fastest by the clock. Processors always do."),
    key("train", "seed", MAYBE, "1", "Of the first weights, and of dropout."),
    key("train", "threads", COUNT, "1", "Threads that a rank computes with."),
    key("train", "recompute", Kind::Choice(&["none", "attention", "full"]), "\"none\"", "What B computes again instead of remembering it: nothing, the insides of attention, or the stage's whole forward pass."),
    key("train", "activation_budget", Kind::Bytes, "", "The most bytes of activations that a rank remembers at a time. B then computes again what costs the least operations for it, and sends nothing twice. In place of `recompute`. Without it: no limit."),
    key("train", "offload", Kind::Text, "", "A folder: what is remembered of a microbatch from its forward pass to its backward pass waits in a file there, not in memory. Files have no name and go with their processes. Without it: memory."),
    key("train", "strands", COUNT, "1", "2: a microbatch runs in two halves that take turns, so that one computes while the other waits for ranks along tp. Needs samples that halve on every rank, and weights that are not dealt out."),
    key("train", "nonfinite", Kind::Choice(&["stop", "skip"]), "\"stop\"", "What to do about a step whose loss or gradient norm is not finite: stop the run, or go on without it. It changes no weight either way."),
    key("train", "overlap", Kind::Flag, "true", "Whether communication between stages runs beside compute."),
    key("optimizer", "kind", Kind::Choice(&["adamw", "sgd"]), "\"adamw\"", "Adam with decoupled weight decay, or gradient descent with momentum."),
    key("optimizer", "learning_rate", POSITIVE, "1e-3", "The rate after warm-up."),
    key("optimizer", "schedule", Kind::Choice(&["cosine", "constant", "wsd"]), "\"cosine\"", "What the rate does after warm-up: fall along a cosine, stay, or stay and fall in a line at the end (warm-up, stable, decay)."),
    key("optimizer", "warmup", MAYBE, "0", "Steps in which the rate rises in a line."),
    key("optimizer", "decay", COUNT, "", "With the schedule `wsd`: steps at the end in which the rate falls. Without it: a fifth of them."),
    key("optimizer", "floor", POSITIVE, "", "The rate of the last step. Without it: a tenth of `learning_rate`, or with the schedule `constant` all of it."),
    key("optimizer", "weight_decay", POSITIVE, "0.1", "Of matrices; biases and norms have none."),
    key("optimizer", "beta1", Kind::Number { least: 0.0, most: 0.999999 }, "0.9", "How long the mean of gradients remembers.").only(ADAMW),
    key("optimizer", "beta2", Kind::Number { least: 0.0, most: 0.999999 }, "0.95", "How long the mean of their squares remembers.").only(ADAMW),
    key("optimizer", "epsilon", POSITIVE, "1e-8", "Added to the root of that mean.").only(ADAMW),
    key("optimizer", "momentum", Kind::Number { least: 0.0, most: 0.999999 }, "0.9", "How long the velocity lasts.").only(SGD),
    key("optimizer", "clip", POSITIVE, "1.0", "The largest norm of all gradients together, over all meshes; 0 leaves them as they are."),
    key("optimizer", "zero", Kind::Level(3), "0", "ZeRO's stage. 1: ranks along the data axes keep a part of the optimizer's states each; 2: of the gradients too, summed after every microbatch; 3: of the parameters too, gathered unit by unit while a pass needs them."),
    key("optimizer", "parameters_over", Kind::Text, "", "The data axes over which parameters are dealt out: `all`, `none`, or some of them, such as `dpi`. Without it: what `zero` says. So it is for the next two."),
    key("optimizer", "gradients_over", Kind::Text, "", "The same for gradients."),
    key("optimizer", "states_over", Kind::Text, "", "The same for the optimizer's states, which have to be dealt out at least as far as the other two."),
    key("optimizer", "fixed_order", Kind::Flag, "false", "Whether every microbatch's gradients are summed in the order of the ranks, so that no bit of the result depends on what is dealt out. For comparing: it sends all gradients to all ranks."),
    key("optimizer", "bucket", Kind::Bytes, "\"1MiB\"", "Gradients are summed over `dp` in pieces of about this size, as soon as they are complete."),
    key("pipeline", "schedule", Kind::Schedule, "\"1f1b\"", "By name, as `crossmesh schedule` has them."),
    key("pipeline", "chunks", COUNT, "", "Stages of a device. Without it: what the schedule needs."),
    key("pipeline", "backward", Kind::Choice(&["fused", "split"]), "", "Whether B and W are one pass. Without it: what the schedule needs."),
    key("pipeline", "balance", Kind::Choice(&["work", "parameters"]), "\"work\"", "What is shared out evenly over ranks where no `layers` are given: operations, or weights."),
    key(
        "pipeline",
        "strategy",
        Kind::Choice(&[
            "flow",
            "auto",
            "sendrecv",
            "allgather",
            "broadcast:naive",
            "broadcast:balance",
            "broadcast:dfs",
            "broadcast:greedy",
        ]),
        "\"flow\"",
        "How activations and gradients cross between meshes.",
    ),
    key("stage", "mesh", Kind::Mesh, "\"1\"", "`dp 2, tp 4`: `dp` splits samples, `tp` splits weights; `1` is a single rank."),
    key("stage", "layers", Kind::Counts { least: 0 }, "", "Transformer blocks (of a U-Transformer: pieces) on this mesh; with chunks, a list in model order. The first stage also has the embedding, the last one the head. Without it in any stage: shared out by `pipeline.balance`."),
    key("stage", "sequence_parallel", Kind::Flag, "false", "Whether the rows between tensor-parallel regions are split over `tp`."),
    key("stage", "repeat", COUNT, "1", "So many stages alike, one behind the other."),
    key("policy", "action", Kind::Choice(Action::NAMES), "", "`keep` in memory, `recompute` in the backward pass (all but what ranks send each other, and losses), or `offload` to the folder `train.offload`."),
    key("policy", "units", Kind::Texts, "", "Of which units: of a decoder `embed`, `block` and `head`, of a U-Transformer `piece`; with a number or a range for some of them, from 0: `block 3`, `block 0-7`. Without it: all."),
    key("policy", "ops", Kind::Texts, "", "Of which ops, such as `attention`, `norm`, `linear`, `activate`, `gate` or `rotate`; `input` is what a unit is given. Without it: all."),
    key("cluster", "file", Kind::Text, "", "A cluster file. Without it: a stage starts on a new host, and hosts have NICs of `nic`."),
    key("cluster", "devices_per_host", COUNT, "", "Ranks of a host. Without it: as many as the last axis of the stage's mesh is long."),
    key("cluster", "nic", Kind::Rate, "\"10Gbit\"", "A host's NIC, each way."),
    key("cluster", "local", Kind::Rate, "\"100GB/s\"", "A rank's link inside its host, each way."),
    key("cluster", "latency", Kind::Time, "\"0s\"", "Of a message from host to host."),
    key("cluster", "flops", POSITIVE, "3e10", "What a thread of a rank computes in a second, for predictions before the first step; f64 has half of it."),
    key("evaluate", "every", MAYBE, "100", "Steps from one validation to the next, with one behind the last step; 0: none."),
    key("evaluate", "batches", COUNT, "4", "Batches of a validation, always the same ones: as many samples as steps have, or all there are where these are fewer."),
    key("checkpoint", "folder", Kind::Text, "", "Where checkpoints go. Without it: `checkpoints` in the folder of the log."),
    key("checkpoint", "every", MAYBE, "0", "Steps from one checkpoint to the next; 0: none on the way."),
    key("checkpoint", "last", Kind::Flag, "true", "Whether the last step is saved."),
    key("checkpoint", "keep", COUNT, "2", "The newest so many are kept."),
    key("log", "folder", Kind::Text, "", "Where metrics.jsonl, report.html and the resolved config go. Without it: `runs/` and the name of the config."),
    key("log", "every", COUNT, "10", "Steps from one printed line to the next, where there is no terminal."),
];

/// The keys of a section.
pub fn keys_of(section: &str) -> impl Iterator<Item = &'static Key> {
    KEYS.iter().filter(move |key| key.section == section)
}

/// Whether there may be several tables of a section.
pub fn is_many(name: &str) -> bool {
    section(name).is_some_and(|section| section.many)
}

pub fn section(name: &str) -> Option<&'static Section> {
    SECTIONS.iter().find(|section| section.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_a_value_of_its_key() {
        for key in KEYS {
            assert!(section(key.section).is_some(), "{}", key.path());
            assert!(key.about.ends_with('.'), "{}", key.path());
            if !key.default.is_empty() {
                let value =
                    key.kind.read_set(key.default).unwrap_or_else(|e| panic!("{}: {e:?}", key.path()));
                assert_eq!(value.to_string(), key.default, "{} is not printed as it is written", key.path());
            }
            let kinds = keys_of(key.section).find(|k| k.name == "kind").map(|k| k.kind);
            for only in key.only {
                assert!(matches!(kinds, Some(Kind::Choice(names)) if names.contains(only)), "{}", key.path());
            }
        }
    }

    #[test]
    fn no_key_is_there_twice() {
        let mut paths: Vec<String> = KEYS.iter().map(Key::path).collect();
        paths.sort();
        let len = paths.len();
        paths.dedup();
        assert_eq!(paths.len(), len);
    }
}
