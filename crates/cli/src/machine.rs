//! Whose numbers a measurement shows, and what they may be held against.
//!
//! Loopback is none of the NICs that somebody described or that are assumed: 0.030 × their bound says nothing of a plan. Times are
//! held against a prediction where the NICs it is for were there: emulated, or of a cluster whose costs were measured.

use crossmesh_comm::environment::now_ms;
use crossmesh_core::cluster::Cluster;

use crate::output::count;

/// Whether what a run takes here can be held against what is predicted of this cluster.
pub fn comparable(cluster: &Cluster, emulated: bool) -> bool {
    emulated || cluster.measured.is_some()
}

/// One line for people: which machine ran, and why nothing is compared where nothing is.
pub fn whose(machine: &str, cluster: Option<&str>, comparable: bool) -> String {
    match (cluster, comparable) {
        (Some(measured), _) => format!("measured on {machine}; predicted with the costs of {measured}"),
        (None, true) => format!("measured on {machine}"),
        (None, false) => format!(
            "measured on {machine}; the NICs of the prediction are others, so the two are not compared \
             (--emulate makes them, bench calibrate measures what is here)"
        ),
    }
}

/// The machine, as far as the system tells: its processor, what it runs at once, its kernel.
pub fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("unknown processor", |(_, name)| name.trim());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let release = read("/proc/sys/kernel/osrelease");
    format!("{model}, {}, Linux {}", count(threads, "thread"), release.trim())
}

/// Today, as in `2026-11-19`, where clocks show UTC.
pub fn today() -> String {
    date(now_ms() / 86_400_000)
}

/// The date so many days after the first of 1970. Years begin with March here, so that a leap day is the last of its year.
fn date(days: u64) -> String {
    let since_0 = days + 719_468;
    let (era, day_of_era) = (since_0 / 146_097, since_0 % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_of_the_calendar() {
        for (days, said) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (19_782, "2024-02-29"),
            (20_776, "2026-11-19"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!(date(days), said);
        }
    }

    #[test]
    fn only_nics_that_were_there_are_compared() {
        let mut cluster = Cluster::of_hosts(vec![]);
        assert!(!comparable(&cluster, false) && comparable(&cluster, true));
        assert!(whose("m", None, false).contains("not compared"));
        cluster.measured = Some("a rack".into());
        assert!(comparable(&cluster, false));
        assert_eq!(whose("m", Some("a rack"), true), "measured on m; predicted with the costs of a rack");
    }
}
