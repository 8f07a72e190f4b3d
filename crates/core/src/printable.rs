//! Words that come from elsewhere: a peer, a file of somebody else's.

/// Somebody else's words, fit for a terminal: what would move its cursor, colour it or turn its text around is spelt out.
pub fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | ' '..='~' => printable.push(c),
            // Marks that change the direction of what follows.
            '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                printable.extend(c.escape_unicode());
            }
            c if c.is_control() => printable.extend(c.escape_default()),
            c => printable.push(c),
        }
    }
    printable
}

/// The same in one line of bounded length: what a file says of itself, inside a sentence of ours.
pub fn one_line(text: &str) -> String {
    const MAX_CHARS: usize = 200;
    let line: String =
        text.chars().take(MAX_CHARS).map(|c| if c.is_whitespace() { ' ' } else { c }).collect();
    printable(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_others_do_not_reach_into_the_terminal() {
        let hostile = "r1 failed\x1b[2J\x1b]0;owned\x07\rok\u{9b}31m \u{202e}txt.exe";
        let said = printable(hostile);
        assert_eq!(said, r"r1 failed\u{1b}[2J\u{1b}]0;owned\u{7}\rok\u{9b}31m \u{202e}txt.exe");
        assert_eq!(printable("größe 3 → 4\nhint: ask"), "größe 3 → 4\nhint: ask");
        assert_eq!(one_line("a\nmachine\x1b"), r"a machine\u{1b}");
        assert_eq!(one_line(&"x".repeat(1000)).len(), 200);
    }
}
