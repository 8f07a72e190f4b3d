//! The notation of boxes and of rank offsets: what prints parses back, every error is the one a person reviewed, and no
//! text panics.

use crossmesh_core::layout::{BoxError, HeldBox, Layout};
use crossmesh_core::mesh::Mesh;
use crossmesh_core::region::Region;
use crossmesh_testkit::boxes;
use crossmesh_testkit::seed::Seed;

fn error(text: &str) -> String {
    match text.parse::<Layout>() {
        Ok(layout) => panic!("{text} parsed as {layout}"),
        Err(error) => error.to_string(),
    }
}

/// What a text is printed as.
fn printed(text: &str) -> String {
    let layout: Layout = text.parse().unwrap_or_else(|e| panic!("{e}"));
    let printed = layout.to_string();
    assert_eq!(printed.parse::<Layout>().as_ref(), Ok(&layout), "{text}");
    printed
}

#[test]
fn boxes_print_as_they_were_written() {
    for text in [
        "f32[8,6]@A{x:2}{0: [0:4, 0:6]; 1: [4:8, 0:3] [4:8, 3:6]}",
        "f32[8,6]@A{x:2}=4-5{0: [0:8, 0:3] by 6,1; 1: [0:8, 3:6] at 3 by 6,1}",
        "f32[8]@A{x:4}{0-1,3: [0:8] at 2}",
        "f32[8]@A{d:2,x:2}{0: [0:8]; 2: [0:3] [3:8] at 5 | sum d}",
        "f32[8]@A{d:2}{| max d}",
        "f32[]@A{x:2}{1: []}",
        "f32[0,4]@A{x:2}{}",
    ] {
        assert_eq!(printed(text), text);
    }
}

#[test]
fn boxes_are_printed_in_the_order_of_memory() {
    // Neighbours with the same boxes are put together, and those without any left out.
    assert_eq!(printed("f32[8]@A{x:3} {2:[0:8];0:[0:8];1: }"), "f32[8]@A{x:3}{0,2: [0:8]}");
    assert_eq!(printed("f32[8]@A{x:1}{0: [4:8] at 4 [0:4] at 0;}"), "f32[8]@A{x:1}{0: [0:4] [4:8]}");
    assert_eq!(printed("f32[8]@A{x:1}{0: [0:4] at4 by2 [4:8]at 0}"), "f32[8]@A{x:1}{0: [4:8] [0:4] by 2}");
    assert_eq!(printed("f32[2,3]@A{x:1}{0: [0:2,0:3] at 0 by 3,1}"), "f32[2,3]@A{x:1}{0: [0:2, 0:3]}");
    assert_eq!(printed("f32[8]@A:2x2 {3: [0:8]}"), "f32[8]@A{x:2,y:2}{3: [0:8]}");
}

#[test]
fn a_box_without_a_place_lies_behind_the_others() {
    let layout: Layout = "f32[9]@A{x:1}{0: [0:2] at 10 [2:4] [4:6] at 1 by 3 [6:9]}".parse().unwrap();
    let places: Vec<(String, u64)> =
        layout.held_at(&[0]).iter().map(|h| (h.region.to_string(), h.offset_elements)).collect();
    let place = |region: &str, at: u64| (region.to_string(), at);
    assert_eq!(places, [place("[4:6]", 1), place("[0:2]", 10), place("[2:4]", 12), place("[6:9]", 14)]);
    assert_eq!(layout.shard_elements(&[0]), 17);
}

#[test]
fn boxes_outside_the_tensor() {
    assert_eq!(
        error("f32[8,6]@A{x:2}=4-5{0: [0:4, 0:6]; 1: [4:9, 0:6]}"),
        "box [4:9, 0:6] of position 1 of A (r5) reaches outside the tensor [0:8, 0:6]
  f32[8,6]@A{x:2}=4-5{0: [0:4, 0:6]; 1: [4:9, 0:6]}
                                        ^^^^^^^^^^"
    );
    assert!(
        error("f32[8,6]@A{x:1}{0: [0:8]}")
            .starts_with("box [0:8] of position 0 of A has 1 dims, the tensor has 2")
    );
    assert!(
        error("f32[8]@A{x:1}{0: []}").starts_with("box [] of position 0 of A has 0 dims, the tensor has 1")
    );
    let huge = "[0:18446744073709551615, 0:18446744073709551615]";
    assert!(error(&format!("f32[8,6]@A{{x:1}}{{0: {huge}}}")).contains("reaches outside the tensor"));
}

#[test]
fn empty_boxes_and_spans_that_fall() {
    assert_eq!(
        error("f32[8]@A{x:2}{0: [0:4]; 1: [4:4]}"),
        "box [4:4] of position 1 of A is empty
  f32[8]@A{x:2}{0: [0:4]; 1: [4:4]}
                             ^^^^^
hint: leave it out: a device may hold nothing"
    );
    assert!(error("f32[8]@A{x:1}{0: [4:2]}").starts_with("expected a span that rises, found 4:2"));
    assert!(error("f32[0]@A{x:1}{0: [0:0]}").starts_with("box [0:0] of position 0 of A is empty"));
}

#[test]
fn boxes_that_share_a_place() {
    assert_eq!(
        error("f32[8]@A{x:2}{0: [0:4] [4:8] at 3}"),
        "boxes [0:4] and [4:8] of position 0 of A share a place in its memory
  f32[8]@A{x:2}{0: [0:4] [4:8] at 3}
                         ^^^^^^^^^^
hint: move one of them with `at`, in elements; boxes without it lie one behind the other"
    );
    // The later one of the text is underlined, also where it comes first in memory.
    assert!(
        error("f32[8]@A{x:2}{0: [0:4] at 3 [4:8] at 0}")
            .contains("\n                              ^^^^^^^^^^")
    );
    // Interleaved is not shared.
    assert!("f32[8,6]@A{x:1}{0: [0:8, 0:3] by 6,1 [0:8, 3:6] at 3 by 6,1}".parse::<Layout>().is_ok());
    assert!(error("f32[8,6]@A{x:1}{0: [0:8, 0:3] by 6,1 [0:8, 3:6] at 2 by 6,1}").contains("share a place"));
}

#[test]
fn strides_that_cannot_be() {
    assert_eq!(
        error("f32[4,4]@A{x:1}{0: [0:4, 0:4] by 1,3}"),
        "box [0:4, 0:4] of position 0 of A has strides that may put two of its elements into one place
  f32[4,4]@A{x:1}{0: [0:4, 0:4] by 1,3}
                     ^^^^^^^^^^^^^^^^^
hint: every stride must lead beyond all that the smaller ones reach"
    );
    assert!(error("f32[4]@A{x:1}{0: [0:4] by 0}").contains("into one place"));
    assert!("f32[4]@A{x:1}{0: [0:1] by 0}".parse::<Layout>().is_ok());
    assert!(
        error("f32[4,4]@A{x:1}{0: [0:4, 0:4] by 4}")
            .starts_with("box [0:4, 0:4] of position 0 of A has 1 strides for 2 dims")
    );
    let ends = "ends beyond 2^64 bytes of memory";
    assert!(error("f32[4]@A{x:1}{0: [0:4] at 18446744073709551615}").contains(ends));
    assert!(error("f32[4]@A{x:1}{0: [0:4] at 4611686018427387901}").contains(ends));
    assert!("f32[4]@A{x:1}{0: [0:4] at 4611686018427387899}".parse::<Layout>().is_ok());
    assert!(error("f32[4]@A{x:1}{0: [0:4] by 9223372036854775808}").contains(ends));
    assert!(error("f32[4]@A{x:1}{0: [0:4] by 18446744073709551616}").contains("does not fit into 64 bits"));
}

#[test]
fn positions_that_are_not_there_or_come_twice() {
    assert_eq!(
        error("f32[8]@A{x:2}{0-2: [0:4]}"),
        "the mesh has 2 devices, there is no position 2
  f32[8]@A{x:2}{0-2: [0:4]}
                ^^^
hint: positions count the devices of the mesh, from 0 to 1"
    );
    assert!(error("f32[8]@A{x:2}{0: [0:4]; 0: [4:8]}").starts_with("position 0 is listed twice"));
    assert!(error("f32[8]@A{x:4}{0-2,1: [0:4]}").starts_with("position 1 is listed twice"));
    assert!(error("f32[8]@A{x:2}{[0:4]}").starts_with("expected a number, found `[`"));
    assert!(error("f32[8]@A{x:2}{0 [0:4]}").starts_with("expected `:` and boxes, found `[`"));
    assert!(error("f32[8]@A{x:2}{0: [0:4]").starts_with("expected a box, `;` or `}`, found the end"));
    assert!(error("f32[8]@A{x:2}{0: [0:4] on 3}").starts_with("expected a box, `;` or `}`, found `o`"));
    assert!(error("f32[8]@A{x:2}{0: [0:8] | sum y}").starts_with("mesh `A` has no axis `y`"));
}

#[test]
fn more_boxes_than_are_planned_for() {
    let text = format!("u8[4]@A{{x:1048576}}{{0-1048575:{}}}", " [0:1] [1:2]".repeat(3));
    assert!(
        error(&text).starts_with("the layout has more than 4194304 boxes, counted on every device"),
        "{}",
        error(&text)
    );
    let whole: Layout = "u8[4]@A{x:1048576}(_)".parse().unwrap();
    assert_eq!(whole.to_boxes().unwrap().to_string(), "u8[4]@A{x:1048576}{0-1048575: [0:4]}");
    let fused = format!("u8[0]@A{{x:1}}(x of {})", ["0"; 9].join("+"));
    assert!(fused.parse::<Layout>().unwrap().to_boxes().is_ok());
    let dims = ["4096"; 2].join(",");
    let fused = format!("x of {}", vec!["2"; 2048].join("+"));
    let many = format!("u8[{dims}]@A{{x:2,y:2}}({fused},{})", fused.replace('x', "y"));
    assert_eq!(many.parse::<Layout>().unwrap().to_boxes().unwrap_err(), BoxError::TooManyBoxes);
}

#[test]
fn layouts_are_made_of_boxes_without_text() {
    let mesh = || "A{x:2}".parse::<Mesh>().unwrap();
    let of = |positions: Vec<Vec<HeldBox>>| {
        Layout::of_boxes(crossmesh_core::dtype::DType::F32, vec![8], mesh(), positions)
    };
    let whole = HeldBox::packed(Region::whole(&[8]), 0);
    assert_eq!(of(vec![vec![whole.clone()], vec![]]).unwrap().to_string(), "f32[8]@A{x:2}{0: [0:8]}");
    assert!(matches!(of(vec![vec![]]), Err(BoxError::PositionsDiffer { given: 1, devices: 2 })));
    assert!(matches!(of(vec![vec![whole.clone(), whole], vec![]]), Err(BoxError::SharedPlace { .. })));
    let outside = HeldBox::packed(Region::whole(&[u64::MAX]), u64::MAX);
    assert!(matches!(of(vec![vec![outside], vec![]]), Err(BoxError::Bad { .. })));
}

#[test]
fn rank_offsets_count_from_a_jobs_first_rank() {
    let mesh = |text: &str| text.parse::<Mesh>().unwrap_or_else(|e| panic!("{e}")).to_string();
    assert_eq!(mesh("A{x:4}=0-3+64"), "A{x:4}=64-67");
    assert_eq!(mesh("A{x:4}=3,0-2 + 64"), "A{x:4}=67,64-66");
    assert_eq!(mesh("A{x:4}=+64"), "A{x:4}=64-67");
    assert_eq!(mesh("A:2x2=+0"), "A{x:2,y:2}=0-3");
    assert_eq!(printed("f32[8]@A{x:2}=+4(x)"), "f32[8]@A{x:2}=4-5(x)");
    assert_eq!(printed("f32[8]@A{x:2}=0-1+4{1: [0:8]}"), "f32[8]@A{x:2}=4-5{1: [0:8]}");
    assert_eq!(
        error("f32[8]@A{x:2}=0-1+4294967294(x)"),
        "rank 4294967295 is too large
  f32[8]@A{x:2}=0-1+4294967294(x)
                ^^^^^^^^^^^^^^
hint: ranks go up to 4294967294"
    );
    assert!(error("f32[8]@A{x:2}=0-1+(x)").starts_with("expected a number, found `(`"));
    assert!(error("f32[8]@A{x:2}=0+4(x)").starts_with("the mesh has 2 devices, 1 ranks are listed"));
}

/// Texts with a character changed, added or taken away: nothing panics, and what still parses prints and parses again.
#[test]
fn spoilt_boxes_are_errors_or_other_boxes() {
    let alphabet: Vec<char> = "0123456789:;,[]{}()|@+-= atbysumx_é\n\u{1b}".chars().collect();
    let mut refused = 0;
    for number in 0..4000 {
        let mut seed = Seed(number);
        let layout = boxes::layout(number % 200);
        let mut chars: Vec<char> = layout.to_string().chars().take(400).collect();
        for _ in 0..1 + seed.below(3) {
            let at = seed.below(chars.len());
            match seed.below(3) {
                0 => drop(chars.remove(at)),
                1 => chars.insert(at, seed.pick(&alphabet)),
                _ => chars[at] = seed.pick(&alphabet),
            }
        }
        let text: String = chars.into_iter().collect();
        match text.parse::<Layout>() {
            Ok(layout) => drop(printed(&layout.to_string())),
            Err(error) => {
                refused += 1;
                assert!(error.to_string().lines().any(|l| l.trim_start().starts_with('^')), "{error}");
            }
        }
    }
    assert!((1000..4000).contains(&refused), "{refused}");
}

/// The examples of docs/notation.md are printed as they are written there.
#[test]
fn the_reference_page_shows_what_is_read() {
    let page = include_str!("../../../docs/notation.md");
    let boxes = page.split("## Boxes").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let examples: Vec<&str> = boxes.lines().filter(|line| line.contains("]@")).collect();
    assert!(examples.len() >= 7, "{examples:?}");
    for example in examples {
        assert_eq!(printed(example), example);
    }
    for line in boxes.lines().filter(|line| line.starts_with("| `[")) {
        let held = line.split('`').nth(1).unwrap();
        printed(&format!("f32[4,6]@A{{x:1}}{{0: {held}}}"));
    }
}
