//! The machine: opcodes to a tree of nodes.
//!
//! Nodes lie in one list and name each other by number, so that what a pickle shares stays shared: a few bytes cannot
//! unfold into a large tree. Strings stay where they are in the input.

use std::collections::HashMap;

use crate::catalog::MAX_DIMS;

/// One list may be that of many objects: what is looked through for each of them is short.
const MAX_ATTRIBUTES: usize = 64;

/// A node of a pickle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Id(u32);

/// What a pickle describes.
#[derive(Debug, Clone, PartialEq)]
pub enum Node<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(&'a str),
    Bytes(&'a [u8]),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Set(Vec<Id>),
    /// Something that would be imported.
    Global(&'a str, &'a str),
    /// Something that would be called or made: of what, with which arguments, and the state set afterwards.
    Call {
        callable: Id,
        args: Id,
        state: Option<Id>,
        items: Vec<(Id, Id)>,
    },
    /// What torch keeps outside of its pickles: storages.
    Persistent(Id),
}

/// Why a pickle was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PickleError {
    #[error("its pickle ends in the middle")]
    Short,
    #[error("its pickle is damaged at byte {at}: {what}")]
    Damaged { at: usize, what: &'static str },
    #[error("its pickle has the opcode {opcode:#04x} at byte {at}, which is not read here")]
    Opcode { at: usize, opcode: u8 },
    #[error("its pickle names `{0}`")]
    Global(String),
    #[error("what its pickle describes takes more than {0} bytes of memory")]
    Memory(u64),
}

/// A pickle that was read.
#[derive(Debug)]
pub struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    pub root: Id,
}

impl<'a> Pickle<'a> {
    /// Reads a pickle, refusing every global that `allowed` does not know, and one whose nodes take more than `max_memory`.
    pub fn read(
        bytes: &'a [u8],
        max_memory: u64,
        allowed: impl Fn(&str, &str) -> bool,
    ) -> Result<Self, PickleError> {
        let mut machine = Machine {
            bytes,
            at: 0,
            memory: 0,
            max_memory,
            nodes: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            allowed: &allowed,
        };
        let root = machine.run()?;
        Ok(Self { nodes: machine.nodes, root })
    }

    pub fn node(&self, id: Id) -> &Node<'a> {
        &self.nodes[id.0 as usize]
    }

    pub fn str(&self, id: Id) -> Option<&'a str> {
        match self.node(id) {
            Node::Str(text) => Some(text),
            _ => None,
        }
    }

    pub fn int(&self, id: Id) -> Option<i64> {
        match self.node(id) {
            Node::Int(n) => Some(*n),
            Node::Bool(b) => Some(i64::from(*b)),
            _ => None,
        }
    }

    /// The members of a tuple or a list.
    pub fn list(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            Node::Tuple(list) | Node::List(list) => Some(list),
            _ => None,
        }
    }

    /// The entries of a dict, an `OrderedDict` too.
    pub fn dict(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.node(id) {
            Node::Dict(entries) => Some(entries),
            Node::Call { items, .. } => Some(items),
            _ => None,
        }
    }

    pub fn get(&self, dict: Id, key: &str) -> Option<Id> {
        self.dict(dict)?.iter().rev().find(|(k, _)| self.str(*k) == Some(key)).map(|(_, v)| *v)
    }

    /// The module and name of what a node would be a call of.
    pub fn callable(&self, id: Id) -> Option<(&'a str, &'a str)> {
        match self.node(id) {
            Node::Call { callable, .. } => self.global(*callable),
            _ => None,
        }
    }

    pub fn global(&self, id: Id) -> Option<(&'a str, &'a str)> {
        match self.node(id) {
            Node::Global(module, name) => Some((module, name)),
            _ => None,
        }
    }

    pub fn args(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            Node::Call { args, .. } => self.list(*args),
            _ => None,
        }
    }

    pub fn state(&self, id: Id) -> Option<Id> {
        match self.node(id) {
            Node::Call { state, .. } => *state,
            _ => None,
        }
    }

    /// An attribute of an object whose state is a dict, of which objects that are described here have a few.
    pub fn attribute(&self, id: Id, name: &str) -> Option<Id> {
        let state = self.state(id)?;
        self.dict(state).filter(|entries| entries.len() <= MAX_ATTRIBUTES)?;
        self.get(state, name)
    }

    /// Lengths and offsets: a tuple or a list, or `torch.Size` of one. None for what is negative.
    pub fn sizes(&self, id: Id) -> Option<Vec<u64>> {
        let list = match self.callable(id) {
            Some(("torch", "Size")) => *self.args(id)?.first()?,
            _ => id,
        };
        let list = self.list(list).filter(|list| list.len() <= MAX_DIMS)?;
        list.iter().map(|&n| self.int(n)?.try_into().ok()).collect()
    }
}

struct Machine<'a, 'f> {
    bytes: &'a [u8],
    at: usize,
    /// Of all that was made so far.
    memory: u64,
    max_memory: u64,
    nodes: Vec<Node<'a>>,
    stack: Vec<Id>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
    allowed: &'f dyn Fn(&str, &str) -> bool,
}

type Step<T> = Result<T, PickleError>;

/// What a node takes in the list of them.
const NODE_BYTES: u64 = size_of::<Node<'_>>() as u64;
/// What a place of the stack takes, and then one in a tuple, a list or a dict: with what an allocation of few of them costs.
const PLACE_BYTES: u64 = 16;
const MARK_BYTES: u64 = size_of::<usize>() as u64;
/// An entry of the memo, whose table may be half empty.
const MEMO_BYTES: u64 = 24;

impl<'a> Machine<'a, '_> {
    fn run(&mut self) -> Step<Id> {
        loop {
            let at = self.at;
            let opcode = self.take(1)?[0];
            match opcode {
                b'.' => return self.pop(),
                0x80 => drop(self.take(1)?),
                0x95 => drop(self.take(8)?),
                _ => self.step(opcode, at)?,
            }
            if self.memory > self.max_memory {
                return Err(PickleError::Memory(self.max_memory));
            }
        }
    }

    fn step(&mut self, opcode: u8, at: usize) -> Step<()> {
        match opcode {
            b'(' => {
                self.memory += MARK_BYTES;
                self.marks.push(self.stack.len());
            }
            b'0' => drop(self.pop()?),
            b'1' => drop(self.marked()?),
            b'2' => {
                let top = self.top()?;
                self.place(top);
            }
            b'N' => self.push(Node::None),
            0x88 => self.push(Node::Bool(true)),
            0x89 => self.push(Node::Bool(false)),
            b'I' | b'L' | b'F' | b'J' | b'K' | b'M' | b'G' | 0x8a | 0x8b => return self.number(opcode),
            b'V' | b'X' | b'U' | b'T' | b'B' | b'C' | 0x8c | 0x8d | 0x8e | 0x96 => return self.text(opcode),
            b')' => self.push(Node::Tuple(vec![])),
            b']' => self.push(Node::List(vec![])),
            b'}' => self.push(Node::Dict(vec![])),
            0x8f => self.push(Node::Set(vec![])),
            b't' | b'l' | b'd' | 0x91 => return self.collect(opcode),
            0x85..=0x87 => {
                let count = usize::from(opcode - 0x84);
                let list = (0..count).map(|_| self.pop()).collect::<Step<Vec<_>>>()?;
                self.push(Node::Tuple(list.into_iter().rev().collect()));
            }
            b'a' | b'e' | 0x90 | b's' | b'u' => return self.extend(opcode),
            b'g' | b'h' | b'j' => return self.remembered(opcode),
            b'p' | b'q' | b'r' | 0x94 => return self.remember(opcode),
            b'c' | 0x93 => return self.named(opcode),
            b'R' | 0x81 | 0x92 | b'b' => return self.made(opcode),
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id));
            }
            opcode => return Err(PickleError::Opcode { at, opcode }),
        }
        Ok(())
    }

    fn number(&mut self, opcode: u8) -> Step<()> {
        let node = match opcode {
            b'J' => Node::Int(i64::from(i32::from_le_bytes(self.array()?))),
            b'K' => Node::Int(i64::from(self.take(1)?[0])),
            b'M' => Node::Int(i64::from(u16::from_le_bytes(self.array()?))),
            b'G' => Node::Float(f64::from_be_bytes(self.array()?)),
            0x8a => {
                let len = usize::from(self.take(1)?[0]);
                self.long(len)?
            }
            0x8b => {
                let len = u32::from_le_bytes(self.array()?) as usize;
                self.long(len)?
            }
            b'F' => Node::Float(self.line()?.parse().map_err(|_| self.wrong("no number"))?),
            _ => match self.line()? {
                "00" => Node::Bool(false),
                "01" => Node::Bool(true),
                text => {
                    let digits = text.strip_suffix('L').unwrap_or(text);
                    Node::Int(digits.parse().map_err(|_| self.wrong("no number that is read here"))?)
                }
            },
        };
        self.push(node);
        Ok(())
    }

    /// Two's complement, little-endian. What needs more than eight bytes counts nothing of a checkpoint.
    fn long(&mut self, len: usize) -> Step<Node<'a>> {
        let bytes = self.take(len)?;
        let negative = bytes.last().is_some_and(|b| *b >= 0x80);
        let fill = if negative { 0xff } else { 0 };
        let mut all = [fill; 8];
        let (low, high) = bytes.split_at(len.min(8));
        all[..low.len()].copy_from_slice(low);
        let fits = high.iter().all(|b| *b == fill) && (all[7] >= 0x80) == negative;
        Ok(if fits { Node::Int(i64::from_le_bytes(all)) } else { Node::None })
    }

    fn text(&mut self, opcode: u8) -> Step<()> {
        let len = match opcode {
            b'V' => {
                let text = self.line()?;
                self.push(Node::Str(text));
                return Ok(());
            }
            0x8c | b'U' | b'C' => u64::from(self.take(1)?[0]),
            b'X' | b'T' | b'B' => u64::from(u32::from_le_bytes(self.array()?)),
            _ => u64::from_le_bytes(self.array()?),
        };
        let len = usize::try_from(len).map_err(|_| PickleError::Short)?;
        let bytes = self.take(len)?;
        let node = match opcode {
            0x8c | b'X' | 0x8d => {
                Node::Str(std::str::from_utf8(bytes).map_err(|_| self.wrong("a string that is not UTF-8"))?)
            }
            // Strings of Python 2, where they are plain.
            b'U' | b'T' => std::str::from_utf8(bytes).map_or(Node::Bytes(bytes), Node::Str),
            _ => Node::Bytes(bytes),
        };
        self.push(node);
        Ok(())
    }

    fn collect(&mut self, opcode: u8) -> Step<()> {
        let list = self.marked()?;
        let node = match opcode {
            b't' => Node::Tuple(list),
            b'l' => Node::List(list),
            0x91 => Node::Set(list),
            _ => Node::Dict(self.pairs(&list)?),
        };
        self.push(node);
        Ok(())
    }

    fn pairs(&self, list: &[Id]) -> Step<Vec<(Id, Id)>> {
        let (pairs, rest) = list.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(self.wrong("a key without a value"));
        }
        Ok(pairs.iter().map(|&[key, value]| (key, value)).collect())
    }

    fn extend(&mut self, opcode: u8) -> Step<()> {
        let added = match opcode {
            b'a' => vec![self.pop()?],
            b's' => {
                let value = self.pop()?;
                vec![self.pop()?, value]
            }
            _ => self.marked()?,
        };
        let pairs = match opcode {
            b's' | b'u' => self.pairs(&added)?,
            _ => vec![],
        };
        let top = self.top()?;
        match (opcode, &mut self.nodes[top.0 as usize]) {
            (b'a' | b'e', Node::List(list)) | (0x90, Node::Set(list)) => list.extend(added),
            (b's' | b'u', Node::Dict(entries) | Node::Call { items: entries, .. }) => entries.extend(pairs),
            _ => return Err(self.wrong("something is added to what is no container")),
        }
        Ok(())
    }

    fn remembered(&mut self, opcode: u8) -> Step<()> {
        let index = self.index(opcode)?;
        let id = *self.memo.get(&index).ok_or_else(|| self.wrong("it recalls what was not remembered"))?;
        self.place(id);
        Ok(())
    }

    fn remember(&mut self, opcode: u8) -> Step<()> {
        let index = if opcode == 0x94 { self.memo.len() as u32 } else { self.index(opcode)? };
        let top = self.top()?;
        self.memory += MEMO_BYTES;
        self.memo.insert(index, top);
        Ok(())
    }

    fn index(&mut self, opcode: u8) -> Step<u32> {
        Ok(match opcode {
            b'h' | b'q' => u32::from(self.take(1)?[0]),
            b'j' | b'r' => u32::from_le_bytes(self.array()?),
            _ => self.line()?.parse().map_err(|_| self.wrong("no number"))?,
        })
    }

    fn named(&mut self, opcode: u8) -> Step<()> {
        let (module, name) = if opcode == b'c' {
            (self.line()?, self.line()?)
        } else {
            let (name, module) = (self.pop()?, self.pop()?);
            let text = |id: Id| match self.nodes[id.0 as usize] {
                Node::Str(text) => Ok(text),
                _ => Err(self.wrong("a global that has no name")),
            };
            (text(module)?, text(name)?)
        };
        if !(self.allowed)(module, name) {
            return Err(PickleError::Global(format!("{module}.{name}")));
        }
        self.push(Node::Global(module, name));
        Ok(())
    }

    fn made(&mut self, opcode: u8) -> Step<()> {
        if opcode == b'b' {
            let set = self.pop()?;
            let top = self.top()?;
            let Node::Call { state, .. } = &mut self.nodes[top.0 as usize] else {
                return Err(self.wrong("state is set on what is no object"));
            };
            *state = Some(set);
            return Ok(());
        }
        let named_args = if opcode == 0x92 { Some(self.pop()?) } else { None };
        let (args, callable) = (self.pop()?, self.pop()?);
        if !matches!(self.nodes[callable.0 as usize], Node::Global(..)) {
            return Err(self.wrong("a call of what is no global"));
        }
        self.push(Node::Call { callable, args, state: named_args, items: vec![] });
        Ok(())
    }

    fn push(&mut self, node: Node<'a>) {
        // One byte of input makes one node at most, and inputs are files of less than 4 GiB.
        self.memory += NODE_BYTES;
        self.place(Id(self.nodes.len() as u32));
        self.nodes.push(node);
    }

    fn place(&mut self, id: Id) {
        self.memory += PLACE_BYTES;
        self.stack.push(id);
    }

    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Step<Id> {
        let id = self.top()?;
        self.stack.pop();
        Ok(id)
    }

    fn top(&self) -> Step<Id> {
        let above = self.stack.len() > self.floor();
        self.stack.last().copied().filter(|_| above).ok_or_else(|| self.wrong("its stack is empty"))
    }

    /// What lies above the last mark, and the mark is gone.
    fn marked(&mut self) -> Step<Vec<Id>> {
        let height = self.marks.pop().ok_or_else(|| self.wrong("there is no mark"))?;
        Ok(self.stack.split_off(height))
    }

    fn take(&mut self, len: usize) -> Step<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or(PickleError::Short)?;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Step<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("as many as were taken"))
    }

    fn line(&mut self) -> Step<&'a str> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|b| *b == b'\n').ok_or(PickleError::Short)?;
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|_| self.wrong("a string that is not UTF-8"))
    }

    fn wrong(&self, what: &'static str) -> PickleError {
        PickleError::Damaged { at: self.at, what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Pickle<'_>, PickleError> {
        Pickle::read(bytes, 1 << 20, |module, _| module == "torch")
    }

    #[test]
    fn names_what_it_would_have_run() {
        // os.system("true"), as `pickle.dumps` of an object with that `__reduce__` writes it.
        let bytes = b"\x80\x04\x95\x1f\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.";
        assert_eq!(read(bytes).unwrap_err(), PickleError::Global("posix.system".into()));
    }

    #[test]
    fn a_few_bytes_do_not_unfold() {
        // Lists that each hold the one before twice: 2^200 leaves, and 200 nodes.
        let mut bytes = b"\x80\x02]q\x00".to_vec();
        for _ in 0..200 {
            bytes.extend_from_slice(b"](h\x00h\x00eq\x00");
        }
        bytes.push(b'.');
        assert_eq!(read(&bytes).unwrap().nodes.len(), 201);
    }

    #[test]
    fn what_takes_more_memory_than_there_may_be_is_refused() {
        // A byte for a node, a mark, a place of the stack, an entry of the memo.
        for (start, opcode) in [("", b'N'), ("", b']'), ("", b'('), ("N", b'2'), ("N", 0x94)] {
            let mut bytes = start.as_bytes().to_vec();
            bytes.resize(1 << 18, opcode);
            assert_eq!(read(&bytes).unwrap_err(), PickleError::Memory(1 << 20), "{opcode:#04x}");
        }
    }

    #[test]
    fn refuses_what_ends_in_the_middle_anywhere() {
        let bytes = b"\x80\x02}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00bctorch\nfloat32\nu.";
        assert!(read(bytes).is_ok());
        for end in 0..bytes.len() {
            assert!(read(&bytes[..end]).is_err(), "{end}");
        }
    }
}
