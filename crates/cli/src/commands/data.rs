//! `crossmesh data`: text to token files, and what is in one.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::Result;
use crossmesh_core::units::Bytes;
use crossmesh_train::data::file::{self, Encoding, Header, PackProgress, TokenFile};
use crossmesh_train::data::text::{DocumentEnd, Encoder};
use serde::Serialize;

use crate::Answer;
use crate::output::{self, Format, FormatArgs, Progress};

/// Pack text into a token file to train on, or show what is in one.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # bytes are the tokens: a vocabulary of 257
  crossmesh data pack books/ notes.txt -o books.tokens
  crossmesh data pack books/ -o books.tokens --tokenizer tokenizer.json
  crossmesh data show books.tokens")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Pack(PackArgs),
    Show(ShowArgs),
}

/// Make a token file from UTF-8 files and folders.
#[derive(Debug, clap::Args)]
#[command(after_help = "A file is a document. Folders are read to the bottom, in the order of the paths;
names that start with a dot are left out. The token file appears when it is
complete. docs/token-file.md has the format.")]
struct PackArgs {
    /// Files and folders of text
    #[arg(value_name = "INPUT", required = true)]
    inputs: Vec<PathBuf>,
    /// Where to write it
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    output: PathBuf,
    /// A Hugging Face tokenizer.json; without one, bytes are the tokens
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// The token behind a document, or `none` [default: the one that the tokenizer is known for]
    #[arg(long, value_name = "TOKEN", requires = "tokenizer")]
    end_of_document: Option<DocumentEnd>,
    /// Tokenize on so many threads; the file is the same [default: one a core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    format: FormatArgs,
}

/// Check all of a token file, and say what is in it.
#[derive(Debug, clap::Args)]
struct ShowArgs {
    /// A token file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    format: FormatArgs,
}

pub fn run(args: &Args) -> Result<Answer> {
    match &args.command {
        Command::Pack(args) => pack(args),
        Command::Show(args) => show(args),
    }
}

/// A line of progress that is written again when there is something new to say.
struct Percent {
    line: Progress,
    doing: &'static str,
    said: Option<u64>,
}

impl Percent {
    fn new(doing: &'static str) -> Self {
        Self { line: Progress::new(), doing, said: None }
    }

    fn say(&mut self, done: u64, all: u64) {
        let percent = (100.0 * done as f64 / all as f64) as u64;
        if self.said.replace(percent) != Some(percent) {
            self.line.say(&format!("{}: {percent} % of {}", self.doing, Bytes(all)));
        }
    }
}

/// A token file as JSON.
#[derive(Debug, Serialize)]
struct Described {
    schema: &'static str,
    file: String,
    bytes: u64,
    dtype: &'static str,
    vocabulary: u64,
    tokens: u64,
    documents: u64,
    encoding: &'static str,
    /// The crc32c of the tokenizer.json.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokenizer_crc32c: Option<String>,
    end_of_document: Option<u32>,
    /// Of the text it was packed from.
    #[serde(skip_serializing_if = "Option::is_none")]
    text_bytes: Option<u64>,
    /// The most tokens of a document.
    #[serde(skip_serializing_if = "Option::is_none")]
    longest_document: Option<u64>,
}

fn pack(args: &PackArgs) -> Result<Answer> {
    let end = args.end_of_document.clone().unwrap_or_default();
    let encoder = match &args.tokenizer {
        Some(path) => Encoder::tokenizer(path, &end)?,
        None => Encoder::bytes(&end)?,
    };
    let cores = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = args.threads.map_or_else(cores, usize::from);
    let mut line = Percent::new("packing");
    let mut progress = |p: PackProgress| line.say(p.bytes_done, p.bytes);
    let packed = file::pack(&args.inputs, &encoder, &args.output, threads, &mut progress)?;
    drop(line);
    let mut described = describe(&args.output, &packed.header, packed.file_bytes);
    described.text_bytes = Some(packed.text_bytes);
    tell(&described, args.format.get())
}

fn show(args: &ShowArgs) -> Result<Answer> {
    let file = TokenFile::open(&args.file)?;
    let mut line = Percent::new("checking");
    file.verify(&mut |done| line.say(done.min(file.bytes()), file.bytes()))?;
    drop(line);
    let starts = file.documents()?;
    let ends = starts.iter().skip(1).copied().chain([file.header().tokens]);
    let mut described = describe(&args.file, file.header(), file.bytes());
    described.longest_document = starts.iter().zip(ends).map(|(start, end)| end - start).max();
    tell(&described, args.format.get())
}

fn describe(path: &Path, header: &Header, bytes: u64) -> Described {
    let (encoding, crc) = match header.encoding {
        Encoding::Bytes => ("bytes", None),
        Encoding::Tokenizer(crc) => ("tokenizer", Some(format!("{crc:08x}"))),
    };
    Described {
        schema: "crossmesh.tokens/1",
        file: path.display().to_string(),
        bytes,
        dtype: header.width.name(),
        vocabulary: header.vocab,
        tokens: header.tokens,
        documents: header.documents,
        encoding,
        tokenizer_crc32c: crc,
        end_of_document: header.end,
        text_bytes: None,
        longest_document: None,
    }
}

fn tell(described: &Described, format: Format) -> Result<Answer> {
    match format {
        Format::Json => output::print_json(described)?,
        Format::Text => output::print(&render(described))?,
    }
    Ok(Answer::Yes)
}

fn render(d: &Described) -> String {
    let plural = |n: u64, noun: &str| format!("{n} {noun}{}", if n == 1 { "" } else { "s" });
    let encoding = match &d.tokenizer_crc32c {
        Some(crc) => format!("tokenizer with crc32c {crc}"),
        None => d.encoding.to_string(),
    };
    let end = d
        .end_of_document
        .map_or("documents run into each other".to_string(), |id| format!("{id} ends a document"));
    let longest =
        d.longest_document.map_or(String::new(), |n| format!(", the longest of {}", plural(n, "token")));
    let text = d.text_bytes.map_or(String::new(), |bytes| format!(" of {} of text", Bytes(bytes)));
    format!(
        "{}: {} as {}, {encoding}\n  vocabulary  {}, {end}\n  documents   {}{longest}\n{}{text}\n",
        d.file,
        Bytes(d.bytes),
        d.dtype,
        d.vocabulary,
        d.documents,
        plural(d.tokens, "token"),
    )
}
