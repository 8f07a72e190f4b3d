use super::reader::Pieces;
use super::*;
use std::path::Path;
use tempfile::TempDir;

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    folder
}

fn read(path: &Path) -> Result<Text, DataError> {
    Text::read(&[path.to_path_buf()], &Encoder::bytes(&Default::default()).unwrap(), 2)
}

fn pieces(path: &Path, size: usize) -> Result<Vec<Piece>, DataError> {
    let file = find_files(&[path.to_path_buf()])?.remove(0);
    Pieces::of_size(&file, size).collect()
}

#[test]
fn documents_come_by_path_and_end() {
    let folder =
        folder(&[("b.txt", b"b"), ("a/z", b"az"), ("a/.hidden", b"\xff"), ("a.txt", "ä".as_bytes())]);
    std::os::unix::fs::symlink(folder.path(), folder.path().join("a/loop")).unwrap();
    let text = read(folder.path()).unwrap();
    let ids: Vec<u32> = vec![97, 122, 256, 0xc3, 0xa4, 256, 98, 256];
    assert_eq!((text.ids.get(0..text.ids.len()), text.vocab, text.documents), (ids, 257, 3));
}

#[test]
fn what_is_wrong_is_named() {
    let folder = folder(&[("bad", b"ok \xc3\x28"), ("cut", b"ok \xc3"), ("empty", b""), ("none/.x", b"1")]);
    let path = |name: &str| folder.path().join(name);
    let told = |name: &str| {
        let text = read(&path(name)).unwrap_err().to_string();
        assert!(text.contains(&path(name).display().to_string()) && text.contains("\nhint: "), "{text}");
        text
    };
    assert!(told("bad").contains("byte 3 (0xc3)"));
    assert!(told("cut").contains("byte 3 (0xc3)"));
    assert!(told("empty").contains("is empty"));
    assert!(told("none").contains("has no files"));
    assert!(told("missing").contains("No such file"));
}

#[test]
fn too_much_text_is_for_packing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large");
    std::fs::File::create(&path).unwrap().set_len(MOST_BYTES + 1).unwrap();
    let error = read(&path).unwrap_err().to_string();
    assert!(error.contains("crossmesh data pack"), "{error}");
}

#[test]
fn pieces_are_the_file_whatever_their_size() {
    let text = "one two\nthree  \nfour\n\nfive ä€🦀\nsix\n   seven".repeat(3);
    let folder = folder(&[("text", text.as_bytes())]);
    for size in 4..text.len() + 3 {
        let pieces = pieces(&folder.path().join("text"), size).unwrap();
        let joined: String = pieces.iter().map(|p| p.text.as_str()).collect();
        assert_eq!(joined, text);
        let mut offset = 0;
        for (i, piece) in pieces.iter().enumerate() {
            assert!(piece.text.len() <= size && (!piece.text.is_empty() || piece.last));
            assert_eq!((piece.offset, piece.last), (offset, i + 1 == pieces.len()));
            offset += piece.text.len() as u64;
        }
    }
}

#[test]
fn pieces_end_between_words_where_they_can() {
    let folder = folder(&[("text", b"aaa\nbbb \nccc\n\nddd\n eee fff")]);
    let pieces = pieces(&folder.path().join("text"), 21).unwrap();
    let texts: Vec<&str> = pieces.iter().map(|p| p.text.as_str()).collect();
    assert_eq!(texts, ["aaa\n", "bbb \nccc\n\nddd\n eee ff", "f"]);
}

#[test]
fn a_bad_byte_is_found_in_any_piece() {
    let mut bytes = "ü\n".repeat(20).into_bytes();
    bytes[31] = 0xff;
    let folder = folder(&[("text", &bytes)]);
    for size in 4..50 {
        let error = pieces(&folder.path().join("text"), size).unwrap_err();
        // Byte 30 begins a character that byte 31 does not end.
        assert!(matches!(error, DataError::NotUtf8 { offset: 30, byte: 0xc3, .. }), "{size}: {error}");
    }
}

#[test]
fn threads_change_nothing() {
    let long: Vec<u8> = (0..3 * reader::PIECE_BYTES).map(|i| b"abc def\n"[i * i % 8]).collect();
    let folder = folder(&[("a", &long), ("b", b"short"), ("c", &long[7..])]);
    let with = |threads| {
        Text::read(&[folder.path().to_path_buf()], &Encoder::bytes(&Default::default()).unwrap(), threads)
            .unwrap()
    };
    let one = with(1);
    assert_eq!(one.ids.len(), 2 * long.len() - 7 + 5 + 3);
    assert!((2..6).all(|threads| with(threads) == one));
}

#[cfg(not(feature = "tokenizers"))]
#[test]
fn a_program_without_tokenizers_says_so() {
    let error = Encoder::tokenizer(Path::new("t.json"), &DocumentEnd::Usual).unwrap_err().to_string();
    assert!(error.starts_with("cannot use t.json: ") && error.contains("--features tokenizers"), "{error}");
}

#[cfg(feature = "tokenizers")]
mod tokenizer {
    use super::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    /// GPT-2's kind of tokenizer, with a handful of merges and an id that is left out.
    fn json(end: &str) -> String {
        let mut alphabet: Vec<String> = ByteLevel::alphabet().into_iter().map(|c| c.to_string()).collect();
        alphabet.sort();
        let merges = [["t", "h"], ["th", "e"], ["Ġ", "the"], ["Ġ", "Ġ"], ["Ċ", "Ċ"], ["o", "n"]];
        let merged = merges.iter().map(|[a, b]| format!("{a}{b}"));
        let mut vocab = serde_json::Map::new();
        alphabet.into_iter().chain(merged).enumerate().for_each(|(i, t)| _ = vocab.insert(t, i.into()));
        vocab.insert(end.to_string(), 300.into());
        let added = serde_json::json!({
            "id": 300, "content": end, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
        });
        serde_json::json!({
            "version": "1.0",
            "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
            "padding": null, "normalizer": null, "post_processor": null, "decoder": null,
            "added_tokens": [added],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "vocab": vocab, "merges": merges}
        })
        .to_string()
    }

    fn encoder(end: &str, wanted: &DocumentEnd) -> Result<Encoder, DataError> {
        let folder = folder(&[("tokenizer.json", json(end).as_bytes())]);
        Encoder::tokenizer(&folder.path().join("tokenizer.json"), wanted)
    }

    #[test]
    fn texts_are_tokenized_whole() {
        let encoder = encoder("<|endoftext|>", &DocumentEnd::Usual).unwrap();
        // One more than the largest id, though there are fewer tokens; texts are not cut after 5 tokens.
        assert_eq!((encoder.vocab(), encoder.end()), (301, Some(300)));
        let folder = folder(&[("text", b"the one and the other then")]);
        let text = Text::read(&[folder.path().to_path_buf()], &encoder, 2).unwrap();
        let ids = text.ids.get(0..text.ids.len());
        assert_eq!(ids.iter().filter(|id| **id == 258).count(), 2, "` the` has an id: {ids:?}");
        assert_eq!((ids[0], ids.last()), (257, Some(&300)));
        assert!(ids.len() > 10, "{ids:?}");
    }

    /// Cuts where reader::cut allows it change no token; cuts elsewhere would.
    #[test]
    fn pieces_tokenize_like_the_whole() {
        let encoder = encoder("</s>", &DocumentEnd::Usual).unwrap();
        let text = "the\n\n\non  the \nthe one\n  the\nthen, the\nother: 12\n3 the\n".repeat(8);
        let ids = |pieces: Vec<Piece>| -> Vec<u32> {
            pieces.iter().flat_map(|p| encoder.encode(p).unwrap()).collect()
        };
        let folder = folder(&[("text", text.as_bytes())]);
        let path = folder.path().join("text");
        let whole = ids(pieces(&path, 10_000).unwrap());
        for size in 60..200 {
            let pieces = pieces(&path, size).unwrap();
            assert!(pieces.len() > 1);
            assert_eq!(ids(pieces), whole, "in pieces of {size}");
        }
        let naive: Vec<Piece> = text
            .split_inclusive('\n')
            .map(|line| Piece {
                file: path.clone(),
                offset: 0,
                text: line.to_string(),
                first: true,
                last: false,
            })
            .collect();
        assert_ne!(ids(naive), whole, "cutting behind every line is not enough");
    }

    #[test]
    fn the_end_of_a_document_has_to_be_known() {
        let unknown = encoder("<end>", &DocumentEnd::Usual).unwrap_err().to_string();
        assert!(unknown.contains("none of <|endoftext|> ") && unknown.contains("\nhint: name"), "{unknown}");
        let named = encoder("<end>", &"<end>".parse().unwrap()).unwrap();
        assert_eq!(named.end(), Some(300));
        assert_eq!(encoder("<end>", &"none".parse().unwrap()).unwrap().end(), None);
        let wrong = encoder("<end>", &"<stop>".parse().unwrap()).unwrap_err().to_string();
        assert!(wrong.contains("has no token `<stop>`"), "{wrong}");
    }

    #[test]
    fn what_is_no_tokenizer_is_named() {
        let folder = folder(&[("t.json", b"{\"model\": 1}")]);
        let error = Encoder::tokenizer(&folder.path().join("t.json"), &DocumentEnd::Usual).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("t.json is not a tokenizer: "), "{error}");
    }
}

/// Every line of a .jsonl is a document, in whatever order its members are; empty lines are none.
#[test]
fn lines_of_json_are_documents() {
    let folder = folder(&[
        ("a.jsonl", b"{\"text\": \"h\\u00e9\"}\n\n{\"id\": 3, \"text\": \"you\"}"),
        ("b.txt", b"x"),
    ]);
    let text = read(folder.path()).unwrap();
    assert_eq!(text.documents, 3);
    let wanted: Vec<u32> =
        [&"hé".bytes().map(u32::from).collect::<Vec<_>>()[..], &[256, 121, 111, 117, 256, 120, 256]].concat();
    assert_eq!(text.ids.get(0..wanted.len()), wanted);
    for (line, reason) in [
        ("{\"txt\": 1}", "missing field `text`"),
        ("{\"text\": 1}", "expected a string"),
        ("hello", "expected value"),
    ] {
        let bad = super::tests::folder(&[("a.jsonl", format!("{{\"text\": \"a\"}}\n{line}\n").as_bytes())]);
        let error = read(bad.path()).unwrap_err().to_string();
        assert!(
            error.contains("a.jsonl: the line at byte 14 is no document: ") && error.contains(reason),
            "{error}"
        );
    }
}
