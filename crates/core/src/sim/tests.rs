//! The simulator against closed forms.

use super::*;
use crate::cluster::{Group, Host, Tier};
use crate::id::{HostId, RegionId};
use crate::program::{Dep, DepKind, List, Op, OpKind, RankProgram, TileId};
use crate::trace::Link;

/// A program written down as messages: `(src, dst, bytes, weight)`, and for each the messages it follows or waits for.
#[derive(Default)]
struct Sketch {
    messages: Vec<(u32, u32, u64, u64)>,
    follows: Vec<(usize, usize)>,
    waits: Vec<(usize, usize)>,
}

impl Sketch {
    fn message(&mut self, src: u32, dst: u32, bytes: u64) -> usize {
        self.weighted(src, dst, bytes, 1)
    }

    fn weighted(&mut self, src: u32, dst: u32, bytes: u64, weight: u64) -> usize {
        self.messages.push((src, dst, bytes, weight));
        self.messages.len() - 1
    }

    fn program(&self, num_ranks: u32, chunk_bytes: u64) -> Program {
        let mut ranks = vec![RankProgram::default(); num_ranks as usize];
        let mut ops: Vec<(u32, u32)> = vec![];
        for (tag, &(src, dst, bytes, weight)) in self.messages.iter().enumerate() {
            let mut add = |rank: u32, kind| {
                let ranked = &mut ranks[rank as usize];
                ranked.ops.push(Op { kind, tensor: 0, region: RegionId(0), bytes, deps: 0..0 });
                ranked.ops.len() as u32 - 1
            };
            let tag = tag as u32;
            let send =
                add(src, OpKind::Send { to: Rank(dst), lane: src, tag, weight, from: TileId::NOWHERE });
            let recv = add(
                dst,
                OpKind::Recv { from: Rank(src), lane: src, tag, into: TileId::NOWHERE, reduce: false },
            );
            ops.push((send, recv));
        }
        for tag in 0..self.messages.len() {
            let (src, send) = (self.messages[tag].0, ops[tag].0);
            let start = ranks[src as usize].deps.len() as u32;
            for (list, kind) in [(&self.follows, DepKind::Stream), (&self.waits, DepKind::Done)] {
                for &(_, on) in list.iter().filter(|(t, _)| *t == tag) {
                    let (on_src, on_dst) = (self.messages[on].0, self.messages[on].1);
                    let op = if on_dst == src { ops[on].1 } else { ops[on].0 };
                    assert!(on_dst == src || on_src == src, "a wait is for an op of the same rank");
                    ranks[src as usize].deps.push(Dep { op, kind });
                }
            }
            let end = ranks[src as usize].deps.len() as u32;
            ranks[src as usize].ops[send as usize].deps = start..end;
        }
        Program { chunk_bytes, ranks, ..Program::default() }
    }

    fn seconds(&self, cluster: &Cluster, chunk_bytes: u64) -> f64 {
        let program = self.program(cluster.num_devices() as u32, chunk_bytes);
        simulate(&program, cluster).unwrap().makespan_s
    }
}

/// Hosts of one device with a NIC of 1000 B/s.
fn hosts(n: usize) -> Cluster {
    let host = Host { nic_out_bytes_per_s: 1000.0, nic_in_bytes_per_s: 1000.0, ..Host::with_devices(1) };
    Cluster::of_hosts(vec![host; n])
}

#[track_caller]
fn assert_close(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-6 * expected.max(1e-9), "found {found}, expected {expected}");
}

#[test]
fn one_message_takes_its_bytes_over_the_rate_and_the_latency() {
    let mut sketch = Sketch::default();
    sketch.message(0, 1, 5000);
    assert_close(sketch.seconds(&hosts(2), 100), 5.0);
    assert_close(sketch.seconds(&Cluster { latency_s: 0.25, ..hosts(2) }, 100), 5.25);
}

#[test]
fn messages_cost_both_their_ends_time() {
    let costly = |n| Cluster { latency_s: 0.25, message_s: 0.1, ..hosts(n) };
    let mut row = Sketch::default();
    (0..4).for_each(|_| _ = row.message(0, 1, 500));
    assert_close(row.seconds(&costly(2), 100), 4.0 * (0.1 + 0.5) + 0.25 + 0.1);

    // A rank sees to one message at a time, whoever it is to or from.
    let (mut to_many, mut from_many) = (Sketch::default(), Sketch::default());
    for peer in 1..4 {
        to_many.message(0, peer, 0);
        from_many.message(peer, 0, 0);
    }
    assert_close(to_many.seconds(&costly(4), 100), 3.0 * 0.1 + 0.25 + 0.1);
    assert_close(from_many.seconds(&costly(4), 100), 0.1 + 0.25 + 3.0 * 0.1);

    // Both of its messages in keep r1 from sending at once: it sees to them, then to its own.
    let mut both = Sketch::default();
    let first = both.message(0, 1, 0);
    both.message(2, 1, 0);
    let last = both.message(1, 3, 0);
    both.waits.push((last, first));
    assert_close(both.seconds(&costly(4), 100), 0.1 + 0.25 + 2.0 * 0.1 + 0.1 + 0.25 + 0.1);

    let mut chain = Sketch::default();
    let head = chain.message(0, 1, 10_000);
    let tail = chain.message(1, 2, 10_000);
    chain.follows.push((tail, head));
    let seconds = chain.seconds(&Cluster { message_s: 0.1, ..hosts(3) }, 100);
    assert_close(seconds, 0.1 + 0.1 + 0.1 + 10.0 + 0.1);
}

#[test]
fn messages_inside_a_host_have_a_cost_of_their_own() {
    let host = Host { local_bytes_per_s: 1000.0, ..Host::with_devices(2) };
    let cluster = Cluster { local_message_s: 0.5, message_s: 7.0, ..Cluster::of_hosts(vec![host]) };
    let mut sketch = Sketch::default();
    sketch.message(0, 1, 1000);
    assert_close(sketch.seconds(&cluster, 100), 0.5 + 1.0 + 0.5);
}

#[test]
fn a_chain_fills_a_chunk_per_hop() {
    for hops in 1..6 {
        let mut sketch = Sketch::default();
        for hop in 0..hops {
            let m = sketch.message(hop, hop + 1, 10_000);
            if m > 0 {
                sketch.follows.push((m, m - 1));
            }
        }
        let fill = f64::from(hops - 1);
        assert_close(sketch.seconds(&hosts(6), 100), 10.0 + fill * 0.1);
        let late = Cluster { latency_s: 0.01, ..hosts(6) };
        assert_close(sketch.seconds(&late, 100), 10.0 + fill * 0.1 + f64::from(hops) * 0.01);
        // A chunk as long as the message is store and forward.
        assert_close(sketch.seconds(&hosts(6), 10_000), 10.0 * f64::from(hops));
    }
}

#[test]
fn a_slow_hop_paces_the_chain_behind_it() {
    let mut cluster = hosts(4);
    cluster.hosts[2].nic_in_bytes_per_s = 500.0;
    let mut sketch = Sketch::default();
    for hop in 0..3 {
        let m = sketch.message(hop, hop + 1, 10_000);
        if m > 0 {
            sketch.follows.push((m, m - 1));
        }
    }
    // The first chunk takes 0.1 s to r1; r1 to r2 takes 20 s; r3 has the last chunk 0.1 s later.
    assert_close(sketch.seconds(&cluster, 100), 0.1 + 20.0 + 0.1);
}

#[test]
fn links_are_shared_max_min_fairly() {
    // x: 0 -> 2 and y: 0 -> 1 share r0; y and z: 3 -> 1 share r1's half-rate NIC.
    let mut cluster = hosts(4);
    cluster.hosts[1].nic_in_bytes_per_s = 500.0;
    let mut sketch = Sketch::default();
    let x = sketch.message(0, 2, 7500);
    let y = sketch.message(0, 1, 2500);
    let z = sketch.message(3, 1, 2500);
    let program = sketch.program(4, 100);
    let trace = simulate(&program, &cluster).unwrap();
    for (m, rank) in [(x, 0), (y, 0), (z, 3)] {
        let op = program.ranks[rank]
            .ops
            .iter()
            .position(|o| matches!(o.kind, OpKind::Send { tag, .. } if tag == m as u32));
        assert_close(trace.ops[rank][op.unwrap()].end_s, 10.0);
    }
    let r0 = trace.links.iter().find(|l| l.link == Link::NicOut(crate::id::PortId(0))).unwrap();
    assert_eq!(r0.bytes, 10_000);
    assert_close(r0.busy[0].share, 1.0);
}

#[test]
fn weights_in_proportion_to_bytes_meet_the_busiest_link() {
    // Whatever the sizes, all channels at once, weighted by their bytes, end with the busiest NIC.
    let sizes = [[3100, 900, 50], [40, 1700, 2300], [990, 10, 5000]];
    let mut sketch = Sketch::default();
    for (i, row) in sizes.iter().enumerate() {
        for (j, &bytes) in row.iter().enumerate() {
            sketch.weighted(i as u32, 3 + j as u32, bytes, bytes);
        }
    }
    let out = sizes.iter().map(|row| row.iter().sum::<u64>()).max().unwrap();
    let into = (0..3).map(|j| sizes.iter().map(|row| row[j]).sum::<u64>()).max().unwrap();
    assert_close(sketch.seconds(&hosts(6), 100), out.max(into) as f64 / 1000.0);
}

#[test]
fn a_channel_is_first_in_first_out_and_waits_wait() {
    let mut sketch = Sketch::default();
    sketch.message(0, 1, 1000);
    sketch.message(0, 1, 1000);
    let third = sketch.message(0, 2, 500);
    sketch.waits.push((third, 1));
    assert_close(sketch.seconds(&hosts(3), 100), 2.5);
}

#[test]
fn full_duplex_costs_nothing_and_local_links_are_apart() {
    let host = Host {
        nic_out_bytes_per_s: 1000.0,
        nic_in_bytes_per_s: 1000.0,
        local_bytes_per_s: 4000.0,
        ..Host::with_devices(2)
    };
    let cluster = Cluster::of_hosts(vec![host; 2]);
    let mut sketch = Sketch::default();
    sketch.message(0, 2, 4000);
    sketch.message(3, 1, 4000);
    sketch.message(0, 1, 4000);
    assert_close(sketch.seconds(&cluster, 100), 4.0);
}

#[test]
fn a_tier_is_shared_by_all_that_leaves_the_group() {
    let mut cluster = hosts(4);
    let group = |hosts: [u32; 2]| Group {
        hosts: hosts.map(HostId).to_vec(),
        out_bytes_per_s: 800.0,
        in_bytes_per_s: 800.0,
    };
    cluster.tiers.push(Tier { name: "rack".into(), groups: vec![group([0, 1]), group([2, 3])] });
    let mut sketch = Sketch::default();
    sketch.message(0, 2, 1000);
    sketch.message(1, 3, 1000);
    assert_close(sketch.seconds(&cluster, 100), 2.5);
    let mut inside = Sketch::default();
    inside.message(0, 1, 1000);
    assert_close(inside.seconds(&cluster, 100), 1.0);
}

#[test]
fn a_program_that_cannot_go_on_is_an_error() {
    let mut sketch = Sketch::default();
    let a = sketch.message(0, 1, 10);
    let b = sketch.message(1, 0, 10);
    sketch.waits.push((a, b));
    sketch.waits.push((b, a));
    let error = simulate(&sketch.program(2, 100), &hosts(2)).unwrap_err();
    assert!(matches!(error, SimError::Stuck { left: 2, .. }));
}

#[test]
fn two_streams_through_one_relay_share_its_way_out() {
    // 0 -> 2 -> 3 and 1 -> 2 -> 4: r2 receives both at half rate and forwards both at half rate.
    let mut sketch = Sketch::default();
    for (src, dst) in [(0, 3), (1, 4)] {
        let first = sketch.message(src, 2, 5000);
        let second = sketch.message(2, dst, 5000);
        sketch.follows.push((second, first));
    }
    assert_close(sketch.seconds(&hosts(5), 100), 10.0 + 2.0 * 0.1);
}

/// A fast second hop catches up with bytes that are still on the wire, and has to wait for them.
#[test]
fn a_follower_waits_for_what_is_still_on_the_wire() {
    let mut cluster = Cluster { latency_s: 1.0, ..hosts(3) };
    cluster.hosts[1].nic_out_bytes_per_s = 4000.0;
    cluster.hosts[2].nic_in_bytes_per_s = 4000.0;
    let mut sketch = Sketch::default();
    let first = sketch.message(0, 1, 10_000);
    let second = sketch.message(1, 2, 10_000);
    sketch.follows.push((second, first));
    // The last chunk is at r1 after 11 s; it takes a fortieth of a second, and a second on the wire.
    assert_close(sketch.seconds(&cluster, 100), 11.0 + 0.025 + 1.0);
}

/// r0 computes, sends what it computed while it computes on, and r1 computes with it.
#[test]
fn computing_takes_its_time_beside_what_moves() {
    let compute =
        |pass, nanos| OpKind::Compute { pass, nanos, needs: List::default(), makes: List::default() };
    let send = OpKind::Send { to: Rank(1), lane: 0, tag: 0, weight: 1, from: TileId::NOWHERE };
    let recv = OpKind::Recv { from: Rank(0), lane: 0, tag: 0, into: TileId::NOWHERE, reduce: false };
    let rank = |ops: &[(OpKind, Option<u32>)]| {
        let mut ranked = RankProgram::default();
        for (kind, dep) in ops {
            let first = ranked.deps.len() as u32;
            ranked.deps.extend(dep.map(|op| Dep { op, kind: DepKind::Done }));
            let bytes = if matches!(kind, OpKind::Compute { .. }) { 0 } else { 1000 };
            let deps = first..ranked.deps.len() as u32;
            ranked.ops.push(Op { kind: *kind, tensor: 0, region: RegionId(0), bytes, deps });
        }
        ranked
    };
    let second = 1_000_000_000;
    let ranks = vec![
        rank(&[(compute(0, 2 * second), None), (send, Some(0)), (compute(1, 3 * second), Some(0))]),
        rank(&[(recv, None), (compute(0, second), Some(0))]),
    ];
    let program = Program { chunk_bytes: 1000, ranks, ..Program::default() };
    let trace = simulate(&program, &hosts(2)).unwrap();
    let span = |rank: usize, op: usize| (trace.ops[rank][op].start_s, trace.ops[rank][op].end_s);
    assert_eq!((span(0, 0), span(0, 1), span(0, 2)), ((0.0, 2.0), (2.0, 3.0), (2.0, 5.0)));
    assert_eq!(span(1, 1), (3.0, 4.0));
    assert_eq!(trace.makespan_s, 5.0);
}
