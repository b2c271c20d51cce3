//! A scheduler: the devices of all nodes as it last heard of them.

use super::nodes::{CAPACITY, DEVICES, Nodes, Shard};
use aquifer::{
    DeviceId, Group, PlaceError, Policy,
    placement::{Candidate, DeviceSource, RejectReason},
};
use aquifer_core::random::SplitMix64;
use std::{cell::RefCell, rc::Rc};

/// Devices as one of several schedulers knows them.
pub(super) struct Scheduler {
    nodes: Rc<Nodes>,
    /// Free bytes by device, of the last report or answer of its node.
    free: RefCell<Vec<u64>>,
    peers: Rc<[Vec<DeviceId>]>,
    turn: u64,
    random: SplitMix64,
}

/// The nodes that one request is placed on.
struct NodeOffer<'a> {
    scheduler: &'a Scheduler,
    /// Nodes, or none for all.
    nodes: Option<Vec<usize>>,
}

impl NodeOffer<'_> {
    fn device(&self, index: usize) -> usize {
        match &self.nodes {
            Some(nodes) => nodes[index / DEVICES] * DEVICES + index % DEVICES,
            None => index,
        }
    }
}

impl DeviceSource for NodeOffer<'_> {
    type Held = Shard;

    fn candidates(&self) -> Vec<Candidate<'_>> {
        let free = self.scheduler.free.borrow();
        let count = self.nodes.as_ref().map_or(free.len(), |nodes| nodes.len() * DEVICES);
        let candidate = |index| {
            let device = self.device(index);
            let id = DeviceId(device as u32);
            let mut candidate = Candidate::new(index, id, free[device], CAPACITY);
            candidate.peers = &self.scheduler.peers[device / DEVICES];
            candidate
        };
        (0..count).map(candidate).collect()
    }

    fn hold(&self, index: usize, bytes: u64) -> Result<Shard, RejectReason> {
        let device = self.device(index);
        let answer = self.scheduler.nodes.claim(device, bytes);
        // The answer has the node's figures.
        self.scheduler.hear_of(device / DEVICES);
        answer
    }
}

impl Scheduler {
    /// Creates the scheduler with this number, of so many.
    pub(super) fn new(nodes: &Rc<Nodes>, count: usize, number: usize, of: usize) -> Self {
        let devices = |node| (node * DEVICES..(node + 1) * DEVICES).map(|d| DeviceId(d as u32));
        Self {
            nodes: nodes.clone(),
            free: RefCell::new(vec![CAPACITY; count * DEVICES]),
            peers: (0..count).map(|node| devices(node).collect()).collect(),
            turn: (number * count * DEVICES / of) as u64,
            random: SplitMix64::new(number as u64),
        }
    }

    /// Reads the figures of a node.
    pub(super) fn hear_of(&self, node: usize) {
        let (first, mut free) = (node * DEVICES, self.free.borrow_mut());
        for (at, free) in free[first..first + DEVICES].iter_mut().enumerate() {
            *free = self.nodes.free(first + at);
        }
    }

    /// Places a group: among `sample` nodes if that is set, and among all if those have no room.
    pub(super) fn place(
        &mut self,
        policy: &Policy,
        group: &Group,
        sample: Option<usize>,
    ) -> Result<Vec<Shard>, PlaceError> {
        let (turn, count) = (self.turn, self.peers.len());
        self.turn += 1;
        if let Some(sample) = sample.filter(|sample| *sample < count) {
            let random = &mut self.random;
            let mut nodes: Vec<usize> =
                (0..sample).map(|_| (random.next_u64() % count as u64) as usize).collect();
            nodes.sort_unstable();
            nodes.dedup();
            if let Ok(placed) = self.place_on(policy, group, turn, Some(nodes)) {
                return Ok(placed);
            }
        }
        self.place_on(policy, group, turn, None)
    }

    fn place_on(
        &self,
        policy: &Policy,
        group: &Group,
        turn: u64,
        nodes: Option<Vec<usize>>,
    ) -> Result<Vec<Shard>, PlaceError> {
        let placed = policy.place_group_in(&NodeOffer { scheduler: self, nodes }, group, turn)?;
        Ok(placed.into_iter().map(|(_, shard)| shard).collect())
    }
}
