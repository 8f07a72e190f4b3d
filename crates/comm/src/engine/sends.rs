//! Whose part is sent next.
//!
//! Channels that can send stand in line by virtual time: bytes sent over weight. So channels that share the rank's
//! links share them in proportion to their weights, and a channel whose link is full does not hold up the others.

use std::cmp::Ordering;

use crossmesh_core::program::OpKind;

use super::Engine;
use crate::error::CommError;
use crate::transport::Message;

/// A channel in line: higher priorities first, then the least virtual time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct InLine {
    priority: u32,
    pass: f64,
    job: u32,
    channel: u32,
}

impl Eq for InLine {}

impl Ord for InLine {
    /// The greatest is first in line.
    fn cmp(&self, other: &Self) -> Ordering {
        let by_priority = self.priority.cmp(&other.priority);
        let by_pass = || other.pass.total_cmp(&self.pass);
        let by_age = || (other.job, other.channel).cmp(&(self.job, self.channel));
        by_priority.then_with(by_pass).then_with(by_age)
    }
}

impl PartialOrd for InLine {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Engine {
    /// Something about this send changed: it may stand in line now.
    pub(super) fn wake_sender(&mut self, id: u32, op: u32) {
        let Some(job) = self.jobs.get(&id) else { return };
        let Some(channel) = job.channel_of(op) else { return };
        self.wake_channel(id, channel);
    }

    fn wake_channel(&mut self, id: u32, channel: u32) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.channels[channel as usize].in_line || job.sendable(channel).is_none() {
            return;
        }
        let c = &mut job.channels[channel as usize];
        c.in_line = true;
        c.pass = c.pass.max(self.virtual_time);
        self.line.push(InLine { priority: job.spec.priority, pass: c.pass, job: id, channel });
    }

    pub(super) fn wake_parked(&mut self, peer: usize) {
        if self.peers[peer].parked.is_empty() || !self.peers[peer].link.has_room() {
            return;
        }
        for (job, channel) in std::mem::take(&mut self.peers[peer].parked) {
            self.wake_channel(job, channel);
        }
    }

    /// Sends until nobody is in line, or all links are full; and says what there is to say.
    pub(super) fn pump_sends(&mut self) -> Result<(), CommError> {
        loop {
            // What goes in one write began at one time: a clock for each part would cost as much as offering it.
            let mut now = if self.line.is_empty() { 0 } else { self.clock.now_ns() };
            while let Some(first) = self.line.pop() {
                self.send_part(first, &mut now)?;
            }
            // What a flush brings may have to be announced, also to peers that had their turn.
            let touched = std::mem::take(&mut self.touched);
            if touched.is_empty() {
                return Ok(());
            }
            for peer in touched {
                self.peers[peer].touched = false;
                self.announce(peer);
                let p = &self.peers[peer];
                if p.link.has_work() || (p.link.wants_write() && !p.watches_write) {
                    self.flush(peer)?;
                }
            }
        }
    }

    fn send_part(&mut self, first: InLine, now: &mut u64) -> Result<(), CommError> {
        let InLine { job: id, channel, pass, .. } = first;
        let Some(job) = self.jobs.get_mut(&id) else { return Ok(()) };
        job.channels[channel as usize].in_line = false;
        self.virtual_time = pass;
        let Some((op, upto)) = job.sendable(channel) else { return Ok(()) };
        let peer = job.channels[channel as usize].link;
        if !self.peers[peer].link.has_room() {
            self.flush(peer)?;
            *now = self.clock.now_ns();
            if !self.peers[peer].link.has_room() {
                self.peers[peer].parked.push((id, channel));
                return Ok(());
            }
        }
        self.issue(id, channel, op, upto, *now);
        self.touch(peer);
        self.wake_channel(id, channel);
        Ok(())
    }

    /// Hands the next part of a send to its link.
    fn issue(&mut self, id: u32, channel: u32, op: u32, upto: u64, now: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let OpKind::Send { tag, weight, .. } = job.op(op).kind else { return };
        let link = &mut self.peers[job.channels[channel as usize].link].link;
        let bytes = job.op(op).bytes;
        let progress = &mut job.ops[op as usize];
        if progress.started_ns == 0 {
            progress.started_ns = now;
        }
        let start = progress.issued;
        let end = upto.min(start + link.part_bytes(job.spec.chunk_bytes));
        progress.issued = end;
        progress.issued_all = end == bytes;
        let place = job.source(op).expect("sends have a place");
        link.send(Message { job: id, tag }, start..end, place);
        let c = &mut job.channels[channel as usize];
        c.pass += (end - start) as f64 / weight.max(1) as f64;
        if end == bytes {
            c.queue.pop_front();
        }
    }
}
