//! What a rank's tensors have to be in the end, by a second reading of every frame that it was sent: slow, obvious, and none of the
//! engine's code but the header's own.

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_comm::buffer::RankBuffers;
use crossmesh_comm::wire::{HEADER_BYTES, Header, Kind};
use crossmesh_core::program::{Op, OpKind, Program};
use crossmesh_core::region::Region;

/// A message that the rank waits for.
#[derive(Debug, Clone)]
pub struct Expected {
    pub tag: u32,
    pub bytes: u64,
    /// It is added to what is there, an element of four bytes at a time.
    pub adds: bool,
    pub tensor: usize,
    region: Region,
}

impl Expected {
    pub fn of(program: &Program, op: &Op) -> Option<Self> {
        let OpKind::Recv { tag, reduce, .. } = op.kind else { return None };
        let region = program.boxes[op.region].clone();
        Some(Self { tag, bytes: op.bytes, adds: reduce, tensor: op.tensor as usize, region })
    }
}

/// The bytes of messages, as far as they came.
#[derive(Debug, Default)]
pub struct Image {
    came: BTreeMap<u32, Vec<u8>>,
    /// Of these the peer offered something in memory of its own, which is not read here.
    unsure: BTreeSet<u32>,
    /// Something was sent that is not one whole frame: from then on nobody knows where frames begin, and
    /// nothing that comes counts.
    pub out_of_step: bool,
    /// How many of the rank's messages were announced.
    pub announced: usize,
    /// And said to be taken out of its memory.
    pub taken: usize,
}

impl Image {
    /// How much of a message has come, in order.
    pub fn len(&self, tag: u32) -> u64 {
        self.came.get(&tag).map_or(0, |bytes| bytes.len() as u64)
    }

    /// Takes in what was sent, as a frame: whatever a rank has to take of it.
    pub fn note(&mut self, frame: &[u8], expected: &[Expected]) {
        let header = frame.first_chunk::<HEADER_BYTES>().and_then(|head| Header::decode(head).ok());
        let is_one = |header: &Header| frame.len() == HEADER_BYTES + header.len as usize;
        let Some(header) = header.filter(is_one).filter(|_| !self.out_of_step) else {
            self.out_of_step = true;
            return;
        };
        let payload = &frame[HEADER_BYTES..];
        if header.job != 0 || header.check_payload(crc32c::crc32c(payload)).is_err() {
            return;
        }
        let message = expected.iter().find(|e| e.tag == header.tag);
        match (header.kind, message) {
            (Kind::Ready, _) => self.announced += payload.len() / 4,
            (Kind::Taken, _) => self.taken += 1,
            (Kind::Offers, _) => {
                let tags = payload.chunks_exact(16).map(|r| u32::from_le_bytes(r[..4].try_into().unwrap()));
                self.unsure.extend(tags);
            }
            (Kind::Offer, Some(_)) => _ = self.unsure.insert(header.tag),
            (Kind::Data, Some(message)) if self.is_next(&header, message) => {
                self.came.entry(header.tag).or_default().extend_from_slice(payload);
            }
            _ => {}
        }
    }

    fn is_next(&self, header: &Header, message: &Expected) -> bool {
        let elements = !message.adds || header.len.is_multiple_of(4);
        header.offset == self.len(header.tag)
            && header.offset + u64::from(header.len) <= message.bytes
            && elements
    }

    /// Compares the tensors of a job that is done, of which `before` is what they begin with; how many bytes were compared.
    pub fn compare(
        &self,
        buffers: &RankBuffers,
        program: &Program,
        expected: &[Expected],
        before: &BTreeMap<usize, Vec<u8>>,
    ) -> usize {
        let mut compared = 0;
        for (tensor, before) in before {
            let of: Vec<&Expected> = expected.iter().filter(|e| e.tensor == *tensor).collect();
            if of.iter().any(|e| self.unsure.contains(&e.tag)) {
                continue;
            }
            let mut wanted = before.clone();
            let shape = &program.tensors[*tensor].shape;
            let element = program.tensors[*tensor].dtype.bytes() as usize;
            for message in of {
                let came = self.came.get(&message.tag).map_or(&[][..], Vec::as_slice);
                assert_eq!(came.len() as u64, message.bytes, "the job is done without all of {message:?}");
                put(&mut wanted, (shape, element), message, came);
            }
            let mut found = vec![0; wanted.len()];
            buffers.read_destination(*tensor, &mut found);
            let wrong = (0..found.len() / element)
                .map(|i| i * element..(i + 1) * element)
                .find(|at| !is_same(&found[at.clone()], &wanted[at.clone()]));
            if let Some(at) = wrong {
                let element = at.start / element;
                panic!(
                    "element {element} of tensor {tensor}: {:?}, not {:?}",
                    &found[at.clone()],
                    &wanted[at]
                );
            }
            compared += found.len();
        }
        compared
    }
}

/// Puts a message, or adds it, to where its box lies in a tensor that is there as a whole.
fn put(into: &mut [u8], (shape, element): (&[u64], usize), message: &Expected, came: &[u8]) {
    for (number, value) in came.chunks_exact(element).enumerate() {
        let (mut number, mut at, mut stride) = (number as u64, 0, 1);
        for (span, dim) in message.region.spans().iter().zip(shape).rev() {
            at += (span.start + number % span.len()) * stride;
            (number, stride) = (number / span.len(), stride * dim);
        }
        let there = &mut into[at as usize * element..][..element];
        match message.adds {
            false => there.copy_from_slice(value),
            true => {
                let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
                let sum = number(there) + number(value);
                there.copy_from_slice(&sum.to_le_bytes());
            }
        }
    }
}

/// Bit for bit; but what is no number has many forms, of which a processor may take any.
fn is_same(found: &[u8], wanted: &[u8]) -> bool {
    let is_nan = |bytes: &[u8]| bytes.try_into().is_ok_and(|bytes| f32::from_le_bytes(bytes).is_nan());
    found == wanted || is_nan(found) && is_nan(wanted)
}
