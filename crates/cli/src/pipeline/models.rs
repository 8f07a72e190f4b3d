//! How much the paper's models compute, and what crosses between their stages.

use super::{Crossing, Stage};

/// Seconds as a suite file would have them.
fn time(seconds: f64) -> String {
    format!("{}us", seconds * 1e6)
}

/// The ranks of stage `i`, where every stage has `devices`.
fn ranks(stage: u32, devices: u32) -> Vec<u32> {
    (stage * devices..(stage + 1) * devices).collect()
}

/// `S1{dp:2,op:2}=4-7`.
fn mesh(stage: u32, axes: &str, devices: u32) -> String {
    format!("S{stage}{{{axes}}}={}-{}", stage * devices, (stage + 1) * devices - 1)
}

/// A stage that recomputes its forward in the backward: B is that and the gradient of its input, each as much as F.
fn recomputing(ranks: Vec<u32>, flops: f64, flops_per_s: f64) -> Stage {
    let f = flops / (ranks.len() as f64 * flops_per_s);
    Stage { ranks, f: time(f), b: time(2.0 * f), w: time(f) }
}

/// A GPT, cut evenly; its last stage has the vocabulary.
pub struct Gpt {
    pub hidden: f64,
    pub layers: f64,
    pub sequence: f64,
    pub vocabulary: f64,
    /// Sequences of a microbatch.
    pub batch: f64,
    pub dp: u32,
    pub op: u32,
    pub pp: u32,
    /// Of a device, reached.
    pub flops_per_s: f64,
}

impl Gpt {
    pub fn stages(&self) -> Vec<Stage> {
        let Self { hidden: h, sequence: s, batch: b, .. } = *self;
        let layer = 24.0 * b * s * h * h * (1.0 + s / (6.0 * h));
        let head = 2.0 * b * s * h * self.vocabulary;
        let stage = |i: u32| {
            let head = if i + 1 == self.pp { head } else { 0.0 };
            let flops = layer * self.layers / f64::from(self.pp) + head;
            recomputing(ranks(i, self.dp * self.op), flops, self.flops_per_s)
        };
        (0..self.pp).map(stage).collect()
    }

    /// The activation between neighbours, split by `dp`, whole on every device along `op`.
    pub fn crossings(&self) -> Vec<Crossing> {
        let devices = self.dp * self.op;
        let axes = match (self.dp, self.op) {
            (dp, 1) => format!("dp:{dp}"),
            (1, op) => format!("op:{op}"),
            (dp, op) => format!("dp:{dp},op:{op}"),
        };
        let split = if self.dp > 1 { "dp" } else { "_" };
        let layout = |stage| {
            let mesh = mesh(stage, &axes, devices);
            format!("f16[{},{},{}]@{mesh}({split},_,_)", self.batch, self.sequence, self.hidden)
        };
        let crossing = |from: u32| Crossing {
            name: format!("activation {from}"),
            from,
            to: from + 1,
            src: layout(from),
            dst: layout(from + 1),
            made: 1.0,
            needed: 0.0,
        };
        (0..self.pp - 1).map(crossing).collect()
    }
}

/// A U-Net with self- and cross-attention: four levels, one layer a block, channels `c` times 1, 2, 4 and 4, images of
/// 32 × 32. Its 13 layers are: in, four down, three in the middle, four up, out.
pub struct UTransformer {
    pub channels: f64,
    /// Images of a microbatch.
    pub batch: f64,
    /// Devices of each of its two stages.
    pub devices: u32,
    /// Layers of the first stage.
    pub first_layers: usize,
    pub flops_per_s: f64,
}

/// A part of a layer, in the order in which they run.
struct Piece {
    layer: usize,
    flops: f64,
    /// It makes a skip tensor: its name and elements of an image.
    makes: Option<(String, f64)>,
    /// It needs the skip tensor of this name.
    needs: Option<String>,
    /// Elements of an image that it hands to the next.
    out: f64,
}

const CONTEXT: f64 = 77.0;
const CONTEXT_WIDTH: f64 = 768.0;

fn conv(c_in: f64, c_out: f64, pixels: f64) -> f64 {
    2.0 * 9.0 * c_in * c_out * pixels
}

fn resnet(c_in: f64, c_out: f64, pixels: f64) -> f64 {
    let shortcut = if c_in == c_out { 0.0 } else { 2.0 * c_in * c_out * pixels };
    conv(c_in, c_out, pixels) + conv(c_out, c_out, pixels) + shortcut
}

/// Projections in and out, self-attention, cross-attention over the context, and a gated feed-forward of 4 × the width.
fn transformer(c: f64, pixels: f64) -> f64 {
    let linear = |count: f64| 2.0 * count * c * c * pixels;
    let own = linear(4.0) + 4.0 * pixels * pixels * c;
    let cross = linear(2.0) + 4.0 * CONTEXT * CONTEXT_WIDTH * c + 4.0 * pixels * CONTEXT * c;
    linear(2.0) + own + cross + linear(12.0)
}

impl UTransformer {
    fn pieces(&self) -> Vec<Piece> {
        let c = self.channels;
        let width = [c, 2.0 * c, 4.0 * c, 4.0 * c];
        let pixels = [1024.0, 256.0, 64.0, 16.0];
        let attends = [true, true, true, false];
        let mut pieces = vec![];
        let mut add = |layer, flops, makes: Option<String>, needs: Option<String>, out: f64| {
            let makes = makes.map(|name| (name, out));
            pieces.push(Piece { layer, flops, makes, needs, out });
        };
        add(0, conv(4.0, c, 1024.0), Some("in".into()), None, c * 1024.0);
        let mut c_in = c;
        for i in 0..4 {
            let (w, px) = (width[i], pixels[i]);
            let attention = if attends[i] { transformer(w, px) } else { 0.0 };
            add(1 + i, resnet(c_in, w, px) + attention, Some(format!("down {i}")), None, w * px);
            if i < 3 {
                let px = pixels[i + 1];
                add(1 + i, conv(w, w, px), Some(format!("half {i}")), None, w * px);
            }
            c_in = w;
        }
        let (w, px) = (width[3], pixels[3]);
        for (i, flops) in [resnet(w, w, px), transformer(w, px), resnet(w, w, px)].into_iter().enumerate() {
            add(5 + i, flops, None, None, w * px);
        }
        for up in 0..4 {
            let i = 3 - up;
            let (w, px) = (width[i], pixels[i]);
            let before = if i > 0 { format!("half {}", i - 1) } else { "in".into() };
            let skips = [(format!("down {i}"), width[i]), (before, if i > 0 { width[i - 1] } else { c })];
            for (name, skip_width) in skips {
                let attention = if attends[i] { transformer(w, px) } else { 0.0 };
                add(8 + up, resnet(c_in + skip_width, w, px) + attention, None, Some(name), w * px);
                c_in = w;
            }
            if i > 0 {
                let px = pixels[i - 1];
                add(8 + up, conv(w, w, px), None, None, w * px);
            }
        }
        add(12, conv(c, 4.0, 1024.0), None, None, 4.0 * 1024.0);
        pieces
    }

    /// Forward FLOPs of an image in each stage.
    fn flops(&self) -> [f64; 2] {
        let mut flops = [0.0; 2];
        for piece in self.pieces() {
            flops[usize::from(piece.layer >= self.first_layers)] += piece.flops;
        }
        flops
    }

    pub fn stages(&self) -> Vec<Stage> {
        let flops = self.flops();
        let stage =
            |i: u32| recomputing(ranks(i, self.devices), self.batch * flops[i as usize], self.flops_per_s);
        (0..2).map(stage).collect()
    }

    /// The activation at the cut, and every skip tensor that is made before it and needed behind it. Images are split
    /// over the devices of a stage.
    pub fn crossings(&self) -> Vec<Crossing> {
        let total = self.flops();
        let mut done = [0.0; 2];
        let mut made: Vec<(String, f64, f64)> = vec![];
        let mut needed: Vec<(String, f64)> = vec![];
        for piece in self.pieces() {
            let stage = usize::from(piece.layer >= self.first_layers);
            if stage == 1 {
                needed.extend(piece.needs.clone().map(|name| (name, done[1] / total[1])));
            }
            done[stage] += piece.flops;
            if stage == 0 {
                let share = done[0] / total[0];
                made.retain(|(name, ..)| name != "activation" && piece.needs.as_ref() != Some(name));
                made.extend(piece.makes.map(|(name, elements)| (name, elements, share)));
                made.push(("activation".into(), piece.out, 1.0));
            }
        }
        let layout = |stage: u32, elements: f64| {
            let mesh = mesh(stage, &format!("dp:{}", self.devices), self.devices);
            format!("f32[{},{elements}]@{mesh}(dp,_)", self.batch)
        };
        let crossing = |(name, elements, made): (String, f64, f64)| {
            let needed = needed.iter().find(|(n, _)| *n == name).map_or(0.0, |(_, at)| *at);
            let (src, dst) = (layout(0, elements), layout(1, elements));
            Crossing { name, from: 0, to: 1, src, dst, made: made.min(1.0), needed }
        };
        made.into_iter().map(crossing).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_skips_cross_a_cut_in_the_middle_and_fewer_a_later_one() {
        let model =
            UTransformer { channels: 480.0, batch: 64.0, devices: 2, first_layers: 8, flops_per_s: 1e13 };
        let names: Vec<String> = model.crossings().into_iter().map(|c| c.name).collect();
        assert_eq!(
            names,
            ["in", "down 0", "half 0", "down 1", "half 1", "down 2", "half 2", "down 3", "activation"]
        );
        let elements = |model: &UTransformer| -> f64 {
            let of = |c: &Crossing| c.src.split([',', ']']).nth(1).unwrap().parse::<f64>().unwrap();
            model.crossings().iter().map(of).sum()
        };
        assert_eq!(elements(&model), 3392.0 * 480.0);
        let later = UTransformer { first_layers: 9, ..model };
        assert_eq!(later.crossings().len(), 7);
        let skips_made_early = later.crossings().iter().filter(|c| c.made < 0.9).count();
        assert!(skips_made_early >= 3, "{:?}", later.crossings());
    }

    #[test]
    fn a_gpt_has_the_edge_of_the_paper() {
        let gpt = Gpt {
            hidden: 2560.0,
            layers: 32.0,
            sequence: 1024.0,
            vocabulary: 51200.0,
            batch: 16.0,
            dp: 2,
            op: 2,
            pp: 2,
            flops_per_s: 5e13,
        };
        assert_eq!(gpt.crossings()[0].src, "f16[16,1024,2560]@S0{dp:2,op:2}=0-3(dp,_,_)");
        let [f, ..] = gpt.stages()[0].seconds().unwrap();
        assert!((0.2..0.25).contains(&f), "{f}");
    }
}
