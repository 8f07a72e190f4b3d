use super::*;
use crate::data::text::{Encoder, Text};
use crate::data::tokens::{Source, Tokens, WindowSpec};
use crate::data::{Column, DataSet, Split};
use proptest::prelude::*;
use std::collections::BTreeSet;
use tempfile::TempDir;

/// Texts in files, packed as bytes; the folder, and the ids that should be there.
fn packed(texts: &[String]) -> (TempDir, PathBuf, Vec<u32>) {
    let folder = tempfile::tempdir().unwrap();
    let inputs: Vec<PathBuf> = (0..texts.len()).map(|i| folder.path().join(format!("in{i}"))).collect();
    inputs.iter().zip(texts).for_each(|(path, text)| std::fs::write(path, text).unwrap());
    let file = folder.path().join("out.tokens");
    pack(&inputs, &Encoder::bytes(&Default::default()).unwrap(), &file, 2, &mut |_| {}).unwrap();
    let document = |text: &String| text.bytes().map(u32::from).chain([256]).collect::<Vec<_>>();
    let ids = texts.iter().flat_map(document).collect();
    (folder, file, ids)
}

/// Everything of a file, or why not.
fn read_all(path: &Path) -> Result<Vec<u32>, DataError> {
    let file = TokenFile::open(path)?;
    file.verify(&mut |_| {})?;
    file.read(0..file.header().tokens)
}

#[test]
fn what_was_packed_is_read() {
    let texts = ["erstes\n".repeat(30_000), "ü".to_string(), "x".repeat(70_000)];
    let (folder, path, ids) = packed(&texts);
    let file = TokenFile::open(&path).unwrap();
    let header = *file.header();
    assert_eq!((header.vocab, header.width, header.end), (257, Width::U16, Some(256)));
    assert_eq!((header.tokens, header.encoding), (ids.len() as u64, Encoding::Bytes));
    let starts = [0, 210_001, 210_004];
    assert_eq!(file.documents().unwrap(), starts);
    assert_eq!(file.read(0..header.tokens).unwrap(), ids);
    for range in
        [0..0, 5..9, 32_700..32_900, 200_000..210_010, ids.len() - 1..ids.len(), ids.len()..ids.len()]
    {
        let wanted = &ids[range.clone()];
        assert_eq!(file.read(range.start as u64..range.end as u64).unwrap(), wanted);
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 4, "nothing is left beside it: {left:?}");
}

/// The reference page's table, byte by byte.
#[test]
fn the_header_is_as_documented() {
    let (_folder, path, _) = packed(&["ab".to_string()]);
    let bytes = std::fs::read(&path).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!(&bytes[..8], b"XMTOKENS");
    assert_eq!((u32_at(8), u32_at(12)), (1, 2));
    assert_eq!((u64_at(16), u64_at(24), u64_at(32)), (257, 3, 1));
    assert_eq!((u32_at(40), u32_at(44), u32_at(48)), (1, 0, 256));
    assert_eq!(bytes[64..72], [97, 0, 98, 0, 0, 1, 0, 0], "three ids and their padding");
    assert_eq!(u64_at(72), 0, "the document starts with the first id");
    assert_eq!(u32_at(80), crc32c::crc32c(&bytes[64..70]));
    assert_eq!((u32_at(52), u32_at(56)), (crc32c::crc32c(&bytes[80..84]), crc32c::crc32c(&bytes[72..80])));
    assert_eq!((u32_at(60), bytes.len()), (crc32c::crc32c(&bytes[..60]), 84));
}

#[test]
fn any_flipped_bit_and_any_length_is_refused_by_name() {
    let (folder, path, ids) = packed(&["hello\n".to_string(), "you".to_string()]);
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(read_all(&path).unwrap(), ids);
    let bad = folder.path().join("bad.tokens");
    let refused = |bytes: &[u8], what: &str| {
        std::fs::write(&bad, bytes).unwrap();
        let error = read_all(&bad).expect_err(what).to_string();
        assert!(
            error.contains("bad.tokens is no token file: ") && error.contains("\nhint: "),
            "{what}: {error}"
        );
    };
    for bit in 0..bytes.len() * 8 {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        refused(&bytes, &format!("bit {bit}"));
    }
    for len in 0..bytes.len() {
        refused(&bytes[..len], &format!("{len} bytes"));
    }
    refused(&[&bytes[..], b"\0"].concat(), "a byte too many");
    refused(
        "just a text, longer than the header of a token file would have been, you see".as_bytes(),
        "text",
    );
}

#[test]
fn a_damaged_block_harms_only_who_reads_it() {
    let (_folder, path, ids) = packed(&["a".repeat(200_000)]);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[64 + (BLOCK_BYTES as usize) + 10] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let file = TokenFile::open(&path).unwrap();
    assert_eq!(file.read(0..32_768).unwrap(), ids[..32_768]);
    assert_eq!(file.read(65_536..70_000).unwrap(), ids[65_536..70_000]);
    let error = file.read(40_000..40_001).unwrap_err().to_string();
    assert!(error.contains("the block of ids at byte 65600"), "{error}");
    assert!(file.verify(&mut |_| {}).is_err());
}

#[test]
fn a_file_cut_short_in_use_is_an_error() {
    let (_folder, path, _) = packed(&["a".repeat(100_000)]);
    let file = TokenFile::open(&path).unwrap();
    file.read(0..100).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(64).unwrap();
    for range in [0..100, 90_000..90_001] {
        let error = file.read(range).unwrap_err().to_string();
        assert!(error.contains("out.tokens is no token file: it was cut short"), "{error}");
    }
}

#[test]
fn packing_that_fails_leaves_the_old_file() {
    let (folder, path, ids) = packed(&["good".to_string()]);
    let bad = folder.path().join("bad");
    std::fs::write(&bad, b"\xff").unwrap();
    let again = pack(&[bad], &Encoder::bytes(&Default::default()).unwrap(), &path, 1, &mut |_| {});
    assert!(matches!(again, Err(DataError::NotUtf8 { offset: 0, .. })), "{again:?}");
    assert_eq!(read_all(&path).unwrap(), ids);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3, "in0, out.tokens, bad");
    let error = pack(
        &[folder.path().join("in0")],
        &Encoder::bytes(&Default::default()).unwrap(),
        folder.path(),
        1,
        &mut |_| {},
    );
    assert!(error.unwrap_err().to_string().contains("cannot write"));
}

#[test]
fn progress_ends_at_the_end() {
    let (folder, path, ids) = packed(&["a".repeat(600_000), "b".to_string()]);
    let inputs = [folder.path().join("in0"), folder.path().join("in1")];
    let mut seen = Vec::new();
    pack(&inputs, &Encoder::bytes(&Default::default()).unwrap(), &path, 1, &mut |p| seen.push(p)).unwrap();
    let last = PackProgress { bytes_done: 600_001, bytes: 600_001, tokens: ids.len() as u64 };
    assert!(seen.len() >= 3 && seen.is_sorted_by_key(|p| p.bytes_done));
    assert_eq!(seen.last(), Some(&last));
}

fn ids_of(column: Column) -> Vec<i32> {
    match column {
        Column::Ids(ids) => ids,
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// From a file or from memory, in one call or in many: windows of the naive stream; an epoch has each once; no token is in both parts.
    #[test]
    fn samples_are_windows_of_the_stream(
        texts in prop::collection::vec("[a-z \n]{1,80}", 1..6),
        context in 1usize..9,
        share in prop::sample::select(vec![0.0, 0.2, 0.5]),
        seed: u64,
    ) {
        let (folder, path, stream) = packed(&texts);
        let spec = WindowSpec { context, validation_share: share, seed };
        let inputs: Vec<PathBuf> = (0..texts.len()).map(|i| folder.path().join(format!("in{i}"))).collect();
        let text = Text::read(&inputs, &Encoder::bytes(&Default::default()).unwrap(), 1).unwrap();
        let of_text = Tokens::new(Source::Text(text), spec);
        let of_file = Tokens::new(Source::File(TokenFile::open(&path).unwrap()), spec);
        let held_out = (stream.len() as f64 * share) as usize;
        let enough = |tokens: usize| tokens > context;
        if !enough(stream.len() - held_out) || (share > 0.0 && !enough(held_out)) {
            prop_assert!(of_text.unwrap_err().to_string().contains("and a sample takes"));
            return Ok(());
        }
        let (of_text, of_file) = (of_text.unwrap(), of_file.unwrap());
        let mut touched = Vec::new();
        for (split, part) in [
            (Split::Training, &stream[..stream.len() - held_out]),
            (Split::Validation, &stream[stream.len() - held_out..]),
        ] {
            let count = of_file.num_samples(split).unwrap();
            prop_assert_eq!(count as usize, part.len().saturating_sub(1) / context);
            if count == 0 {
                prop_assert!(of_file.read("tokens", 0..1, split).is_err());
                continue;
            }
            for epoch in [0, 3] {
                let samples = epoch * count..(epoch + 1) * count;
                let tokens = ids_of(of_file.read("tokens", samples.clone(), split).unwrap());
                let targets = ids_of(of_file.read("targets", samples.clone(), split).unwrap());
                prop_assert_eq!(&tokens, &ids_of(of_text.read("tokens", samples.clone(), split).unwrap()));
                let one = samples.start + count / 2;
                let one_read = ids_of(of_file.read("tokens", one..one + 1, split).unwrap());
                prop_assert_eq!(&tokens[(count / 2) as usize * context..][..context], &one_read[..]);
                let mut windows: Vec<_> = tokens.chunks(context).zip(targets.chunks(context)).collect();
                windows.sort();
                let at = |i: usize| part[i] as i32;
                let naive = |w: usize| (w * context..(w + 1) * context).map(at).collect::<Vec<_>>();
                let shifted = |w: usize| (w * context + 1..=(w + 1) * context).map(at).collect::<Vec<_>>();
                let naive: Vec<_> = (0..count as usize).map(|w| (naive(w), shifted(w))).collect();
                let mut naive: Vec<_> = naive.iter().map(|(a, b)| (&a[..], &b[..])).collect();
                naive.sort();
                prop_assert_eq!(windows, naive);
            }
            let starts = (0..count).map(|n| of_file.start(n, split).unwrap());
            touched.push(starts.flat_map(|s| s..=s + context as u64).collect::<BTreeSet<u64>>());
        }
        if let [training, validation] = &touched[..] {
            prop_assert!(training.is_disjoint(validation));
        }
    }
}

#[test]
fn refuses_windows_that_make_no_sense() {
    let (_folder, path, _) = packed(&["hello".to_string()]);
    let refused = |context, validation_share| {
        let spec = WindowSpec { context, validation_share, seed: 0 };
        Tokens::new(Source::File(TokenFile::open(&path).unwrap()), spec).unwrap_err().to_string()
    };
    assert!(refused(0, 0.0).starts_with("context = 0: "));
    assert!(refused(2, 1.0).starts_with("validation_share = 1: "));
    assert!(refused(2, f64::NAN).starts_with("validation_share = NaN: "));
    let short = refused(6, 0.0);
    assert!(short.contains("has 6 tokens for training, and a sample takes 7\nhint: "), "{short}");
    assert!(refused(3, 0.4).contains("has 2 tokens for validation, and a sample takes 4"));
}
