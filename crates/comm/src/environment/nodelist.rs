//! Slurm's short form of many node names: `n[1-3,07],login` is n1, n2, n3, n07 and login.

use super::{EnvironmentError, MAX_WORLD};

/// The nodes of a list, in its order.
pub fn expand_nodelist(list: &str) -> Result<Vec<String>, EnvironmentError> {
    let mut nodes = Vec::new();
    for entry in split_outside_brackets(list) {
        expand_entry(list, entry.trim(), &mut nodes)?;
    }
    Ok(nodes)
}

/// The parts between commas that no bracket holds.
fn split_outside_brackets(list: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0i32, 0);
    for (at, c) in list.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    parts
}

/// One entry: `prefix[ranges]rest`, where the rest may have brackets of its own.
fn expand_entry(list: &str, entry: &str, nodes: &mut Vec<String>) -> Result<(), EnvironmentError> {
    let wrong = |why| EnvironmentError::Nodelist { list: list.into(), why };
    if entry.is_empty() {
        return Err(wrong("a name is missing"));
    }
    let mut names = vec![String::new()];
    let mut rest = entry;
    while let Some(open) = rest.find('[') {
        let close = rest[open..].find(']').ok_or(wrong("a bracket is not closed"))? + open;
        let numbers = expand_ranges(&rest[open + 1..close]).map_err(wrong)?;
        if names.len() * numbers.len() + nodes.len() > MAX_WORLD as usize {
            return Err(wrong("it has too many nodes"));
        }
        let prefix = &rest[..open];
        let longer = |name: &String| numbers.iter().map(|n| format!("{name}{prefix}{n}")).collect::<Vec<_>>();
        names = names.iter().flat_map(longer).collect();
        rest = &rest[close + 1..];
    }
    if rest.contains(']') {
        return Err(wrong("a bracket is not opened"));
    }
    nodes.extend(names.into_iter().map(|name| name + rest));
    Ok(())
}

/// `1-3,07` as the texts 1, 2, 3, 07; a range keeps the width of its first number.
fn expand_ranges(ranges: &str) -> Result<Vec<String>, &'static str> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse::<u32>().map_err(|_| "a range is not made of numbers");
        let (from, to) = (number(first)?, number(last)?);
        if from > to {
            return Err("a range runs backwards");
        }
        if to - from >= MAX_WORLD || numbers.len() > MAX_WORLD as usize {
            return Err("it has too many nodes");
        }
        let width = first.len();
        numbers.extend((from..=to).map(|n| format!("{n:0width$}")));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn expanded(list: &str) -> String {
        expand_nodelist(list).unwrap().join(" ")
    }

    #[test]
    fn lists_are_expanded_as_slurm_does() {
        assert_eq!(expanded("n[1-3,7]"), "n1 n2 n3 n7");
        assert_eq!(expanded("gpu[098-101],login"), "gpu098 gpu099 gpu100 gpu101 login");
        assert_eq!(expanded("r[1-2]c[0,5].x"), "r1c0.x r1c5.x r2c0.x r2c5.x");
        assert_eq!(expanded("one"), "one");
    }

    #[test]
    fn wrong_lists_say_why() {
        let why = |list| expand_nodelist(list).unwrap_err().to_string();
        assert!(why("n[1-3").contains("n[1-3 is not a list of nodes: a bracket is not closed"));
        assert!(why("n1-3]").contains("not opened"));
        assert!(why("n[3-1]").contains("backwards"));
        assert!(why("n[a]").contains("numbers"));
        assert!(why("").contains("missing"));
        assert!(why("n[0-4294967295]").contains("too many"));
        assert!(why("n[0-99999][0-99999]").contains("too many"));
    }

    proptest! {
        #[test]
        fn any_text_is_expanded_or_refused(list in r"[\[\]a0-9,\-]{0,24}") {
            let _ = expand_nodelist(&list);
        }
    }
}
