//! Text to token files, and what the binary says about them.

mod common;

use common::{Scratch, crossmesh, ok, refused};

fn packed(scratch: &Scratch) -> String {
    let text = scratch.file("in.txt", "hello\nyou\n");
    let out = scratch.at("out.tokens");
    ok(&["data", "pack", text.to_str().unwrap(), "-o", &out]);
    out
}

#[test]
fn packs_and_shows() {
    let scratch = Scratch::new();
    let text = scratch.file("in.txt", "hello\nyou\n");
    let out = scratch.at("out.tokens");
    let said = ok(&["data", "pack", text.to_str().unwrap(), text.to_str().unwrap(), "-o", &out]);
    let wanted = "  vocabulary  257, 256 ends a document\n  documents   2\n22 tokens of 20 B of text\n";
    assert!(said.stdout.starts_with(&format!("{out}: ")) && said.stdout.ends_with(wanted), "{}", said.stdout);
    let shown = ok(&["data", "show", &out]);
    assert!(
        shown.stdout.contains("documents   2, the longest of 11 tokens\n22 tokens\n"),
        "{}",
        shown.stdout
    );
    let json = ok(&["data", "show", &out, "--format", "json"]).json();
    assert_eq!(json["schema"], "crossmesh.tokens/1");
    assert_eq!(
        (&json["tokens"], &json["vocabulary"], &json["dtype"]),
        (&22.into(), &257.into(), &"u16".into())
    );
    assert_eq!(json["bytes"], std::fs::metadata(&out).unwrap().len());
}

#[test]
fn what_cannot_be_packed_is_named() {
    let scratch = Scratch::new();
    let bad = scratch.file("bad.txt", b"ab\xff");
    let out = scratch.at("out.tokens");
    let stderr = refused(&["data", "pack", bad.to_str().unwrap(), "-o", &out]);
    assert!(
        stderr.contains("bad.txt is not UTF-8: byte 2 (0xff)") && stderr.contains("\nhint: "),
        "{stderr}"
    );
    assert!(!std::path::Path::new(&out).exists());
    let stderr = refused(&["data", "pack", "no/such/file", "-o", &out]);
    assert!(stderr.contains("cannot read no/such/file"), "{stderr}");
    let text = scratch.file("in.txt", "hello");
    let stderr = refused(&["data", "pack", text.to_str().unwrap(), "-o", "/proc/none/out"]);
    assert!(stderr.contains("cannot write /proc/none/"), "{stderr}");
    let stderr =
        refused(&["data", "pack", text.to_str().unwrap(), "-o", &out, "--tokenizer", text.to_str().unwrap()]);
    assert!(stderr.contains("in.txt"), "{stderr}");
}

#[test]
fn a_damaged_file_is_refused_by_name() {
    let scratch = Scratch::new();
    let out = packed(&scratch);
    let mut bytes = std::fs::read(&out).unwrap();
    bytes[66] ^= 1;
    std::fs::write(&out, &bytes).unwrap();
    let stderr = refused(&["data", "show", &out]);
    assert!(stderr.contains("out.tokens is no token file: the block of ids at byte 64"), "{stderr}");
    std::fs::write(&out, &bytes[..70]).unwrap();
    assert!(refused(&["data", "show", &out]).contains("it has 70 bytes where its header says"));
    assert_eq!(crossmesh(&["data", "show", "/dev/null"]).code, 2);
}
