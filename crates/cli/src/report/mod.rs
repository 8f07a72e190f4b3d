//! Reports to look at: one HTML file each, inline SVG and CSS, the data embedded as JSON, no script needed.
//!
//! A report is a function from data to a `String`; writing the file is the command's business.

use std::fmt::Write as _;

pub mod bench;
pub mod figure;
pub mod gantt;
pub mod matrix;
pub mod pipeline;
pub mod plan;
pub mod schedule;
pub mod timeline;
pub mod train;

/// No picture is wider: in a window of 700 pixels its text of 12 units is then one of 9 pixels, and nothing scrolls sideways.
const MOST_WIDTH: f64 = 860.0;

const STYLE: &str = include_str!("style.css");

/// A page: what it is called, what it shows, the data behind it, and where it came from.
pub struct Page {
    pub title: String,
    /// HTML, shown under the title.
    pub subtitle: String,
    /// HTML.
    pub body: String,
    pub data: serde_json::Value,
    /// Lines of the footer, as plain text.
    pub footer: Vec<String>,
}

impl Page {
    pub fn render(&self) -> String {
        // A `<` stands only in strings of the JSON; escaped, it can neither end the script element nor open a comment.
        let data = self.data.to_string().replace('<', "\\u003c");
        let mut footer = String::new();
        for line in &self.footer {
            let _ = writeln!(footer, "<div>{}</div>", escape(line));
        }
        let title = escape(&self.title);
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
             <h1>{title}</h1>\n<p class=\"subtitle\">{}</p>\n{}\n</main>\n<footer>\n{footer}</footer>\n\
             <script type=\"application/json\" id=\"data\">{data}</script>\n</body>\n</html>\n",
            self.subtitle, self.body,
        )
    }
}

/// Text as HTML.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            _ => out.push(c),
        }
    }
    out
}

/// The command that was typed, quoted for a shell, and the version that ran.
pub fn provenance() -> Vec<String> {
    let words: Vec<String> = std::env::args_os().skip(1).map(|w| shell_quote(&w.to_string_lossy())).collect();
    vec![format!("crossmesh {}", words.join(" ")), format!("crossmesh {}", env!("CARGO_PKG_VERSION"))]
}

fn shell_quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// A figure on a card: the number large, what it is below.
pub fn card(value: &str, label: &str, class: &str) -> String {
    format!(
        "<div class=\"card {class}\"><div class=\"value\">{}</div><div class=\"label\">{}</div></div>\n",
        escape(value),
        escape(label)
    )
}

/// Round steps for an axis from 0 to `end`: about `count` of them, 1, 2 or 5 times a power of ten.
pub fn ticks(end: f64, count: usize) -> Vec<f64> {
    if !(end > 0.0 && end.is_finite()) {
        return vec![0.0];
    }
    let rough = end / count.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough).unwrap_or(end);
    (0..).map(|i| f64::from(i) * step).take_while(|t| *t <= end * (1.0 + 1e-9)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The colours of a style sheet's variables, in light (the first of each) and in dark (the second).
    fn colours(name: &str) -> [&'static str; 2] {
        let said = format!("--{name}: #");
        let mut found = STYLE.split(&*said).skip(1).map(|rest| &rest[..6]);
        let both = [found.next(), found.next()].map(|colour| colour.unwrap_or_else(|| panic!("--{name}")));
        assert_eq!(found.next(), None, "--{name} is said more than twice");
        both
    }

    /// How far apart two colours are, from 0 to 441.
    fn distance(a: &str, b: &str) -> f64 {
        let channel =
            |colour: &str, at: usize| f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap());
        [0, 2, 4].map(|at| (channel(a, at) - channel(b, at)).powi(2)).iter().sum::<f64>().sqrt()
    }

    /// The colour as somebody without cones for green sees it (Machado, Oliveira and Fernandes, 2009).
    fn without_green(colour: &str) -> String {
        const SEEN: [[f64; 3]; 3] = [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ];
        let light = |at: usize| {
            let value = f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap()) / 255.0;
            if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        let rgb = [0, 2, 4].map(light);
        let shown = |row: [f64; 3]| {
            let value = std::iter::zip(row, rgb).map(|(a, b)| a * b).sum::<f64>().clamp(0.0, 1.0);
            let value =
                if value <= 0.0031308 { 12.92 * value } else { 1.055 * value.powf(1.0 / 2.4) - 0.055 };
            format!("{:02x}", (value * 255.0).round() as u8)
        };
        SEEN.map(shown).concat()
    }

    /// What a page of a plan shows; of schedules, pipelines and training; and of a benchmark.
    const PAGES: [&[&str]; 3] = [
        &["out", "in", "local", "tier", "bound"],
        &["pf", "pb", "pw", "pbw", "po", "act", "grad", "compute", "exposed", "bubble", "bar"],
        &["ours", "bar", "bound"],
    ];

    #[test]
    fn one_colour_has_one_meaning_on_a_page() {
        for page in PAGES {
            for (i, a) in page.iter().enumerate() {
                for b in &page[i + 1..] {
                    for (a_colour, b_colour) in std::iter::zip(colours(a), colours(b)) {
                        let alike = format!("{a} #{a_colour} and {b} #{b_colour} look alike");
                        let apart = distance(a_colour, b_colour);
                        assert!(apart > 38.0, "{alike}: {apart:.0}");
                        let apart = distance(&without_green(a_colour), &without_green(b_colour));
                        assert!(apart > 28.0, "{alike} to one in twenty men: {apart:.0}");
                    }
                }
            }
        }
    }

    #[test]
    fn colours_are_seen_as_published() {
        assert_eq!(without_green("ffffff"), "ffffff");
        assert_eq!(without_green("000000"), "000000");
        // Red and green become shades of one yellow.
        let (red, green) = (without_green("d03020"), without_green("309020"));
        assert!(distance("d03020", "309020") > 180.0 && distance(&red, &green) < 80.0, "{red} {green}");
    }

    #[test]
    fn data_cannot_end_its_script() {
        let page = Page {
            title: "a < b".into(),
            subtitle: String::new(),
            body: String::new(),
            data: serde_json::json!({ "x": "</script><b>" }),
            footer: vec!["<i>".into()],
        };
        let html = page.render();
        assert!(html.contains("<title>a &lt; b</title>"));
        assert!(html.contains("\\u003c/script>"));
        assert_eq!(html.matches("</script>").count(), 1);
        assert!(html.contains("&lt;i&gt;"));
    }

    #[test]
    fn ticks_are_round_and_reach_the_end() {
        assert_eq!(ticks(1.0, 5), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(ticks(0.0, 5), [0.0]);
        assert_eq!(ticks(f64::NAN, 5), [0.0]);
        assert!(ticks(3.3e-8, 6).len() <= 8);
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(shell_quote("--nic"), "--nic");
        assert_eq!(shell_quote("f32[8]@A{tp:2}(tp)"), "'f32[8]@A{tp:2}(tp)'");
        assert_eq!(shell_quote("it's"), "'it'\\''s'");
    }
}
