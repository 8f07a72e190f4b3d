//! How many random cases a test looks at.

/// `CROSSMESH_SWEEP`, where it is set; else `usual`, which takes a few seconds.
pub fn count(usual: usize) -> usize {
    number("CROSSMESH_SWEEP").map_or(usual, |n| n as usize)
}

/// `CROSSMESH_FIRST`: which case to begin with, to look at one of them alone; else 0.
pub fn first() -> u64 {
    number("CROSSMESH_FIRST").unwrap_or(0)
}

#[expect(clippy::disallowed_methods, reason = "how long a test looks, not what it decides")]
fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is a number of cases, not `{text}`")))
}
