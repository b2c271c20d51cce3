//! Programs over registered memory: two agents of a simulated NIXL, pools under one registration
//! each, blocks and parts that outlive them, transfers that are fast, slow or dropped, and failing
//! calls.
//!
//! Invariants after every operation: no two blocks overlap, and each lies in its pool's memory,
//! which is registered. Blocks have the contents that were last written to them. At the end no
//! value of NIXL's and no pinned memory is left, whatever has failed.
#![expect(clippy::panic, reason = "a broken promise is told by a panic")]

use crate::{
    pinned::shared_host,
    program::{Bytes, Process, Program},
};
use aquifer_core::Budget;
use aquifer_host::{PinnedConfig, PinnedPool};
use aquifer_nixl::{
    Direction, FixedRange, NixlAgent, NixlError, NixlPeer, NixlTransfer, RegisteredBlock,
    RegisteredPart, RegisteredPool, RemoteRange,
    simulated::{World, nixl, world},
};

/// Maximum number of blocks, so that comparing all of them after each operation is cheap.
const MAX_BLOCKS: usize = 24;
const MAX_POOLS: usize = 4;
const NAMES: [&str; 2] = ["first", "second"];
/// Calls that may fail once the agents know each other.
const FAULTS: [&str; 20] = [
    "create_reg_dlist",
    "reg_dlist_add_desc",
    "destroy_reg_dlist",
    "register_mem",
    "deregister_mem",
    "create_xfer_dlist",
    "xfer_dlist_add_desc",
    "destroy_xfer_dlist",
    "create_opt_args",
    "opt_args_set_notif_msg",
    "opt_args_set_has_notif",
    "destroy_opt_args",
    "create_xfer_req",
    "post_xfer_req",
    "get_xfer_status",
    "release_xfer_req",
    "destroy_xfer_req",
    "create_notif_map",
    "get_notifs",
    "notif_map_size",
];

struct Pool {
    agent: usize,
    pool: RegisteredPool,
    range: FixedRange,
}

struct Block {
    agent: usize,
    /// The memory of its pool.
    whole: FixedRange,
    block: RegisteredBlock,
    content: Vec<u8>,
}

pub(crate) struct Machine {
    pinned: PinnedPool,
    peers: Vec<NixlPeer>,
    agents: Vec<NixlAgent>,
    pools: Vec<Pool>,
    blocks: Vec<Block>,
    /// Parts of dropped blocks, whose ranges stay taken, with the memory of their pools.
    parts: Vec<(FixedRange, RegisteredPart)>,
    transfers: Vec<NixlTransfer>,
}

/// Returns what a call has made, or `None` if it was refused for a reason that it may have.
fn went<T>(result: Result<T, NixlError>) -> Option<T> {
    let fails = world(|world| world.fails);
    match result {
        Ok(value) => Some(value),
        Err(NixlError::PoolFull { .. } | NixlError::Memory(_)) => None,
        Err(NixlError::Call { call, .. }) if fails == Some(call) => None,
        Err(error) => panic!("refused while {fails:?} fails: {error}"),
    }
}

/// Returns what a call has made that cannot fail.
fn sure<T>(result: Result<T, NixlError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("refused: {error}"),
    }
}

impl Program for Machine {
    const PROCESS: Process = Process::Shared;

    fn open(_: &mut Bytes<'_>) -> Option<Self> {
        world(|world| *world = World::default());
        let budget = Budget::new("registered", 8 << 20);
        let pinned = match PinnedPool::new(shared_host(), &budget, PinnedConfig::default()) {
            Ok(pinned) => pinned,
            Err(error) => panic!("a pool takes nothing at first: {error}"),
        };
        let agents = NAMES.map(|name| {
            let agent = sure(NixlAgent::new(&nixl(), name));
            sure(agent.add_backend("UCX", &[]));
            agent
        });
        let peers = [0, 1].map(|at| sure(agents[at].add_peer(&sure(agents[1 - at].metadata()))));
        Some(Self {
            pinned,
            peers: peers.into(),
            agents: agents.into(),
            pools: Vec::new(),
            blocks: Vec::new(),
            parts: Vec::new(),
            transfers: Vec::new(),
        })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(16) {
            0 if self.pools.len() < MAX_POOLS => {
                let agent = usize::from(bytes.flag());
                let size = 1 + u64::from(bytes.u32()) % (1 << (4 + bytes.choice(17)));
                let made = RegisteredPool::new(&self.agents[agent], &self.pinned, size);
                if let Some(pool) = went(made) {
                    let range = pool.registration().range();
                    assert!(range.bytes >= size, "{range:?} for {size} bytes");
                    self.pools.push(Pool { agent, pool, range });
                }
            }
            1 => drop(bytes.take(&mut self.pools)),
            2..=6 if !self.pools.is_empty() && self.blocks.len() < MAX_BLOCKS => {
                self.allocate(bytes);
            }
            7 | 8 => {
                let Some(Block { whole, block, .. }) = bytes.take(&mut self.blocks) else { return };
                if bytes.flag() {
                    self.parts.push((whole, block.part().clone()));
                }
            }
            9 => drop(bytes.take(&mut self.parts)),
            10 if !self.blocks.is_empty() => {
                let at = usize::from(bytes.u8()) % self.blocks.len();
                self.write(at, bytes.u8(), usize::from(bytes.u16()));
            }
            11 | 12 => self.transfer(bytes),
            13 if !self.transfers.is_empty() => {
                let at = usize::from(bytes.u8()) % self.transfers.len();
                let transfer = self.transfers.swap_remove(at);
                if let Some(is_done) = went(transfer.is_done()) {
                    assert!(is_done || world(|world| world.is_slow), "a fast transfer is done");
                }
            }
            14 => {
                let fails = usize::from(bytes.choice(1 + FAULTS.len() as u8));
                world(|world| world.fails = FAULTS.get(fails).copied());
            }
            15 => {
                let (is_slow, aborts) = (bytes.flag(), bytes.flag());
                world(|world| (world.is_slow, world.aborts) = (is_slow, aborts));
                went(self.agents[usize::from(bytes.flag())].messages());
            }
            _ => {}
        }
    }

    fn check(&mut self) {
        let blocks = self.blocks.iter().map(|block| (block.whole, block.block.part().range()));
        let parts = self.parts.iter().map(|(whole, part)| (*whole, part.range()));
        let mut taken: Vec<_> = blocks.chain(parts).collect();
        taken.sort_unstable_by_key(|(_, range)| range.address);
        for (whole, range) in &taken {
            let (start, end) = (range.address, range.address + range.bytes);
            assert!(start >= whole.address && end <= whole.address + whole.bytes, "{range:?}");
        }
        for pair in taken.windows(2) {
            let [(_, low), (_, high)] = pair else { continue };
            assert!(low.address + low.bytes <= high.address, "{low:?} overlaps {high:?}");
        }
        let pools = self.pools.iter().map(|pool| pool.range);
        for range in pools.chain(taken.iter().map(|(whole, _)| *whole)) {
            let is_registered = world(|world| {
                let mut registered = world.registered.values().flatten();
                registered.any(|known| known.1 as u64 == range.address)
            });
            assert!(is_registered, "{range:?}");
        }
    }

    fn finish(self) {
        world(|world| (world.fails, world.is_slow) = (None, false));
        self.check_contents();
        let pinned = self.pinned.clone();
        drop(self);
        assert_eq!(world(|world| world.live), 0, "a value of NIXL's is left");
        assert_eq!(pinned.stats().memory.live, 0, "pinned memory is left");
    }
}

impl Machine {
    fn allocate(&mut self, bytes: &mut Bytes<'_>) {
        let Pool { agent, pool, range } = &self.pools[usize::from(bytes.u8()) % self.pools.len()];
        let (agent, whole) = (*agent, *range);
        let size = 1 + u64::from(bytes.u16()) % (1 << bytes.choice(17));
        let free = pool.free_bytes();
        let Some(block) = went(pool.allocate(size)) else {
            assert!(free < whole.bytes || size > free, "{size} of {free} free bytes are refused");
            assert_eq!(pool.free_bytes(), free, "a refusal changes nothing");
            return;
        };
        assert_eq!(block.bytes(), size);
        assert!(pool.free_bytes() <= free - size, "{free} bytes were free before {size}");
        self.blocks.push(Block { agent, whole, block, content: vec![0; size as usize] });
        self.write(self.blocks.len() - 1, bytes.u8(), 0);
    }

    /// Writes to a block from an offset on.
    fn write(&mut self, at: usize, stamp: u8, offset: usize) {
        let Block { block, content, .. } = &mut self.blocks[at];
        let offset = offset % content.len();
        for (byte, place) in content[offset..].iter_mut().enumerate() {
            *place = (byte as u8).wrapping_mul(7) ^ stamp;
        }
        sure(block.copy_from(offset as u64, &content[offset..]));
    }

    /// Transfers all of a block from or to the beginning of one of the other agent.
    fn transfer(&mut self, bytes: &mut Bytes<'_>) {
        let agent = usize::from(bytes.flag());
        let mut pick = |agent: usize| {
            let of = |at: &usize| self.blocks[*at].agent == agent;
            let picked = usize::from(bytes.u8()) % (0..self.blocks.len()).filter(of).count().max(1);
            (0..self.blocks.len()).filter(of).nth(picked)
        };
        let (Some(ours), Some(theirs)) = (pick(agent), pick(1 - agent)) else { return };
        let (here, there) = (&self.blocks[ours], &self.blocks[theirs]);
        let len = here.content.len();
        if len > there.content.len() {
            return;
        }
        let mut sent = there.block.part().location().to_bytes();
        sent[8..16].copy_from_slice(&(len as u64).to_le_bytes());
        let (parts, remote) = ([here.block.part().clone()], [sure(RemoteRange::from_bytes(sent))]);
        let is_read = bytes.flag();
        let direction = if is_read { Direction::Read } else { Direction::Write };
        let message = bytes.flag().then_some(&b"some bytes"[..]);
        let begun =
            self.agents[agent].transfer(direction, &self.peers[agent], &parts, &remote, message);
        let Some(transfer) = went(begun) else { return };
        // The simulated NIXL copies at once or, where it is slow, never.
        if !world(|world| world.is_slow) {
            let (from, to) = if is_read { (theirs, ours) } else { (ours, theirs) };
            let copied = self.blocks[from].content[..len].to_vec();
            self.blocks[to].content[..len].copy_from_slice(&copied);
        }
        if bytes.flag() {
            self.transfers.push(transfer);
        }
    }

    fn check_contents(&self) {
        for Block { block, content, .. } in &self.blocks {
            let mut found = vec![0; content.len()];
            sure(block.copy_to(0, &mut found));
            assert_eq!(found, *content, "{block:?}");
        }
    }
}
