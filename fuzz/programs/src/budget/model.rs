//! A model of a tree of budgets, which derives everything from the direct charges of each node.

use std::cmp::Reverse;

/// Names that identify nodes in errors.
pub(super) const NAMES: [&str; 24] = [
    "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16",
    "17", "18", "19", "20", "21", "22", "23",
];

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) name: &'static str,
    pub(super) parent: Option<usize>,
    pub(super) limit: u64,
    pub(super) guarantee: u64,
    pub(super) priority: i32,
    /// Charged here directly, without its children.
    direct: u64,
    pub(super) peak: u64,
    /// The priority of the first waiter for room in this node.
    line: Option<i32>,
    pub(super) live: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Wait {
    pub(super) node: usize,
    pub(super) bytes: u64,
    deadline: Option<u32>,
    priority: i32,
    pub(super) answer: Option<bool>,
}

impl Wait {
    pub(super) fn new(node: usize, bytes: u64, deadline: Option<u32>) -> Self {
        Self { node, bytes, deadline, priority: 0, answer: None }
    }
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) nodes: Vec<Node>,
    /// By number. `None` once its result has been taken.
    waits: Vec<Option<Wait>>,
}

impl Model {
    pub(super) fn new(limit: u64) -> Self {
        let mut model = Self { nodes: Vec::new(), waits: Vec::new() };
        model.push(None, limit, 0);
        model
    }

    fn push(&mut self, parent: Option<usize>, limit: u64, priority: i32) {
        self.nodes.push(Node {
            name: NAMES[self.nodes.len()],
            parent,
            limit,
            guarantee: 0,
            priority,
            direct: 0,
            peak: 0,
            line: None,
            live: true,
        });
    }

    pub(super) fn child(&mut self, parent: usize, limit: u64) {
        self.push(Some(parent), limit, self.nodes[parent].priority);
    }

    fn path(&self, at: usize) -> Vec<usize> {
        std::iter::successors(Some(at), |&at| self.nodes[at].parent).collect()
    }

    pub(super) fn is_below(&self, at: usize, above: usize) -> bool {
        self.path(at).contains(&above)
    }

    pub(super) fn used(&self, at: usize) -> u64 {
        self.totals()[at].0
    }

    pub(super) fn held(&self, at: usize) -> u64 {
        self.totals()[at].1
    }

    /// Returns the used and held bytes of each node. A child has a larger index than its parent.
    fn totals(&self) -> [(u64, u64); NAMES.len()] {
        let mut totals = [(0, 0); NAMES.len()];
        for (at, node) in self.nodes.iter().enumerate().rev() {
            let (used, held) = &mut totals[at];
            (*used, *held) = (*used + node.direct, *held + node.direct);
            let (used, share) = (*used, (*held).max(node.guarantee));
            if let Some(parent) = node.parent {
                totals[parent].0 += used;
                totals[parent].1 += share;
            }
        }
        totals
    }

    /// Returns the used and held bytes of each node of `path`, with `bytes` more charged to its
    /// first node.
    fn with(&mut self, path: &[usize], bytes: u64) -> Vec<(u64, u64)> {
        self.nodes[path[0]].direct += bytes;
        let totals = self.totals();
        self.nodes[path[0]].direct -= bytes;
        path.iter().map(|&at| totals[at]).collect()
    }

    /// Returns whether a `try` charge would be granted, or the node that refuses it.
    pub(super) fn fits(&self, at: usize, bytes: u64) -> Result<(), usize> {
        let mut scratch = Self { nodes: self.nodes.clone(), waits: Vec::new() };
        scratch.admit(at, bytes, self.nodes[at].priority)
    }

    fn admit(&mut self, at: usize, bytes: u64, priority: i32) -> Result<(), usize> {
        let path = self.path(at);
        let (before, after) = (self.with(&path, 0), self.with(&path, bytes));
        for ((&at, before), after) in path.iter().zip(before).zip(after) {
            let node = &self.nodes[at];
            let grows = after.1 > before.1;
            if after.0 > node.limit
                || grows && (after.1 > node.limit || node.line.is_some_and(|line| line >= priority))
            {
                return Err(at);
            }
        }
        Ok(())
    }

    /// Returns whether it would not fit even if everything else were released.
    fn never(&mut self, at: usize, bytes: u64) -> bool {
        let mut scratch = Self { nodes: self.nodes.clone(), waits: Vec::new() };
        for node in &mut scratch.nodes {
            node.direct = 0;
        }
        scratch.nodes[at].direct = bytes;
        self.path(at).into_iter().any(|at| scratch.held(at) > self.nodes[at].limit)
    }

    fn change(&mut self, at: usize, change: impl FnOnce(&mut u64)) {
        change(&mut self.nodes[at].direct);
        for at in self.path(at) {
            let used = self.used(at);
            self.nodes[at].peak = self.nodes[at].peak.max(used);
        }
    }

    /// Performs a `try` charge.
    pub(super) fn charge(&mut self, at: usize, bytes: u64) -> Result<(), usize> {
        let priority = self.nodes[at].priority;
        let mut answer = self.admit(at, bytes, priority);
        if answer.is_err() && self.waiting(0) > 0 {
            // Before a refusal because of a waiter, the queue is served.
            self.look(0);
            answer = self.admit(at, bytes, priority);
        }
        if answer.is_ok() {
            self.change(at, |direct| *direct += bytes);
        }
        answer
    }

    pub(super) fn release(&mut self, at: usize, bytes: u64) {
        // Releasing zero bytes does not serve the queue.
        if bytes > 0 {
            self.change(at, |direct| *direct -= bytes);
            self.look(0);
        }
    }

    pub(super) fn set_limit(&mut self, at: usize, limit: u64) {
        self.nodes[at].limit = limit;
        self.nodes[at].guarantee = self.nodes[at].guarantee.min(limit);
        self.look(0);
    }

    pub(super) fn set_guarantee(&mut self, at: usize, guarantee: u64) -> Result<(), usize> {
        let path = self.path(at);
        let before = std::mem::replace(&mut self.nodes[at].guarantee, guarantee);
        let after: Vec<u64> = path.iter().map(|&at| self.held(at)).collect();
        self.nodes[at].guarantee = before;
        if guarantee > self.nodes[at].limit {
            return Err(at);
        }
        for (&at, after) in path.iter().zip(after).skip(1) {
            if after > self.held(at) && after > self.nodes[at].limit {
                return Err(at);
            }
        }
        self.nodes[at].guarantee = guarantee;
        self.look(0);
        Ok(())
    }

    pub(super) fn leave(&mut self, at: usize) {
        assert_eq!(self.used(at), 0, "bytes that nobody has");
        self.nodes[at].guarantee = 0;
        self.nodes[at].live = false;
        self.look(0);
    }

    pub(super) fn enter(&mut self, wait: Wait) -> u64 {
        let priority = self.nodes[wait.node].priority;
        self.waits.push(Some(Wait { priority, ..wait }));
        self.waits.len() as u64 - 1
    }

    pub(super) fn wait(&self, number: u64) -> &Wait {
        self.waits[number as usize].as_ref().expect("a wait that is there")
    }

    pub(super) fn give_up(&mut self, number: u64) {
        if let Some(wait) = self.waits[number as usize].take() {
            match wait.answer {
                Some(true) => self.release(wait.node, wait.bytes),
                Some(false) => {}
                None => self.look(0),
            }
        }
    }

    pub(super) fn waiting(&self, at: usize) -> usize {
        let unanswered = self.waits.iter().flatten().filter(|wait| wait.answer.is_none());
        unanswered.filter(|wait| self.is_below(wait.node, at)).count()
    }

    /// Serves the queue at an hour: by priority, then in order. No waiter overtakes another one for
    /// room in the same node.
    pub(super) fn look(&mut self, now: u32) {
        for node in &mut self.nodes {
            node.line = None;
        }
        let mut order: Vec<_> = (0..self.waits.len())
            .filter(|&number| self.waits[number].as_ref().is_some_and(|wait| wait.answer.is_none()))
            .collect();
        order.sort_by_key(|&number| Reverse(self.waits[number].as_ref().map(|wait| wait.priority)));
        for number in order {
            let wait = self.wait(number as u64).clone();
            let answer = match self.admit(wait.node, wait.bytes, wait.priority) {
                Ok(()) => {
                    self.change(wait.node, |direct| *direct += wait.bytes);
                    Some(true)
                }
                Err(_) if self.never(wait.node, wait.bytes) => Some(false),
                Err(_) if wait.deadline.is_some_and(|deadline| deadline <= now) => Some(false),
                Err(by) => {
                    self.nodes[by].line.get_or_insert(wait.priority);
                    None
                }
            };
            if let Some(wait) = &mut self.waits[number] {
                wait.answer = answer;
            }
        }
    }
}
