//! Pictures of pixels: read from PNG files, and compared.
//!
//! Two programs draw the same letter a little differently: another hinting, a third of a pixel to the side; and where one mixes the
//! colours on both sides of an edge, another decides for one of them. What is compared is therefore whether a pixel of one picture lies
//! between those at its place and beside it in the other. A bar that is missing, a label elsewhere or another colour does not.

use std::io::Read;
use std::path::Path;

/// Red, green and blue, row by row.
pub struct Pixels {
    pub width: usize,
    pub height: usize,
    rgb: Vec<u8>,
}

impl Pixels {
    /// Reads what browsers and converters write: 8 bits a channel, not interlaced.
    pub fn read(path: &Path) -> Self {
        let file = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert_eq!(&file[..8], b"\x89PNG\r\n\x1a\n", "{} is no PNG", path.display());
        let number = |at: usize| u32::from_be_bytes(file[at..at + 4].try_into().unwrap()) as usize;
        let (mut at, mut packed) = (8, vec![]);
        let (mut width, mut height, mut channels) = (0, 0, 0);
        while at < file.len() {
            let (long, kind, body) = (number(at), &file[at + 4..at + 8], at + 8);
            if kind == b"IHDR" {
                (width, height) = (number(body), number(body + 4));
                assert_eq!(
                    (file[body + 8], file[body + 12]),
                    (8, 0),
                    "{}: depth, interlacing",
                    path.display()
                );
                channels = match file[body + 9] {
                    2 => 3,
                    6 => 4,
                    kind => panic!("{}: colour type {kind}", path.display()),
                };
            } else if kind == b"IDAT" {
                packed.extend_from_slice(&file[body..body + long]);
            }
            at = body + long + 4;
        }
        let mut raw = Vec::new();
        flate2::read::ZlibDecoder::new(&packed[..]).read_to_end(&mut raw).unwrap();
        let rows = unfiltered(raw, width * channels, channels);
        let rgb = rows.chunks_exact(channels).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect();
        Self { width, height, rgb }
    }

    fn at(&self, x: usize, y: usize) -> &[u8] {
        let first = 3 * (y * self.width + x);
        &self.rgb[first..first + 3]
    }

    /// The share of pixels that the other has neither at their place nor beside it, one way and the other.
    pub fn missing_in(&self, other: &Self) -> f64 {
        let missing = |a: &Self, b: &Self| {
            let (width, height) = (a.width.min(b.width), a.height.min(b.height));
            let lost = |(x, y): (usize, usize)| {
                let (xs, ys) =
                    (x.saturating_sub(1)..width.min(x + 2), y.saturating_sub(1)..height.min(y + 2));
                let beside = || ys.clone().flat_map(|y| xs.clone().map(move |x| (x, y)));
                (0..3).any(|channel| {
                    let of = |(x, y): (usize, usize)| b.at(x, y)[channel];
                    let (least, most) = (beside().map(of).min(), beside().map(of).max());
                    let (least, most) = (least.unwrap_or(0), most.unwrap_or(255));
                    !(least.saturating_sub(NEAR)..=most.saturating_add(NEAR)).contains(&a.at(x, y)[channel])
                })
            };
            let all = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
            all.filter(|at| lost(*at)).count() as f64 / (width * height) as f64
        };
        missing(self, other).max(missing(other, self))
    }
}

/// Of 255: what is no other colour to an eye, and how far the ink of thin strokes differs.
const NEAR: u8 = 48;

/// Rows as they were before each was written as its difference to what is left of it and above.
fn unfiltered(raw: Vec<u8>, row: usize, channels: usize) -> Vec<u8> {
    let mut out: Vec<u8> = Vec::with_capacity(raw.len());
    for line in raw.chunks_exact(row + 1) {
        let start = out.len();
        for (i, byte) in line[1..].iter().enumerate() {
            let left = if i >= channels { out[start + i - channels] } else { 0 };
            let up = if start > 0 { out[start + i - row] } else { 0 };
            let corner = if start > 0 && i >= channels { out[start + i - row - channels] } else { 0 };
            let guess = match line[0] {
                0 => 0,
                1 => left,
                2 => up,
                3 => ((u16::from(left) + u16::from(up)) / 2) as u8,
                4 => nearest(left, up, corner),
                filter => panic!("there is no filter {filter}"),
            };
            out.push(byte.wrapping_add(guess));
        }
    }
    out
}

/// Of three neighbours the one nearest to left + up - corner (Paeth).
fn nearest(left: u8, up: u8, corner: u8) -> u8 {
    let guess = i16::from(left) + i16::from(up) - i16::from(corner);
    let far = |of: u8| (guess - i16::from(of)).abs();
    match (far(left), far(up), far(corner)) {
        (l, u, c) if l <= u && l <= c => left,
        (_, u, c) if u <= c => up,
        _ => corner,
    }
}

#[test]
fn a_shift_of_a_pixel_is_the_same_and_another_colour_is_not() {
    let picture = |from: usize, colour: u8| {
        let mut rgb = vec![255; 3 * 20 * 10];
        for (x, y) in (from..from + 5).flat_map(|x| (2..8).map(move |y| (x, y))) {
            rgb[3 * (y * 20 + x)..][..3].fill(colour);
        }
        Pixels { width: 20, height: 10, rgb }
    };
    assert_eq!(picture(4, 0).missing_in(&picture(5, 0)), 0.0);
    assert_eq!(picture(4, 0).missing_in(&picture(4, 40)), 0.0);
    assert!(picture(4, 0).missing_in(&picture(7, 0)) > 0.05);
    assert!(picture(4, 0).missing_in(&picture(4, 80)) > 0.1, "another colour");
    assert!(picture(4, 0).missing_in(&picture(4, 255)) > 0.1, "a bar that is not there");
}
