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

const P3M2: [&str; 3] = ["0F0 0F1 0BW0 0BW1", "1F0 1F1 1BW0 1BW1", "2F0 2BW0 2F1 2BW1"];

#[test]
fn passes_run_as_soon_as_they_can() {
    let schedule = linear(2, &P3M2).unwrap();
    let timed = time(&schedule, &Costs::even(3, 1.0, 1.0, 1.0, 0.0).unwrap()).unwrap();
    assert_eq!(timed.makespan, 12.0);
    assert_eq!(timed.spans[0].iter().map(|s| s.start).collect::<Vec<_>>(), [0.0, 1.0, 7.0, 10.0]);
    assert_eq!(timed.spans[2].iter().map(|s| s.end).collect::<Vec<_>>(), [3.0, 5.0, 6.0, 8.0]);
    assert!((timed.bubble() - 0.5).abs() < 1e-12);
    let timed = time(&schedule, &Costs::even(3, 1.0, 1.0, 1.0, 0.5).unwrap()).unwrap();
    assert_eq!(timed.messages.len(), 8);
    assert_eq!(timed.spans[2][0].start, 3.0);
}

#[test]
fn the_first_of_a_pair_waits_until_both_can() {
    let alone = linear(2, &["0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1"]).unwrap();
    let pair = ("0F1".parse().unwrap(), "0BW0".parse().unwrap());
    let paired = alone.clone().with_pairs(vec![pair]).unwrap();
    let starts = |schedule: &Schedule| {
        let timed = time(schedule, &Costs::even(2, 1.0, 1.0, 1.0, 0.0).unwrap()).unwrap();
        [timed.spans[0][1].start, timed.spans[0][2].start]
    };
    assert_eq!(starts(&alone), [1.0, 4.0]);
    assert_eq!(starts(&paired), [4.0, 5.0]);
}

#[test]
fn a_serial_channel_carries_one_message_at_a_time() {
    let schedule = linear(3, &["0F0 0F1 0F2 0BW0 0BW1 0BW2", "1F0 1F1 1F2 1BW0 1BW1 1BW2"]).unwrap();
    let costs = Costs::even(2, 1.0, 1.0, 1.0, 3.0).unwrap();
    let starts = |costs: &Costs| {
        time(&schedule, costs).unwrap().spans[1].iter().take(3).map(|s| s.start).collect::<Vec<_>>()
    };
    assert_eq!(starts(&costs), [4.0, 7.0, 10.0]);
    assert_eq!(starts(&costs.with_channel(Channel::Delay)), [4.0, 5.0, 6.0]);
}

#[test]
fn checkers_name_the_pass_and_the_rule() {
    let error = |lines: &[&str]| {
        let error = check(&linear(2, lines).unwrap()).unwrap_err();
        (error.check(), error.to_string())
    };
    assert_eq!(
        error(&["0F0 0BW0 0F1"]),
        (Check::Completeness, "0BW1 is missing: device 0 never runs it".into())
    );
    assert_eq!(error(&["0F0 0B0 0F1 0B1 0W1"]).1, "0W0 is missing: device 0 never runs it");
    assert_eq!(error(&["0F0 0BW0 0W0 0F1 0BW1"]).0, Check::Completeness);
    assert_eq!(
        error(&["0F0 0BW0 0BW1 0F1"]),
        (Check::Dependencies, "device 0 runs 0BW1 before 0F1, which it needs".into())
    );
    let (which, text) = error(&["0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1"]);
    assert_eq!(which, Check::Deadlock);
    assert_eq!(
        text,
        "deadlock: 0BW0 on device 0 needs 1BW0; 1BW0 on device 1 comes after 1F1; 1F1 on device 1 needs 0F1; \
         0F1 on device 0 comes after 0BW0"
    );
    let stuck = linear(2, &["0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1"]).unwrap();
    let costs = Costs::even(2, 1.0, 1.0, 1.0, 0.0).unwrap();
    assert_eq!(time(&stuck, &costs).unwrap_err().check(), Check::Deadlock);
}

#[test]
fn blocking_sends_can_deadlock_where_buffered_ones_cannot() {
    let crossing = linear(2, &["0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1"]).unwrap();
    assert_eq!(check(&crossing), Ok(()));
    assert_eq!(check::deadlock_if_blocking(&crossing).unwrap_err().check(), Check::Deadlock);
    let gpipe = linear(2, &["0F0 0F1 0BW0 0BW1", "1F0 1F1 1BW0 1BW1"]).unwrap();
    assert_eq!(check::deadlock_if_blocking(&gpipe), Ok(()));
}

#[test]
fn messages_that_overtake_need_tags() {
    let swapped = linear(2, &["0F0 0F1 0BW0 0BW1", "1F1 1F0 1BW0 1BW1"]).unwrap();
    assert_eq!(check(&swapped), Ok(()));
    assert_eq!(
        check::channels(&swapped).unwrap_err().to_string(),
        "device 0 sends the activation of microbatch 0 before that of microbatch 1, but device 1 uses them the other way round"
    );
    assert_eq!(check::channels(&linear(2, &P3M2).unwrap()), Ok(()));
}

fn peak_of(lines: &[&str], kept: f64) -> Vec<f64> {
    let schedule = linear(2, lines).unwrap();
    let costs = Costs::even(lines.len(), 1.0, 1.0, 1.0, 0.0).unwrap();
    let timed = time(&schedule, &costs).unwrap();
    let footprint = Footprint::units(schedule.placement()).keeping(kept);
    memory::peaks(&schedule, &timed, &footprint).iter().map(|p| p.amount).collect()
}

#[test]
fn activations_live_from_f_to_w() {
    assert_eq!(peak_of(&P3M2, 0.5), [2.0, 2.0, 1.0]);
    assert_eq!(peak_of(&["0F0 0B0 0F1 0B1 0W0 0W1"], 0.5), [1.5]);
    assert_eq!(peak_of(&["0F0 0B0 0F1 0B1 0W0 0W1"], 1.0), [2.0]);
}

#[test]
fn evicted_activations_weigh_on_their_keeper() {
    let lines = ["0F0 0EVICT0 0F1 0BW1 0LOAD0 0BW0", "1F0 1F1 1BW1 1BW0"];
    let schedule = linear(2, &lines).unwrap();
    let costs = Costs::even(2, 1.0, 1.0, 1.0, 0.0).unwrap();
    let units = Footprint::units(schedule.placement());
    let unkept = schedule.clone();
    assert_eq!(
        check(&unkept).unwrap_err().to_string(),
        "device 0 evicts with 0EVICT0, but no device keeps what it evicts"
    );
    let schedule = schedule.with_keepers(vec![Some(DeviceId(1)), None]);
    assert_eq!(check(&schedule), Ok(()));
    let timed = time(&schedule, &costs).unwrap();
    let peaks: Vec<f64> = memory::peaks(&schedule, &timed, &units).iter().map(|p| p.amount).collect();
    assert_eq!(peaks, [1.0, 3.0]);
    assert_eq!(memory::within(&schedule, &timed, &units, &[1.0, 3.0]), Ok(()));
    assert_eq!(
        memory::within(&schedule, &timed, &units, &[1.0, 2.0]).unwrap_err().to_string(),
        "device 1 holds 3 activations at 1F1, more than its cap of 2 activations"
    );
    let bytes = Footprint::bytes(vec![100, 10]);
    assert_eq!(
        memory::within(&schedule, &timed, &bytes, &[50.0, 100.0]).unwrap_err().to_string(),
        "device 0 holds 100 B of activations at 0F0, more than its cap of 50 B of activations"
    );
}
