//! A meeting that MPI arranged: ranks, hosts and barriers are MPI's, and no socket of ours is opened.
//!
//! Words travel as two messages each, a length and the text. A rank that gives up tells all others, who look for such
//! news wherever they wait.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crossmesh_core::id::Rank;

use super::calls::{Bytes, Request};
use super::pool::Pool;
use super::{Mpi, MpiError, MpiLink};
use crate::buffer::Sharing;
use crate::deadline::Deadline;
use crate::rendezvous::{Abort, Fault, Links, Meeting, Mover, RendezvousError};

const LEN_TAG: i32 = 3;
const TEXT_TAG: i32 = 4;
/// Bad news: a length, then its text.
const ABORT_TAG: i32 = 5;
const ABORT_TEXT_TAG: i32 = 6;
/// Longer words are nonsense.
const MAX_WORD_BYTES: u64 = 64 << 20;
/// Between two questions to MPI.
const ASK_AGAIN: Duration = Duration::from_micros(100);
/// Others say what they know in this time, before all of them are ended.
const LAST_WORDS: Duration = Duration::from_millis(700);
/// Bad news are short: MPI takes them without waiting for the peer.
const TELL: Duration = Duration::from_millis(200);
/// How long the last rank may take to come to the end.
const FAREWELL: Duration = Duration::from_secs(30);

/// All ranks of MPI's world.
pub struct OverMpi {
    mpi: Arc<Mpi>,
    pool: Arc<Pool>,
    hosts: Vec<String>,
    /// Who is to blame, once it is over.
    blamed: Option<Rank>,
    left: bool,
}

impl From<MpiError> for RendezvousError {
    fn from(error: MpiError) -> Self {
        RendezvousError::Io(std::io::Error::other(error))
    }
}

impl OverMpi {
    /// Starts MPI, and learns which hosts the ranks are on.
    pub fn meet(deadline: Deadline) -> Result<Self, RendezvousError> {
        let mpi = Mpi::start()?;
        let mut meeting = Self { mpi, pool: Arc::default(), hosts: vec![], blamed: None, left: false };
        meeting.hosts = meeting.share(meeting.mpi.host().to_string(), deadline)?;
        Ok(meeting)
    }

    /// What every rank has to tell, by rank, told to all.
    pub fn share(&mut self, text: String, deadline: Deadline) -> Result<Vec<String>, RendezvousError> {
        let nonsense = || RendezvousError::Unexpected { expected: "a list of words" };
        let Some(told) = self.gather(text, deadline)? else {
            return serde_json::from_str(&self.hear(Rank(0), deadline)?).map_err(|_| nonsense());
        };
        let told: Vec<String> = told.into_values().collect();
        let table = serde_json::to_string(&told).map_err(|_| nonsense())?;
        let others = (1..self.mpi.size()).map(Rank);
        let sends: Vec<[Request; 2]> =
            others.map(|rank| self.tell(rank, table.clone())).collect::<Result<_, _>>()?;
        sends.into_iter().flatten().try_for_each(|request| self.finish(request, deadline).map(drop))?;
        Ok(told)
    }

    pub fn rank(&self) -> Rank {
        self.mpi.me()
    }

    pub fn world(&self) -> u32 {
        self.mpi.size()
    }

    fn tell(&self, to: Rank, text: String) -> Result<[Request; 2], MpiError> {
        let len = (text.len() as u64).to_le_bytes().to_vec();
        Ok([
            self.mpi.send(to, LEN_TAG, Bytes::Owned(len))?,
            self.mpi.send(to, TEXT_TAG, Bytes::Owned(text.into_bytes()))?,
        ])
    }

    fn hear(&self, from: Rank, deadline: Deadline) -> Result<String, RendezvousError> {
        let len = self.mpi.receive(from, LEN_TAG, Bytes::Owned(vec![0; 8]))?;
        let bytes = self.finish(len, deadline)?;
        let nonsense = || RendezvousError::Unexpected { expected: "words" };
        let len = u64::from_le_bytes(bytes.try_into().map_err(|_| nonsense())?);
        if len > MAX_WORD_BYTES {
            return Err(nonsense());
        }
        let text = self.mpi.receive(from, TEXT_TAG, Bytes::Owned(vec![0; len as usize]))?;
        String::from_utf8(self.finish(text, deadline)?).map_err(|_| nonsense())
    }

    /// Waits for a call's end, or for bad news.
    fn finish(&self, mut request: Request, deadline: Deadline) -> Result<Vec<u8>, RendezvousError> {
        loop {
            if let Some((bytes, _)) = request.test()? {
                let Bytes::Owned(bytes) = bytes else { unreachable!("words are owned") };
                return Ok(bytes);
            }
            if let Some(abort) = self.bad_news()? {
                return Err(RendezvousError::Aborted(abort));
            }
            if deadline.passed() {
                return Err(RendezvousError::BarrierTimedOut(deadline.allowed_s()));
            }
            std::thread::sleep(ASK_AGAIN);
        }
    }

    /// What a rank that gave up tells everybody, if there is one.
    fn bad_news(&self) -> Result<Option<Abort>, RendezvousError> {
        let Some(from) = self.mpi.probe(ABORT_TAG)? else { return Ok(None) };
        let deadline = Deadline::after(TELL);
        let read = |tag, len| -> Result<Vec<u8>, RendezvousError> {
            let mut request = self.mpi.receive(from, tag, Bytes::Owned(vec![0; len]))?;
            while !deadline.passed() {
                if let Some((Bytes::Owned(bytes), _)) = request.test()? {
                    return Ok(bytes);
                }
                std::thread::sleep(ASK_AGAIN);
            }
            Err(RendezvousError::BarrierTimedOut(deadline.allowed_s()))
        };
        let nonsense = || RendezvousError::Unexpected { expected: "bad news" };
        let len = u64::from_le_bytes(read(ABORT_TAG, 8)?.try_into().map_err(|_| nonsense())?);
        let text = read(ABORT_TEXT_TAG, len.min(MAX_WORD_BYTES) as usize)?;
        serde_json::from_slice(&text).map(Some).map_err(|_| nonsense())
    }

    fn tell_all(&self, abort: &Abort) -> Result<(), RendezvousError> {
        let text = serde_json::to_vec(abort).expect("an abort is made of text");
        let mut sends = vec![];
        for rank in (0..self.mpi.size()).map(Rank).filter(|r| *r != self.mpi.me()) {
            let len = (text.len() as u64).to_le_bytes().to_vec();
            sends.push(self.mpi.send(rank, ABORT_TAG, Bytes::Owned(len))?);
            sends.push(self.mpi.send(rank, ABORT_TEXT_TAG, Bytes::Owned(text.clone()))?);
        }
        let deadline = Deadline::after(TELL);
        while !deadline.passed() && !sends.is_empty() {
            sends.retain_mut(|send| matches!(send.test(), Ok(None)));
            std::thread::sleep(ASK_AGAIN);
        }
        Ok(())
    }
}

impl Meeting for OverMpi {
    fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// MPI has ways of its own inside a host.
    fn sharing(&self) -> Sharing {
        Sharing::Private
    }

    fn transport(&self) -> &'static str {
        "MPI"
    }

    fn connect(&mut self, peers: &BTreeSet<Rank>, _: Deadline) -> Result<Links, RendezvousError> {
        let me = self.mpi.me();
        let link = |&peer: &Rank| -> Result<_, RendezvousError> {
            if peer.0 >= self.mpi.size() {
                return Err(RendezvousError::UnknownPeer { peer });
            }
            let link = MpiLink::new(self.mpi.clone(), self.pool.clone(), peer);
            let link = link.map_err(|cause| RendezvousError::BadLink { me, peer, cause })?;
            Ok((peer, Box::new(link) as Box<dyn crate::transport::Link>))
        };
        peers.iter().map(link).collect()
    }

    /// MPI moves only when it is called: what it still owes a peer, such as the word that a message was received, would wait
    /// as long as this rank does.
    fn mover(&self) -> Option<Mover> {
        let mpi = self.mpi.clone();
        Some(Box::new(move || {
            // What is wrong with MPI is seen by whoever uses it next.
            let _unseen = mpi.probe(ABORT_TAG);
        }))
    }

    fn barrier(&mut self, deadline: Deadline) -> Result<(), RendezvousError> {
        self.finish(self.mpi.barrier()?, deadline).map(drop)
    }

    fn gather(
        &mut self,
        text: String,
        deadline: Deadline,
    ) -> Result<Option<BTreeMap<Rank, String>>, RendezvousError> {
        if self.mpi.me() != Rank(0) {
            let told = self.tell(Rank(0), text)?;
            told.into_iter().try_for_each(|request| self.finish(request, deadline).map(drop))?;
            return Ok(None);
        }
        let others = (1..self.mpi.size()).map(|rank| Ok((Rank(rank), self.hear(Rank(rank), deadline)?)));
        let mut told: BTreeMap<Rank, String> = others.collect::<Result<_, RendezvousError>>()?;
        told.insert(Rank(0), text);
        Ok(Some(told))
    }

    fn fail(&mut self, fault: Fault) -> Abort {
        let me = self.mpi.me();
        let heard = self.bad_news().ok().flatten();
        let abort = heard.clone().unwrap_or_else(|| {
            let culprit = fault.blames.unwrap_or(me);
            let host = self.hosts.get(culprit.index()).cloned().unwrap_or_else(|| "an unknown host".into());
            Abort::new(culprit, host, format!("failed: {}", fault.text))
        });
        self.blamed = Some(abort.culprit);
        self.mpi.leave_unclean();
        if heard.is_none() {
            // Where MPI itself fails, the others find out by their deadlines.
            let _unheard = self.tell_all(&abort);
        }
        abort
    }

    fn leave(mut self: Box<Self>) {
        let all_here = self.mpi.barrier().map_err(RendezvousError::from);
        let all_here = all_here.and_then(|barrier| self.finish(barrier, Deadline::after(FAREWELL)));
        self.left = all_here.is_ok();
    }
}

impl Drop for OverMpi {
    /// Ending MPI waits for all ranks, so it is done only where all are well. Where a rank is stuck or dead, the job is
    /// ended for it, after everybody had the time to say so.
    fn drop(&mut self) {
        if !self.left {
            self.mpi.leave_unclean();
        }
        if self.blamed.is_some_and(|rank| rank != self.mpi.me()) {
            std::thread::sleep(LAST_WORDS);
            self.mpi.abort(2);
        }
    }
}
