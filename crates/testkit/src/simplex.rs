//! A little linear programming: dense, exact enough for a few dozen rows, and slow.
//!
//! `maximize c x  where  a x <= b, x >= 0` with `b >= 0`, so that `x = 0` is where it starts. Bland's rule picks the
//! pivots: the first column that gains, the first row that binds, and no cycle.

/// Columns of `a` with their gain `c`; all of the same height as `b`.
#[derive(Debug, Clone, Default)]
pub struct Program {
    pub limits: Vec<f64>,
    pub columns: Vec<Vec<f64>>,
    pub gains: Vec<f64>,
}

/// The best value, where, and what one more of each limit would gain.
#[derive(Debug, Clone)]
pub struct Solution {
    pub value: f64,
    pub prices: Vec<f64>,
}

const EPSILON: f64 = 1e-11;

/// Solves it; `None` if there is no end to the gain.
pub fn maximize(program: &Program) -> Option<Solution> {
    let (rows, columns) = (program.limits.len(), program.columns.len());
    let width = columns + rows + 1;
    // A row each: coefficients, those of the slack, the limit. The last row has what a column still gains, negated.
    let mut table = vec![vec![0.0; width]; rows + 1];
    for (c, column) in program.columns.iter().enumerate() {
        column.iter().enumerate().for_each(|(r, &a)| table[r][c] = a);
        table[rows][c] = -program.gains[c];
    }
    for (r, &limit) in program.limits.iter().enumerate() {
        assert!(limit >= 0.0, "nothing at all has to be allowed");
        table[r][columns + r] = 1.0;
        table[r][width - 1] = limit;
    }
    let mut basis: Vec<usize> = (columns..columns + rows).collect();
    while let Some(enters) = (0..width - 1).find(|&c| table[rows][c] < -EPSILON) {
        let leaves = binding_row(&table, &basis, enters)?;
        pivot(&mut table, leaves, enters);
        basis[leaves] = enters;
    }
    let prices = (0..rows).map(|r| table[rows][columns + r]).collect();
    Some(Solution { value: table[rows][width - 1], prices })
}

fn binding_row(table: &[Vec<f64>], basis: &[usize], enters: usize) -> Option<usize> {
    let last = table[0].len() - 1;
    let mut best: Option<(f64, usize)> = None;
    for row in (0..basis.len()).filter(|&r| table[r][enters] > EPSILON) {
        let ratio = table[row][last] / table[row][enters];
        let closer = |(least, at): (f64, usize)| {
            ratio < least - EPSILON || (ratio < least + EPSILON && basis[row] < basis[at])
        };
        if best.is_none_or(closer) {
            best = Some((ratio, row));
        }
    }
    best.map(|(_, row)| row)
}

fn pivot(table: &mut [Vec<f64>], row: usize, column: usize) {
    let by = table[row][column];
    table[row].iter_mut().for_each(|a| *a /= by);
    let pivot_row = table[row].clone();
    for (r, other) in table.iter_mut().enumerate() {
        let times = other[column];
        if r != row && times != 0.0 {
            other.iter_mut().zip(&pivot_row).for_each(|(a, p)| *a -= times * p);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_corner_and_its_prices() {
        // 3 x + 5 y with x <= 4, 2 y <= 12, 3 x + 2 y <= 18: at (2, 6), Dantzig's own example.
        let program = Program {
            limits: vec![4.0, 12.0, 18.0],
            columns: vec![vec![1.0, 0.0, 3.0], vec![0.0, 2.0, 2.0]],
            gains: vec![3.0, 5.0],
        };
        let solution = maximize(&program).unwrap();
        assert!((solution.value - 36.0).abs() < 1e-9);
        let expected = [0.0, 1.5, 1.0];
        assert!(solution.prices.iter().zip(expected).all(|(p, e)| (p - e).abs() < 1e-9), "{solution:?}");
    }

    #[test]
    fn says_when_there_is_no_end() {
        let program = Program { limits: vec![1.0], columns: vec![vec![-1.0]], gains: vec![1.0] };
        assert!(maximize(&program).is_none());
    }
}
