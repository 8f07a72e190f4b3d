//! Several lists that need nothing of each other, as one.
//!
//! Which goes on where another waits is decided beforehand, by a walk through the lists with the times that their ranks are thought to take: a list goes on until it
//! has to stand still. Then goes on, of those that need not, the one with the most before it, calls included, for that is the one that would be late in the end; lists that
//! start nothing any more fill what is left, item by item. Some other ways to choose are walked through as well, and the shortest is taken.

use super::{Item, List};

/// Of which list the next item is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    picks: Vec<usize>,
}

/// How it is chosen who goes on.
#[derive(Debug, Clone, Copy)]
struct Rule {
    by: By,
    /// Whether a call that a list has come to is started at once, and not when the one that computes has to wait.
    starts_at_once: bool,
    /// Whether another may go on behind every item.
    yields: bool,
}

/// Who goes on, of those that can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// Who has the most before it.
    Longest,
    /// The one whose next call keeps links busy the longest.
    NextCall,
    /// The one that is the nearest to its next call.
    Soonest,
    /// They take turns, as two strands with a baton do.
    Turns,
    /// The first that is not done, even if it waits: for lists that have nothing to hide.
    First,
}

impl Rule {
    /// Who computes goes on until it waits.
    const fn until_it_waits(by: By) -> Self {
        Self { by, starts_at_once: false, yields: false }
    }

    const fn starting_at_once(by: By, yields: bool) -> Self {
        Self { by, starts_at_once: true, yields }
    }
}

const RULES: [Rule; 7] = [
    Rule::until_it_waits(By::Longest),
    Rule::until_it_waits(By::NextCall),
    Rule::until_it_waits(By::Turns),
    Rule::until_it_waits(By::First),
    Rule::starting_at_once(By::Soonest, false),
    Rule::starting_at_once(By::Soonest, true),
    Rule::starting_at_once(By::Longest, true),
];

impl Order {
    /// All of one list, then all of the next.
    pub fn one_by_one(lists: &[&List]) -> Self {
        let picks = lists.iter().enumerate().flat_map(|(i, list)| vec![i; list.items().len()]);
        Self { picks: picks.collect() }
    }

    /// Each goes on until it waits, then the other does, as two strands with a baton do.
    pub fn by_turns(lists: &[&List]) -> Self {
        let (_, picks) = Walk::new(lists, Rule::until_it_waits(By::Turns)).walk();
        Self { picks }
    }

    /// The shortest that was found.
    pub fn of(lists: &[&List]) -> Self {
        let walks = RULES.iter().map(|&rule| Walk::new(lists, rule).walk());
        let (_, picks) = walks.min_by_key(|(end, _)| *end).expect("there are rules");
        Self { picks }
    }

    /// A rank's lists in this order. All ranks' have the same items but for their times.
    pub fn applied_to(&self, lists: &[&List]) -> List {
        let mut merged = List::default();
        let mut at = vec![0; lists.len()];
        let mut numbers: Vec<Vec<usize>> = lists.iter().map(|list| vec![0; list.calls().len()]).collect();
        for &pick in &self.picks {
            let item = lists[pick].items().get(at[pick]).expect("the order is one of such lists");
            at[pick] += 1;
            match *item {
                Item::Compute { ns } => merged.compute(ns),
                Item::Start(call) => numbers[pick][call] = merged.start(lists[pick].calls()[call]),
                Item::Wait(call) => merged.wait(numbers[pick][call]),
            }
        }
        let all = at.iter().zip(lists).all(|(at, list)| *at == list.items().len());
        assert!(all, "the order is one of such lists");
        merged
    }
}

/// A walk through lists that share a rank and its link.
struct Walk<'a> {
    lists: &'a [&'a List],
    rule: Rule,
    at: Vec<usize>,
    /// Before each list from its place on: computing and calls, one behind the other.
    rest: Vec<Vec<u64>>,
    /// Its starts from there on.
    starts: Vec<Vec<usize>>,
    ends: Vec<Vec<u64>>,
    now: u64,
    link_free: u64,
    picks: Vec<usize>,
}

impl<'a> Walk<'a> {
    fn new(lists: &'a [&'a List], rule: Rule) -> Self {
        let behind = |list: &List, of: &dyn Fn(&Item) -> u64| {
            let mut sums = vec![0; list.items().len() + 1];
            for (i, item) in list.items().iter().enumerate().rev() {
                sums[i] = sums[i + 1] + of(item);
            }
            sums
        };
        let time = |list: &List| {
            behind(list, &|item| match item {
                Item::Compute { ns } => *ns,
                Item::Start(call) => list.calls()[*call].ns,
                Item::Wait(_) => 0,
            })
        };
        let starts = |list: &List| {
            let counts = behind(list, &|item| u64::from(matches!(item, Item::Start(_))));
            counts.into_iter().map(|n| n as usize).collect()
        };
        Self {
            lists,
            rule,
            at: vec![0; lists.len()],
            rest: lists.iter().map(|list| time(list)).collect(),
            starts: lists.iter().map(|list| starts(list)).collect(),
            ends: lists.iter().map(|list| vec![0; list.calls().len()]).collect(),
            now: 0,
            link_free: 0,
            picks: vec![],
        }
    }

    /// When it ends, and the order.
    fn walk(mut self) -> (u64, Vec<usize>) {
        let mut last = None;
        while let Some(list) = self.next(last) {
            self.step(list);
            last = Some(list);
        }
        (self.now, self.picks)
    }

    fn item(&self, list: usize) -> Option<Item> {
        self.lists[list].items().get(self.at[list]).copied()
    }

    /// From when on a list can go on.
    fn ready(&self, list: usize) -> Option<u64> {
        Some(match self.item(list)? {
            Item::Wait(call) => self.ends[list][call],
            _ => self.now,
        })
    }

    fn is_filler(&self, list: usize) -> bool {
        self.starts[list][self.at[list]] == 0
    }

    fn next(&self, last: Option<usize>) -> Option<usize> {
        if self.rule.by == By::First {
            return (0..self.lists.len()).find(|&list| self.item(list).is_some());
        }
        let can: Vec<usize> = (0..self.lists.len())
            .filter(|&list| self.ready(list).is_some_and(|ready| ready <= self.now))
            .collect();
        let takes_no_time = |list: &usize| match self.item(*list) {
            Some(Item::Compute { ns }) => ns == 0,
            _ => true,
        };
        if let Some(list) = can.iter().copied().find(takes_no_time).filter(|_| self.rule.starts_at_once) {
            return Some(list);
        }
        let goes_on = |last: &usize| can.contains(last) && !self.is_filler(*last) && !self.rule.yields;
        if let Some(last) = last.filter(goes_on) {
            return Some(last);
        }
        let busy = can.iter().copied().filter(|&list| !self.is_filler(list));
        let first = std::cmp::Reverse::<usize>;
        busy.max_by_key(|&list| (self.weight(list, last), first(list)))
            .or_else(|| can.into_iter().max_by_key(|&list| (self.before(list), first(list))))
            .or_else(|| {
                let waiting = (0..self.lists.len()).filter_map(|list| Some((self.ready(list)?, list)));
                waiting.min().map(|(_, list)| list)
            })
    }

    /// All that a list has before it.
    fn before(&self, list: usize) -> u64 {
        self.rest[list][self.at[list]]
    }

    fn weight(&self, list: usize, last: Option<usize>) -> u64 {
        let (items, calls) = (&self.lists[list].items()[self.at[list]..], self.lists[list].calls());
        let next = items.iter().position(|item| matches!(item, Item::Start(_)));
        match self.rule.by {
            By::Longest => self.before(list),
            By::NextCall => match next.map(|at| items[at]) {
                Some(Item::Start(call)) => calls[call].ns,
                _ => 0,
            },
            By::Soonest => {
                let until = next.map_or(self.at[list], |next| self.at[list] + next);
                u64::MAX - (self.before(list) - self.rest[list][until])
            }
            By::Turns | By::First => u64::from(last != Some(list)),
        }
    }

    fn step(&mut self, list: usize) {
        match self.item(list).expect("it goes on") {
            Item::Compute { ns } => self.now += ns,
            Item::Start(call) => {
                self.link_free = self.link_free.max(self.now) + self.lists[list].calls()[call].ns;
                self.ends[list][call] = self.link_free;
            }
            Item::Wait(call) => self.now = self.now.max(self.ends[list][call]),
        }
        self.at[list] += 1;
        self.picks.push(list);
    }
}
