//! A schedule with its times and everything that is shown of it.

pub mod chrome;
pub mod doc;
pub mod draw;

use anyhow::{Context, Result};
use crossmesh_core::id::DeviceId;
use crossmesh_core::schedule::memory::{Level, peaks, timeline};
use crossmesh_core::schedule::{
    Bubble, Footprint, Schedule, Spec, Step, Timed, bubble, check, critical_path, time,
};

/// A schedule that was checked, and when everything happens.
pub struct Timetable {
    pub schedule: Schedule,
    pub timed: Timed,
    /// The most activations of a stage that each device holds at once.
    pub peaks: Vec<f64>,
    /// The same, in activations of a device's whole share of the layers.
    pub shares: Vec<f64>,
    /// The same in bytes, where it is known what an activation weighs.
    pub bytes: Option<Vec<f64>>,
    /// Why every device is idle.
    pub bubbles: Vec<Bubble>,
    /// The passes that the step's time is made of.
    pub path: Vec<Step>,
    /// No schedule for this pipeline is shorter, whatever its chunks are.
    pub bound: f64,
}

impl Timetable {
    /// `activation_bytes` holds a number for all stages, for each device's whole share, or for each stage.
    pub fn new(schedule: Schedule, spec: &Spec, activation_bytes: &[u64]) -> Result<Self> {
        check(&schedule).with_context(|| format!("{} cannot be run", schedule.name()))?;
        let placement = schedule.placement();
        let timed = time(&schedule, &spec.costs(placement)?)?;
        let chunks = |device| placement.stages_on(device).len();
        let even = placement.devices().all(|device| chunks(device) == placement.num_chunks());
        let (bubbles, bound) = (bubble::split(&schedule, &timed), spec.bound_of(even));
        let path = critical_path(&schedule, &timed);
        let held = |footprint: &Footprint| {
            peaks(&schedule, &timed, footprint).iter().map(|peak| peak.amount).collect::<Vec<_>>()
        };
        let bytes = stage_bytes(&schedule, activation_bytes)?.map(|bytes| held(&Footprint::bytes(bytes)));
        let (units, shares) = (held(&Footprint::units(placement)), held(&Footprint::shares(placement)));
        Ok(Self { peaks: units, shares, bytes, bubbles, path, bound, schedule, timed })
    }

    pub fn makespan(&self) -> f64 {
        self.timed.makespan
    }

    /// What kept devices idle, as shares of all their time.
    pub fn causes(&self) -> Bubble {
        bubble::shares(&self.bubbles, self.makespan())
    }

    /// How many times the bound it takes: `1.125 ×`, or nothing where nothing costs anything.
    pub fn over_bound(&self) -> String {
        over(self.makespan(), self.bound)
    }

    /// The most that any device holds, in shares, and which one.
    pub fn highest(&self) -> (f64, DeviceId) {
        let all = self.shares.iter().enumerate().map(|(d, share)| (*share, DeviceId::at(d)));
        all.fold((0.0, DeviceId(0)), |best, next| if next.0 > best.0 { next } else { best })
    }

    /// `device 2, computes 24 of 28`: the one that computes longest; or all of them, where they compute as long.
    pub fn busiest_in_words(&self) -> String {
        let busy = &self.timed.busy;
        let most = busy.iter().copied().fold(0.0, f64::max);
        let close = |time: &&f64| most - **time <= 1e-9 * most;
        let who = match (busy.iter().filter(close).count(), busy.iter().position(|time| *time == most)) {
            (all, _) if all == busy.len() && all > 1 => "every device".into(),
            (_, first) => DeviceId::at(first.unwrap_or(0)).to_string(),
        };
        format!("{who}, computes {} of {}", number(most), number(self.makespan()))
    }

    /// `0F0 1F0 2F0…2BW5 (12) 1BW5 0BW5; passes 16, messages 0`: passes of one device that follow each other are one word, with
    /// their number. Of many words the longest stretches of time are shown, as many as fit on a line.
    pub fn path_in_words(&self) -> String {
        const LETTERS: usize = 80;
        let device = |step: &Step| self.schedule.placement().device(step.pass.stage);
        let runs: Vec<&[Step]> = self.path.chunk_by(|a, b| device(a) == device(b)).collect();
        let word = |run: &&[Step]| match run {
            [one] => one.pass.to_string(),
            [first, .., last] => format!("{}…{} ({})", first.pass, last.pass, run.len()),
            [] => String::new(),
        };
        let words: Vec<String> = runs.iter().map(word).collect();
        let length = |at: &usize| {
            let run = runs[*at];
            run.last().map_or(0.0, |last| last.arrived - run[0].span.start)
        };
        let mut longest: Vec<usize> = (0..runs.len()).collect();
        longest.sort_by(|a, b| length(b).total_cmp(&length(a)));
        let (mut room, mut shown) = (LETTERS, vec![false; runs.len()]);
        for at in longest {
            let needed = words[at].chars().count() + 3;
            if needed > room {
                break;
            }
            room -= needed;
            shown[at] = true;
        }
        let mut text: Vec<&str> = vec![];
        for (word, shown) in words.iter().zip(shown) {
            match shown {
                true => text.push(word),
                false if text.last() != Some(&"…") => text.push("…"),
                false => {}
            }
        }
        let messages: f64 = self.path.iter().map(|step| step.arrived - step.span.end).sum();
        let passes = self.makespan() - messages;
        format!("{}; passes {}, messages {}", text.join(" "), number(passes), number(messages))
    }

    /// Every device's memory over time, in shares.
    pub fn memory(&self) -> Vec<Vec<Level>> {
        timeline(&self.schedule, &self.timed, &Footprint::shares(self.schedule.placement()))
    }

    /// `4 stages, 2 chunks each, 8 microbatches`.
    pub fn size(&self) -> String {
        let (placement, count) = (self.schedule.placement(), crate::output::count);
        let stages = count(placement.num_devices(), "stage");
        let chunks = match placement.num_chunks() {
            1 => String::new(),
            n => format!("{n} chunks each, "),
        };
        format!("{stages}, {chunks}{}", count(self.schedule.num_microbatches() as usize, "microbatch"))
            .replace("microbatchs", "microbatches")
    }
}

fn stage_bytes(schedule: &Schedule, given: &[u64]) -> Result<Option<Vec<u64>>> {
    let placement = schedule.placement();
    let (stages, devices) = (placement.num_stages(), placement.num_devices());
    let chunks = |stage| placement.stages_on(placement.device(stage)).len() as u64;
    let bytes: Vec<u64> = match given.len() {
        0 => return Ok(None),
        1 => placement.stages().map(|stage| given[0] / chunks(stage)).collect(),
        n if n == stages => given.to_vec(),
        n if n == devices => {
            placement.stages().map(|s| given[placement.device(s).index()] / chunks(s)).collect()
        }
        n => anyhow::bail!(
            "{n} sizes of activations fit neither {devices} devices nor {stages} stages\nhint: give one for all, one for each device or one for each stage"
        ),
    };
    Ok(Some(bytes))
}

/// A number without needless digits: `33`, `28.5`, `947.5`, `0.0625`.
pub fn number(value: f64) -> String {
    let text = format!("{value:.4}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text.is_empty() || text == "-0" { "0".into() } else { text.into() }
}

/// How many times the bound a makespan is.
pub fn over(makespan: f64, bound: f64) -> String {
    if bound > 0.0 { format!("{:.3} ×", makespan / bound) } else { "–".into() }
}

/// `ramp 27.3 %, dependency 6.0 %`: what there is of each, largest first.
pub fn causes(shares: &Bubble) -> String {
    let mut parts = [
        ("ramp", shares.ramp),
        ("imbalance", shares.imbalance),
        ("communication", shares.communication),
        ("dependency", shares.dependency),
    ];
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let shown = parts.iter().filter(|(_, share)| *share >= 0.0005);
    shown.map(|(name, share)| format!("{name} {}", percent(*share))).collect::<Vec<_>>().join(", ")
}

/// A share as a percentage: `27.3 %`.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::schedule::{Name, generate};

    #[test]
    fn every_schedule_says_what_its_time_is_made_of() {
        let spec = Spec { speeds: vec![1.0, 1.0, 0.5, 1.0], ..Spec::even(4, 8).with_hop(0.25) };
        for name in Name::ALL {
            let table = Timetable::new(generate(name, &spec).unwrap(), &spec, &[]).unwrap();
            assert!(table.busiest_in_words().starts_with("device "), "{name}: {}", table.busiest_in_words());
            let words = table.path_in_words();
            assert!(words.contains("; passes ") && words.chars().count() < 115, "{name}: {words}");
        }
        let spec = Spec::even(3, 2);
        let even = Timetable::new(generate(Name::GPipe, &spec).unwrap(), &spec, &[]).unwrap();
        assert_eq!(even.busiest_in_words(), "every device, computes 6 of 12");
        assert_eq!(even.path_in_words(), "0F0 1F0 2F0…2BW0 (3) 1BW0 0BW0…0BW1 (2); passes 12, messages 0");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [33.0, 28.5, 0.0625, 0.1 + 0.2, 0.0, 1e-9].map(number),
            ["33", "28.5", "0.0625", "0.3", "0", "0"]
        );
        assert_eq!(percent(3.0 / 11.0), "27.3 %");
    }
}
