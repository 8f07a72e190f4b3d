//! One meaning a word: the glossary explains each once, and nobody else explains it again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// Rows of the page's tables: the first cell and the second.
fn rows(page: &str) -> impl Iterator<Item = (&str, &str)> {
    let cells = page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    cells.filter(|(first, _)| *first != "word")
}

/// What stands in bold.
fn bold(cell: &str) -> impl Iterator<Item = &str> {
    cell.split("**").skip(1).step_by(2)
}

#[test]
fn every_word_is_explained_once() {
    let page = std::fs::read_to_string(docs().join("glossary.md")).unwrap();
    let mut seen: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (first, meaning) in rows(&page) {
        assert!(bold(first).next().is_some(), "`{first}` is no word");
        assert!(meaning.trim_end_matches(" |").len() > 5, "{first} has no meaning");
        for word in bold(first).chain(bold(meaning)) {
            seen.entry(word).or_default().push(first);
        }
    }
    for (word, at) in &seen {
        assert_eq!(at.len(), 1, "`{word}` is explained in {at:?}");
    }
    for word in [
        "exposed communication",
        "signal",
        "lower bound",
        "step bound",
        "lane",
        "window",
        "B",
        "W",
        "F",
        "BW",
    ] {
        assert!(seen.contains_key(word), "`{word}` is missing");
    }
    assert!(seen.len() > 50, "{}", seen.len());
}

/// A table of words elsewhere would be a second glossary.
#[test]
fn no_other_page_has_a_table_of_words() {
    for entry in std::fs::read_dir(docs()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "md") && !path.ends_with("glossary.md") {
            let page = std::fs::read_to_string(&path).unwrap();
            assert!(!page.contains("| word | meaning |"), "{}: words are in glossary.md", path.display());
        }
    }
}
