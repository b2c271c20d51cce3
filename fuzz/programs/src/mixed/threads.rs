//! Phases in which threads run concurrently.

use super::{Live, Owner, World, went};
use crate::{
    program::{Bytes, seeded},
    rig::access,
};
use aquifer_device::{Block, DeviceBuffer, DevicePool, Request};
use aquifer_driver::{Access, Call, sim::Sim};
use aquifer_stream::Stream;
use std::{thread, time::Duration};

/// Longer than any operation takes that does not hang.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// Operations per thread in a phase.
const WORK: usize = 40;
/// Calls that may stall while others go on.
const STALLS: [Call; 6] = [
    Call::HandleCreate,
    Call::Map,
    Call::Unmap,
    Call::EventRecord,
    Call::EventQuery,
    Call::MemAlloc,
];

impl World {
    /// Runs one thread per pool that allocates, uses and frees on a stream of the pool and on its
    /// own default stream, while limits change and a driver call may stall. The program keeps the
    /// blocks that the threads still hold.
    pub(super) fn phase(&mut self, bytes: &mut Bytes<'_>) {
        let seeds = [bytes.u64(), bytes.u64(), bytes.u64()];
        let limits: Vec<(usize, u64)> = (0..bytes.choice(6))
            .map(|_| (usize::from(bytes.choice(4)), (u64::from(bytes.choice(32)) + 1) << 21))
            .collect();
        let stall = STALLS.get(usize::from(bytes.choice(2 * STALLS.len() as u8))).copied();
        for &(at, limit) in &limits {
            self.most[at] = self.most[at].max(limit);
        }
        let (sim, budgets, owners) = (&self.sim, &self.budgets, &self.owners);
        let kept = thread::scope(|threads| {
            let stalled = stall.map(|call| sim.stall(call));
            let work = |owner: usize, seed: u64| {
                let Owner { pool, streams, .. } = &owners[owner];
                let stream = streams[0].clone();
                move || work(sim, pool, &stream, seed)
            };
            let workers: Vec<_> = seeds
                .iter()
                .enumerate()
                .map(|(owner, &seed)| threads.spawn(work(owner, seed)))
                .collect();
            if let Some(stalled) = stalled {
                // Statistics can be read while other threads are in driver calls.
                let _ = stalled.wait_for(1, Duration::from_micros(200));
                budgets.iter().for_each(|budget| _ = budget.figures());
                owners.iter().for_each(|owner| _ = owner.pool.stats());
                drop(stalled);
            }
            for &(at, limit) in &limits {
                budgets[at].set_limit(limit);
                thread::yield_now();
            }
            let joined = workers.into_iter().map(|worker| match worker.join() {
                Ok(blocks) => blocks,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            joined.collect::<Vec<Vec<Block>>>()
        });
        for (owner, blocks) in kept.into_iter().enumerate() {
            for block in blocks {
                if let Ok(buffer) = DeviceBuffer::from_block(block) {
                    let (of_tenant, of_thread, content) = (false, true, None);
                    self.live.push(Live { buffer, owner, of_tenant, of_thread, content });
                }
            }
        }
    }
}

/// Runs one thread's operations and returns the blocks that it still holds.
fn work(sim: &Sim, pool: &DevicePool, stream: &Stream, seed: u64) -> Vec<Block> {
    let script = seeded(seed, 6 * WORK);
    let mut bytes = Bytes::new(&script);
    let mut blocks: Vec<Block> = Vec::new();
    let Some(own) = went(pool.streams().thread_default()) else { return blocks };
    for _ in 0..WORK {
        let stream = if bytes.choice(4) == 0 { &own } else { stream };
        match bytes.choice(8) {
            0..=3 => {
                let size = (u64::from(bytes.u16()) << bytes.choice(6)) + 1;
                if let Some(block) = went(pool.alloc(stream, Request::bytes(size))) {
                    access(sim, stream, &block, Access::Write);
                    blocks.push(block);
                }
            }
            4 | 5 => {
                if let Some(at) = super::pick(&blocks, &mut bytes) {
                    blocks.swap_remove(at);
                }
            }
            6 => {
                if let Some(block) = blocks.last()
                    && let Some(used) = went(block.prepare(stream, Access::ReadWrite))
                {
                    access(sim, stream, block, Access::ReadWrite);
                    let _ = used.finish();
                }
            }
            _ => drop(pool.trim(u64::from(bytes.u8()) << 18)),
        }
    }
    blocks.truncate(3);
    blocks
}
