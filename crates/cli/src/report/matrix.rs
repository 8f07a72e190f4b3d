//! The traffic matrix: a row per sending host, a column per receiving host, heat for bytes.
//!
//! ```text
//!          h2       h3      sent
//! h0    | 512 MiB |       | 512 MiB
//! h1    |         | 1 GiB | 1 GiB
//! ```
//!
//! Large clusters are shown in blocks of neighbouring hosts, so that the picture stays one.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crossmesh_core::id::HostId;
use crossmesh_core::units::Bytes;

use crate::output::count;
use crate::summary::Traffic;

use super::escape;

/// More rows or columns than this become blocks.
const MAX_CELLS: usize = 40;
/// Where cells still have room for their bytes.
const MAX_LABELLED: usize = 9;

/// Hosts side by side, as many to a block as it takes.
struct Side {
    hosts: Vec<HostId>,
    block: usize,
}

impl Side {
    fn new(mut hosts: Vec<HostId>) -> Self {
        hosts.sort_unstable();
        hosts.dedup();
        let block = hosts.len().div_ceil(MAX_CELLS).max(1);
        Self { hosts, block }
    }

    fn len(&self) -> usize {
        self.hosts.len().div_ceil(self.block)
    }

    fn index(&self, host: HostId) -> usize {
        self.hosts.binary_search(&host).expect("every host of the traffic is on its side") / self.block
    }

    fn name(&self, index: usize) -> String {
        let block = &self.hosts[index * self.block..((index + 1) * self.block).min(self.hosts.len())];
        match block {
            [one] => one.to_string(),
            [first, .., last] => format!("{first}…{}", last.0),
            [] => String::new(),
        }
    }
}

/// The matrix as SVG.
pub fn render(traffic: &BTreeMap<(HostId, HostId), Traffic>) -> String {
    let rows = Side::new(traffic.keys().map(|k| k.0).collect());
    let columns = Side::new(traffic.keys().map(|k| k.1).collect());
    let mut cells: BTreeMap<(usize, usize), (Traffic, bool)> = BTreeMap::new();
    for ((from, to), t) in traffic {
        let (cell, local) =
            cells.entry((rows.index(*from), columns.index(*to))).or_insert((Traffic::default(), true));
        cell.bytes += t.bytes;
        cell.transfers += t.transfers;
        *local &= from == to;
    }
    // One scale for all cells, so that any two compare.
    let max = cells.values().map(|c| c.0.bytes).max().unwrap_or(1).max(1);
    let labelled = columns.len() <= MAX_LABELLED;
    let (w, h) = if labelled { (72.0, 34.0) } else { (17.0, 17.0) };
    let (left, top) = (72.0, 40.0);
    let (width, height) = (left + w * columns.len() as f64 + 104.0, top + h * rows.len() as f64 + 34.0);
    let mut svg = format!(
        "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         aria-label=\"bytes from host to host\">\n"
    );
    let _ = writeln!(svg, "<text class=\"soft\" x=\"0\" y=\"14\">from ↓ to →</text>");
    for c in 0..columns.len() {
        let x = left + w * (c as f64 + 0.5);
        if labelled || c % 4 == 0 {
            let _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                top - 8.0,
                columns.name(c)
            );
        }
    }
    for r in 0..rows.len() {
        let y = top + h * (r as f64 + 0.5) + 4.0;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{y}\" text-anchor=\"end\">{}</text>",
            left - 10.0,
            rows.name(r)
        );
        for c in 0..columns.len() {
            let (x, y) = (left + w * c as f64, top + h * r as f64);
            let _ = writeln!(
                svg,
                "<rect class=\"track\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"3\"/>",
                x + 1.0,
                y + 1.0,
                w - 2.0,
                h - 2.0
            );
        }
    }
    for ((r, c), (t, local)) in &cells {
        let (x, y) = (left + w * *c as f64, top + h * *r as f64);
        // What is written on the strongest can still be read, in light and dark.
        let heat = 0.1 + 0.5 * (t.bytes as f64 / max as f64);
        let class = if *local { "local" } else { "out" };
        let _ = writeln!(
            svg,
            "<g><title>{} to {}: {} in {}</title>\
             <rect class=\"{class}\" fill-opacity=\"{heat:.3}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"3\"/>",
            rows.name(*r),
            columns.name(*c),
            Bytes(t.bytes),
            count(t.transfers, "transfer"),
            x + 1.0,
            y + 1.0,
            w - 2.0,
            h - 2.0
        );
        if labelled {
            let label = escape(&Bytes(t.bytes).to_string());
            let (x, y) = (x + w / 2.0, y + h / 2.0 + 4.0);
            let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>");
        }
        svg += "</g>\n";
    }
    svg += &totals(&cells, &rows, &columns, (left, top), (w, h), labelled);
    svg + "</svg>\n"
}

/// What each row sends and each column receives over the network.
fn totals(
    cells: &BTreeMap<(usize, usize), (Traffic, bool)>,
    rows: &Side,
    columns: &Side,
    (left, top): (f64, f64),
    (w, h): (f64, f64),
    labelled: bool,
) -> String {
    let sum = |keep: &dyn Fn(usize, usize) -> bool| -> u64 {
        cells.iter().filter(|((r, c), (_, local))| !local && keep(*r, *c)).map(|(_, (t, _))| t.bytes).sum()
    };
    let right = left + w * columns.len() as f64 + 12.0;
    let below = top + h * rows.len() as f64 + 18.0;
    let mut svg = format!("<text class=\"soft\" x=\"{right}\" y=\"{}\">sent over NICs</text>\n", top - 8.0);
    for r in 0..rows.len() {
        let y = top + h * (r as f64 + 0.5) + 4.0;
        let _ = writeln!(
            svg,
            "<text class=\"soft\" x=\"{right}\" y=\"{y}\">{}</text>",
            Bytes(sum(&|row, _| row == r))
        );
    }
    if labelled {
        let _ = writeln!(
            svg,
            "<text class=\"soft\" x=\"{}\" y=\"{below}\" text-anchor=\"end\">received</text>",
            left - 10.0
        );
        for c in 0..columns.len() {
            let x = left + w * (c as f64 + 0.5);
            let bytes = Bytes(sum(&|_, column| column == c));
            let _ = writeln!(
                svg,
                "<text class=\"soft\" x=\"{x}\" y=\"{below}\" text-anchor=\"middle\">{bytes}</text>"
            );
        }
    }
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic(pairs: &[(u32, u32, u64)]) -> BTreeMap<(HostId, HostId), Traffic> {
        pairs.iter().map(|&(a, b, bytes)| ((HostId(a), HostId(b)), Traffic { bytes, transfers: 1 })).collect()
    }

    #[test]
    fn a_cell_a_pair_with_its_bytes() {
        let svg = render(&traffic(&[(0, 2, 1024), (1, 2, 2048), (2, 2, 10)]));
        assert!(svg.contains("<title>h0 to h2: 1.00 KiB in 1 transfer</title>"), "{svg}");
        let two = BTreeMap::from([((HostId(0), HostId(2)), Traffic { bytes: 1024, transfers: 2 })]);
        assert!(render(&two).contains("<title>h0 to h2: 1.00 KiB in 2 transfers</title>"));
        assert_eq!(svg.matches("class=\"out\"").count(), 2);
        assert_eq!(svg.matches("class=\"local\"").count(), 1);
    }

    #[test]
    fn many_hosts_become_blocks() {
        let pairs: Vec<(u32, u32, u64)> = (0..200).map(|h| (h, h + 200, 1)).collect();
        let svg = render(&traffic(&pairs));
        assert_eq!(svg.matches("class=\"out\"").count(), 40);
        assert!(svg.contains("h0…4"));
    }

    #[test]
    fn no_traffic_is_still_a_picture() {
        assert!(render(&traffic(&[])).ends_with("</svg>\n"));
    }
}
