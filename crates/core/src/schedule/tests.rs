use super::*;

/// A schedule from its drawing: a line of passes per device, linear placement.
pub(super) fn linear(num_microbatches: u32, lines: &[&str]) -> Result<Schedule, ScheduleError> {
    let placement = Placement::linear(lines.len() as u32)?;
    let order = |line: &&str| line.split_whitespace().map(|p| p.parse().unwrap()).collect();
    let routes = Routes::model_order(placement.num_stages());
    Schedule::new("drawn", placement, routes, num_microbatches, lines.iter().map(order).collect())
}

fn needs(schedule: &Schedule, pass: &str) -> Vec<String> {
    schedule.needs(pass.parse().unwrap()).iter().map(|need| need.pass.to_string()).collect()
}

#[test]
fn needs_follow_the_microbatch() {
    let schedule = linear(2, &["0F0 0F1 0BW0 0BW1", "1F0 1B0 1F1 1BW1 1W0"]).unwrap();
    assert_eq!(needs(&schedule, "0F0"), [""; 0]);
    assert_eq!(needs(&schedule, "1F1"), ["0F1"]);
    assert_eq!(needs(&schedule, "0BW0"), ["0F0", "1B0"]);
    assert_eq!(needs(&schedule, "0BW1"), ["0F1", "1BW1"]);
    assert_eq!(needs(&schedule, "1W0"), ["1B0"]);
    assert_eq!(schedule.place("1BW1".parse().unwrap()), Some((DeviceId(1), 3)));
    assert_eq!(schedule.node("1BW1".parse().unwrap()), Some(7));
}

#[test]
fn skips_are_needs_like_any_other() {
    let placement = Placement::linear(3).unwrap();
    let skip = Edge { from: StageId(0), to: StageId(2) };
    let routes = Routes::model_order(3).with_skips(vec![skip]).unwrap();
    let orders = ["0F0 0BW0", "1F0 1BW0", "2F0 2BW0"];
    let orders = orders.map(|line| line.split(' ').map(|p| p.parse().unwrap()).collect()).to_vec();
    let schedule = Schedule::new("skips", placement, routes, 1, orders).unwrap();
    assert_eq!(needs(&schedule, "2F0"), ["1F0", "0F0"]);
    assert_eq!(needs(&schedule, "0BW0"), ["0F0", "1BW0", "2BW0"]);
    assert_eq!(schedule.needs("2F0".parse().unwrap())[1].via, Via::Activation(skip));
}

#[test]
fn moved_activations_come_back_before_their_backward() {
    let schedule = linear(1, &["0F0 0EVICT0 0LOAD0 0BW0 0OPT0"]).unwrap();
    assert_eq!(needs(&schedule, "0BW0"), ["0LOAD0"]);
    assert_eq!(needs(&schedule, "0LOAD0"), ["0EVICT0"]);
    assert_eq!(needs(&schedule, "0EVICT0"), ["0F0"]);
    assert_eq!(needs(&schedule, "0OPT0"), ["0BW0"]);
}

#[test]
fn the_vocabulary_joins_all_devices() {
    let schedule = linear(1, &["0F0 0S0 0T0 0BW0", "1F0 1S0 1T0 1BW0"]).unwrap();
    assert_eq!(needs(&schedule, "0S0"), ["1F0"]);
    assert_eq!(needs(&schedule, "0T0"), ["0S0", "1S0"]);
    assert_eq!(needs(&schedule, "1BW0"), ["1F0", "0T0", "1T0"]);
}

#[test]
fn passes_are_where_their_stage_is_and_once() {
    let error = |lines: &[&str]| linear(1, lines).unwrap_err().to_string();
    assert_eq!(error(&["0F0", "0F0"]), "0F0 is on device 1, but stage 0 is on device 0");
    assert_eq!(error(&["0F0 0F0"]), "0F0 is on device 0 twice");
    assert_eq!(error(&["0F1"]), "0F1 on device 0 is of microbatch 1: there are 1");
    assert_eq!(error(&["3F0"]), "3F0 on device 0 is of stage 3: the model has 1");
    assert_eq!(linear(0, &["0F0"]).unwrap_err(), ScheduleError::NoMicrobatches);
}
