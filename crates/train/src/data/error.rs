//! What can be wrong with data: the file, the place in it, why, and what to do.

use std::io;
use std::path::{Path, PathBuf};

/// Data that cannot be trained on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    #[error("cannot {doing} {}: {}", file.display(), reason(cause))]
    Io { doing: &'static str, file: PathBuf, cause: io::Error },
    #[error(
        "{} is not UTF-8: byte {offset} ({byte:#04x}) starts no character\nhint: convert it (`iconv -t utf-8`), or leave it out",
        file.display()
    )]
    NotUtf8 { file: PathBuf, offset: u64, byte: u8 },
    #[error("{} is empty: there is nothing to learn in 0 bytes\nhint: delete it, or name the other files", file.display())]
    EmptyFile { file: PathBuf },
    #[error("{} has no files\nhint: name a file of text, or a folder of them; names that start with a dot are left out", folder.display())]
    EmptyFolder { folder: PathBuf },
    #[error(
        "{data} has {bytes} bytes of text, more than the {most} that every rank would tokenize and keep in memory\nhint: `crossmesh data pack` it once, and train on the token file"
    )]
    TooLarge { data: String, bytes: u64, most: u64 },
    #[error("{} is not a tokenizer: {reason}\nhint: it has to be a Hugging Face tokenizer.json", file.display())]
    Tokenizer { file: PathBuf, reason: String },
    #[error(
        "cannot use {}: this program was built for bytes only\nhint: build it with `--features tokenizers`",
        file.display()
    )]
    NoTokenizers { file: PathBuf },
    #[error("{} has no token `{token}` to end a document with\nhint: name one that it has, or `none`", file.display())]
    NoEndToken { file: PathBuf, token: String },
    #[error(
        "{} does not say which token ends a document: it has none of {known}\nhint: name the token, or `none` to let documents run into each other",
        file.display()
    )]
    UnknownEndToken { file: PathBuf, known: String },
    #[error("{} cannot be tokenized at byte {offset}: {reason}", file.display())]
    Encode { file: PathBuf, offset: u64, reason: String },
    #[error(
        "{}: the line at byte {offset} is no document: {reason}\nhint: every line of a .jsonl is an object with a member `text`",
        file.display()
    )]
    Json { file: PathBuf, offset: u64, reason: String },
    #[error("{} is no token file: {reason}\nhint: {hint}", file.display())]
    TokenFile { file: PathBuf, reason: String, hint: &'static str },
    #[error("{data} has {tokens} tokens for {what}, and a sample takes {wanted}\nhint: {hint}")]
    TooShort { data: String, tokens: u64, what: &'static str, wanted: u64, hint: &'static str },
    #[error("{data} has no port `{port}`; it has {known}\nhint: take a data set that is made for this model")]
    NoPort { data: String, port: String, known: String },
    #[error(
        "{data} gives `{port}` as {has}, and the model wants {wanted}\nhint: make the two sizes the same"
    )]
    Shape { data: String, port: String, has: String, wanted: String },
    #[error(
        "{data} has ids up to {} on `{port}`, and the model's vocabulary ends at {}\nhint: give the model a vocabulary of {has} or more, or take a smaller tokenizer",
        has.saturating_sub(1), knows.saturating_sub(1)
    )]
    Vocabulary { data: String, port: String, has: usize, knows: usize },
    #[error("{key} = {value}: {reason}\nhint: {hint}")]
    Value { key: &'static str, value: String, reason: String, hint: &'static str },
}

impl DataError {
    pub(super) fn io(doing: &'static str, file: &Path) -> impl FnOnce(io::Error) -> Self {
        let file = file.to_path_buf();
        move |cause| Self::Io { doing, file, cause }
    }

    pub(super) fn value(
        key: &'static str,
        value: impl ToString,
        reason: impl ToString,
        hint: &'static str,
    ) -> Self {
        Self::Value { key, value: value.to_string(), reason: reason.to_string(), hint }
    }
}

/// A cause with what may help.
fn reason(cause: &io::Error) -> String {
    let hint = match cause.kind() {
        io::ErrorKind::NotFound => "look at the path; a relative one starts where the program was started",
        io::ErrorKind::PermissionDenied => "give this user the right to, or take another place",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "make room there, or write elsewhere",
        io::ErrorKind::IsADirectory => "name a file",
        _ => return cause.to_string(),
    };
    format!("{cause}\nhint: {hint}")
}
