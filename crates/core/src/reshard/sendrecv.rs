//! `sendrecv`: every receiver gets every box from a sender of its own, whole.
//!
//! The sender is the replica with the fewest bytes to send so far, over all tensors (Alpa's `normal` load balance); it
//! looks at devices and is blind to the NIC they share. One box for A hosts of B devices costs A·B times its size:
//!
//! ```text
//!  host A                host C
//!  a0 a1 a2 a3           c0 c1 c2 c3
//!  |__|__|__|__[NIC]_____|__|__|__|      a0->c0  a1->c1  a2->c2  a3->c3: four copies, one NIC
//! ```

use crate::cluster::Topology;
use crate::id::Rank;

use super::draft::Draft;
use super::plan::Plan;
use super::problem::{PlanError, Problem};
use super::strategy::{PlanOptions, Strategy};
use super::unit::UnitTasks;
use crate::units::Bytes;

pub fn plan(problem: &Problem, options: &PlanOptions) -> Result<Plan, PlanError> {
    let mut draft = Draft::new(problem, options, Strategy::SendRecv)?;
    let mut loads = SenderLoads::new(&problem.topology);
    for units in UnitTasks::of_all(problem)? {
        send_tasks(&mut draft, &units, &mut loads);
    }
    let mut plan = draft.finish()?;
    let between = Bytes(plan.bytes_between_hosts());
    plan.reasons.push(format!(
        "every device is sent each box that it lacks by a holder, whoever beside it has it too: {between} between hosts"
    ));
    Ok(plan)
}

/// Sends every task of a tensor once to each of its receivers. (Alpa's release walks the senders of a destination
/// tile twice, so that a tile with J source tiles is sent J times over; nothing here depends on that.)
pub(super) fn send_tasks(draft: &mut Draft, units: &UnitTasks, loads: &mut SenderLoads) {
    for task in &units.tasks {
        let regions = draft.add_regions(units.boxes(task));
        for receiver in units.receivers(task) {
            let sender = loads.pick(units.holders(task), receiver, task.bytes);
            for region in &regions {
                draft.send(units.tensor, sender, receiver, *region, None);
            }
            draft.end_op();
        }
    }
}

/// Bytes that every device was given to send over the network, over all tensors.
pub(super) struct SenderLoads<'a> {
    topology: &'a Topology,
    sent: Vec<u64>,
}

impl<'a> SenderLoads<'a> {
    pub fn new(topology: &'a Topology) -> Self {
        Self { topology, sent: vec![0; topology.num_ranks()] }
    }

    /// The least loaded holder, the first of several; holders beside the receiver go before all others, and cost the
    /// network nothing.
    pub fn pick(&mut self, holders: &[Rank], receiver: Rank, bytes: u64) -> Rank {
        let local = |r: &Rank| self.topology.same_host(*r, receiver);
        let sender = holders
            .iter()
            .copied()
            .min_by_key(|r| (!local(r), self.sent[r.index()]))
            .expect("a source tile has at least one device");
        if !local(&sender) {
            self.sent[sender.index()] += bytes;
        }
        sender
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::testing::{in_t, pairs, problem};

    fn plan_of(tensors: &[(&str, &str)]) -> Plan {
        plan(&problem(tensors), &PlanOptions::default()).unwrap()
    }

    #[test]
    fn every_receiver_gets_every_box_once() {
        // Four source tiles, one destination tile of eight devices: 32 messages, not 4 * 32.
        let plan = plan_of(&[("f32[16,4]@A{x:1,y:4}(y,_)", "f32[16,4]@B{x:2,y:4}(_,_)")]);
        assert_eq!(plan.transfers().len(), 32);
        assert_eq!(plan.bytes_moved(), 8 * 16 * 4 * 4);
    }

    #[test]
    fn senders_take_turns_across_tensors() {
        let tensor = ("f32[4]@A{y:2}(_)", "f32[4]@B{y:1}(_)");
        let plan = plan_of(&[tensor, tensor, tensor]);
        assert_eq!(pairs(&plan), ["r0->r2", "r1->r2", "r0->r2"]);
    }

    #[test]
    fn a_device_runs_one_op_at_a_time() {
        let plan = plan_of(&[("f32[4,4]@A{x:2,y:1}(_,x)", "f32[4,4]@B{x:2,y:1}(x,_)")]);
        assert_eq!(pairs(&plan), ["r0->r2", "r1->r2", "r0->r3", "r1->r3"]);
        let after: Vec<Vec<u32>> =
            plan.transfers().iter().map(|t| plan.after(t).iter().map(|id| id.0).collect()).collect();
        assert_eq!(after, [vec![], vec![0], vec![0], vec![1, 2]]);
        assert!(plan.transfers().iter().all(|t| t.weight == 1));
    }

    #[test]
    fn what_the_host_holds_moves_locally() {
        // Host 0 has ranks 0 and 1, host 1 ranks 2 and 3; the source is rank 0 and rank 2.
        let plan = plan_of(&[("f32[4]@H{x:2,y:2}(_)", "f32[4]@H{x:2,y:2}(_)")]);
        assert!(plan.transfers().is_empty());
        let plan = plan_of(&[
            ("f32[4]@H{x:2,y:2}(_)", "f32[4]@H{x:2,y:2}(_)"),
            ("f32[4]@S{x:2}=0,2(_)", "f32[4]@D{x:2}=1,3(_)"),
        ]);
        assert_eq!(pairs(&plan), ["r0->r1", "r2->r3"]);
    }

    #[test]
    fn a_sum_is_refused() {
        let p = problem(&[("f32[4]@A{y:2}(_ | sum y)", "f32[4]@B{y:1}(_)")]);
        let err = plan(&p, &PlanOptions::default()).unwrap_err();
        assert!(matches!(err, PlanError::CannotReduce { .. }), "{err}");
    }

    #[test]
    fn a_box_for_many_devices_costs_a_copy_each() {
        for (dst, t) in [("{x:1,y:3}", 3.0), ("{x:2,y:2}", 4.0), ("{x:4,y:2}", 8.0)] {
            let (src, dst) = ("f32[1024]@A{x:1,y:1}(_)", format!("f32[1024]@B{dst}(_)"));
            assert_eq!(in_t(&plan_of(&[(src, &dst)])), t, "{dst}");
        }
    }
}
