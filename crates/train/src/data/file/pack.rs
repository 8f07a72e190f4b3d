//! From text to a token file: streamed, so that memory does not grow with the text, and there whole or not at all.

use std::fs::{self, File};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::header::{BLOCK_BYTES, Encoding, HEADER_BYTES, Header, Width};
use crate::data::DataError;
use crate::data::text::{Encoder, Run, TextFile, encode_files, find_files};

/// How far packing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackProgress {
    pub bytes_done: u64,
    pub bytes: u64,
    pub tokens: u64,
}

/// What was packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    pub header: Header,
    pub text_bytes: u64,
    pub file_bytes: u64,
}

/// Packs files and folders into a token file. It appears under its name when it is complete and on the disk.
pub fn pack(
    inputs: &[PathBuf],
    encoder: &Encoder,
    output: &Path,
    threads: usize,
    progress: &mut dyn FnMut(PackProgress),
) -> Result<Packed, DataError> {
    let files = find_files(inputs)?;
    let beside = Beside::new(output)?;
    let packed = write(&files, encoder, &beside.path, threads, progress)?;
    beside.rename_to(output)?;
    Ok(packed)
}

fn write(
    files: &[TextFile],
    encoder: &Encoder,
    path: &Path,
    threads: usize,
    progress: &mut dyn FnMut(PackProgress),
) -> Result<Packed, DataError> {
    let text_bytes = files.iter().map(|f| f.bytes).sum();
    let file = File::create(path).map_err(DataError::io("write", path))?;
    let mut writer = Writer::new(file, Width::of_vocab(encoder.vocab() as u64), path)?;
    encode_files(files, encoder, threads, &mut |run: Run| {
        if run.starts {
            writer.start_document();
        }
        writer.put(&run.ids)?;
        progress(PackProgress { bytes_done: run.bytes_done, bytes: text_bytes, tokens: writer.tokens });
        Ok(())
    })?;
    let encoding = if encoder.is_bytes() { Encoding::Bytes } else { Encoding::Tokenizer(encoder.checksum()) };
    let (header, file_bytes) = writer.finish(encoder.vocab() as u64, encoding, encoder.end())?;
    Ok(Packed { header, text_bytes, file_bytes })
}

/// Writes ids, and keeps what comes behind them.
struct Writer<'a> {
    path: &'a Path,
    out: BufWriter<File>,
    width: Width,
    tokens: u64,
    documents: Vec<u64>,
    blocks: Vec<u32>,
    /// Of the block that is not full yet.
    block_bytes: u64,
    scratch: Vec<u8>,
}

impl<'a> Writer<'a> {
    fn new(file: File, width: Width, path: &'a Path) -> Result<Self, DataError> {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        // The real header comes last: until then this is no token file.
        out.write_all(&[0; HEADER_BYTES as usize]).map_err(DataError::io("write", path))?;
        let (documents, blocks, scratch) = (vec![], vec![], vec![]);
        Ok(Self { path, out, width, tokens: 0, documents, blocks, block_bytes: 0, scratch })
    }

    /// A document of no ids, whose end has no id either, is none.
    fn start_document(&mut self) {
        if self.documents.last() != Some(&self.tokens) {
            self.documents.push(self.tokens);
        }
    }

    fn put(&mut self, ids: &[u32]) -> Result<(), DataError> {
        self.scratch.clear();
        self.width.put(ids, &mut self.scratch);
        self.tokens += ids.len() as u64;
        self.out.write_all(&self.scratch).map_err(DataError::io("write", self.path))?;
        let mut rest = &self.scratch[..];
        while !rest.is_empty() {
            if self.block_bytes == 0 {
                self.blocks.push(0);
            }
            let (now, later) = rest.split_at(rest.len().min((BLOCK_BYTES - self.block_bytes) as usize));
            let crc = self.blocks.last_mut().expect("pushed when the block began");
            *crc = crc32c::crc32c_append(*crc, now);
            self.block_bytes = (self.block_bytes + now.len() as u64) % BLOCK_BYTES;
            rest = later;
        }
        Ok(())
    }

    fn finish(
        mut self,
        vocab: u64,
        encoding: Encoding,
        end: Option<u32>,
    ) -> Result<(Header, u64), DataError> {
        // The last document may have had no ids.
        self.documents.retain(|start| *start < self.tokens);
        let documents: Vec<u8> = self.documents.iter().flat_map(|start| start.to_le_bytes()).collect();
        let blocks: Vec<u8> = self.blocks.iter().flat_map(|crc| crc.to_le_bytes()).collect();
        let header = Header {
            width: self.width,
            vocab,
            tokens: self.tokens,
            documents: self.documents.len() as u64,
            encoding,
            end,
            blocks_crc: crc32c::crc32c(&blocks),
            documents_crc: crc32c::crc32c(&documents),
        };
        let places = header.places().expect("sizes of a file that was just written");
        let ids_end = HEADER_BYTES + self.tokens * self.width.bytes();
        let padding = vec![0; (places.documents - ids_end) as usize];
        let parts = [&padding[..], &documents[..], &blocks[..]];
        let written = parts.iter().try_for_each(|part| self.out.write_all(part));
        let written = written.and_then(|()| self.out.seek(SeekFrom::Start(0)));
        let written = written.and_then(|_| self.out.write_all(&header.to_bytes()));
        let written = written.and_then(|()| self.out.flush()).and_then(|()| self.out.get_ref().sync_all());
        written.map_err(DataError::io("write", self.path))?;
        Ok((header, places.end))
    }
}

/// A file beside the one that is meant, which goes away unless it takes its place.
struct Beside {
    path: PathBuf,
}

impl Beside {
    fn new(output: &Path) -> Result<Self, DataError> {
        if output.is_dir() {
            return Err(DataError::io("write", output)(std::io::ErrorKind::IsADirectory.into()));
        }
        let no_name = || DataError::io("write", output)(std::io::ErrorKind::InvalidInput.into());
        let name = output.file_name().ok_or_else(no_name)?.to_string_lossy();
        Ok(Self { path: output.with_file_name(format!(".{name}.{}", std::process::id())) })
    }

    fn rename_to(self, output: &Path) -> Result<(), DataError> {
        fs::rename(&self.path, output).map_err(DataError::io("write", output))?;
        // The name is on the disk when its folder is.
        let folder = output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder_synced = File::open(folder).and_then(|f| f.sync_all());
        folder_synced.map_err(DataError::io("write", folder))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Gone already where it was renamed.
        let _ = fs::remove_file(&self.path);
    }
}
