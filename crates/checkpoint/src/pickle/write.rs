//! Writing pickles: opcodes of protocol 2, which every torch reads.

use std::collections::HashMap;

/// A pickle being written.
#[derive(Debug)]
pub struct Writer {
    bytes: Vec<u8>,
    /// Words that come again and again: where each is remembered.
    words: HashMap<String, u32>,
    /// The same of globals, which are few.
    globals: Vec<(String, String, u32)>,
}

impl Default for Writer {
    fn default() -> Self {
        Self { bytes: vec![0x80, 2], words: HashMap::new(), globals: Vec::new() }
    }
}

impl Writer {
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.push(b'.');
        self.bytes
    }

    pub fn none(&mut self) {
        self.bytes.push(b'N');
    }

    pub fn bool(&mut self, value: bool) {
        self.bytes.push(if value { 0x88 } else { 0x89 });
    }

    pub fn int(&mut self, value: u64) {
        match value {
            0..=0xff => self.bytes.extend([b'K', value as u8]),
            0x100..=0xffff => {
                self.bytes.push(b'M');
                self.bytes.extend((value as u16).to_le_bytes());
            }
            0x1_0000..=0x7fff_ffff => {
                self.bytes.push(b'J');
                self.bytes.extend((value as u32).to_le_bytes());
            }
            // One byte more than eight, so that the highest bit is no sign.
            _ => {
                self.bytes.extend([0x8a, 9]);
                self.bytes.extend(value.to_le_bytes());
                self.bytes.push(0);
            }
        }
    }

    pub fn float(&mut self, value: f64) {
        self.bytes.push(b'G');
        self.bytes.extend(value.to_be_bytes());
    }

    pub fn str(&mut self, text: &str) {
        self.bytes.push(b'X');
        self.bytes.extend((text.len() as u32).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }

    /// A word that comes often.
    pub fn word(&mut self, text: &str) {
        if let Some(&index) = self.words.get(text) {
            return self.recall(index);
        }
        self.str(text);
        let index = self.remember();
        self.words.insert(text.to_string(), index);
    }

    pub fn global(&mut self, module: &str, name: &str) {
        if let Some(&(_, _, index)) = self.globals.iter().find(|(m, n, _)| m == module && n == name) {
            return self.recall(index);
        }
        self.bytes.push(b'c');
        self.bytes.extend(format!("{module}\n{name}\n").as_bytes());
        let index = self.remember();
        self.globals.push((module.to_string(), name.to_string(), index));
    }

    fn recall(&mut self, index: u32) {
        self.bytes.push(b'j');
        self.bytes.extend(index.to_le_bytes());
    }

    fn remember(&mut self) -> u32 {
        let index = (self.words.len() + self.globals.len()) as u32;
        self.bytes.push(b'r');
        self.bytes.extend(index.to_le_bytes());
        index
    }

    pub fn tuple(&mut self, members: impl FnOnce(&mut Self)) {
        self.bytes.push(b'(');
        members(self);
        self.bytes.push(b't');
    }

    pub fn list(&mut self, members: impl FnOnce(&mut Self)) {
        self.bytes.extend(b"](");
        members(self);
        self.bytes.push(b'e');
    }

    /// Keys and values in turn.
    pub fn dict(&mut self, entries: impl FnOnce(&mut Self)) {
        self.bytes.extend(b"}(");
        entries(self);
        self.bytes.push(b'u');
    }

    /// A call of a global with these arguments.
    pub fn call(&mut self, module: &str, name: &str, args: impl FnOnce(&mut Self)) {
        self.global(module, name);
        self.tuple(args);
        self.bytes.push(b'R');
    }

    /// An object made without arguments, whose state is set to what is written.
    pub fn object(&mut self, module: &str, name: &str, state: impl FnOnce(&mut Self)) {
        self.global(module, name);
        self.bytes.extend([b')', 0x81]);
        state(self);
        self.bytes.push(b'b');
    }

    /// What lies outside of the pickle, by the id that is written.
    pub fn persistent(&mut self, id: impl FnOnce(&mut Self)) {
        id(self);
        self.bytes.push(b'Q');
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Node, Pickle};
    use super::*;

    #[test]
    fn reads_what_it_wrote() {
        let numbers = [0, 255, 256, 65535, 65536, 0x7fff_ffff, 0x8000_0000, i64::MAX as u64];
        let mut writer = Writer::default();
        writer.dict(|w| {
            w.word("numbers");
            w.list(|w| numbers.iter().for_each(|n| w.int(*n)));
            w.word("size");
            w.call("torch", "Size", |w| w.tuple(|w| (0..3).for_each(|n| w.int(n))));
            w.word("again");
            w.object("torch", "Size", |w| w.word("size"));
        });
        let bytes = writer.finish();
        let pickle = Pickle::read(&bytes, 1 << 20, |_, _| true).unwrap();
        let list = pickle.get(pickle.root, "numbers").unwrap();
        assert_eq!(pickle.sizes(list).unwrap(), numbers);
        let size = pickle.get(pickle.root, "size").unwrap();
        assert_eq!(pickle.sizes(size).unwrap(), [0, 1, 2]);
        let again = pickle.get(pickle.root, "again").unwrap();
        assert_eq!(pickle.node(pickle.state(again).unwrap()), &Node::Str("size"));
    }
}
