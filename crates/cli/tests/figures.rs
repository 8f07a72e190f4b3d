//! Figures for papers: what is written in them can be read at column width, and every program draws the same.
//!
//! The second needs a browser and converters, which a machine without a screen rarely has: it runs when asked for,
//! `cargo test -p crossmesh-cli --test figures -- --ignored --nocapture`.

mod common;
mod pixels;
mod tiny;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Scratch, ok};
use pixels::Pixels;
use tiny::{Run, trained};

const SRC: &str = "i32[64,64,64]@A{host:2,gpu:4}(_,host,_)";
const DST: &str = "i32[64,64,64]@B{host:3,gpu:4}(host,_,_)";
const SCHEDULE: [&str; 7] = ["schedule", "zbv", "--stages", "4", "--microbatches", "8", "--comm=0.25"];

/// Every figure there is, by name.
fn figures(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let at = |name: &str| folder.join(format!("{name}.{ending}"));
    let compare = ["schedule", "compare", "--stages", "4", "--microbatches", "8"];
    let commands: [(&str, &[&str]); 3] =
        [("links", &["explain", SRC, DST]), ("passes", &SCHEDULE), ("compare", &compare)];
    for (name, words) in commands {
        ok(&[words, &["--svg", at(name).to_str().unwrap()]].concat());
    }
    trained(&Run::new().train(&["--svg", at("loss").to_str().unwrap()]));
    ["links", "passes", "compare", "loss"].map(at).to_vec()
}

/// A unit of the picture is a point on paper: 85 mm are 240.94 of them.
#[test]
fn text_has_six_points_at_85_mm() {
    let scratch = Scratch::new();
    for path in figures(scratch.path(), "svg") {
        let svg = std::fs::read_to_string(&path).unwrap();
        let attribute = |name: &str| -> Vec<String> {
            let said = format!(" {name}=\"");
            let found = svg.split(&said).skip(1).map(|rest| rest.split('"').next().unwrap());
            found.map(String::from).collect()
        };
        assert_eq!(attribute("width")[0], "85mm", "{}", path.display());
        assert!(attribute("viewBox")[0].starts_with("0 0 240.94 "), "{}", path.display());
        let sizes: Vec<f64> = attribute("font-size").iter().map(|size| size.parse().unwrap()).collect();
        assert!(!sizes.is_empty() && sizes.iter().all(|size| *size >= 6.0), "{}: {sizes:?}", path.display());
        assert!(
            !svg.contains("<script") && !svg.contains("href"),
            "{}: it needs nothing else",
            path.display()
        );
    }
}

/// Enlarged this much, 85 mm are 964 pixels.
const ZOOM: f64 = 3.0;
/// Of the pixels, what two programs may draw differently: letters.
const LETTERS: f64 = 0.0005;
/// pdftoppm moves edges onto pixels, so that a gap of a quarter point between two bars is a pixel wide or none.
const GAPS: f64 = 0.005;

/// A program that draws a figure: how it is called, and what it draws from.
struct Drawer {
    program: &'static str,
    ending: &'static str,
    limit: f64,
    draw: fn(&Path, &Path) -> Vec<String>,
}

static DRAWERS: [Drawer; 4] = [
    Drawer {
        program: "rsvg-convert",
        ending: "svg",
        limit: LETTERS,
        draw: |from, to| {
            vec![format!("--zoom={ZOOM}"), format!("--output={}", to.display()), from.display().to_string()]
        },
    },
    Drawer {
        program: "chromium",
        ending: "svg",
        limit: LETTERS,
        draw: |from, to| {
            let flags =
                ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-lcd-text"];
            let page = [
                format!("--force-device-scale-factor={ZOOM}"),
                "--window-size=400,800".into(),
                format!("--user-data-dir={}.profile", to.display()),
                format!("--screenshot={}", to.display()),
                format!("file://{}", from.display()),
            ];
            flags.map(String::from).into_iter().chain(page).collect()
        },
    },
    Drawer {
        program: "inkscape",
        ending: "svg",
        limit: LETTERS,
        draw: |from, to| {
            let dpi = 96.0 * ZOOM;
            vec![
                format!("--export-dpi={dpi}"),
                format!("--export-filename={}", to.display()),
                from.display().to_string(),
            ]
        },
    },
    Drawer {
        program: "pdftoppm",
        ending: "pdf",
        limit: GAPS,
        draw: |from, to| {
            let (dpi, to) = (format!("{}", 96.0 * ZOOM), to.with_extension(""));
            let words = ["-png", "-singlefile", "-r", &dpi].map(String::from);
            words.into_iter().chain([from.display().to_string(), to.display().to_string()]).collect()
        },
    },
];

/// The picture a program makes of a figure.
fn drawn(drawer: &Drawer, from: &Path) -> Pixels {
    let name = from.file_stem().unwrap().to_string_lossy();
    let to = from.with_file_name(format!("{name}-{}.png", drawer.program));
    let args = (drawer.draw)(from, &to);
    let out = Command::new(drawer.program).args(&args).stdin(Stdio::null()).output().unwrap();
    assert!(to.exists(), "{} {args:?}: {}", drawer.program, String::from_utf8_lossy(&out.stderr));
    Pixels::read(&to)
}

/// An SVG looks the same in a browser and in converters, and as a PDF.
#[test]
#[ignore = "needs rsvg-convert, and chromium, inkscape or pdftoppm"]
fn every_program_draws_the_same() {
    let there = |program: &str| Command::new(program).arg("--version").output().is_ok();
    let (drawers, missing): (Vec<&Drawer>, Vec<&Drawer>) = DRAWERS.iter().partition(|d| there(d.program));
    for drawer in missing {
        eprintln!("SKIPPED: {} is not installed, and was not compared", drawer.program);
    }
    assert!(drawers.len() >= 2 && drawers[0].program == "rsvg-convert", "there is nothing to compare with");
    let scratch = Scratch::new();
    let figures: Vec<[PathBuf; 2]> = figures(scratch.path(), "svg")
        .into_iter()
        .zip(figures(scratch.path(), "pdf"))
        .map(|(s, p)| [s, p])
        .collect();
    let mut apart = vec![];
    for [svg, pdf] in figures {
        let reference = drawn(drawers[0], &svg);
        assert!(reference.width.abs_diff(964) <= 1, "85 mm are {} pixels", reference.width);
        for drawer in &drawers[1..] {
            let picture = drawn(drawer, if drawer.ending == "pdf" { &pdf } else { &svg });
            let (name, missing) =
                (svg.file_stem().unwrap().to_string_lossy(), reference.missing_in(&picture));
            let line =
                format!("{name:8} {:10} {:.3} % of the pixels differ", drawer.program, 100.0 * missing);
            eprintln!("{line}");
            apart.extend((missing > drawer.limit).then_some(line));
        }
    }
    assert!(apart.is_empty(), "{apart:#?}");
}
