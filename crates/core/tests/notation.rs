//! The notation: what prints parses back, every error is the one a person reviewed, and no text panics.

use crossmesh_core::dtype::DType;
use crossmesh_core::layout::{Layout, Rule};
use crossmesh_core::mesh::Mesh;
use crossmesh_core::region::Region;
use crossmesh_core::reshard::Problem;
use crossmesh_testkit::arb::{Limits, RuleWords, arb_layout_words, arb_mesh_words, arb_reshard};
use proptest::prelude::*;

proptest! {
    #[test]
    fn meshes_print_as_they_were_written(words in arb_mesh_words(Limits::words())) {
        let text = words.to_string();
        let mesh: Mesh = text.parse().unwrap();
        prop_assert_eq!(mesh.to_string(), text.as_str());
        prop_assert_eq!(mesh.name(), words.name.as_str());
        let axes: Vec<_> = mesh.axes().iter().map(|a| (a.name.clone(), a.len)).collect();
        prop_assert_eq!(&axes, &words.axes);
        let ranks = mesh.listed_ranks().map(|ranks| ranks.iter().map(|r| r.0).collect::<Vec<_>>());
        prop_assert_eq!(&ranks, &words.ranks);
        prop_assert_eq!(mesh.to_string().parse::<Mesh>().unwrap(), mesh);
    }

    #[test]
    fn layouts_print_as_they_were_written(words in arb_layout_words(Limits::words())) {
        let text = words.to_string();
        let layout: Layout = text.parse().unwrap();
        prop_assert_eq!(layout.to_string(), text.as_str());
        prop_assert_eq!(layout.to_string().parse::<Layout>().unwrap(), layout.clone());
        prop_assert_eq!(layout.dtype(), words.dtype);
        prop_assert_eq!(layout.shape(), &words.shape[..]);
        for (split, (axes, rule)) in layout.by_axes().unwrap().splits().iter().zip(&words.splits) {
            prop_assert_eq!(&split.axes, axes);
            let same = match (&split.rule, rule) {
                (Rule::Chunk, RuleWords::Chunk) => true,
                (Rule::Cuts(a), RuleWords::Cuts(b)) | (Rule::Parts(a), RuleWords::Parts(b)) => a == b,
                _ => false,
            };
            prop_assert!(same, "{:?} was read as {:?}", rule, split.rule);
        }
        let partial = layout.partial().map(|p| (p.op, p.axes.clone()));
        prop_assert_eq!(partial, words.partial);
    }

    #[test]
    fn blanks_change_nothing(words in arb_layout_words(Limits::words()), blank in "[ \t]{0,2}") {
        let text = words.to_string();
        let mut spaced = blank.clone();
        for c in text.chars() {
            let token = !c.is_ascii_alphanumeric() && c != '_';
            spaced.push_str(if token { &blank } else { "" });
            spaced.push(c);
            spaced.push_str(if token { &blank } else { "" });
        }
        prop_assert_eq!(spaced.parse::<Layout>().unwrap(), words.parse());
    }

    /// Together the devices hold every element, and those that hold one copy each hold it once.
    #[test]
    fn shards_cover_the_tensor(words in arb_layout_words(Limits::small())) {
        let layout = words.parse();
        prop_assume!(layout.volume() <= 1000);
        let mut copies = vec![0usize; layout.volume() as usize];
        for position in 0..layout.mesh().len() {
            for region in layout.shard_at(&layout.mesh().coord(position)) {
                each_index(layout.shape(), &region, &mut |i| copies[i] += 1);
            }
        }
        let used: usize = (0..layout.shape().len()).map(|dim| layout.by_axes().unwrap().num_parts(dim)).product();
        prop_assert!(copies.iter().all(|&n| n == layout.mesh().len() / used), "{}: {:?}", layout, copies);
    }

    #[test]
    fn every_reshard_can_be_placed((src, dst) in arb_reshard(Limits::small())) {
        let problem = Problem::pair(src, dst);
        prop_assert!(problem.is_ok(), "{}", problem.unwrap_err());
    }

    #[test]
    fn errors_of_any_text_print(text in "\\PC{0,80}") {
        print_error(&text);
    }

    #[test]
    fn errors_of_spoilt_layouts_print(
        words in arb_layout_words(Limits::words()),
        at in any::<prop::sample::Index>(),
        remove in 0usize..3,
        insert in prop_oneof!["", "[-+=:,|_xSRP'\"(){}\\[\\]@]", "\\PC{1,3}", "[0-9]{1,25}", "[\r\n\u{0}\u{1b}\u{2028}é]"],
    ) {
        let chars: Vec<char> = words.to_string().chars().collect();
        let at = at.index(chars.len());
        let rest = chars.iter().skip(at + remove);
        let spoilt: String = chars[..at].iter().copied().chain(insert.chars()).chain(rest.copied()).collect();
        print_error(&spoilt);
    }
}

/// Parses as everything there is; an error must print, and underline characters that are there.
fn print_error(text: &str) {
    if let Err(error) = text.parse::<Mesh>() {
        assert!(!error.to_string().is_empty());
    }
    match text.parse::<Layout>() {
        Ok(layout) => assert_eq!(layout.to_string().parse::<Layout>().unwrap(), layout),
        Err(error) => {
            let lines: Vec<String> = error.to_string().lines().map(str::to_string).collect();
            assert!(error.text.is_char_boundary(error.at.start) && error.text.is_char_boundary(error.at.end));
            assert!(lines.iter().any(|l| l.trim_start().starts_with('^')), "{error}");
            assert!(!error.to_string().contains(|c: char| c.is_control() && c != '\n'), "{error:?}");
        }
    }
}

fn each_index(shape: &[u64], region: &Region, visit: &mut dyn FnMut(usize)) {
    fn walk(shape: &[u64], region: &Region, dim: usize, base: u64, visit: &mut dyn FnMut(usize)) {
        match region.spans().get(dim) {
            None => visit(base as usize),
            Some(span) => (span.start..span.end)
                .for_each(|i| walk(shape, region, dim + 1, base * shape[dim] + i, visit)),
        }
    }
    walk(shape, region, 0, 0, visit);
}

fn error(text: &str) -> String {
    match text.parse::<Layout>() {
        Ok(layout) => panic!("{text} parsed as {layout}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn splitting_twice_over_one_axis() {
    assert_eq!(
        error("f32[8,6]@A{tp:2}(tp,tp)"),
        "layout splits two dims over the same axis `tp`
  f32[8,6]@A{tp:2}(tp,tp)
                  ^^^^^^^
hint: an axis splits one dim at most; name another axis, or `_` to leave a dim whole"
    );
}

#[test]
fn an_unknown_axis() {
    assert_eq!(
        error("f32[8,6]@A{dp:2,tp:4}(tpp,_)"),
        "mesh `A` has no axis `tpp`
  f32[8,6]@A{dp:2,tp:4}(tpp,_)
                        ^^^
hint: its axes are dp, tp"
    );
    assert!(error("f32[8]@A{}(tp)").ends_with("hint: the mesh has no axes"));
}

#[test]
fn a_tensor_beyond_u64() {
    assert_eq!(
        error("f32[4294967296,4294967296]@A{tp:2}(tp,_)"),
        "the tensor has more than 2^64 bytes
  f32[4294967296,4294967296]@A{tp:2}(tp,_)
     ^^^^^^^^^^^^^^^^^^^^^^^"
    );
    // A zero-size dim does not excuse the others.
    assert!(error("f32[0,4294967296,4294967296]@A{tp:2}(tp,_,_)").starts_with("the tensor has more than"));
    assert!(
        error("u8[18446744073709551616]@A{tp:2}(tp)")
            .starts_with("the number 18446744073709551616 does not fit")
    );
    assert!("u8[18446744073709551615]@A{tp:2}(tp)".parse::<Layout>().is_ok());
}

#[test]
fn ranks_repeated_missing_or_too_many() {
    assert_eq!(
        error("f32[8]@A{tp:3}=0-1,1(tp)"),
        "rank 1 is listed twice
  f32[8]@A{tp:3}=0-1,1(tp)
                     ^"
    );
    assert!(error("f32[8]@A{tp:6}=4-6,0-4(tp)").starts_with("rank 4 is listed twice"));
    assert!(error("f32[8]@A{tp:6}=2,0-4(tp)").starts_with("rank 2 is listed twice"));
    assert!(error("f32[8]@A{tp:6}=0-4,2(tp)").starts_with("rank 2 is listed twice"));
    assert!("f32[8]@A{tp:6}=5,2-4,0-1(tp)".parse::<Layout>().is_ok());
    assert_eq!(
        error("f32[8]@A{tp:3}=0-4294967294(tp)"),
        "the mesh has 3 devices, 4294967295 ranks are listed
  f32[8]@A{tp:3}=0-4294967294(tp)
                 ^^^^^^^^^^^^
hint: list 3 ranks, or none to take the next free ones"
    );
    assert!(error("f32[8]@A{tp:3}=0(tp)").starts_with("the mesh has 3 devices, 1 ranks are listed"));
    assert!(error("f32[8]@A{tp:1}=4294967295(tp)").starts_with("rank 4294967295 is too large"));
    assert!(error("f32[8]@A{tp:1}=4294967296(tp)").starts_with("expected a number below 2^32"));
    assert!(error("f32[8]@A{tp:2}=1-0(tp)").starts_with("expected a range that rises"));
    let last: Mesh = "A{tp:2}=4294967294,7".parse().unwrap();
    assert_eq!(last.to_string(), "A{tp:2}=4294967294,7");
}

#[test]
fn cuts_and_parts_that_do_not_fit() {
    assert_eq!(
        error("f32[8,6]@A{tp:2}(tp[0,3,5,8],_)"),
        "4 cuts make 3 parts, the axes make 2
  f32[8,6]@A{tp:2}(tp[0,3,5,8],_)
                   ^^^^^^^^^^^
hint: give 3 cuts, from 0 to the dim's length"
    );
    assert!(error("f32[8]@A{tp:2}(tp[])").starts_with("0 cuts make 0 parts"));
    assert!(error("f32[8]@A{tp:2}(tp[0,9,8])").starts_with("cut 8 comes after cut 9"));
    assert!(error("f32[8]@A{tp:2}(tp[1,3,8])").starts_with("cuts run from 1 to 8, the dim from 0 to 8"));
    assert!(error("f32[8]@A{tp:2}(tp of 4+5)").starts_with("fused parts add up to 9, the dim has 8"));
    let huge = "18446744073709551615";
    assert!(
        error(&format!("f32[8]@A{{tp:2}}(tp of {huge}+{huge})")).contains("add up to 36893488147419103230")
    );
    let many = vec!["0"; 17].join("+");
    assert!(
        error(&format!("f32[0]@A{{tp:1048576}}(tp of {many})"))
            .starts_with("17 fused parts split over 1048576")
    );
}

#[test]
fn meshes_that_cannot_be() {
    assert!(error("f32[8]@A{tp:0}(tp)").starts_with("axis `tp` has length 0"));
    assert!(error("f32[8]@A{tp:2,tp:2}(tp)").starts_with("axis `tp` is named twice"));
    assert!(
        error("f32[8]@A{dp:1024,tp:1025}(tp)").starts_with("the mesh has 1049600 devices, more than 1048576")
    );
    let axes = |n: usize, len: &str| (0..n).map(|i| format!("a{i}:{len}")).collect::<Vec<_>>().join(",");
    assert!(
        error(&format!("f32[8]@A{{{}}}(_)", axes(9, "4294967295")))
            .starts_with("the mesh has over 2^64 devices")
    );
    assert!(
        error(&format!("f32[8]@A{{{}}}(_)", axes(100, "1")))
            .starts_with("the mesh has 33 axes, more than 32")
    );
    assert!(format!("f32[8]@A{{{}}}(_)", axes(32, "1")).parse::<Layout>().is_ok());
}

#[test]
fn dims_dtypes_and_reductions() {
    assert_eq!(
        error("f32[8,6]@A{tp:2}(tp)"),
        "the shape has 2 dims, the layout splits 1
  f32[8,6]@A{tp:2}(tp)
                  ^^^^
hint: give 2 terms; `_` leaves a dim whole"
    );
    assert!(error("f32[1,1,1,1,1,1,1,1,1]@A{tp:2}(_)").starts_with("the tensor has 9 dims, more than 8"));
    assert_eq!(
        error("quad[8]@A{tp:2}(tp)"),
        "unknown dtype `quad`
  quad[8]@A{tp:2}(tp)
  ^^^^
hint: dtypes are f64 f32 bf16 f16 f8e4m3 f8e5m2 i64 i32 i8 u8 bool"
    );
    assert!(error("f32[8]@A{tp:2}(_ | avg tp)").starts_with("unknown reduction `avg`"));
    assert!(
        error("f32[8]@A{tp:2}(tp | sum tp)")
            .starts_with("axis `tp` both splits a dim and carries a partial sum")
    );
    assert!(error("f32[8]@A{tp:2}(tp+tp)").starts_with("axis `tp` is named twice"));
}

#[test]
fn text_that_stops_or_goes_on() {
    assert_eq!(
        error("f32[8]@A{tp:2}"),
        "expected `(` and how each dim is split, or `{` and boxes, found the end
  f32[8]@A{tp:2}
                ^"
    );
    assert!(error("").starts_with("expected a dtype, found the end"));
    assert!(error("f32[8]@A{tp:2}(tp)é").starts_with("expected the end, found `é`"));
    assert!(error("f32[8]@A{tp:2}(tp)\u{1b}").starts_with("expected the end, found `\\u{1b}`"));
    assert!(error("f32[-8]@A{tp:2}(tp)").starts_with("expected a number, found `-`"));
}

#[test]
fn a_long_line_is_shown_in_part() {
    let text = format!("f32[8]@A{{tp:2}}({}", "(".repeat(100_000));
    let shown = error(&text);
    assert!(shown.len() < 1000, "{} bytes", shown.len());
    let lines: Vec<&str> = shown.lines().collect();
    let column = lines[2].find('^').unwrap();
    assert_eq!(lines[1].chars().nth(column), Some('('));
    let text = format!("f32[8]@A{{tp:2}}(tp){}é", " ".repeat(5000));
    let shown = error(&text);
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines[1].chars().nth(lines[2].find('^').unwrap()), Some('é'));
}

#[test]
fn names_of_other_systems_are_read() {
    for (read, written) in [
        ("bfloat16[8]@trainer-0{tp:2}(tp)", "bf16[8]@trainer-0{tp:2}(tp)"),
        ("float8_e4m3fn[8]@a-b-2{tp:2}=0-1(tp)", "f8e4m3[8]@a-b-2{tp:2}=0-1(tp)"),
        ("half[8]@A{tp:2}(tp)", "f16[8]@A{tp:2}(tp)"),
    ] {
        let layout: Layout = read.parse().unwrap();
        assert_eq!(layout.to_string(), written);
        assert_eq!(written.parse::<Layout>().unwrap(), layout);
    }
    for dtype in DType::ALL {
        assert!(dtype.other_names().iter().all(|name| name.parse() == Ok(dtype)), "{dtype}");
    }
    assert!("f32[8]@trainer-{tp:2}(tp)".parse::<Layout>().is_err());
}

/// The page's productions, by name: the words of each, and what it says in quotes.
fn grammar() -> std::collections::BTreeMap<String, (Vec<String>, Vec<String>)> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/notation.md");
    let page = std::fs::read_to_string(page).unwrap();
    let block = page.split("## Grammar").nth(1).unwrap().split("```").nth(1).unwrap();
    let productions = block.lines().filter_map(|line| line.split_once(":="));
    let read = |(name, right): (&str, &str)| {
        let quoted = right.split('\'').skip(1).step_by(2).map(String::from).collect();
        let bare =
            right.split('\'').step_by(2).flat_map(|part| part.split(|c: char| !c.is_ascii_lowercase()));
        (name.trim().to_string(), (bare.filter(|w| !w.is_empty()).map(String::from).collect(), quoted))
    };
    productions.map(read).collect()
}

#[test]
fn every_word_of_the_grammar_has_a_production_and_every_production_is_used() {
    let grammar = grammar();
    let used: std::collections::BTreeSet<&String> = grammar.values().flat_map(|(words, _)| words).collect();
    for word in &used {
        assert!(grammar.contains_key(*word), "`{word}` is used and nowhere said");
    }
    for name in grammar.keys().filter(|name| *name != "layout") {
        assert!(used.contains(name), "`{name}` is said and nowhere used");
    }
    assert!(grammar.len() >= 18, "{grammar:?}");
}

#[test]
fn the_grammar_names_all_dtypes_and_ways_to_add_up() {
    let grammar = grammar();
    assert_eq!(grammar["dtype"].1, DType::ALL.map(|dtype| dtype.name().to_string()));
    for op in &grammar["op"].1 {
        let text = format!("f32[8]@A{{x:2}}(_ | {op} x)");
        assert_eq!(text.parse::<Layout>().unwrap().to_string(), text);
    }
    assert_eq!(grammar["op"].1.len(), 3);
    assert!("f32[8]@A{x:2}(_ | prod x)".parse::<Layout>().is_err());
}

#[test]
fn what_torch_and_jax_cannot_say_is_named() {
    let axes = |text: &str| -> Vec<Vec<usize>> {
        let layout: Layout = text.parse().unwrap();
        layout.chunking_axes().unwrap().into_iter().map(<[usize]>::to_vec).collect()
    };
    assert_eq!(axes("f32[8,6]@A{dp:2,tp:2}(tp+dp,_)"), [vec![1, 0], vec![]]);
    // Said by cuts or as fused, and yet where torch.chunk cuts.
    assert_eq!(axes("f32[10,4]@A{tp:4}(tp[0,3,6,9,10],_)"), [vec![0], vec![]]);
    assert_eq!(axes("f32[8]@A{tp:2}(tp of 8)"), [vec![0]]);
    for (text, says) in [
        (
            "f32[10]@A{tp:4}(tp[0,2,6,9,10])",
            "dim 0 is split `tp[0,2,6,9,10]`: cuts that are not torch.chunk's",
        ),
        ("f32[4,6]@A{tp:2}(_,tp of 4+2)", "dim 1 is split `tp of 4+2`: fused parts have no counterpart"),
        ("f32[8]@A{tp:2}{0: [0:4]; 1: [4:8]}", "listed boxes have no counterpart"),
    ] {
        let error = text.parse::<Layout>().unwrap().chunking_axes().unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("hint: "), "{error}");
    }
}

#[test]
fn an_empty_shard_has_its_other_dims() {
    let layout: Layout = "f32[4,2,6]@A{tp:3,ep:2}(_,tp,ep of 4+2)".parse().unwrap();
    let by_axes = layout.by_axes().unwrap();
    assert_eq!(by_axes.lens_at(&[1, 1]), [4, 1, 3]);
    assert_eq!(by_axes.lens_at(&[2, 0]), [4, 0, 3]);
}
