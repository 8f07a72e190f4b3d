//! How the ids of a model are read and written: as text, where that is known, or as numbers.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use crossmesh_train::checkpoint::Checkpoint;
use crossmesh_train::config::{Config, DataKind};
use crossmesh_train::data::DataError;
use crossmesh_train::data::file::{Encoding, ForeignFile, TokenFile};
use crossmesh_train::data::text::{DocumentEnd, Encoder};

/// See the module.
pub enum Words {
    Text {
        encoder: Box<Encoder>,
        /// The tokenizer.json; none for bytes.
        file: Option<PathBuf>,
    },
    /// As numbers.
    Ids,
}

const ASK: &str = "hint: say how text becomes tokens: --tokenizer FILE, `bytes` or `ids`";

impl Words {
    /// What was asked for: `bytes`, `ids`, or the path of a tokenizer.json.
    pub fn named(name: &str, vocab: usize) -> Result<Self> {
        match name {
            "bytes" => Self::bytes(vocab),
            "ids" => Ok(Words::Ids),
            file => Self::tokenizer(Path::new(file), &DocumentEnd::Usual),
        }
    }

    /// What the model of a checkpoint was trained with.
    pub fn of(checkpoint: &Checkpoint, vocab: usize) -> Result<Self> {
        let config = checkpoint.facts().run.get("config").and_then(|text| text.as_str());
        let trained_with = config.and_then(|text| Config::read("the checkpoint's config", text, &[]).ok());
        match trained_with.map(|config| config.data.kind) {
            Some(DataKind::Text { tokenizer: None, .. }) => Self::bytes(vocab),
            Some(DataKind::Text { tokenizer: Some(file), end, .. }) => {
                let end = end.as_deref().map_or(DocumentEnd::Usual, |end| match end.parse() {
                    Ok(end) => end,
                });
                Self::tokenizer(Path::new(&file), &end)
            }
            Some(DataKind::Tokens { paths, .. }) => Self::of_token_file(Path::new(&paths[0]), vocab),
            Some(DataKind::Language { .. }) => Ok(Words::Ids),
            Some(DataKind::Images { .. }) => bail!("it was trained on images, and has no words"),
            None => bail!("{} does not say what it was trained with\n{ASK}", checkpoint.folder().display()),
        }
    }

    fn of_token_file(path: &Path, vocab: usize) -> Result<Self> {
        let shown = path.display();
        if ForeignFile::is_meant(path) {
            bail!("{shown} does not say what made its tokens\n{ASK}");
        }
        let file = TokenFile::open(path).with_context(|| format!("the data it was trained on\n{ASK}"))?;
        match file.header().encoding {
            Encoding::Bytes => Self::bytes(vocab),
            Encoding::Tokenizer(crc) => {
                bail!(
                    "{shown} was made by a tokenizer with crc32c {crc:08x}, and nobody knows where that is\n{ASK}"
                )
            }
        }
    }

    fn bytes(vocab: usize) -> Result<Self> {
        let end = if vocab == 256 { DocumentEnd::Nothing } else { DocumentEnd::Usual };
        Ok(Words::Text { encoder: Box::new(Encoder::bytes(&end)?), file: None })
    }

    /// A tokenizer.json; one that has nothing to end documents with can still be talked to.
    fn tokenizer(file: &Path, end: &DocumentEnd) -> Result<Self> {
        let encoder = match Encoder::tokenizer(file, end) {
            Err(DataError::UnknownEndToken { .. }) => Encoder::tokenizer(file, &DocumentEnd::Nothing)?,
            other => other?,
        };
        Ok(Words::Text { encoder: Box::new(encoder), file: Some(file.to_path_buf()) })
    }

    /// The id that ends a document.
    pub fn end(&self) -> Option<u32> {
        match self {
            Words::Text { encoder, .. } => encoder.end(),
            Words::Ids => None,
        }
    }

    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let number = |word: &str| {
            word.parse().with_context(|| {
                format!("`{word}` of the prompt is no token's number\nhint: --tokenizer ids reads numbers: --prompt '3 1 4'")
            })
        };
        match self {
            Words::Text { encoder, .. } => Ok(encoder.encode_text(text)?),
            Words::Ids => text.split([' ', ',']).filter(|word| !word.is_empty()).map(number).collect(),
        }
    }

    /// What ids say behind a prompt. Together with it: tokens may be parts of a character.
    pub fn decode(&self, prompt: &[u32], ids: &[u32]) -> Result<String> {
        let Words::Text { encoder, .. } = self else {
            return Ok(ids.iter().map(|id| format!(" {id}")).collect());
        };
        let (whole, before) = (encoder.decode(&[prompt, ids].concat())?, encoder.decode(prompt)?);
        match whole.strip_prefix(&before) {
            Some(rest) => Ok(rest.to_string()),
            None => Ok(encoder.decode(ids)?),
        }
    }
}
