//! Special kinds of memory: stable, reserved and parkable memory, and memory of graphs.
#![expect(unsafe_code, reason = "parks memory that nothing is about to use, and captures")]

use super::{Lodged, STEP, STEPS, Stable, World, pick, went};
use crate::{
    program::Bytes,
    rig::{access, declare},
};
use allocator_api2::alloc::Global;
use aquifer_core::MemoryError;
use aquifer_device::{Park, Request};
use aquifer_driver::{Access, DeviceRange};

impl World {
    pub(super) fn stable(&mut self, bytes: &mut Bytes<'_>) {
        let owner = usize::from(bytes.choice(3));
        if bytes.flag() && !self.stable.is_empty() {
            return drop(bytes.take(&mut self.stable));
        }
        let stream = self.pick_stream(owner, bytes);
        let request = Request::bytes(u64::from(bytes.u16()) << 6 | 1);
        if let Some(block) = went(self.owners[owner].pool.alloc_stable(&stream, request)) {
            access(&self.sim, &stream, block.block(), Access::Write);
            if self.calm || bytes.flag() {
                // The registration keeps the memory alive after the block.
                let token = block.register();
                drop(block);
                drop(token);
            } else {
                self.stable.push(Stable { block, owner });
            }
        }
    }

    pub(super) fn reserve(&mut self, bytes: &mut Bytes<'_>) {
        let owner = usize::from(bytes.choice(2));
        if self.rooms.len() == 3 || bytes.flag() && !self.rooms.is_empty() {
            return drop(bytes.take(&mut self.rooms));
        }
        let stream = self.pick_stream(owner, bytes);
        let room = self.owners[owner].pool.reserve::<u8>(&stream, STEP * STEPS);
        self.rooms.extend(went(room).map(|room| (room, owner)));
    }

    pub(super) fn commit(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = pick(&self.rooms, bytes) else { return };
        let (one, other) = (bytes.below(7) * STEP, bytes.below(7) * STEP);
        let range = one.min(other)..one.max(other);
        let (room, _) = &mut self.rooms[at];
        let before = room.committed_bytes();
        if bytes.choice(3) == 0 {
            let given = room.decommit(range).expect("within its bounds");
            assert_eq!(room.committed_bytes(), before - given);
        } else if let Some(()) = went(room.commit(range.clone())) {
            assert!(room.committed_bytes() >= before.max(range.len() as u64));
            // It can be used at once.
            let stream = room.stream().clone();
            if let Ok(used) = room.prepare(&stream, Access::Write)
                && !range.is_empty()
            {
                let address = room.address() + range.start as u64;
                let part =
                    DeviceRange { device: room.device(), address, bytes: range.len() as u64 };
                declare(&self.sim, &stream, part, Access::Write, room.generation());
                drop(used);
            }
        } else {
            assert_eq!(room.committed_bytes(), before, "a commit that was refused has committed");
        }
    }

    /// Allocates, fills or frees a parkable block.
    pub(super) fn lodge(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.pick_stream(0, bytes);
        let (how, byte) = (bytes.choice(3), bytes.u8());
        let parked = self.parkable.is_parked();
        match (how, pick(&self.lodged, bytes)) {
            (0, Some(at)) => drop(self.lodged.swap_remove(at)),
            (1, Some(at)) => {
                let Lodged { buffer, content } = &mut self.lodged[at];
                match stream.fill(buffer, byte) {
                    Ok(()) => {
                        assert!(!parked, "parked memory was written");
                        *content = Some(byte);
                    }
                    Err(MemoryError::Parked { .. }) => assert!(parked),
                    Err(MemoryError::Driver(_)) => *content = None,
                    Err(other) => drop(went::<()>(Err(other))),
                }
            }
            _ => {
                let len = (usize::from(byte) + 1) << 12;
                if let Some(buffer) = went(self.parkable.buffer::<u8>(&stream, len)) {
                    assert!(!parked, "served from what is parked");
                    self.placed(buffer.block().address());
                    self.lodged.push(Lodged { buffer, content: None });
                }
            }
        }
    }

    pub(super) fn park_or_resume(&mut self, bytes: &mut Bytes<'_>) {
        let (pool, tag) = (&self.owners[0].pool, self.parkable.tag());
        if self.parkable.is_parked() {
            if went(pool.resume(tag, None)).is_some() {
                assert!(!self.parkable.is_parked(), "resumed and not awake");
                let stream = self.pick_stream(0, bytes);
                for Lodged { buffer, content } in &self.lodged {
                    self.compare(buffer, *content, &stream);
                }
            }
            return;
        }
        let discards = bytes.choice(4) == 0;
        let how = if discards { Park::discard() } else { Park::save_in(Global) };
        // SAFETY: 1. and 2. no other thread runs now, and this one queues all its work at once.
        if went(unsafe { pool.park(tag, how) }).is_some() {
            assert_eq!(self.parkable.stats().physical, 0, "what is parked is held");
            if discards {
                self.lodged.iter_mut().for_each(|lodged| lodged.content = None);
            }
        }
    }

    pub(super) fn capture(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.pick_stream(0, bytes);
        let sizes: Vec<u64> = (0..1 + bytes.choice(4))
            .map(|_| u64::from(bytes.u16()) << bytes.choice(6) | 1)
            .collect();
        let kept = usize::from(bytes.choice(3));
        let Some(graphs) = &self.graph_pool else { return };
        let pool = &self.owners[0].pool;
        // SAFETY: 1. and 2. the work touches blocks of the graph pool only.
        let made = unsafe {
            graphs.capture(&stream, |s| {
                let mut blocks = Vec::new();
                for &size in &sizes {
                    let block = pool.alloc(s, Request::bytes(size))?;
                    access(&self.sim, s, &block, Access::Write);
                    blocks.push(block);
                    if blocks.len() > kept {
                        blocks.remove(0);
                    }
                }
                Ok(())
            })
        };
        if let Some((graph, ())) = went(made)
            && self.graphs.len() < 6
        {
            self.graphs.push(graph);
        }
    }

    /// Launches a graph, or drops it.
    pub(super) fn launch(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.pick_stream(0, bytes);
        let Some(at) = pick(&self.graphs, bytes) else { return };
        if bytes.choice(4) == 0 {
            self.graphs.swap_remove(at);
        } else {
            let _ = went(self.graphs[at].launch(&stream));
        }
    }
}
