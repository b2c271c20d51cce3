//! Tests of what may be sent to another thread or shared between threads, and of what a lost device
//! means for all users.

use crate::support::{MIB, Rig, assert_returned};
use aquifer_core::{MemoryError, Result};
use aquifer_device::{Block, DeviceBuffer, DevicePool, Direct, Request, Resource, StreamOrdered};
use aquifer_driver::{Access, DeviceId, sim::Sim};
use aquifer_stream::{Stream, StreamPool, Timeline, Use};
use std::{sync::Barrier, thread};

#[test]
fn blocks_streams_and_pools_can_be_sent_and_shared() {
    fn both<T: Send + Sync + ?Sized>() {}
    both::<Block>();
    both::<DeviceBuffer<f32>>();
    both::<DevicePool>();
    both::<Direct>();
    both::<StreamOrdered>();
    both::<dyn Resource>();
    both::<Stream>();
    both::<StreamPool>();
    both::<Timeline>();
    both::<Use>();
}

#[test]
fn threads_that_take_over_memory_from_each_other_get_no_out_of_memory() {
    const THREADS: u64 = 16;
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let rig = Rig::on(sim, 64 << 10, |_| ());
    let together = Barrier::new(THREADS as usize);
    // Each stream repeatedly frees memory that other streams search.
    let live_and_let_go = |number: u64, stream: &Stream| -> Result<()> {
        let mut live = Vec::new();
        for step in 0..100 {
            if step % 3 == 2 {
                live.swap_remove(step as usize * 7 % live.len());
            } else {
                let bytes = 100_000 + (step * 777_777 + number * 123_456) % (8 * MIB);
                live.push(rig.pool.alloc(stream, Request::bytes(bytes))?);
            }
        }
        Ok(())
    };
    let refused: Vec<_> = thread::scope(|scope| {
        let threads = (0..THREADS).map(|number| {
            let (rig, together, live_and_let_go) = (&rig, &together, &live_and_let_go);
            let stream = rig.stream();
            scope.spawn(move || {
                together.wait();
                (0..40).try_for_each(|_| {
                    live_and_let_go(number, &stream)?;
                    // Every stream has to search for memory again.
                    rig.pool.trim(0).map(drop)
                })
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap().err()).collect()
    });
    assert!(refused.is_empty(), "{}", refused[0]);
}

#[test]
fn a_lost_device_is_reported_and_everything_can_still_be_dropped() {
    let rig = Rig::on(Sim::h200(1).stepped(), 16, |_| ());
    let (s, u) = (rig.stream(), rig.stream());
    let (sim, budget) = (rig.sim.clone(), rig.budget.clone());
    let block = rig.alloc(&s, 4 * MIB);
    let used = block.prepare(&u, Access::Read).unwrap();
    sim.lose_device(DeviceId(0));
    let lost = MemoryError::DeviceLost { device: DeviceId(0) };
    assert_eq!(rig.pool.alloc(&s, Request::bytes(8 * MIB)).map(drop), Err(lost.clone()));
    assert_eq!(s.synchronize(), Err(lost.clone()));
    let copy: Result<()> = block.prepare(&s, Access::Read).map(drop);
    assert_eq!(copy, Ok(()), "which stream uses what is known without the device");
    assert_eq!(rig.pool.trim(0).map(drop), Err(lost));
    drop(used);
    drop(block);
    drop((s, u));
    drop(rig);
    assert_returned(&sim, &budget);
}
