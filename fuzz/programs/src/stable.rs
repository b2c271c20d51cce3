//! Programs over memory with stable addresses: stable blocks with their registrations, and reserved
//! elements that are committed and decommitted, together with ordinary blocks under one budget.
//!
//! Invariants after every operation: the pool's account agrees with a model, held bytes with
//! charged bytes, and contents with what was last written. The oracle reports nothing: no mapping
//! removed under queued work or under a registration, no unordered work.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

use crate::{
    program::{Bytes, Process, Program},
    rig::{Open, Rig, assert_within, declare, quietly, simulated, trim, went},
};
use aquifer_core::{Budget, MemoryError};
use aquifer_device::{AddressRegistration, Block, PoolConfig, Request, Reserved, StableBlock};
use aquifer_driver::{Access, Call, DeviceId, DeviceRange, ExportTypes};
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

/// The device's memory.
const CAPACITY: u64 = 64 << 20;
/// The granule of commitment, in bytes.
const STEP: usize = 2 << 20;
/// Maximum number of elements, slightly more than whole granules.
const MAX_LEN: usize = 9 * STEP + 77;
/// Calls that may fail during a program, of those that can be retried.
const FAULTS: [Call; 12] = [
    Call::AddressReserve,
    Call::AddressFree,
    Call::HandleCreate,
    Call::Map,
    Call::SetAccess,
    Call::Unmap,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventQuery,
    Call::StreamWaitEvent,
    Call::MemAlloc,
    Call::MemFree,
];

struct Stable {
    block: StableBlock,
    stream: usize,
    address: u64,
    content: Option<u8>,
}

/// A registration that keeps an address, with the contents when its block was freed.
struct Kept {
    token: AddressRegistration,
    content: Option<u8>,
}

struct Room {
    reserved: Reserved<u8>,
    stream: usize,
    address: u64,
    /// Granules that have memory.
    committed: BTreeSet<usize>,
}

pub(crate) struct World {
    rig: Rig,
    stable: Vec<Stable>,
    kept: Vec<Kept>,
    rooms: Vec<Room>,
    blocks: Vec<Block>,
}

fn range(address: u64, bytes: usize) -> DeviceRange {
    DeviceRange { device: DeviceId(0), address, bytes: bytes as u64 }
}

impl Program for World {
    const PROCESS: Process = Process::Shared;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        let mapping = bytes.choice(8) != 0;
        let sim = simulated(mapping).capacity(CAPACITY);
        let sim = if bytes.choice(4) == 0 { sim } else { sim.symbolic() };
        let sim = if bytes.flag() { sim.seeded(bytes.u64()) } else { sim };
        let budget = Budget::new("the fuzzed device", (u64::from(bytes.choice(30)) + 4) << 20);
        let mut config = PoolConfig::with_budget(budget);
        config.wait = Duration::from_micros(300);
        config.bypass = bytes.choice(8) == 1;
        config.export =
            if mapping && bytes.flag() { ExportTypes::POSIX_FD } else { ExportTypes::NONE };
        Some(Self {
            rig: Rig::open(sim, config, 3),
            stable: Vec::new(),
            kept: Vec::new(),
            rooms: Vec::new(),
            blocks: Vec::new(),
        })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(21) {
            0 | 1 => self.alloc(bytes),
            2 => self.free(bytes),
            3 => self.write(bytes),
            4 => self.register(bytes),
            5 => self.forget(bytes),
            6 | 7 => self.reserve_or_drop(bytes),
            8..=10 => self.commit(bytes),
            11 | 12 => self.decommit(bytes),
            13 => self.prepare(bytes),
            14 => self.rig.end_one(bytes),
            15 => self.ordinary(bytes),
            16 => trim(&self.rig.pool, u64::from(bytes.u8()) << 18),
            17 => self.rig.fail_one(bytes, FAULTS),
            18 => self.rig.go_on(bytes),
            19 => self.need(bytes),
            _ => self.rig.limit(bytes, 40),
        }
    }

    fn check(&mut self) {
        let committed: u64 =
            self.rooms.iter().map(|room| (room.committed.len() * STEP) as u64).sum();
        let blocks: u64 = self.blocks.iter().map(Block::capacity).sum();
        let stable: u64 = self.stable.iter().map(|s| s.block.capacity()).sum();
        assert_within(&self.rig.check(Some(committed + blocks + stable), None));
        for room in &self.rooms {
            assert_eq!(room.reserved.address(), room.address, "an address has changed");
            let steps: BTreeSet<usize> = room
                .reserved
                .committed()
                .into_iter()
                .flat_map(|r| r.start / STEP..r.end.div_ceil(STEP))
                .collect();
            assert_eq!(steps, room.committed);
        }
        for Stable { block, address, content, .. } in &self.stable {
            assert_eq!(block.address(), *address, "an address has changed");
            self.check_content(range(*address, block.bytes() as usize), *content);
        }
        for Kept { token, content } in &self.kept {
            self.check_content(token.range(), *content);
        }
    }

    fn finish(mut self) {
        self.rig.sim.clear_failures();
        self.rig.work_all();
        drop((self.stable, self.kept, self.rooms, self.blocks));
        self.rig.finish();
    }
}

impl World {
    fn alloc(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
        let size = u64::from(bytes.u16()) << 7 | 1;
        let failures = self.rig.pool.stats().failures;
        match went(self.rig.pool.alloc_stable(&self.rig.streams[stream], Request::bytes(size))) {
            Some(block) => {
                assert!(block.bytes() == size && block.capacity() >= size, "a short block");
                let address = block.address();
                self.stable.push(Stable { block, stream, address, content: None });
            }
            None => assert_eq!(self.rig.pool.stats().failures, failures + 1),
        }
    }

    fn free(&mut self, bytes: &mut Bytes<'_>) {
        let Some(stable) = bytes.take(&mut self.stable) else { return };
        let Stable { block, address, content, .. } = stable;
        for kept in self.kept.iter_mut().filter(|kept| kept.token.range().address == address) {
            kept.content = content;
        }
        quietly(&self.rig.sim, "a free", || drop(block));
    }

    /// Writes a stable block, and waits for the write.
    fn write(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = bytes.index(self.stable.len()) else { return };
        let byte = bytes.u8();
        let Stable { block, stream, content, .. } = &mut self.stable[at];
        let stream = &self.rig.streams[*stream];
        let len = block.bytes() as usize;
        let mut all = block.slice_mut::<u8>(0..len).expect("within its bounds");
        match stream.fill(&mut all, byte) {
            Ok(()) => *content = stream.synchronize().ok().map(|()| byte),
            Err(MemoryError::Busy { .. } | MemoryError::Driver(_)) => {}
            Err(other) => panic!("{other:?}"),
        }
        // A fill that was queued but not waited for leaves the contents unknown.
        if content.is_none() {
            let _ = stream.synchronize();
        }
    }

    fn register(&mut self, bytes: &mut Bytes<'_>) {
        let at = usize::from(bytes.u8());
        if bytes.flag() && !self.kept.is_empty() {
            let Kept { token, content } = &self.kept[at % self.kept.len()];
            let (token, content) = (token.clone(), *content);
            self.kept.push(Kept { token, content });
        } else if !self.stable.is_empty() {
            let stable = &self.stable[at % self.stable.len()];
            let before = stable.block.registrations();
            let token = stable.block.register();
            assert_eq!(stable.block.registrations(), before + 1);
            self.kept.push(Kept { token, content: None });
        }
    }

    fn forget(&mut self, bytes: &mut Bytes<'_>) {
        if let Some(kept) = bytes.take(&mut self.kept) {
            quietly(&self.rig.sim, "the end of a registration", || drop(kept));
        }
    }

    fn reserve_or_drop(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
        if self.rooms.len() == 3 || (bytes.flag() && !self.rooms.is_empty()) {
            let room = bytes.take(&mut self.rooms);
            return quietly(&self.rig.sim, "a drop", || drop(room));
        }
        match self.rig.pool.reserve(&self.rig.streams[stream], MAX_LEN) {
            Ok(reserved) => {
                let address = reserved.address();
                self.rooms.push(Room { reserved, stream, address, committed: BTreeSet::new() });
            }
            Err(MemoryError::Driver(_)) => {}
            Err(MemoryError::Unsupported { .. }) => assert!(!self.rig.pool.info().virtual_memory),
            Err(other) => panic!("{other:?}"),
        }
    }

    fn elements(bytes: &mut Bytes<'_>) -> std::ops::Range<usize> {
        let (a, b) = (
            usize::from(bytes.u16()) * MAX_LEN / 65_535,
            usize::from(bytes.u16()) * MAX_LEN / 65_535,
        );
        a.min(b)..a.max(b)
    }

    fn commit(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = bytes.index(self.rooms.len()) else { return };
        let range = Self::elements(bytes);
        let Room { reserved, stream, committed, address } = &mut self.rooms[at];
        match reserved.commit(range.clone()) {
            Ok(()) => {
                if !range.is_empty() {
                    committed.extend(range.start / STEP..range.end.div_ceil(STEP));
                }
                let stream = &self.rig.streams[*stream];
                let part = self::range(*address + range.start as u64, range.len());
                // It can be used at once by its own stream, unless another use is open.
                if let Ok(used) = reserved.prepare(stream, Access::Write) {
                    declare(&self.rig.sim, stream, part, Access::Write, reserved.generation());
                    drop(used);
                }
                assert!(reserved.slice(range).is_ok());
            }
            Err(MemoryError::Busy { address: busy }) => {
                assert!(
                    busy == *address
                        && self.rig.open.iter().any(|o| o.generation == reserved.generation()),
                    "busy with nothing open"
                );
            }
            Err(other) => {
                let _ = went::<()>(Err(other));
            }
        }
    }

    fn decommit(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = bytes.index(self.rooms.len()) else { return };
        let range = Self::elements(bytes);
        let is_idle = bytes.flag();
        quietly(&self.rig.sim, "a decommit", || {
            let Room { reserved, committed, .. } = &mut self.rooms[at];
            let kept = reserved.idle_bytes();
            let bytes = match is_idle {
                true => reserved.idle(range.clone()),
                false => reserved.decommit(range.clone()),
            };
            let bytes = bytes.expect("within its bounds");
            assert_eq!(reserved.idle_bytes() - kept, if is_idle { bytes } else { 0 });
            let before = committed.len();
            let last = if range.end == MAX_LEN { MAX_LEN.div_ceil(STEP) } else { range.end / STEP };
            committed.retain(|step| !(range.start.div_ceil(STEP)..last).contains(step));
            assert_eq!(bytes, ((before - committed.len()) * STEP) as u64);
        });
    }

    /// Reclaims for others.
    fn need(&mut self, bytes: &mut Bytes<'_>) {
        let wanted = u64::from(bytes.u8()) << 17;
        let until = Instant::now() + Duration::from_micros(u64::from(bytes.u8()));
        self.rig.pool.budget().reclaim(wanted, Some(until), None);
    }

    /// Opens a use of all committed parts of a reserved range, or of a stable block.
    fn prepare(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
        let access = bytes.pick([Access::Read, Access::Write]);
        let at = usize::from(bytes.u8());
        let stream = self.rig.streams[stream].clone();
        let open = if bytes.flag() && !self.rooms.is_empty() {
            let room = &self.rooms[at % self.rooms.len()];
            let ranges =
                room.committed.iter().map(|step| range(room.address + (step * STEP) as u64, STEP));
            let (ranges, generation) = (ranges.collect(), room.reserved.generation());
            let answer = room.reserved.prepare(&stream, access);
            answer.map(|used| Open { used, stream, ranges, generation, access })
        } else if !self.stable.is_empty() {
            let block = self.stable[at % self.stable.len()].block.block();
            block.prepare(&stream, access).map(|used| Open::of(used, block, &stream, access))
        } else {
            return;
        };
        match open {
            Ok(open) => self.rig.open.push(open),
            Err(MemoryError::Driver(_) | MemoryError::Busy { .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Allocates or frees an ordinary block, which changes the free memory.
    fn ordinary(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
        if bytes.flag() && !self.blocks.is_empty() {
            bytes.take(&mut self.blocks);
        } else {
            let size = u64::from(bytes.u16()) << 7 | 1;
            match self.rig.pool.alloc(&self.rig.streams[stream], Request::bytes(size)) {
                // A driver allocation in bypass mode does not reclaim memory.
                Err(MemoryError::OutOfBudget(_)) => {}
                answer => self.blocks.extend(went(answer)),
            }
        }
    }

    fn check_content(&self, range: DeviceRange, content: Option<u8>) {
        // Devices without bytes have nothing to read.
        let ends = [range.address, range.address + range.bytes - 1]
            .map(|address| self.rig.sim.read_back(DeviceRange { address, bytes: 1, ..range }));
        for end in ends.into_iter().flatten() {
            assert!(content.is_none_or(|byte| end == [byte]), "contents have changed");
        }
    }
}
