//! Quantities as people write them, and as people like to read them.
//!
//! ```text
//! rates    10Gbit  10Gbit/s  400mbit  10 Gbps     bits, powers of 1000, any case
//!          450GB/s  1.5GiB/s                      bytes, with a capital B
//! bytes    1048576  512B  64KB                    KB MB GB TB PB are powers of 1000
//!          256M  64MiB  1.5Gi                     K M G T P, alone or with i or iB, are powers of 1024
//! seconds  10us  1.5ms  2s  100ns                 a unit is asked for, but of 0
//! ```
//!
//! A number is digits with at most one point; there are no exponents, signs or digit groups. `Gb/s` is refused, because
//! half of its writers mean bytes.
//!
//! ```
//! use crossmesh_core::units::{Bytes, Rate, Seconds, parse_bytes, parse_rate, parse_seconds};
//! assert_eq!(parse_rate("10Gbit"), Ok(1.25e9));
//! assert_eq!(parse_bytes("1.5 MiB").map(Bytes).unwrap().to_string(), "1.50 MiB");
//! assert_eq!(Rate(1.25e9).to_string(), "10 Gbit/s");
//! assert_eq!(parse_seconds("34ms").map(Seconds).unwrap().to_string(), "34.0 ms");
//! ```

use std::fmt;

/// What a text was read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantity {
    Rate,
    Bytes,
    Seconds,
}

impl Quantity {
    fn hint(self) -> &'static str {
        match self {
            Quantity::Rate => "write bits as 10Gbit or 10Gbps, bytes as 450GB/s or 1.5GiB/s",
            Quantity::Bytes => "write 1048576, 64MiB or 256M (powers of 1024), or 64MB (powers of 1000)",
            Quantity::Seconds => "write 10us, 1.5ms or 2s",
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Quantity::Rate => "a rate",
            Quantity::Bytes => "a number of bytes",
            Quantity::Seconds => "a time",
        })
    }
}

/// Why a text is no quantity. `text` is what was read, cut short where it is very long.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    #[error("`{text}` is not {quantity}: it does not start with a number\nhint: {}", quantity.hint())]
    NoNumber { quantity: Quantity, text: String },
    #[error("`{text}` is not {quantity}: it is negative\nhint: {}", quantity.hint())]
    Negative { quantity: Quantity, text: String },
    #[error("`{text}` is not {quantity}: it has no unit\nhint: {}", quantity.hint())]
    NoUnit { quantity: Quantity, text: String },
    #[error("`{text}` is not {quantity}: unknown unit `{unit}`\nhint: {}", quantity.hint())]
    UnknownUnit { quantity: Quantity, text: String, unit: String },
    #[error("`{text}` may mean bits or bytes\nhint: {}", quantity.hint())]
    BitsOrBytes { quantity: Quantity, text: String },
    #[error("`{text}` is no use as a rate: nothing would ever arrive\nhint: give at least 1bit")]
    ZeroRate { text: String },
    #[error("`{text}` is not a whole number of bytes\nhint: {}", Quantity::Bytes.hint())]
    BrokenByte { text: String },
    #[error("`{text}` is too large for {quantity}\nhint: {}", quantity.hint())]
    TooLarge { quantity: Quantity, text: String },
}

/// Rates outside of this are typing mistakes, and would overflow the times computed from them.
const RATES_BYTES_PER_S: std::ops::RangeInclusive<f64> = 0.125..=1e18;

/// Reads a rate, in bytes per second; at least one bit a second.
pub fn parse_rate(text: &str) -> Result<f64, UnitError> {
    let quantity = Quantity::Rate;
    let (number, unit) = split_unit(quantity, text)?;
    let value = float(quantity, text, number)?;
    let rate = value * rate_unit(text, unit)?;
    if rate > *RATES_BYTES_PER_S.end() {
        return Err(UnitError::TooLarge { quantity, text: shown(text) });
    }
    if rate < *RATES_BYTES_PER_S.start() {
        return Err(UnitError::ZeroRate { text: shown(text) });
    }
    Ok(rate)
}

/// Reads a number of bytes. A fraction of a unit is rounded down to whole bytes.
pub fn parse_bytes(text: &str) -> Result<u64, UnitError> {
    let quantity = Quantity::Bytes;
    let (number, unit) = split_unit(quantity, text)?;
    let factor = bytes_unit(unit).ok_or_else(|| unknown_unit(quantity, text, unit))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let too_large = || UnitError::TooLarge { quantity, text: shown(text) };
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_large())? };
    // Eighteen digits are more than any unit of ours can tell apart, and keep the product below inside u128.
    let fraction = fraction.trim_end_matches('0');
    let fraction = &fraction[..fraction.len().min(18)];
    if factor == 1 && !fraction.is_empty() {
        return Err(UnitError::BrokenByte { text: shown(text) });
    }
    let numerator: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| too_large())? };
    let part = numerator * u128::from(factor) / 10u128.pow(fraction.len() as u32);
    u64::try_from(u128::from(whole) * u128::from(factor) + part).map_err(|_| too_large())
}

/// Reads a time, in seconds; finite, and zero is welcome.
pub fn parse_seconds(text: &str) -> Result<f64, UnitError> {
    let quantity = Quantity::Seconds;
    let (number, unit) = split_unit(quantity, text)?;
    let value = float(quantity, text, number)?;
    // Dividing keeps `10us` the same number as the literal 10e-6; multiplying by 1e-6 would not.
    let units_per_s = match unit {
        "" if value == 0.0 => 1.0,
        "" => return Err(UnitError::NoUnit { quantity, text: shown(text) }),
        "s" => 1.0,
        "ms" => 1e3,
        "us" | "µs" | "μs" => 1e6,
        "ns" => 1e9,
        _ => return Err(unknown_unit(quantity, text, unit)),
    };
    Ok(value / units_per_s)
}

/// A number and what follows it.
fn split_unit(quantity: Quantity, text: &str) -> Result<(&str, &str), UnitError> {
    let trimmed = text.trim();
    if trimmed.starts_with('-') {
        return Err(UnitError::Negative { quantity, text: shown(text) });
    }
    let digits = |s: &str| s.find(|c: char| !c.is_ascii_digit()).unwrap_or(s.len());
    let whole = digits(trimmed);
    let len = match trimmed[whole..].strip_prefix('.') {
        Some(fraction) => whole + 1 + digits(fraction),
        None => whole,
    };
    if !trimmed[..len].contains(|c: char| c.is_ascii_digit()) {
        return Err(UnitError::NoNumber { quantity, text: shown(text) });
    }
    Ok((&trimmed[..len], trimmed[len..].trim_start()))
}

fn float(quantity: Quantity, text: &str, number: &str) -> Result<f64, UnitError> {
    let value = number.parse::<f64>().ok().filter(|v| v.is_finite());
    value.ok_or_else(|| UnitError::TooLarge { quantity, text: shown(text) })
}

/// Bytes per second in one of this unit.
fn rate_unit(text: &str, unit: &str) -> Result<f64, UnitError> {
    let quantity = Quantity::Rate;
    if unit.is_empty() {
        return Err(UnitError::NoUnit { quantity, text: shown(text) });
    }
    let lower = unit.to_ascii_lowercase();
    let bits = ["bit/s", "bps", "bit"].iter().find_map(|end| lower.strip_suffix(end));
    if let Some(factor) = bits.and_then(prefix) {
        return Ok(factor as f64 / 8.0);
    }
    if let Some(factor) = unit.strip_suffix("B/s").and_then(|p| prefix(&p.to_ascii_lowercase())) {
        return Ok(factor as f64);
    }
    match lower.strip_suffix("/s").unwrap_or(&lower).strip_suffix('b').and_then(prefix) {
        Some(_) => Err(UnitError::BitsOrBytes { quantity, text: shown(text) }),
        None => Err(unknown_unit(quantity, text, unit)),
    }
}

fn bytes_unit(unit: &str) -> Option<u64> {
    let lower = unit.to_ascii_lowercase();
    match lower.strip_suffix('b') {
        Some(p) => prefix(p),
        None if lower.is_empty() || lower.ends_with('i') => prefix(&lower),
        None => prefix(&format!("{lower}i")),
    }
}

/// What a lower-case prefix multiplies by: `k` is 1000, `ki` is 1024.
fn prefix(prefix: &str) -> Option<u64> {
    let (letter, base) = match prefix.strip_suffix('i') {
        Some(letter) => (letter, 1024u64),
        None => (prefix, 1000),
    };
    let power = match letter {
        "" if base == 1000 => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        "p" => 5,
        _ => return None,
    };
    Some(base.pow(power))
}

fn unknown_unit(quantity: Quantity, text: &str, unit: &str) -> UnitError {
    UnitError::UnknownUnit { quantity, text: shown(text), unit: shown(unit) }
}

/// A text fit for one line of an error.
pub(crate) fn shown(text: &str) -> String {
    const MAX_CHARS: usize = 60;
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut out: String = text.chars().take(MAX_CHARS).map(clean).collect();
    if text.chars().nth(MAX_CHARS).is_some() {
        out.push('…');
    }
    out
}

/// Prints bytes in powers of 1024, to three digits: `512 B`, `1.50 MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let units =
            [("KiB", 1u64 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40), ("PiB", 1 << 50)];
        // 1023.9 KiB prints as `1024`, which is a MiB.
        let fits = |unit: u64| (self.0 as f64 / unit as f64).round() < 1024.0;
        match units.into_iter().find(|u| fits(u.1)) {
            Some((name, unit)) => f.pad(&format!("{} {name}", three_digits(self.0 as f64 / unit as f64))),
            // Rounded down: 16384 PiB would be more than a u64 holds.
            None => f.pad(&format!("{} PiB", self.0 >> 50)),
        }
    }
}

/// Prints bytes per second as bits, to three digits at most: `10 Gbit/s`, `3.6 Tbit/s`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate(pub f64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.0 * 8.0;
        let units = [("bit/s", 1.0), ("kbit/s", 1e3), ("Mbit/s", 1e6), ("Gbit/s", 1e9), ("Tbit/s", 1e12)];
        let (name, unit) = pick(bits, &units);
        let number = three_digits(bits / unit);
        let number = match number.contains('.') {
            true => number.trim_end_matches('0').trim_end_matches('.'),
            false => &number,
        };
        f.pad(&format!("{number} {name}"))
    }
}

/// Prints seconds to three digits: `1.72 s`, `34.0 ms`, `12.0 us`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seconds(pub f64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0.0 {
            return f.pad("0 s");
        }
        let units = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
        let (name, unit) = pick(self.0, &units);
        f.pad(&format!("{} {name}", three_digits(self.0 / unit)))
    }
}

/// The unit that leaves one to three digits before the point, or the nearest there is.
fn pick<'a>(value: f64, units: &[(&'a str, f64)]) -> (&'a str, f64) {
    let fits = |unit: f64| (value.abs() / unit).round() < 1000.0;
    units.iter().copied().find(|u| fits(u.1)).unwrap_or(units[units.len() - 1])
}

/// `1.72`, `34.0`, `172`, and whole above that.
fn three_digits(value: f64) -> String {
    // What prints as `10.00` or `100.0` wants one digit less.
    let decimals = match value.abs() {
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_rates() {
        for text in
            ["10Gbit", "10gbit", "10Gbit/s", "10 Gbps", "10GBPS", "10000mbit", "1.25GB/s", " 10 gbit "]
        {
            assert_eq!(parse_rate(text), Ok(1.25e9), "{text}");
        }
        assert_eq!(parse_rate("400mbit"), Ok(50e6));
        assert_eq!(parse_rate("450GB/s"), Ok(450e9));
        assert_eq!(parse_rate("1.5GiB/s"), Ok(1.5 * 1073741824.0));
        assert_eq!(parse_rate("800bit"), Ok(100.0));
        assert_eq!(parse_rate("7B/s"), Ok(7.0));
    }

    #[test]
    fn reads_bytes() {
        assert_eq!(parse_bytes("1048576"), Ok(1 << 20));
        assert_eq!(parse_bytes("256M"), Ok(256 << 20));
        assert_eq!(parse_bytes("64MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("64Mi"), Ok(64 << 20));
        assert_eq!(parse_bytes("64mb"), Ok(64_000_000));
        assert_eq!(parse_bytes("1.5K"), Ok(1536));
        assert_eq!(parse_bytes("0.1KiB"), Ok(102));
        assert_eq!(parse_bytes("5.B"), Ok(5));
        assert_eq!(parse_bytes(".5k"), Ok(512));
        assert_eq!(parse_bytes("18446744073709551615"), Ok(u64::MAX));
    }

    #[test]
    fn reads_times() {
        assert_eq!(parse_seconds("10us"), Ok(10e-6));
        assert_eq!(parse_seconds("10 µs"), Ok(10e-6));
        assert_eq!(parse_seconds("1.5ms"), Ok(1.5e-3));
        assert_eq!(parse_seconds("0"), Ok(0.0));
    }

    #[test]
    fn errors_name_value_reason_and_hint() {
        let rate = |text: &str| parse_rate(text).unwrap_err().to_string();
        assert_eq!(
            rate("10Gbat"),
            "`10Gbat` is not a rate: unknown unit `Gbat`\nhint: write bits as 10Gbit or 10Gbps, bytes as 450GB/s or 1.5GiB/s"
        );
        assert!(rate("10").contains("has no unit"));
        assert!(rate("-1Gbit").contains("negative"));
        assert!(rate("0Gbit").contains("nothing would ever arrive"));
        assert!(rate("0.0000001bit").contains("nothing would ever arrive"));
        assert!(rate("9999PB/s").contains("too large"));
        assert!(rate("nan Gbit").contains("does not start with a number"));
        assert!(rate("inf").contains("does not start with a number"));
        assert!(rate(&format!("1{}Gbit", "0".repeat(310))).contains("too large"));
        assert!(rate("400Gb/s").starts_with("`400Gb/s` may mean bits or bytes"));
        assert!(rate("400gb/s").starts_with("`400gb/s` may mean bits or bytes"));
        let bytes = |text: &str| parse_bytes(text).unwrap_err().to_string();
        assert!(bytes("17E").contains("unknown unit `E`"));
        assert!(bytes("20000P").contains("too large"));
        assert!(bytes("18446744073709551616").contains("too large"));
        assert!(bytes("1.5").contains("not a whole number of bytes"));
        assert!(bytes("").contains("does not start with a number"));
        assert!(parse_seconds("10").unwrap_err().to_string().contains("has no unit"));
        assert!(
            parse_seconds("10 fortnights").unwrap_err().to_string().contains("unknown unit `fortnights`")
        );
    }

    #[test]
    fn prints_three_digits() {
        let bytes = |n| Bytes(n).to_string();
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes((1 << 20) - 1), "1.00 MiB");
        assert_eq!(bytes(150 << 20), "150 MiB");
        assert_eq!(bytes(1000 << 20), "1000 MiB");
        assert_eq!(bytes(u64::MAX), "16383 PiB");
        let rate = |r| Rate(r).to_string();
        assert_eq!(rate(1.25e9), "10 Gbit/s");
        assert_eq!(rate(450e9), "3.6 Tbit/s");
        assert_eq!(rate(0.5e9), "4 Gbit/s");
        assert_eq!(rate(12.5e9), "100 Gbit/s");
        assert_eq!(rate(1.0), "8 bit/s");
        let seconds = |s| Seconds(s).to_string();
        assert_eq!(seconds(1.72), "1.72 s");
        assert_eq!(seconds(34e-3), "34.0 ms");
        assert_eq!(seconds(12e-6), "12.0 us");
        assert_eq!(seconds(0.9999), "1.00 s");
        assert_eq!(seconds(9.996), "10.0 s");
        assert_eq!(seconds(0.0), "0 s");
        assert_eq!(format!("{:>10}|", Seconds(1.0)), "    1.00 s|");
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back_to_three_digits(bytes: u64, shift in 0u32..64, x in 1e-7f64..1e15) {
            let near = |a: f64, b: f64| (a - b).abs() <= 0.0056 * b;
            let bytes = bytes >> shift;
            // A fraction of a unit rounds down to whole bytes.
            let again = parse_bytes(&Bytes(bytes).to_string()).unwrap() as f64 + if bytes < 1024 { 0.0 } else { 0.5 };
            prop_assert!(near(again, bytes as f64), "{} as {}", bytes, again);
            if x > 1.0 {
                prop_assert!(near(parse_rate(&Rate(x).to_string()).unwrap(), x));
            }
            prop_assert!(near(parse_seconds(&Seconds(x).to_string()).unwrap(), x));
        }

        #[test]
        fn no_text_panics(text in "\\PC*", number in "[0-9.]{0,40}", unit in "[kKmMgGiIbBtTps/]{0,6}") {
            for text in [text, format!("{number}{unit}")] {
                let _ = (parse_rate(&text), parse_bytes(&text), parse_seconds(&text));
            }
        }
    }
}
