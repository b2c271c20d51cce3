//! Tests of copies and fills beyond one run of bytes: rows, elements of every size, and other
//! devices.
//!
//! - Bytes between the rows of a destination are unchanged.
//! - Rows that do not lie within both sides are refused before anything is queued, and the host
//!   side is returned.

#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::support::{assert_silent, runtime};
use aquifer::{
    DeviceBuffer, DeviceId, MemoryError, Runtime, Stream,
    driver::Call,
    sim::{Sim, SimConfig},
    stream::Grid,
    vec::Vec as PinnedVec,
};
use bytemuck::Pod;
use std::fmt::Debug;

/// A runtime on `devices` devices, with a stream of the first.
struct Rig {
    sim: Sim,
    rt: Runtime,
    s: Stream,
}

impl Rig {
    fn new(sim: Sim) -> Self {
        let rt = runtime(&sim);
        let s = rt.devices()[0].stream().unwrap();
        Self { sim, rt, s }
    }

    fn buffer<T: Pod>(&self, len: usize) -> DeviceBuffer<T> {
        self.rt.device(0).unwrap().buffer(&self.s, len).unwrap()
    }

    /// Returns a buffer that holds the first numbers.
    fn counted(&self, len: usize) -> DeviceBuffer<u32> {
        let mut x = self.buffer(len);
        let numbers = counted(len);
        self.s.scope(|c| c.upload(&numbers, &mut x)).unwrap().unwrap();
        x
    }

    fn read<T: Pod>(&self, x: &DeviceBuffer<T>) -> Vec<T> {
        let mut back = vec![T::zeroed(); x.len()];
        self.s.scope(|c| c.download(x, &mut back)).unwrap().unwrap();
        back
    }

    fn made(&self, call: Call) -> u64 {
        self.sim.driver().calls().get(call)
    }
}

fn counted(len: usize) -> Vec<u32> {
    (0..len as u32).collect()
}

/// Returns what a copy of rows should leave in `to`.
fn expected(mut to: Vec<u32>, from: &[u32], grid: Grid) -> Vec<u32> {
    for row in 0..grid.height {
        to[row * grid.to_pitch..][..grid.width]
            .copy_from_slice(&from[row * grid.from_pitch..][..grid.width]);
    }
    to
}

#[test]
fn a_tile_goes_up_across_and_down_by_rows() {
    for sim in [Sim::h200(1), Sim::h200(1).stepped(), Sim::h200(1).seeded(3)] {
        let rig = Rig::new(sim);
        let image = counted(40 * 30);
        let (up, across, down) = (
            Grid::new(7, 11).source_pitch(40).target_pitch(10),
            Grid::new(7, 11).source_pitch(10),
            Grid::new(7, 11).target_pitch(13),
        );
        let (mut x, mut y) = (rig.buffer::<u32>(110), rig.buffer::<u32>(77));
        rig.s.fill(&mut x, 9).unwrap();
        let mut back = vec![5; 13 * 11];
        rig.s
            .scope(|c| {
                // From the third row and the fifth column.
                c.upload_2d(&image[3 * 40 + 5..], &mut x, up)?;
                c.stream().copy_2d(&x, &mut y, across)?;
                c.download_2d(&y, &mut back, down)
            })
            .unwrap()
            .unwrap();
        let on_x = expected(vec![9; 110], &image[125..], up);
        assert_eq!(rig.read(&x), on_x);
        let on_y = expected(vec![0; 77], &on_x, across);
        assert_eq!(rig.read(&y), on_y);
        assert_eq!(back, expected(vec![5; 143], &on_y, down));
        assert_silent(&rig.sim);
    }
}

#[test]
fn rows_fly_with_their_host_side_and_an_early_drop_holds_it_back() {
    let rig = Rig::new(Sim::h200(1).stepped());
    let mut v = PinnedVec::new_in(rig.rt.pinned_near(0).allocator());
    v.extend(counted(400));
    let grid = Grid::new(10, 20).source_pitch(20);
    let (mut x, y) = (rig.buffer::<u32>(200), rig.counted(400));
    let v = rig.s.upload_2d(v, &mut x, grid).unwrap().wait().unwrap();
    assert_eq!(rig.read(&x), expected(vec![0; 200], &counted(400), grid));
    let v = rig.s.download_2d(&y, v, Grid::new(1, 20).source_pitch(20).target_pitch(20)).unwrap();
    assert!(!v.is_done());
    drop(v);
    assert!(rig.rt.pinned_near(0).stats().memory.pending > 0);
    rig.sim.run_all();
    drop(PinnedVec::<u32, _>::with_capacity_in(400, rig.rt.pinned_near(0).allocator()));
    assert_eq!(rig.rt.pinned_near(0).stats().memory.pending, 0);
    assert_silent(&rig.sim);
}

#[test]
fn rows_that_lie_in_one_side_only_are_refused_and_nothing_is_queued() {
    let rig = Rig::new(Sim::h200(1).stepped());
    let (x, mut y) = (rig.buffer::<u32>(100), rig.buffer::<u32>(50));
    let copy = |grid: Grid, y: &mut DeviceBuffer<u32>| rig.s.copy_2d(&x, y, grid);
    // To the last element, and one beyond.
    let fits = Grid::new(10, 9).source_pitch(11).target_pitch(10);
    let short = |len: u64, bytes: u64| {
        Err(MemoryError::OutOfBounds { offset: 0, len: len * 4, bytes: bytes * 4 })
    };
    assert_eq!(copy(fits, &mut y), short(90, 50));
    assert_eq!(copy(Grid::new(10, 5).source_pitch(23), &mut y), short(102, 100));
    assert_eq!(
        copy(Grid::new(10, 5).source_pitch(9), &mut y),
        Err(MemoryError::BadPitch { pitch: 36, width: 40 })
    );
    assert_eq!(
        copy(Grid::new(10, 5).target_pitch(0), &mut y),
        Err(MemoryError::BadPitch { pitch: 0, width: 40 })
    );
    assert!(matches!(copy(Grid::new(usize::MAX, 2), &mut y), Err(MemoryError::TooLarge { .. })));
    let far = Grid::new(1, usize::MAX).source_pitch(usize::MAX / 8);
    assert!(matches!(copy(far, &mut y), Err(MemoryError::OutOfBounds { .. })));
    for nothing in [Grid::new(0, 9), Grid::new(9, 0)] {
        copy(nothing, &mut y).unwrap();
        rig.s.fill_2d(&mut y, 1, 9, nothing.width, nothing.height).unwrap();
    }
    assert_eq!(
        rig.s.fill_2d(&mut y, 1, 9, 10, 2),
        Err(MemoryError::BadPitch { pitch: 36, width: 40 })
    );
    assert_eq!(rig.s.fill_2d(&mut y, 1, 41, 10, 2), short(51, 50));

    let mut v = PinnedVec::new_in(rig.rt.pinned_near(0).allocator());
    v.extend(counted(49));
    let address = v.as_ptr();
    let refused = rig.s.upload_2d(v, &mut y, Grid::new(10, 5)).map(drop).unwrap_err();
    assert_eq!(refused.error, MemoryError::OutOfBounds { offset: 0, len: 200, bytes: 196 });
    assert_eq!((refused.host.as_ptr(), &refused.host[..]), (address, &counted(49)[..]));
    assert_eq!(rig.sim.pending(rig.s.raw()), 0);
    assert_eq!(rig.made(Call::Copy2d) + rig.made(Call::Fill2d32), 0);
    copy(Grid::new(10, 5).source_pitch(22), &mut y).unwrap();
    rig.s.fill_2d(&mut y, 1, 40, 10, 2).unwrap();
    assert_silent(&rig.sim);
}

/// Fills a buffer, the middle of one, and rows of one.
fn fills<T: Pod + PartialEq + Debug>(rig: &Rig, value: T, other: T) {
    for len in [1, 2, 3, 100, 1021] {
        let mut x = rig.buffer::<T>(len);
        rig.s.fill(&mut x, other).unwrap();
        assert_eq!(rig.read(&x), vec![other; len]);
        let middle = len / 3..len - len / 4;
        rig.s.fill(&mut x.slice_mut(middle.clone()).unwrap(), value).unwrap();
        let mut all = vec![other; len];
        all[middle].fill(value);
        assert_eq!(rig.read(&x), all);
    }
    let mut x = rig.buffer::<T>(100);
    rig.s.fill(&mut x, other).unwrap();
    rig.s.fill_2d(&mut x, value, 10, 3, 9).unwrap();
    let all: Vec<T> = (0..100).map(|i| if i % 10 < 3 && i < 90 { value } else { other }).collect();
    assert_eq!(rig.read(&x), all);
}

#[test]
fn elements_of_every_size_are_filled_with_their_value() {
    for sim in [Sim::h200(1), Sim::h200(1).seeded(11)] {
        let rig = Rig::new(sim);
        fills::<u8>(&rig, 1, 2);
        fills::<[u8; 3]>(&rig, [1, 2, 3], [4; 3]);
        fills::<u16>(&rig, 0x0102, 0x0304);
        fills::<f32>(&rig, 1.5, -0.0);
        fills::<f64>(&rig, std::f64::consts::PI, 0.0);
        fills::<u64>(&rig, u64::from_ne_bytes([1, 2, 3, 4, 1, 2, 3, 4]), 7);
        fills::<[f64; 3]>(&rig, [1.0, 2.0, 2.0], [0.25; 3]);
        fills::<[u16; 5]>(&rig, [1, 1, 2, 3, 5], [8; 5]);
        assert_silent(&rig.sim);
    }
}

#[test]
fn a_fill_is_one_call_where_the_driver_has_one_and_few_where_it_has_none() {
    let rig = Rig::new(Sim::h200(1).symbolic());
    let all = || {
        let calls = [Call::Fill, Call::Fill16, Call::Fill32, Call::CopyOnDevice];
        calls.map(|call| rig.made(call))
    };
    let cost = |work: &dyn Fn()| {
        let before = all();
        work();
        let mut after = all();
        after.iter_mut().zip(before).for_each(|(after, before)| *after -= before);
        after
    };
    const LEN: usize = 1 << 20;
    assert_eq!(cost(&|| rig.s.fill(&mut rig.buffer(LEN), 1.0f32).unwrap()), [0, 0, 1, 0]);
    assert_eq!(cost(&|| rig.s.fill(&mut rig.buffer(LEN), 1u16).unwrap()), [0, 1, 0, 0]);
    assert_eq!(cost(&|| rig.s.fill(&mut rig.buffer(LEN), [0.0f64; 8]).unwrap()), [1, 0, 0, 0]);
    assert_eq!(
        cost(&|| rig.s.fill_bytes(&mut rig.buffer::<f64>(LEN), 0xff).unwrap()),
        [1, 0, 0, 0]
    );
    // Two words, and 2²⁰ elements by doubling one.
    assert_eq!(cost(&|| rig.s.fill(&mut rig.buffer(LEN), 1.1f64).unwrap()), [0, 0, 2, 20]);
    // Runs of equal words are combined.
    let sparse: [u32; 64] = std::array::from_fn(|i| 1 + u32::from(i == 40));
    assert_eq!(cost(&|| rig.s.fill(&mut rig.buffer(3), sparse).unwrap()), [0, 0, 3, 2]);
    assert_silent(&rig.sim);
}

#[test]
fn a_fill_that_the_driver_refuses_says_so() {
    let rig = Rig::new(Sim::h200(1));
    let mut x = rig.buffer::<f64>(10);
    rig.sim.fail(Call::CopyOnDevice, 2, 999);
    let refused = rig.s.fill(&mut x, 1.1);
    assert!(matches!(refused, Err(MemoryError::Driver(e)) if e.code == 999), "{refused:?}");
    rig.s.fill(&mut x, 1.1).unwrap();
    assert_eq!(rig.read(&x), vec![1.1; 10]);
}

#[test]
fn a_copy_to_another_device_comes_behind_both_streams_and_before_what_follows_on_either() {
    for seed in 0..40 {
        let rig = Rig::new(Sim::h200(2).seeded(seed));
        let there = rig.rt.device(1).unwrap();
        let t = there.stream().unwrap();
        for round in 0..4u32 {
            let mut x = rig.buffer::<u32>(1000);
            let mut y: DeviceBuffer<u32> = there.buffer(&t, 1000).unwrap();
            rig.s.fill(&mut x, round).unwrap();
            t.fill(&mut y, 99).unwrap();
            rig.s.copy_to_peer(&x, &mut y, &t).unwrap();
            // The source is written again, and its block reused, on its own stream. The destination
            // is read on its own.
            rig.s.fill(&mut x, 77).unwrap();
            drop(x);
            let mut back = vec![0; 1000];
            t.scope(|c| c.download(&y, &mut back)).unwrap().unwrap();
            assert_eq!(back, vec![round; 1000], "seed {seed}");
        }
        assert_silent(&rig.sim);
    }
}

/// As with the driver: devices without peer access copy through the host.
#[test]
fn a_copy_between_devices_that_are_no_peers_arrives() {
    let mut config = SimConfig::h200(2);
    config.peers = false;
    let rig = Rig::new(Sim::new(config));
    let there = rig.rt.device(1).unwrap();
    assert!(there.info().peers.is_empty());
    let t = there.stream().unwrap();
    let x = rig.counted(100_000);
    let mut y: DeviceBuffer<u32> = there.buffer(&t, 100_000).unwrap();
    rig.s.copy_to_peer(&x, &mut y, &t).unwrap();
    let mut back = vec![0; 100_000];
    t.scope(|c| c.download(&y, &mut back)).unwrap().unwrap();
    assert_eq!(back, counted(100_000));
    assert_silent(&rig.sim);
}

#[test]
fn a_buffer_dropped_behind_a_copy_from_another_device_is_not_reused_before_it() {
    for seed in 0..40 {
        let rig = Rig::new(Sim::h200(2).seeded(seed));
        let there = rig.rt.device(1).unwrap();
        let t = there.stream().unwrap();
        let x = rig.counted(1000);
        for _ in 0..4 {
            let mut y: DeviceBuffer<u32> = there.buffer(&t, 1000).unwrap();
            rig.s.copy_to_peer(&x, &mut y, &t).unwrap();
            drop(y);
            let mut z: DeviceBuffer<u32> = there.buffer(&t, 1000).unwrap();
            t.fill(&mut z, 5).unwrap();
        }
        assert_silent(&rig.sim);
    }
}

/// The control for the two tests above.
#[test]
#[expect(unsafe_code, reason = "leaves the waits out")]
fn the_oracle_reports_an_unordered_copy_between_devices() {
    use aquifer::Operand;
    let rig = Rig::new(Sim::h200(2).stepped());
    let there = rig.rt.device(1).unwrap();
    let t = there.stream().unwrap();
    let x = rig.counted(1000);
    let mut y: DeviceBuffer<u32> = there.buffer(&t, 1000).unwrap();
    t.fill(&mut y, 99).unwrap();
    let (from, to) = (x.range(), y.range());
    // SAFETY: 1. both live on until the streams are idle. 2. deliberately broken.
    unsafe { rig.sim.driver().copy_on_device(rig.s.raw(), to.address, from.address, 4000) }
        .unwrap();
    assert_eq!(rig.sim.take_violations().len(), 1);
    rig.s.synchronize().unwrap();
}

#[test]
fn a_copy_between_devices_checks_both_and_refuses_the_wrong_way_round() {
    let rig = Rig::new(Sim::h200(2).stepped());
    let there = rig.rt.device(1).unwrap();
    let t = there.stream().unwrap();
    let x = rig.counted(1000);
    let mut y: DeviceBuffer<u32> = there.buffer(&t, 1000).unwrap();
    let wrong = |expected, actual| {
        Err(MemoryError::WrongDevice { expected: DeviceId(expected), actual: DeviceId(actual) })
    };
    assert_eq!(t.copy_to_peer(&x, &mut y, &rig.s), wrong(1, 0));
    assert_eq!(rig.s.copy_to_peer(&x, &mut y, &rig.s), wrong(0, 1));
    let mut half = y.slice_mut(0..500).unwrap();
    let lengths = MemoryError::LengthMismatch { from: 4000, to: 2000 };
    assert_eq!(rig.s.copy_to_peer(&x, &mut half, &t), Err(lengths));
    // A refusal by the driver leaves nothing behind. If `t` cannot be made to wait, the copy is
    // complete.
    rig.sim.fail(Call::CopyOnDevice, 1, 999);
    assert!(rig.s.copy_to_peer(&x, &mut y, &t).is_err());
    rig.s.fill(&mut rig.buffer::<u8>(1), 0).unwrap();
    rig.sim.fail(Call::StreamWaitEvent, 1, 999);
    assert!(rig.s.copy_to_peer(&x, &mut y, &t).is_err());
    drop(y);
    let mut z: DeviceBuffer<u32> = there.buffer(&t, 1000).unwrap();
    t.fill(&mut z, 5).unwrap();
    assert_silent(&rig.sim);
}
