//! What meeting costs, by the number of ranks.

use super::*;

/// Everybody meets, learns where `peers` others are, and passes a barrier.
fn meet(n: usize, peers: usize) -> Sim {
    let hosts: Vec<usize> = (0..n).map(|i| i / 8).collect();
    let mut sim = Sim::new(&hosts, 60_000 * MS);
    for i in 0..n {
        sim.processes[i].peers = (1..=peers).map(|step| (i + step * 37) % n).filter(|p| *p != i).collect();
        // They come in no particular order.
        sim.at((i as u64 * 7919) % 50 * MS, Happens::Start(i));
    }
    sim.run(1_200 * MS);
    assert!(sim.processes.iter().all(|p| p.ready && p.heard.is_none()), "not everybody came to the barrier");
    for process in &sim.processes {
        let found: Vec<usize> = process.found.iter().map(|entry| entry.rank.index()).collect();
        assert_eq!(found, process.peers);
    }
    sim
}

#[test]
fn a_tree_of_ranks_meets() {
    for n in [1, 2, 13, 14, 157, 158, 700] {
        meet(n, 4);
    }
}

/// At most 64 KiB from any rank but the root, 64 MiB from the root, and a number of messages that grows with n log n.
#[test]
fn meeting_is_cheap_for_everybody() {
    let sim = meet(16_384, 16);
    let root = sim.processes[0].sent_bytes;
    let most = sim.processes[1..].iter().map(|p| p.sent_bytes).max().unwrap();
    println!(
        "16384 ranks: the root sent {root} B, any other at most {most} B; {} messages",
        sim.num_messages
    );
    assert!(root <= 64 << 20, "the root sent {root} B");
    assert!(most <= 64 << 10, "a rank sent {most} B");
    // Fourteen is log2 of 16,384.
    assert!(sim.num_messages <= 16_384 * 14 * 4, "{} messages", sim.num_messages);
    let links = sim.processes.iter().map(|p| p.links.len()).max().unwrap();
    assert!(links <= 20, "{links} connections of one rank");
}
