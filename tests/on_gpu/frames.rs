//! Tests of rings of frames on a real GPU, in pinned and in device memory: every step's bytes
//! arrive, and the memory of a step is not reused before its work is done.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::first_gpu;
use aquifer::{DeviceArena, DeviceBuffer, DevicePool, Frames, Gate, Limit, Stream, vec::Vec};

/// The number of elements of a step.
const LEN: usize = 1 << 20;
const STEPS: u32 = 24;

fn buffers(pool: &DevicePool, s: &Stream) -> std::vec::Vec<DeviceBuffer<u32>> {
    (0..STEPS).map(|_| pool.buffer(s, LEN).unwrap()).collect()
}

/// Asserts that each step has its own elements.
fn check(s: &Stream, buffers: &[DeviceBuffer<u32>], of: impl Fn(u32, usize) -> u32) {
    let mut back = vec![0; LEN];
    for (step, x) in (0..).zip(buffers) {
        s.scope(|c| c.download(x, &mut back)).unwrap().unwrap();
        let wrong = (0..LEN).find(|&at| back[at] != of(step, at));
        assert_eq!(wrong, None, "step {step}");
    }
}

#[test]
fn pinned_frames_carry_every_step_and_wait_for_the_one_that_had_them() {
    let Some(rt) = first_gpu::runtime() else { return };
    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    let mut all = buffers(pool, &s);
    let mut frames = Frames::new_in(3, rt.pinned_near(0).allocator());
    let mut ends = std::vec::Vec::new();
    for (step, x) in (0..).zip(&mut all) {
        let frame = frames.next().unwrap();
        if let Some(before) = ends.len().checked_sub(3) {
            let end: &aquifer::stream::Point = &ends[before];
            assert!(end.is_open(), "the step three ago is done");
        }
        let mut batch = Vec::with_capacity_in(LEN, frame.arena());
        batch.extend((0..LEN as u32).map(|at| at.wrapping_mul(step + 1)));
        drop(s.upload(batch, x).unwrap());
        ends.push(s.point());
    }
    check(&s, &all, |step, at| (at as u32).wrapping_mul(step + 1));
}

#[test]
fn device_frames_carry_every_step_over_two_streams_under_a_limit() {
    let Some(rt) = first_gpu::runtime() else { return };
    let pool = rt.device(0).unwrap();
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let mut all = buffers(pool, &u);
    let bytes = 4 * LEN as u64;
    let limit = Limit::new(pool.clone(), aquifer::Budget::new("frames", 6 * bytes));
    let arena = || DeviceArena::new(&limit, &s, 2 * bytes).unwrap();
    let mut frames = Frames::of(arena(), [arena(), arena()]);
    assert!(DeviceArena::new(&limit, &s, 1).is_err());
    for (step, x) in (0..).zip(&mut all) {
        let frame = frames.next().unwrap();
        let (mut a, mut b) =
            (frame.arena().alloc::<u32>(LEN).unwrap(), frame.arena().alloc::<u32>(LEN).unwrap());
        s.fill(&mut a, step).unwrap();
        s.copy(&a, &mut b).unwrap();
        s.fill(&mut a, u32::MAX).unwrap();
        u.copy(&b, x).unwrap();
    }
    check(&u, &all, |step, _| step);
    drop(frames);
    u.synchronize().unwrap();
    s.synchronize().unwrap();
    pool.trim(u64::MAX).unwrap();
    assert_eq!(limit.live(), 0);
}
