//! Synthetic images with noise on them, whose best possible loss is known.
//!
//! An image is smooth: a sum of a few cosine waves (the lowest frequencies of the discrete cosine transform, orthonormal). Its class, which
//! the context tells, says what the waves' amplitudes are on average; each deviates from that by chance. A time step says how much of the
//! image is left under the noise, along a quarter of a circle:
//!
//! ```text
//! x = cos(a) image + sin(a) noise       a from 9° (time 0) to 90° (time 999, noise alone)
//! ```
//!
//! The noise is white, so most of it lies where no image of the family can be, and can be told from the image exactly. Only along the
//! waves do the two mix. There, both being normal, the part of the noise that remains unknown has a known variance, so the least
//! mean squared error that any model can reach is a sum over waves and time steps ([`Images::reachable_loss`]).

use std::f64::consts::{FRAC_PI_2, PI};
use std::ops::Range;

use super::{Column, DataError, DataSet, Feature, Kind, Split, no_port};
use crate::kernels::random::Stream;
use crate::models::unet::TIME_STEPS;

/// Which images.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImagesSpec {
    /// Height and width.
    pub side: usize,
    pub channels: usize,
    /// Waves along each side; an image has the square of it, for each channel.
    pub waves: usize,
    pub classes: usize,
    /// Rows and columns of the text that tells the class.
    pub context_rows: usize,
    pub context_width: usize,
    pub seed: u64,
}

impl ImagesSpec {
    /// Four waves a channel, eight classes.
    pub fn new(side: usize, channels: usize, context_rows: usize, context_width: usize) -> Self {
        Self { side, channels, waves: 2, classes: 8, context_rows, context_width, seed: 0 }
    }
}

/// The share of an image's variance that its class does not tell.
const DEVIATION_SHARE: f64 = 0.5;

/// Of a right angle: how far the noise is along its way at time 0. Less, and the loss would be about pictures of hardly any noise.
const FIRST_ANGLE: f64 = 0.1;

/// Noisy images, the noise, its time step, and the text.
#[derive(Debug, Clone)]
pub struct Images {
    spec: ImagesSpec,
    /// `[waves², side²]`, rows of length 1.
    basis: Vec<f64>,
    /// Mean amplitudes, `[classes, channels, waves²]`.
    means: Vec<f64>,
}

impl Images {
    pub fn new(spec: ImagesSpec) -> Result<Self, DataError> {
        check(&spec)?;
        let mean = Stream::named(spec.seed, "images/means");
        let deviation = ((1.0 - DEVIATION_SHARE) * spec.amplitude_variance()).sqrt();
        let amplitudes = (spec.classes * spec.amplitudes()) as u64;
        let means = (0..amplitudes).map(|i| deviation * mean.normal(i)).collect();
        Ok(Self { basis: basis(spec.side, spec.waves), means, spec })
    }

    fn stream(&self, what: &str, split: Split) -> Stream {
        let split = match split {
            Split::Training => "training",
            Split::Validation => "validation",
        };
        Stream::named(self.spec.seed, &format!("images/{split}/{what}"))
    }

    fn class(&self, sample: u64, split: Split) -> usize {
        below(self.stream("class", split).at(sample), self.spec.classes)
    }

    fn time(&self, sample: u64, split: Split) -> usize {
        below(self.stream("time", split).at(sample), TIME_STEPS)
    }

    /// `[side, side, channels]`.
    fn noise(&self, sample: u64, split: Split) -> impl Iterator<Item = f64> {
        let (stream, len) = (self.stream("noise", split), self.spec.len() as u64);
        let first = sample.wrapping_mul(len);
        (0..len).map(move |i| stream.normal(first.wrapping_add(i)))
    }

    /// The image under the noise.
    fn clean(&self, sample: u64, split: Split) -> Vec<f64> {
        let ImagesSpec { side, channels, waves, .. } = self.spec;
        let (pixels, count) = (side * side, self.spec.amplitudes());
        let stream = self.stream("amplitudes", split);
        let first = sample.wrapping_mul(count as u64);
        let deviation = self.spec.deviation_variance().sqrt();
        let means = &self.means[self.class(sample, split) * count..][..count];
        let mut image = vec![0.0; pixels * channels];
        for (i, mean) in means.iter().enumerate() {
            let amplitude = mean + deviation * stream.normal(first.wrapping_add(i as u64));
            let (channel, wave) = (i / (waves * waves), i % (waves * waves));
            let wave = &self.basis[wave * pixels..][..pixels];
            let of_channel = image.iter_mut().skip(channel).step_by(channels);
            of_channel.zip(wave).for_each(|(pixel, wave)| *pixel += amplitude * wave);
        }
        image
    }

    fn noisy(&self, sample: u64, split: Split) -> impl Iterator<Item = f64> {
        let (left, added) = mixture(self.time(sample, split));
        let pixels = self.clean(sample, split).into_iter().zip(self.noise(sample, split));
        pixels.map(move |(image, noise)| left * image + added * noise)
    }

    /// What a class is called: rows of numbers that belong to it.
    fn text(&self, class: usize) -> impl Iterator<Item = f64> {
        let len = (self.spec.context_rows * self.spec.context_width) as u64;
        let stream = Stream::named(self.spec.seed, "images/text");
        (0..len).map(move |i| stream.normal(class as u64 * len + i))
    }

    /// What no model can tell of the noise along one wave, at a time step.
    fn unknown(&self, time: usize) -> f64 {
        let (left, added) = mixture(time);
        let image = left * left * self.spec.deviation_variance();
        image / (image + added * added)
    }
}

impl ImagesSpec {
    /// Numbers of an image.
    fn len(&self) -> usize {
        self.side * self.side * self.channels
    }

    fn amplitudes(&self) -> usize {
        self.channels * self.waves * self.waves
    }

    /// Such that a pixel has variance 1.
    fn amplitude_variance(&self) -> f64 {
        (self.side * self.side) as f64 / (self.waves * self.waves) as f64
    }

    fn deviation_variance(&self) -> f64 {
        DEVIATION_SHARE * self.amplitude_variance()
    }
}

impl DataSet for Images {
    fn features(&self) -> Vec<Feature> {
        let ImagesSpec { side, channels, context_rows, context_width, .. } = self.spec;
        let image = vec![side, side, channels];
        let real = |port, dims| Feature { port, dims, kind: Kind::Real };
        vec![
            real("image", image.clone()),
            Feature { port: "time", dims: vec![], kind: Kind::Ids { classes: TIME_STEPS } },
            real("context", vec![context_rows, context_width]),
            real("noise", image),
        ]
    }

    fn num_samples(&self, _: Split) -> Option<u64> {
        None
    }

    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, DataError> {
        Ok(match port {
            "image" => Column::Real(samples.flat_map(|n| self.noisy(n, split)).collect()),
            "noise" => Column::Real(samples.flat_map(|n| self.noise(n, split)).collect()),
            "context" => Column::Real(samples.flat_map(|n| self.text(self.class(n, split))).collect()),
            "time" => Column::Ids(samples.map(|n| self.time(n, split) as i32).collect()),
            _ => return Err(no_port(self, port)),
        })
    }

    /// The mean squared error of the best guess of the noise.
    fn reachable_loss(&self) -> Option<f64> {
        let unknown = (0..TIME_STEPS).map(|time| self.unknown(time)).sum::<f64>() / TIME_STEPS as f64;
        Some(unknown * self.spec.amplitudes() as f64 / self.spec.len() as f64)
    }

    fn describe(&self) -> String {
        let ImagesSpec { side, channels, waves, classes, seed, .. } = self.spec;
        format!(
            "synthetic images of {side}×{side}×{channels}, {waves}×{waves} waves, {classes} classes and seed {seed}"
        )
    }
}

fn check(spec: &ImagesSpec) -> Result<(), DataError> {
    let ImagesSpec { side, channels, waves, classes, context_rows, context_width, .. } = *spec;
    let sizes = [
        ("side", side),
        ("channels", channels),
        ("waves", waves),
        ("classes", classes),
        ("context_rows", context_rows),
        ("context_width", context_width),
    ];
    for (key, value) in sizes {
        if !(1..=1 << 16).contains(&value) {
            return Err(DataError::value(key, value, "it has to be from 1 to 65536", "use 1 or more"));
        }
    }
    if waves > side || waves.pow(2) * side.pow(2) > 1 << 24 {
        let reason = format!("up to {side} along a side of {side} pixels, in tables of up to 2^24 numbers");
        return Err(DataError::value("waves", waves, reason, "2 makes smooth images"));
    }
    Ok(())
}

/// How much of image and noise there is at a time step; their squares add up to 1.
fn mixture(time: usize) -> (f64, f64) {
    let done = time as f64 / (TIME_STEPS - 1) as f64;
    let (sin, cos) = (FRAC_PI_2 * (FIRST_ANGLE + (1.0 - FIRST_ANGLE) * done)).sin_cos();
    (cos, sin)
}

/// A draw as one of `n`.
fn below(draw: u32, n: usize) -> usize {
    ((u64::from(draw) * n as u64) >> 32) as usize
}

/// The lowest waves of the discrete cosine transform, `[waves², side²]`.
fn basis(side: usize, waves: usize) -> Vec<f64> {
    let along = |wave: usize, at: usize| {
        let length = if wave == 0 { 1.0 } else { 2.0 } / side as f64;
        length.sqrt() * (PI * (at as f64 + 0.5) * wave as f64 / side as f64).cos()
    };
    let pixel = |u: usize, v: usize| (0..side * side).map(move |i| along(u, i / side) * along(v, i % side));
    (0..waves * waves).flat_map(|wave| pixel(wave / waves, wave % waves)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images() -> Images {
        Images::new(ImagesSpec { waves: 3, ..ImagesSpec::new(8, 2, 3, 5) }).unwrap()
    }

    fn real(images: &Images, port: &str, samples: Range<u64>) -> Vec<f64> {
        match images.read(port, samples, Split::Training).unwrap() {
            Column::Real(values) => values,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn waves_are_orthonormal() {
        let basis = basis(8, 3);
        let rows: Vec<&[f64]> = basis.chunks(64).collect();
        for (i, a) in rows.iter().enumerate() {
            for (j, b) in rows.iter().enumerate() {
                let product: f64 = a.iter().zip(*b).map(|(a, b)| a * b).sum();
                assert!((product - f64::from(u8::from(i == j))).abs() < 1e-12, "{i} {j}: {product}");
            }
        }
    }

    /// The best guess, written out: along the waves the mean of noise given image and class, elsewhere the noise itself.
    #[test]
    fn the_reachable_loss_is_that_of_the_best_guess() {
        let images = images();
        let (mut sum, samples) = (0.0, 4000);
        for n in 0..samples {
            let (left, added) = mixture(images.time(n, Split::Training));
            let (x, noise) = (real(&images, "image", n..n + 1), real(&images, "noise", n..n + 1));
            let means = &images.means[images.class(n, Split::Training) * 18..][..18];
            let variance = images.spec.deviation_variance();
            let mut guess: Vec<f64> = x.iter().map(|x| x / added).collect();
            for (i, mean) in means.iter().enumerate() {
                let wave = &images.basis[i % 9 * 64..][..64];
                let channel = |values: &[f64]| -> f64 {
                    values.iter().skip(i / 9).step_by(2).zip(wave).map(|(x, w)| x * w).sum()
                };
                let seen = channel(&x) - left * mean;
                let best = seen * added / (left * left * variance + added * added);
                let was = channel(&guess);
                let of_channel = guess.iter_mut().skip(i / 9).step_by(2);
                of_channel.zip(wave).for_each(|(g, w)| *g += (best - was) * w);
            }
            sum += guess.iter().zip(&noise).map(|(g, e)| (g - e).powi(2)).sum::<f64>() / 128.0;
        }
        let (seen, stated) = (sum / samples as f64, images.reachable_loss().unwrap());
        assert!((seen / stated - 1.0).abs() < 0.03, "saw {seen}, stated {stated}");
    }

    #[test]
    fn a_sample_is_the_same_whoever_reads_it() {
        let images = images();
        for (port, each) in [("image", 128), ("noise", 128), ("context", 15)] {
            let all = real(&images, port, 0..6);
            assert_eq!(all.len(), 6 * each);
            assert_eq!(all[2 * each..4 * each], real(&images, port, 2..4), "{port}");
        }
        let time = |split| images.read("time", 0..200, split).unwrap();
        let Column::Ids(ids) = time(Split::Training) else { panic!("time steps are ids") };
        assert!(ids.iter().all(|t| (0..1000).contains(t)) && ids.iter().max() > Some(&900));
        assert_ne!(time(Split::Training), time(Split::Validation));
    }

    #[test]
    fn pixels_have_variance_one_and_classes_their_text() {
        let images = Images::new(ImagesSpec { classes: 200, ..ImagesSpec::new(8, 1, 2, 4) }).unwrap();
        let pixels: Vec<f64> = (0..2000).flat_map(|n| images.clean(n, Split::Training)).collect();
        let variance = pixels.iter().map(|x| x * x).sum::<f64>() / pixels.len() as f64;
        assert!((variance - 1.0).abs() < 0.15, "{variance}");
        let text = |class: usize| images.text(class).collect::<Vec<_>>();
        assert_ne!(text(0), text(1));
        let class = images.class(5, Split::Training);
        assert_eq!(real(&images, "context", 5..6), text(class));
    }

    #[test]
    fn refuses_what_is_no_image() {
        let refused = |spec| Images::new(spec).unwrap_err().to_string();
        assert!(refused(ImagesSpec::new(0, 1, 1, 1)).starts_with("side = 0: "));
        assert!(refused(ImagesSpec { waves: 9, ..ImagesSpec::new(8, 1, 1, 1) }).starts_with("waves = 9: "));
        assert!(refused(ImagesSpec { classes: 0, ..ImagesSpec::new(8, 1, 1, 1) }).starts_with("classes = 0"));
    }
}
