//! How many random cases a test looks at.

/// `CROSSMESH_SWEEP`, where it is set; else `usual`, which takes a few seconds.
#[expect(clippy::disallowed_methods, reason = "how much a test looks at decides no plan")]
pub fn count(usual: usize) -> usize {
    match std::env::var("CROSSMESH_SWEEP") {
        Ok(text) => {
            text.parse().unwrap_or_else(|_| panic!("CROSSMESH_SWEEP is a number of cases, not `{text}`"))
        }
        Err(_) => usual,
    }
}
