//! Layouts by boxes and ranks of another job, wherever a layout is read.

mod common;

use common::{Scratch, ok, refused};

const SRC: &str = "f32[8,6]@A{x:2}{0: [0:5, 0:6]; 1: [4:8, 0:3] by 6,1 [4:8, 3:6] at 3 by 6,1}";
const DST: &str = "f32[8,6]@B{x:3}{0: [0:8, 0:2] by 1,8; 2: [1:7, 2:6]}";

#[test]
fn a_plan_keeps_its_boxes() {
    let scratch = Scratch::new();
    let path = scratch.at("plan.json");
    ok(&["plan", SRC, DST, "-o", &path]);
    let doc = ok(&["explain", SRC, DST, "--format", "json"]).json();
    assert_eq!((&doc["src"], &doc["dst"]), (&SRC.into(), &DST.into()));
    assert!(ok(&["verify", &path]).stdout.contains("every element arrives exactly once"));
    ok(&["simulate", &path]);
    assert!(ok(&["run", &path]).last_line().ends_with("every element checked"));
    let pairs =
        scratch.file("pairs.txt", format!("# chunks\nw: {SRC} -> {DST}\n{SRC} -> f32[8,6]@B{{x:3}}(x,_)\n"));
    assert!(ok(&["run", pairs.to_str().unwrap()]).last_line().ends_with("every element checked"));
}

#[test]
fn long_lists_are_counted_for_readers_and_kept_in_documents() {
    let boxes: String = (0..100).map(|i| format!(" [{i}:{}]", i + 1)).collect();
    let src = format!("u8[100]@A{{x:2}}{{1:{boxes}}}");
    let said = ok(&["explain", &src, "u8[100]@B{x:1}(_)"]);
    assert!(
        said.stdout.starts_with("reshard u8[100]  A{x:2}{100 boxes on 1 devices} -> B{x:1}(_)"),
        "{}",
        said.stdout
    );
    let doc = ok(&["explain", &src, "u8[100]@B{x:1}(_)", "--format", "json"]).json();
    assert_eq!(doc["src"], src);
}

#[test]
fn boxes_that_cannot_be_are_named_with_rank_and_box() {
    let dst = "f32[8]@B{x:2}(x)";
    let hole = refused(&["explain", "f32[8]@A{x:2}{0: [0:4]; 1: [6:8]}", dst]);
    assert!(hole.starts_with("error: nobody holds [4:6], which r3 wants\n"), "{hole}");
    let twice = refused(&["explain", "f32[8]@A{x:2}(x)", "f32[8]@B{x:1}{0: [0:4] [3:8]}"]);
    assert!(twice.starts_with("error: r2 wants [3:4] twice: in [0:4] and in [3:8]\n"), "{twice}");
    let outside = refused(&["explain", "f32[8]@A{x:2}=0-1{0: [0:8]; 1: [6:9]}", dst]);
    assert!(
        outside.contains("box [6:9] of position 1 of A (r1) reaches outside the tensor [0:8]"),
        "{outside}"
    );
    let places = refused(&["plan", "f32[8]@A{x:1}{0: [0:4] [4:8] at 2}", dst]);
    assert!(places.contains("boxes [0:4] and [4:8] of position 0 of A share a place"), "{places}");
    let missing = refused(&["explain", "f32[8]@A{x:1}{0: [0:8]}"]);
    assert!(missing.contains("the destination of f32[8]@A{x:1}{0: [0:8]} is missing"), "{missing}");
}

#[test]
fn two_jobs_that_count_from_0_are_the_two_sides() {
    let (src, dst) = ("f32[8]@M{x:2}=0-1(x)", "f32[8]@M{x:3}=0-2(x)");
    let doc = ok(&["explain", src, dst, "--dst-rank-offset", "2", "--format", "json"]).json();
    assert_eq!((&doc["src"], &doc["dst"]), (&src.into(), &"f32[8]@M_dst{x:3}=2-4(x)".into()));
    assert_eq!(doc["devices"].as_array().unwrap().len(), 5);
    assert!(ok(&["run", src, dst, "--dst-rank-offset", "2"]).last_line().ends_with("every element checked"));
    let gap = refused(&["explain", src, dst, "--dst-rank-offset", "9"]);
    assert!(gap.contains("leaves 7 ranks below it without a device"), "{gap}");
    let far = refused(&["explain", src, dst, "--dst-rank-offset", "4294967295"]);
    assert!(far.contains("a rank offset of 4294967295 make"), "{far}");
    let scratch = Scratch::new();
    let path = scratch.at("plan.json");
    ok(&["plan", src, dst, "--dst-rank-offset", "2", "-o", &path]);
    ok(&["verify", &path]);
    assert!(refused(&["run", &path, "--dst-rank-offset", "2"]).contains("planned already"));
}
