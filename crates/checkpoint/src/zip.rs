//! torch's zip files: what `torch.save` of one tensor writes, read for where its bytes are, and written.
//!
//! ```text
//! archive/data.pkl      a pickle: shape, strides, which storage
//! archive/byteorder     little
//! archive/data/0        the storage, uncompressed, at a multiple of 64 bytes
//! archive/version       3
//! central directory     where each of them begins
//! ```

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crossmesh_core::region::Region;

use crate::catalog::{checked_bytes, row_major};
use crate::crc::crc32;
use crate::element::Element;
use crate::error::CheckpointError;
use crate::pickle::{Id, Node, Pickle, PickleError, Writer};

/// What is read of an item's end at once: the directory of a tensor takes about 600 bytes.
const TAIL_BYTES: u64 = 2048;
/// What is read of its beginning at once: the pickle of a tensor, and the header of its storage.
const HEAD_BYTES: u64 = 1024;
/// A directory, or the pickle of a tensor, that is longer than this is none.
const MAX_PART_BYTES: u64 = 1 << 20;
/// Of what the pickle of one tensor describes: it is about forty nodes.
const MAX_PICKLE_MEMORY: u64 = 16 << 20;

/// Where the tensor of an item lies in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    pub element: Element,
    pub shape: Vec<u64>,
    /// Of its first element in the file.
    pub offset: u64,
    /// In bytes.
    pub strides: Vec<u64>,
}

/// A part of a file that is a zip file of its own.
struct Item<'a> {
    file: &'a File,
    path: &'a Path,
    start: u64,
    len: u64,
    /// Its beginning and its end, read once.
    head: Vec<u8>,
    tail: Vec<u8>,
}

/// A file of a zip file: where its bytes are in the item.
struct Part {
    name: String,
    header: u64,
    bytes: u64,
}

/// Reads where the tensor is that `torch.save` has written to `len` bytes from `start` of a file.
pub fn read_tensor(file: &File, path: &Path, start: u64, len: u64) -> Result<Stored, CheckpointError> {
    let item = Item::open(file, path, start, len)?;
    let parts = item.directory()?;
    let find = |ending: &str| parts.iter().find(|p| p.name.split_once('/').is_some_and(|(_, n)| n == ending));
    let wrong = |what: &str| item.wrong(what);
    if let Some(part) = find("byteorder")
        && item.contents(part)? != b"little"
    {
        return Err(wrong("its bytes are not in little-endian order"));
    }
    let pickle = item.contents(find("data.pkl").ok_or_else(|| wrong("it has no data.pkl"))?)?;
    let tensor = Rebuilt::read(&pickle).map_err(|e| match e {
        Refusal::Pickle(PickleError::Global(global)) => {
            CheckpointError::Global { path: path.to_path_buf(), global }
        }
        Refusal::Pickle(error) => wrong(&error.to_string()),
        Refusal::Other(what) => wrong(what),
    })?;
    let storage = find(&format!("data/{}", tensor.storage)).ok_or_else(|| wrong("its storage is missing"))?;
    let base = item.data(storage)?;
    tensor
        .placed(start + base, storage.bytes)
        .ok_or_else(|| wrong("its tensor does not fit into its storage"))
}

impl<'a> Item<'a> {
    fn open(file: &'a File, path: &'a Path, start: u64, len: u64) -> Result<Self, CheckpointError> {
        let mut item = Self { file, path, start, len, head: vec![], tail: vec![] };
        item.tail = item.read(len - len.min(TAIL_BYTES), len.min(TAIL_BYTES))?;
        // A small item is all tail.
        item.head = match len <= TAIL_BYTES {
            true => item.tail[..len.min(HEAD_BYTES) as usize].to_vec(),
            false => item.read(0, HEAD_BYTES)?,
        };
        Ok(item)
    }

    fn wrong(&self, what: &str) -> CheckpointError {
        let (start, end) = (self.start, self.start.saturating_add(self.len));
        CheckpointError::damaged(self.path, format!("the item at bytes {start}..{end}: {what}"))
    }

    /// Bytes of the item: from what is read already, or from the file.
    fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, CheckpointError> {
        let end = at.checked_add(len).filter(|end| *end <= self.len);
        let end = end.ok_or_else(|| self.wrong("it speaks of bytes behind its end"))?;
        if end <= self.head.len() as u64 {
            return Ok(self.head[at as usize..end as usize].to_vec());
        }
        let tail = self.len - self.tail.len() as u64;
        if at >= tail && !self.tail.is_empty() {
            return Ok(self.tail[(at - tail) as usize..(end - tail) as usize].to_vec());
        }
        let mut bytes = vec![0; len as usize];
        let at = self.start.checked_add(at).ok_or_else(|| self.wrong("it is outside of every file"))?;
        self.file
            .read_exact_at(&mut bytes, at)
            .map_err(|_| self.wrong("it ends behind the end of its file"))?;
        Ok(bytes)
    }

    /// The parts, as the central directory lists them.
    fn directory(&self) -> Result<Vec<Part>, CheckpointError> {
        let wrong = |what: &str| self.wrong(what);
        let end_at = self.len.checked_sub(22).ok_or_else(|| wrong("it is too short for a zip file"))?;
        let end = self.read(end_at, 22)?;
        if !end.starts_with(b"PK\x05\x06") || le(&end, 20, 2) != 0 {
            return Err(wrong("it does not end as a zip file of torch does"));
        }
        let (mut size, mut at) = (le(&end, 12, 4), le(&end, 16, 4));
        if at == 0xffff_ffff || size == 0xffff_ffff {
            let locator = self.read(end_at.checked_sub(20).ok_or_else(|| wrong("it is too short"))?, 20)?;
            let record = self.read(le(&locator, 8, 8), 56)?;
            if !locator.starts_with(b"PK\x06\x07") || !record.starts_with(b"PK\x06\x06") {
                return Err(wrong("its zip64 directory is damaged"));
            }
            (size, at) = (le(&record, 40, 8), le(&record, 48, 8));
        }
        if size > MAX_PART_BYTES {
            return Err(wrong("its directory is too large for that of a tensor"));
        }
        let bytes = self.read(at, size)?;
        self.entries(&bytes)
    }

    fn entries(&self, mut rest: &[u8]) -> Result<Vec<Part>, CheckpointError> {
        let wrong = || self.wrong("its directory is damaged");
        let mut parts = Vec::new();
        while !rest.is_empty() {
            let head = rest.get(..46).filter(|h| h.starts_with(b"PK\x01\x02")).ok_or_else(wrong)?;
            let [name_len, extra_len, note_len] = [28, 30, 32].map(|at| le(head, at, 2) as usize);
            let method = le(head, 10, 2);
            let (mut packed, mut bytes, mut header) = (le(head, 20, 4), le(head, 24, 4), le(head, 42, 4));
            let name = rest.get(46..46 + name_len).ok_or_else(wrong)?;
            let extra = rest.get(46 + name_len..46 + name_len + extra_len).ok_or_else(wrong)?;
            zip64(extra, &mut [&mut bytes, &mut packed, &mut header]);
            if method != 0 || packed != bytes {
                return Err(self.wrong("it is compressed"));
            }
            let name = String::from_utf8_lossy(name).into_owned();
            parts.push(Part { name, header, bytes });
            rest = rest.get(46 + name_len + extra_len + note_len..).ok_or_else(wrong)?;
        }
        Ok(parts)
    }

    /// Where a part's bytes begin in the item.
    fn data(&self, part: &Part) -> Result<u64, CheckpointError> {
        let header = self.read(part.header, 30)?;
        if !header.starts_with(b"PK\x03\x04") {
            return Err(self.wrong("its parts are not where its directory says"));
        }
        let at = part.header + 30 + le(&header, 26, 2) + le(&header, 28, 2);
        match at.checked_add(part.bytes) {
            Some(end) if end <= self.len => Ok(at),
            _ => Err(self.wrong("its parts end behind its end")),
        }
    }

    fn contents(&self, part: &Part) -> Result<Vec<u8>, CheckpointError> {
        if part.bytes > MAX_PART_BYTES {
            return Err(self.wrong("the pickle of a tensor is not so large"));
        }
        self.read(self.data(part)?, part.bytes)
    }
}

/// A little-endian number; the slice was checked to be long enough.
fn le(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
}

/// Replaces the numbers that did not fit into four bytes.
fn zip64(mut extra: &[u8], numbers: &mut [&mut u64]) {
    while extra.len() >= 4 {
        let (id, len) = (le(extra, 0, 2), le(extra, 2, 2) as usize);
        let Some(field) = extra.get(4..4 + len) else { return };
        if id == 1 {
            let wide = numbers.iter_mut().filter(|n| ***n == 0xffff_ffff);
            for (number, value) in wide.zip(field.as_chunks::<8>().0) {
                **number = u64::from_le_bytes(*value);
            }
        }
        extra = &extra[4 + len..];
    }
}

/// What the pickle of a tensor says.
struct Rebuilt {
    element: Element,
    storage: String,
    /// In elements.
    offset: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

enum Refusal {
    Pickle(PickleError),
    Other(&'static str),
}

/// All that a tensor's pickle may name.
fn of_tensor(module: &str, name: &str) -> bool {
    match module {
        "torch._utils" => {
            matches!(name, "_rebuild_tensor_v2" | "_rebuild_tensor_v3" | "_rebuild_parameter")
        }
        "collections" => name == "OrderedDict",
        "torch" => Element::of_storage(name).is_some() || Element::of_torch(name).is_some(),
        "torch.storage" => matches!(name, "UntypedStorage" | "TypedStorage"),
        _ => false,
    }
}

impl Rebuilt {
    fn read(bytes: &[u8]) -> Result<Self, Refusal> {
        let pickle = Pickle::read(bytes, MAX_PICKLE_MEMORY, of_tensor).map_err(Refusal::Pickle)?;
        let mut root = pickle.root;
        if pickle.callable(root) == Some(("torch._utils", "_rebuild_parameter")) {
            root = pickle.args(root).and_then(|a| a.first().copied()).ok_or(Refusal::Other("no tensor"))?;
        }
        let version = match pickle.callable(root) {
            Some(("torch._utils", "_rebuild_tensor_v2")) => 2,
            Some(("torch._utils", "_rebuild_tensor_v3")) => 3,
            _ => return Err(Refusal::Other("its pickle is not that of a tensor")),
        };
        let args = pickle.args(root).unwrap_or_default();
        Self::from_args(&pickle, args, version).ok_or(Refusal::Other("the pickle of its tensor is damaged"))
    }

    fn from_args(pickle: &Pickle<'_>, args: &[Id], version: u32) -> Option<Self> {
        let (&[storage, offset, shape, strides], rest) = args.split_first_chunk()?;
        let Node::Persistent(id) = pickle.node(storage) else { return None };
        let &[_, class, key, ..] = pickle.list(*id)? else { return None };
        let of_storage = pickle.global(class).and_then(|(_, name)| Element::of_storage(name));
        let element = match version {
            2 => of_storage?,
            // requires_grad, hooks, dtype
            _ => Element::of_torch(pickle.global(*rest.get(2)?)?.1)?,
        };
        let storage = pickle.str(key)?.to_string();
        let offset = pickle.int(offset)?.try_into().ok()?;
        let (shape, strides) = (pickle.sizes(shape)?, pickle.sizes(strides)?);
        (shape.len() == strides.len()).then_some(Self { element, storage, offset, shape, strides })
    }

    /// Where its elements are, if the storage has them all.
    fn placed(self, base: u64, storage_bytes: u64) -> Option<Stored> {
        let width = self.element.bytes();
        checked_bytes(&self.shape, self.element)?;
        let strides = self.strides.iter().map(|s| s.checked_mul(width)).collect::<Option<Vec<u64>>>()?;
        let start = self.offset.checked_mul(width)?;
        if !Region::whole(&self.shape).is_empty() {
            let mut steps = self.shape.iter().zip(&strides).map(|(n, stride)| (n - 1).checked_mul(*stride));
            let end = steps.try_fold(start.checked_add(width)?, |at, step| at.checked_add(step?))?;
            if end > storage_bytes {
                return None;
            }
        }
        Some(Stored { element: self.element, shape: self.shape, offset: base.checked_add(start)?, strides })
    }
}

/// A zip file of one tensor, with a hole where its bytes go.
#[derive(Debug, Clone)]
pub struct Shell {
    /// Everything before the tensor.
    pub head: Vec<u8>,
    bytes: u64,
    parts: Vec<Written>,
    /// Behind the tensor, without what depends on its checksum.
    pub tail_bytes: u64,
}

#[derive(Debug, Clone)]
struct Written {
    name: &'static str,
    crc: u32,
    bytes: u64,
    header: u64,
}

const STORAGE: &str = "archive/data/0";
/// Storages begin at multiples of this, as torch has them.
const ALIGNMENT: u64 = 64;

impl Shell {
    pub fn of_tensor(element: Element, shape: &[u64]) -> Self {
        let bytes = shape.iter().product::<u64>() * element.bytes();
        Self::of_storage(&tensor_pickle(element, shape), bytes)
    }

    /// Around a pickle and a storage of so many bytes.
    fn of_storage(pickle: &[u8], bytes: u64) -> Self {
        let mut shell = Self { head: vec![], bytes, parts: vec![], tail_bytes: 0 };
        shell.part("archive/data.pkl", pickle);
        shell.part("archive/byteorder", b"little");
        shell.local(STORAGE, None);
        shell.tail_bytes = shell.tail(0).len() as u64;
        shell
    }

    /// Where the tensor begins.
    pub fn data_at(&self) -> u64 {
        self.head.len() as u64
    }

    /// Of the whole item.
    pub fn item_bytes(&self) -> u64 {
        self.data_at() + self.bytes + self.tail_bytes
    }

    fn part(&mut self, name: &'static str, contents: &[u8]) {
        self.local(name, Some(contents));
        self.head.extend_from_slice(contents);
    }

    /// A part's header, padded so that its contents are aligned. The checksum of the storage is known later: bit 3 says
    /// that it follows the contents.
    fn local(&mut self, name: &'static str, contents: Option<&[u8]>) {
        let header = self.head.len() as u64;
        let (crc, bytes) = contents.map_or((0, self.bytes), |c| (crc32(c), c.len() as u64));
        let flags: u16 = if contents.is_some() { 0x0800 } else { 0x0808 };
        let wide = bytes >= 0xffff_ffff;
        let fixed = header + 30 + name.len() as u64 + 4 + if wide { 20 } else { 0 };
        let padding = fixed.next_multiple_of(ALIGNMENT) - fixed;
        let mut extra = Vec::new();
        if wide {
            extra.extend([1, 0, 16, 0]);
            extra.extend([bytes.to_le_bytes(), bytes.to_le_bytes()].concat());
        }
        // torch's own filler.
        extra.extend(b"FB");
        extra.extend((padding as u16).to_le_bytes());
        extra.extend(vec![b'Z'; padding as usize]);
        let short = if wide { 0xffff_ffff } else { bytes as u32 };
        let sizes = if contents.is_some() || wide { short } else { 0 };
        self.head.extend(b"PK\x03\x04\x00\x00");
        self.head.extend(flags.to_le_bytes());
        self.head.extend([0; 6]);
        self.head.extend(crc.to_le_bytes());
        self.head.extend([sizes.to_le_bytes(), sizes.to_le_bytes()].concat());
        self.head.extend((name.len() as u16).to_le_bytes());
        self.head.extend((extra.len() as u16).to_le_bytes());
        self.head.extend(name.as_bytes());
        self.head.extend(extra);
        self.parts.push(Written { name, crc, bytes, header });
    }

    /// Everything behind the tensor, once its checksum is known.
    pub fn tail(&self, crc: u32) -> Vec<u8> {
        let wide = self.bytes >= 0xffff_ffff;
        let mut tail = b"PK\x07\x08".to_vec();
        tail.extend(crc.to_le_bytes());
        for _ in 0..2 {
            if wide {
                tail.extend(self.bytes.to_le_bytes());
            } else {
                tail.extend((self.bytes as u32).to_le_bytes());
            }
        }
        let base = self.data_at() + self.bytes;
        let mut parts = self.parts.clone();
        if let Some(storage) = parts.iter_mut().find(|p| p.name == STORAGE) {
            storage.crc = crc;
        }
        let version = Written {
            name: "archive/version",
            crc: crc32(b"3\n"),
            bytes: 2,
            header: base + tail.len() as u64,
        };
        tail.extend(b"PK\x03\x04\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00");
        tail.extend(version.crc.to_le_bytes());
        tail.extend([2u32.to_le_bytes(), 2u32.to_le_bytes()].concat());
        tail.extend([(version.name.len() as u16).to_le_bytes(), [0, 0]].concat());
        tail.extend(version.name.as_bytes());
        tail.extend(b"3\n");
        parts.push(version);
        let directory = base + tail.len() as u64;
        parts.iter().for_each(|part| tail.extend(central(part)));
        let size = base + tail.len() as u64 - directory;
        tail.extend(end_of_directory(parts.len() as u64, size, directory));
        tail
    }
}

/// The line of a part in the central directory.
fn central(part: &Written) -> Vec<u8> {
    let mut extra = Vec::new();
    let wide_bytes = part.bytes >= 0xffff_ffff;
    let wide_header = part.header >= 0xffff_ffff;
    if wide_bytes {
        extra.extend([part.bytes.to_le_bytes(), part.bytes.to_le_bytes()].concat());
    }
    if wide_header {
        extra.extend(part.header.to_le_bytes());
    }
    let short = |wide: bool, n: u64| if wide { 0xffff_ffff } else { n as u32 }.to_le_bytes();
    let mut line = b"PK\x01\x02\x00\x00\x00\x00".to_vec();
    line.extend(if part.name == STORAGE { 0x0808u16 } else { 0x0800 }.to_le_bytes());
    line.extend([0; 6]);
    line.extend(part.crc.to_le_bytes());
    line.extend([short(wide_bytes, part.bytes), short(wide_bytes, part.bytes)].concat());
    line.extend((part.name.len() as u16).to_le_bytes());
    let extra_len = if extra.is_empty() { 0 } else { extra.len() as u16 + 4 };
    line.extend(extra_len.to_le_bytes());
    line.extend([0; 10]);
    line.extend(short(wide_header, part.header));
    line.extend(part.name.as_bytes());
    if !extra.is_empty() {
        line.extend([1, 0]);
        line.extend((extra.len() as u16).to_le_bytes());
        line.extend(extra);
    }
    line
}

/// With the zip64 record always, as torch writes it.
fn end_of_directory(count: u64, size: u64, at: u64) -> Vec<u8> {
    let mut end = b"PK\x06\x06".to_vec();
    end.extend(44u64.to_le_bytes());
    end.extend([0x1e, 3, 0x2d, 0]);
    end.extend([0; 8]);
    for number in [count, count, size, at] {
        end.extend(number.to_le_bytes());
    }
    end.extend(b"PK\x06\x07\x00\x00\x00\x00");
    end.extend((at + size).to_le_bytes());
    end.extend(1u32.to_le_bytes());
    end.extend(b"PK\x05\x06\x00\x00\x00\x00");
    end.extend([(count as u16).to_le_bytes(), (count as u16).to_le_bytes()].concat());
    end.extend((size.min(0xffff_ffff) as u32).to_le_bytes());
    end.extend((at.min(0xffff_ffff) as u32).to_le_bytes());
    end.extend([0, 0]);
    end
}

/// What `torch.save` writes of a contiguous tensor.
fn tensor_pickle(element: Element, shape: &[u64]) -> Vec<u8> {
    let count = shape.iter().product::<u64>();
    let mut writer = Writer::default();
    let name = if element.storage().is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" };
    writer.call("torch._utils", name, |w| {
        w.persistent(|w| {
            w.tuple(|w| {
                w.str("storage");
                match element.storage() {
                    Some(class) => w.global("torch", class),
                    None => w.global("torch.storage", "UntypedStorage"),
                }
                w.str("0");
                w.str("cpu");
                // Of an untyped storage, bytes.
                w.int(if element.storage().is_some() { count } else { count * element.bytes() });
            })
        });
        w.int(0);
        w.tuple(|w| shape.iter().for_each(|n| w.int(*n)));
        w.tuple(|w| row_major(shape.iter().copied(), 1).iter().for_each(|n| w.int(*n)));
        w.bool(false);
        w.call("collections", "OrderedDict", |_| {});
        if element.storage().is_none() {
            w.global("torch", element.torch());
        }
    });
    writer.finish()
}

/// What `torch.save` writes of something that has no tensors in it.
pub fn object_zip(pickle: &[u8]) -> Vec<u8> {
    let shell = Shell::of_storage(pickle, 0);
    let mut bytes = shell.head.clone();
    bytes.extend(shell.tail(0));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn written(element: Element, shape: &[u64], before: usize) -> (tempfile::NamedTempFile, u64) {
        let shell = Shell::of_tensor(element, shape);
        let count = shape.iter().product::<u64>() * element.bytes();
        let data: Vec<u8> = (0..count).map(|i| i as u8).collect();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7; before]).unwrap();
        for part in [&shell.head, &data, &shell.tail(crc32(&data))] {
            file.write_all(part).unwrap();
        }
        assert_eq!(shell.tail_bytes, shell.tail(crc32(&data)).len() as u64);
        (file, shell.item_bytes())
    }

    #[test]
    fn finds_the_tensor_it_wrote() {
        for (element, shape) in [
            (Element::F32, vec![3, 5]),
            (Element::F8E4M3, vec![2]),
            (Element::I64, vec![]),
            (Element::BF16, vec![0, 4]),
        ] {
            let (file, len) = written(element, &shape, 100);
            let stored = read_tensor(file.as_file(), file.path(), 100, len).unwrap();
            assert_eq!((stored.element, &stored.shape), (element, &shape));
            assert_eq!((stored.offset - 100) % ALIGNMENT, 0);
            assert_eq!(stored.strides, row_major(shape.iter().copied(), element.bytes()));
        }
    }

    #[test]
    fn an_item_that_is_cut_short_is_refused() {
        let (file, len) = written(Element::F32, &[300, 5], 0);
        for cut in [1, 22, 100, len / 2, len - 1, len] {
            assert!(read_tensor(file.as_file(), file.path(), 0, len - cut).is_err(), "{cut}");
        }
        assert!(read_tensor(file.as_file(), file.path(), 10, len).is_err());
        assert!(read_tensor(file.as_file(), file.path(), u64::MAX - 5, len).is_err());
    }
}
