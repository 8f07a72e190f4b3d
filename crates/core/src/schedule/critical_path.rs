//! The chain of passes and messages that takes as long as the step: to make it shorter is the only way to a shorter step.
//!
//! ```text
//! device 0  F0 F1 ..........BW0   BW1       0F0, a hop, 1F0, 1BW0, 1F1, 1BW1, a hop, 0BW1
//! device 1  ......F0 BW0   F1 BW1
//! ```

use super::bubble::Walk;
use super::{Pass, Schedule, Span, Timed};

/// A pass of the path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    pub pass: Pass,
    pub span: Span,
    /// When the next pass of the path had what this one made; later than its end where a message took time.
    pub arrived: f64,
}

/// In order of time.
pub fn critical_path(schedule: &Schedule, timed: &Timed) -> Vec<Step> {
    let walk = Walk::new(schedule, timed);
    let mut steps = vec![];
    let mut cause = walk.last();
    while let Some(at) = cause.filter(|_| steps.len() < schedule.num_passes()) {
        steps.push(Step { pass: at.pass, span: walk.span(at.pass), arrived: at.arrived });
        cause = walk.cause(at.pass);
    }
    steps.reverse();
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Name, Spec, generate, time};

    fn path(name: Name, spec: &Spec) -> (Vec<String>, f64) {
        let schedule = generate(name, spec).unwrap();
        let timed = time(&schedule, &spec.costs(schedule.placement()).unwrap()).unwrap();
        let steps = critical_path(&schedule, &timed);
        let messages = steps.iter().map(|step| step.arrived - step.span.end).sum();
        (steps.iter().map(|step| step.pass.to_string()).collect(), messages)
    }

    #[test]
    fn one_microbatch_goes_there_and_back() {
        let (passes, messages) = path(Name::GPipe, &Spec::even(3, 1).with_hop(0.5));
        assert_eq!(passes, ["0F0", "1F0", "2F0", "2BW0", "1BW0", "0BW0"]);
        assert_eq!(messages, 2.0);
    }

    #[test]
    fn a_slow_device_has_nearly_all_of_it() {
        let spec = Spec { speeds: vec![1.0, 1.0, 0.25, 1.0], ..Spec::even(4, 16) };
        let (passes, _) = path(Name::OneF1B, &spec);
        let slow = passes.iter().filter(|pass| pass.starts_with('2')).count();
        assert!(slow == 32 && passes.len() <= 32 + 6, "{passes:?}");
    }
}
