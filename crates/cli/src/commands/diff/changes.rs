//! A property with two values, and how far they are apart.

use serde::Serialize;

/// How a number is shown.
pub type Number<'a> = &'a dyn Fn(f64) -> String;

/// Numbers nearer than this, as a share, are one number that was computed twice.
const SAME: f64 = 1e-9;

/// A property with different values.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    pub what: String,
    pub a: String,
    pub b: String,
    /// `b` over `a`, less 1; missing of words, and where there was nothing before.
    pub change: Option<f64>,
}

impl Change {
    /// Of words; none where they are the same.
    pub fn words(what: &str, a: String, b: String) -> Option<Self> {
        (a != b).then(|| Self { what: what.into(), a, b, change: None })
    }

    /// Of numbers; none where they are the same.
    pub fn number(what: &str, [a, b]: [f64; 2], show: Number<'_>) -> Option<Self> {
        if (a - b).abs() <= SAME * a.abs().max(b.abs()) {
            return None;
        }
        let change = Some(b / a - 1.0).filter(|change| change.is_finite());
        Some(Self { what: what.into(), a: show(a), b: show(b), change })
    }

    /// `+25.0 %`, or nothing of words. What grew many times says how many.
    pub fn percent(&self) -> String {
        match self.change {
            None => String::new(),
            Some(change) if change >= 9.995 => format!("{:.1} times", 1.0 + change),
            Some(change) if change.abs() < 0.0005 => format!("{:+.1e} %", 100.0 * change),
            Some(change) => format!("{:+.1} %", 100.0 * change),
        }
    }

    /// By how many times, up or down: of words, and of what came from nothing, more than any.
    fn size(&self) -> f64 {
        self.change.map_or(f64::INFINITY, |change| change.ln_1p().abs())
    }
}

/// The largest first; what is alike, and words among themselves, stay in the order they are in.
pub fn by_size(changes: &mut [Change]) {
    changes.sort_by(|a, b| b.size().total_cmp(&a.size()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_first_and_what_is_the_same_is_not_there() {
        let show = |n: f64| n.to_string();
        let number = |what: &str, a: f64, b: f64| Change::number(what, [a, b], &show);
        assert_eq!(number("same", 3.0, 3.0 + 1e-12), None);
        assert_eq!(number("nothing", 0.0, 0.0), None);
        assert_eq!(Change::words("strategy", "flow".into(), "flow".into()), None);
        let changes = [
            number("a tenth more", 10.0, 11.0),
            number("half", 8.0, 4.0),
            number("from nothing", 0.0, 1.0),
            number("three times", 1.0, 3.0),
            Change::words("strategy", "flow".into(), "auto".into()),
            number("gone", 7.0, 0.0),
        ];
        let mut changes: Vec<Change> = changes.into_iter().flatten().collect();
        by_size(&mut changes);
        let said: Vec<(&str, String)> = changes.iter().map(|c| (c.what.as_str(), c.percent())).collect();
        let expected = [
            ("from nothing", ""),
            ("strategy", ""),
            ("gone", "-100.0 %"),
            ("three times", "+200.0 %"),
            ("half", "-50.0 %"),
            ("a tenth more", "+10.0 %"),
        ];
        assert_eq!(said, expected.map(|(what, percent)| (what, percent.to_string())));
        assert_eq!(number("", 1.0, 64.0).unwrap().percent(), "64.0 times");
        assert_eq!(number("", 1.0, 1.00001).unwrap().percent(), "+1.0e-3 %");
    }
}
