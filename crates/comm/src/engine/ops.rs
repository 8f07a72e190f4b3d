//! Ops: what they wait for, and what becomes of that.
//!
//! ```text
//! its dependencies end --> activate: a send stands in line, a receive is announced, a copy or a pass is queued
//! its bytes have moved --> end: what waited for it becomes ready
//! ```

use crossmesh_core::id::Rank;
use crossmesh_core::program::OpKind;

use super::{Engine, Job};
use crate::error::CommError;
use crate::transport::{Expected, Message};
use crate::wire::{Kind, WireError};

/// Messages announced for jobs that have not started here yet; a peer that announces more is out of its mind.
const MAX_EARLY_TAGS: usize = 1 << 22;

impl Engine {
    pub(super) fn on_ready(&mut self, peer: Rank, id: u32, tags: &[u32]) -> Result<(), CommError> {
        let Some(job) = self.jobs.get_mut(&id) else {
            self.early_tags += tags.len();
            if self.early_tags > MAX_EARLY_TAGS {
                let cause = "peers announce more messages than any program has".into();
                return Err(CommError::System { me: self.me, what: "keep announcements", cause });
            }
            self.early.entry(id).or_default().extend(tags.iter().map(|tag| (peer, *tag)));
            self.peers[self.index_of[&peer]].early += tags.len();
            return Ok(());
        };
        let mut ops = Vec::with_capacity(tags.len());
        for tag in tags {
            match job.note_ready(peer, *tag) {
                Ok(op) => ops.push(op),
                Err(why) => {
                    let cause = WireError::Unexpected { kind: Kind::Ready, job: id, tag: *tag, why };
                    return Err(self.nonsense(peer, cause));
                }
            }
        }
        for op in ops {
            self.wake_sender(id, op);
        }
        Ok(())
    }

    pub(super) fn on_arrived(&mut self, message: Message, upto: u64, now: u64) {
        let Some(job) = self.jobs.get_mut(&message.job) else { return };
        let Some(op) = job.recv_by_tag.get(message.tag) else { return };
        job.bytes_received += upto - job.ops[op as usize].moved;
        let done = note_progress(job, op, upto, now);
        let followers = job.followers.get(&op).cloned().unwrap_or_default();
        for follower in followers {
            self.wake_sender(message.job, follower);
        }
        if done {
            self.end(message.job, op, now);
        }
    }

    pub(super) fn on_sent(&mut self, message: Message, upto: u64, now: u64) {
        let Some(job) = self.jobs.get_mut(&message.job) else { return };
        let Some(op) = job.send_by_tag.get(message.tag) else { return };
        job.bytes_sent += upto - job.ops[op as usize].moved;
        if note_progress(job, op, upto, now) {
            self.end(message.job, op, now);
        }
    }

    /// An op has ended: whoever waited for the last of its dependencies becomes ready.
    pub(super) fn end(&mut self, id: u32, op: u32, now: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.count_down(op);
        if job.left == 0 {
            self.sleeper.note();
        }
        let mut ready = vec![];
        for place in job.dependents(op) {
            let dependent = job.dependent(place);
            job.ops[dependent as usize].waits -= 1;
            if job.ops[dependent as usize].waits == 0 {
                ready.push(dependent);
            }
        }
        let followers = job.followers.get(&op).cloned().unwrap_or_default();
        for follower in followers {
            self.wake_sender(id, follower);
        }
        for op in ready {
            self.activate(id, op, now);
        }
    }

    /// Nothing keeps the op from running any more.
    pub(super) fn activate(&mut self, id: u32, op: u32, now: u64) {
        let job = self.jobs.get_mut(&id).expect("ops belong to jobs under way");
        job.ops[op as usize].ready_ns = now;
        match job.op(op).kind {
            OpKind::Send { .. } => self.wake_sender(id, op),
            OpKind::Copy { .. } => self.copies.push_back((id, op)),
            OpKind::Compute { .. } => self.passes.push_back((id, op)),
            OpKind::Recv { from, tag, reduce, .. } => {
                let place = job.target(op).cloned().expect("receives have a place");
                let tensor = &job.spec.tensors[job.op(op).tensor as usize];
                let combine = tensor.combine.filter(|_| reduce);
                let expected = Expected { place, bytes: job.op(op).bytes, combine };
                let peer = self.index_of[&from];
                self.peers[peer].link.expect(Message { job: id, tag }, expected);
                self.peers[peer].announce.push((id, tag));
                self.touch(peer);
            }
        }
    }

    /// Tells a peer what there is a place for.
    pub(super) fn announce(&mut self, peer: usize) {
        let peer = &mut self.peers[peer];
        for same_job in peer.announce.chunk_by(|a, b| a.0 == b.0) {
            let tags: Vec<u32> = same_job.iter().map(|(_, tag)| *tag).collect();
            peer.link.announce(same_job[0].0, &tags);
        }
        peer.announce.clear();
    }
}

/// Notes how far an op is; true once it has ended.
pub(super) fn note_progress(job: &mut Job, op: u32, upto: u64, now: u64) -> bool {
    let bytes = job.op(op).bytes;
    let progress = &mut job.ops[op as usize];
    if progress.started_ns == 0 {
        progress.started_ns = now;
    }
    progress.moved = upto;
    job.moved_ns = now;
    if upto < bytes {
        return false;
    }
    progress.done = true;
    progress.ended_ns = now;
    true
}
