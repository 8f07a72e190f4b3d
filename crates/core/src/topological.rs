//! Nodes in an order in which each comes after all that it waits for.

/// Sorts the nodes `0..n`. `waits_for(node, i)` is the `i`-th node that a node waits for, if there are so many; what it waits for
/// comes first, and else lower numbers do. `Err` is a cycle: each of its nodes waits for the next, the last for the first.
pub fn topological(n: usize, waits_for: impl Fn(u32, usize) -> Option<u32>) -> Result<Vec<u32>, Vec<u32>> {
    #[derive(Clone, Copy, PartialEq)]
    enum Mark {
        New,
        Open,
        Done,
    }
    let mut marks = vec![Mark::New; n];
    let mut order = Vec::with_capacity(n);
    let mut path: Vec<(u32, usize)> = Vec::new();
    for start in 0..n as u32 {
        if marks[start as usize] != Mark::New {
            continue;
        }
        path.push((start, 0));
        marks[start as usize] = Mark::Open;
        while let Some((node, i)) = path.last_mut() {
            let next = waits_for(*node, *i);
            *i += 1;
            match next.map(|next| (next, marks[next as usize])) {
                Some((next, Mark::New)) => {
                    marks[next as usize] = Mark::Open;
                    path.push((next, 0));
                }
                Some((next, Mark::Open)) => {
                    let first =
                        path.iter().position(|(n, _)| *n == next).expect("open nodes are on the path");
                    return Err(path[first..].iter().map(|(n, _)| *n).collect());
                }
                Some((_, Mark::Done)) => {}
                None => {
                    marks[*node as usize] = Mark::Done;
                    order.push(*node);
                    path.pop();
                }
            }
        }
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sort(waits: &[&[u32]]) -> Result<Vec<u32>, Vec<u32>> {
        topological(waits.len(), |node, i| waits[node as usize].get(i).copied())
    }

    #[test]
    fn what_is_waited_for_comes_first() {
        assert_eq!(sort(&[&[2], &[0], &[]]), Ok(vec![2, 0, 1]));
        assert_eq!(sort(&[&[], &[], &[]]), Ok(vec![0, 1, 2]));
    }

    #[test]
    fn a_cycle_is_returned_in_its_order() {
        assert_eq!(sort(&[&[1], &[2], &[3], &[1]]), Err(vec![1, 2, 3]));
        assert_eq!(sort(&[&[0]]), Err(vec![0]));
    }
}
