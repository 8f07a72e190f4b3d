//! A figure as a file: an SVG as it is, a PDF by a converter that the machine has.
//!
//! We draw no PDF ourselves: fonts would have to be embedded, and whoever writes papers has one of these programs.

use std::io::{ErrorKind, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::output;

/// Programs that read an SVG from stdin and write a PDF to stdout, the best first.
const CONVERTERS: [(&str, &[&str]); 3] = [
    ("rsvg-convert", &["-f", "pdf"]),
    ("inkscape", &["--pipe", "--export-type=pdf", "--export-filename=-"]),
    ("cairosvg", &["-", "-f", "pdf", "-o", "-"]),
];

/// Writes a figure; a name that ends in `.pdf` asks for a PDF.
pub fn write(path: &Path, svg: &str) -> Result<()> {
    match wants_pdf(path)? {
        true => output::write_file(path, to_pdf(svg, &CONVERTERS)?),
        false => output::write_file(path, svg),
    }
}

/// Refuses what could not be written, before the work that the figure shows.
pub fn check(path: &Path) -> Result<()> {
    if wants_pdf(path)? {
        to_pdf(NOTHING, &CONVERTERS)?;
    }
    Ok(())
}

const NOTHING: &str = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1\" height=\"1\"></svg>";

fn wants_pdf(path: &Path) -> Result<bool> {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    match ending.to_ascii_lowercase().as_str() {
        "pdf" => Ok(true),
        other @ ("png" | "jpg" | "jpeg" | "eps" | "ps") => bail!(
            "cannot write {}: figures are SVG or PDF, not `.{other}`\nhint: name it `.svg` or `.pdf`",
            path.display()
        ),
        _ => Ok(false),
    }
}

fn to_pdf(svg: &str, converters: &[(&str, &[&str])]) -> Result<Vec<u8>> {
    for (program, args) in converters {
        let started = Command::new(program)
            .args(*args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = match started {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            started => started.with_context(|| format!("cannot start {program}"))?,
        };
        let mut stdin = child.stdin.take().context("no pipe")?;
        // It writes when it has read all: neither waits for the other.
        let fed = stdin.write_all(svg.as_bytes());
        drop(stdin);
        let out = child.wait_with_output().with_context(|| format!("cannot read from {program}"))?;
        if fed.is_err() || !out.status.success() || !out.stdout.starts_with(b"%PDF") {
            let said = String::from_utf8_lossy(&out.stderr);
            bail!("{program} makes no PDF of the figure: {}: {}", out.status, said.trim());
        }
        return Ok(out.stdout);
    }
    let names: Vec<&str> = converters.iter().map(|(program, _)| *program).collect();
    bail!(
        "a PDF needs a converter, and none of {} is installed\nhint: install one (Debian: librsvg2-bin), or name the file `.svg`",
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_converter_it_says_which_would_do() {
        let error = to_pdf("<svg/>", &[("no-such-converter", &[])]).unwrap_err().to_string();
        assert!(error.contains("none of no-such-converter is installed\nhint: "), "{error}");
    }

    #[test]
    fn what_a_converter_makes_is_looked_at() {
        let echo: (&str, &[&str]) = ("cat", &[]);
        assert!(to_pdf("%PDF-1.5", &[("no-such-converter", &[]), echo]).unwrap() == b"%PDF-1.5");
        let error = to_pdf("<svg/>", &[echo]).unwrap_err().to_string();
        assert!(error.starts_with("cat makes no PDF of the figure"), "{error}");
    }

    #[test]
    fn pictures_of_pixels_are_refused() {
        let error = write(Path::new("figure.png"), "<svg/>").unwrap_err().to_string();
        assert!(error.contains("name it `.svg` or `.pdf`"), "{error}");
    }
}
