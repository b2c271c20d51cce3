//! Tests that forgotten guards leak and never race.
//!
//! Each test creates one guard, forgets it where its end would have mattered, and reuses the memory
//! of both pools under random timing. The oracle checks every access against what the program told
//! the driver. Two controls show that it would report an unrecorded use or copy.

#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]
#![allow(clippy::mem_forget, clippy::forget_non_drop, reason = "that is what is tested")]

use crate::support::{assert_silent, runtime};
use aquifer::{
    Access, DeviceBuffer, DeviceRange, Gate, Operand, OperandMut, PinnedAllocator, PinnedBuf,
    PlacementRequest, Policy, Request, Runtime, Stream, sim::Sim, vec::Vec as PinnedVec,
};
use std::mem::forget;

const SEEDS: std::ops::Range<u64> = 0..5;
/// Bytes of each buffer.
const BYTES: usize = 64 << 10;

struct Rig {
    sim: Sim,
    rt: Runtime,
    s: Stream,
    u: Stream,
}

impl Rig {
    fn new(seed: u64) -> Self {
        let sim = Sim::h200(1).seeded(seed);
        let rt = runtime(&sim);
        let pool = rt.devices()[0].clone();
        let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
        Self { sim, rt, s, u }
    }

    fn buffer(&self, stream: &Stream) -> DeviceBuffer<u8> {
        let mut x = self.rt.devices()[0].buffer(stream, BYTES).unwrap();
        stream.fill(&mut x, 1).unwrap();
        x
    }

    fn pinned(&self) -> PinnedVec<u8, PinnedAllocator> {
        let mut bytes = PinnedVec::with_capacity_in(BYTES, self.rt.pinned_near(0).allocator());
        bytes.resize(BYTES, 1);
        bytes
    }

    /// Queues a kernel on a range.
    fn kernel(&self, stream: &Stream, range: DeviceRange, access: Access) {
        self.sim.access(stream.raw(), range, access, None).unwrap();
    }

    /// Both pools allocate all they have on every stream, and it is written immediately.
    fn churn(&self) {
        for _ in 0..6 {
            for stream in [&self.s, &self.u] {
                let mut held: Vec<_> = (0..3).map(|_| self.buffer(stream)).collect();
                let host: Vec<_> = (0..3).map(|_| self.pinned()).collect();
                for (x, v) in held.iter_mut().zip(host) {
                    drop(stream.upload(v, x).unwrap());
                }
            }
        }
    }
}

/// Runs `work`, which forgets something, and reuses the memory after it.
#[track_caller]
fn forgetting(work: impl Fn(&Rig)) {
    for seed in SEEDS {
        let rig = Rig::new(seed);
        work(&rig);
        rig.churn();
        assert_silent(&rig.sim);
    }
}

/// Returns for how many of the seeds the oracle reports violations.
fn objected(work: impl Fn(&Rig)) -> usize {
    let objects = |seed: &u64| {
        let rig = Rig::new(*seed);
        work(&rig);
        rig.churn();
        !rig.sim.take_violations().is_empty()
    };
    SEEDS.filter(objects).count()
}

#[test]
fn control_an_unrecorded_use_is_reported() {
    let unnoted = |rig: &Rig| {
        let x = rig.buffer(&rig.s);
        rig.u.wait_for(&rig.s).unwrap();
        rig.kernel(&rig.u, x.range(), Access::Read);
        drop(x);
    };
    assert_eq!(objected(unnoted), SEEDS.count());
}

#[test]
#[expect(unsafe_code, reason = "copies without a flight")]
fn control_a_copy_without_a_flight_is_reported() {
    let bare = |rig: &Rig| {
        let (x, mut v) = (rig.buffer(&rig.s), rig.pinned());
        let from = std::ptr::NonNull::from(&mut v[0]);
        // SAFETY: 1. the chunk that contains it stays mapped. 2. deliberately broken: the vector is
        // freed.
        unsafe { rig.sim.driver().copy_to_device(rig.s.raw(), x.range().address, from, BYTES) }
            .unwrap();
        drop(v);
    };
    assert_eq!(objected(bare), SEEDS.count());
}

#[test]
fn a_flight() {
    forgetting(|rig| {
        let mut x = rig.buffer(&rig.s);
        forget(rig.s.upload(rig.pinned(), &mut x).unwrap());
        forget(rig.u.download(&x, rig.pinned()).unwrap());
    });
}

#[test]
fn a_refused_flight() {
    forgetting(|rig| {
        let (mut x, mut v) = (rig.buffer(&rig.s), rig.pinned());
        v.truncate(10);
        forget(rig.s.upload(v, &mut x).map(drop).unwrap_err());
    });
}

#[test]
fn a_prepared_use() {
    forgetting(|rig| {
        for access in [Access::Read, Access::Write] {
            let x = rig.buffer(&rig.s);
            let used = x.block().prepare(&rig.u, access).unwrap();
            rig.kernel(&rig.u, x.range(), access);
            forget(used);
            drop(x);
        }
    });
}

#[test]
fn a_part_that_is_lent() {
    forgetting(|rig| {
        let mut x = rig.buffer(&rig.s);
        let mut part = x.slice_mut(0..1000).unwrap();
        part.order_mut(rig.u.raw(), None, Access::Write).unwrap();
        rig.kernel(&rig.u, part.range(), Access::Write);
        forget(part);
        let part = x.slice(500..2000).unwrap();
        part.order(rig.s.raw(), None, Access::Read).unwrap();
        rig.kernel(&rig.s, part.range(), Access::Read);
    });
}

#[test]
fn parts_beside_each_other_that_are_lent() {
    forgetting(|rig| {
        let mut x = rig.buffer(&rig.s);
        let (mut a, mut b) = x.split_at_mut(BYTES / 4).unwrap();
        a.order_mut(rig.u.raw(), None, Access::Write).unwrap();
        b.order_mut(rig.s.raw(), None, Access::Write).unwrap();
        rig.kernel(&rig.u, a.range(), Access::Write);
        rig.kernel(&rig.s, b.range(), Access::Write);
        forget((a, b));
    });
}

#[test]
fn a_block_or_a_buffer() {
    forgetting(|rig| {
        let x = rig.buffer(&rig.s);
        let mut y = rig.buffer(&rig.u);
        rig.u.copy(&x, &mut y).unwrap();
        forget(x);
        let block = rig.rt.devices()[0].alloc(&rig.s, Request::bytes(BYTES as u64)).unwrap();
        rig.kernel(&rig.s, block.range(), Access::Write);
        forget(block);
        let live = rig.rt.devices()[0].stats().requested;
        assert_eq!(live, 3 * BYTES as u64, "leaked, and counted");
    });
}

#[test]
fn a_stream() {
    forgetting(|rig| {
        let t = rig.rt.devices()[0].stream().unwrap();
        let (x, mut y) = (rig.buffer(&rig.s), rig.buffer(&t));
        t.copy(&x, &mut y).unwrap();
        forget(t);
    });
}

#[test]
fn a_point_and_a_gate_of_it() {
    forgetting(|rig| {
        let x = rig.buffer(&rig.s);
        let point = rig.s.point();
        let _ = point.is_open();
        forget((point.clone(), point));
        drop(x);
        // A gate that is never polled holds its memory for good.
        let ahead = aquifer::stream::Point::ahead(rig.s.timeline());
        let mut v = rig.pinned();
        aquifer::stream::HostOwned::defer(&mut v, std::sync::Arc::new(ahead.clone())).unwrap();
        forget(ahead);
        drop(v);
    });
}

#[test]
fn a_scope_inside_out() {
    forgetting(|rig| {
        let (mut x, mut up) = (rig.buffer(&rig.s), rig.pinned());
        // A scope exists only by reference. Forgetting the result of its work skips no wait.
        let returned = rig.s.scope(|c| {
            c.upload(&up, &mut x).unwrap();
            Box::new(7)
        });
        forget(returned);
        rig.sim.host_write(up.as_ptr().addr() as u64, BYTES as u64);
        up.fill(2);
    });
}

#[test]
fn a_lease_of_a_device_and_what_is_drawn_from_it() {
    forgetting(|rig| {
        let lease = rig
            .rt
            .placer(Policy::MostFree)
            .place(&PlacementRequest::bytes(4 * BYTES as u64))
            .unwrap();
        let mut x: DeviceBuffer<u8> = lease.buffer(&rig.s, BYTES).unwrap();
        rig.u.fill(&mut x, 3).unwrap();
        drop(x);
        let budget = rig.rt.devices()[0].budget().remaining();
        forget(lease);
        assert_eq!(rig.rt.devices()[0].budget().remaining(), budget, "it is held for good");
    });
}

#[test]
fn a_charge_and_a_reservation() {
    forgetting(|rig| {
        let budget = rig.rt.devices()[0].budget();
        forget(budget.charge(1000).unwrap());
        forget(budget.reserve(1000).unwrap());
    });
}

#[test]
fn a_pinned_buffer_under_a_copy() {
    forgetting(|rig| {
        let mut x = rig.buffer(&rig.s);
        let buffer = PinnedBuf::<u8>::new_in(rig.rt.pinned_near(0), BYTES).unwrap();
        let flight = rig.s.upload(buffer, &mut x).unwrap();
        forget(flight);
        forget(rig.pinned());
    });
}

#[test]
fn a_frame_whose_memory_a_copy_reads() {
    forgetting(|rig| {
        let mut x = rig.buffer(&rig.s);
        let mut frames = aquifer::Frames::new_in(2, rig.rt.pinned_near(0).allocator());
        for _ in 0..5 {
            let frame = frames.next().unwrap();
            let mut batch = PinnedVec::new_in(frame.arena());
            batch.resize(BYTES, 4u8);
            forget(rig.s.upload(batch, &mut x).unwrap());
            forget(frame);
        }
    });
}

#[test]
fn a_pool() {
    forgetting(|rig| {
        let x = rig.buffer(&rig.s);
        forget(rig.rt.devices()[0].clone());
        forget(rig.rt.pinned_near(0).clone());
        drop(x);
    });
}
