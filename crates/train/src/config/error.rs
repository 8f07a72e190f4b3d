//! What can be wrong with a config: where, which key, why, and what to write instead.

use std::fmt;

/// Where a value was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A line of a file, from 1.
    Line { file: String, line: usize },
    /// `--set key=value`, as it was typed.
    Set(String),
    /// Nowhere: it is what the key is without.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Line { file, line } => write!(f, "{file}:{line}"),
            Origin::Set(text) => write!(f, "--set {text}"),
            Origin::Default => f.write_str("by default"),
        }
    }
}

/// A config that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    pub origin: Origin,
    /// `train.steps`; empty where the text is no TOML at all.
    pub key: String,
    pub reason: String,
    pub hint: String,
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.reason)?;
        match self.hint.is_empty() {
            true => Ok(()),
            false => write!(f, "\nhint: {}", self.hint),
        }
    }
}

/// The word that is nearest to a mistyped one, if it is near enough to have been meant.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = |(candidate, distance): &(&str, usize)| {
        *distance <= 1 + word.chars().count().min(candidate.chars().count()) / 3
    };
    let measured = known.into_iter().map(|candidate| (candidate, distance(word, candidate)));
    measured.filter(near).min_by_key(|(_, distance)| *distance).map(|(candidate, _)| candidate)
}

/// Letters to add, drop, change or swap with the next one, to make one word of the other.
fn distance(a: &str, b: &str) -> usize {
    let plain = |text: &str| text.to_lowercase().replace('-', "_").chars().collect::<Vec<char>>();
    let (a, b) = (plain(a), plain(b));
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            let swap = if swapped { rows[i - 2][j - 2] + 1 } else { usize::MAX };
            row.push(change.min(swap).min(rows[i - 1][j] + 1).min(row[j - 1] + 1));
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_found_and_a_far_one_is_not() {
        let keys = ["steps", "seed", "threads", "learning_rate", "sequence_parallel"];
        let near = |word| nearest(word, keys);
        assert_eq!(near("stpes"), Some("steps"));
        assert_eq!(near("step"), Some("steps"));
        assert_eq!(near("learningrate"), Some("learning_rate"));
        assert_eq!(near("learning-rate"), Some("learning_rate"));
        assert_eq!(near("sequence_paralel"), Some("sequence_parallel"));
        assert_eq!(near("lr"), None);
        assert_eq!(near("banana"), None);
    }

    #[test]
    fn distances() {
        for (a, b, wanted) in [("", "abc", 3), ("abc", "abc", 0), ("abc", "acb", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!((distance(a, b), distance(b, a)), (wanted, wanted), "{a} {b}");
        }
    }
}
