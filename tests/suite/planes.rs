//! Tests of copies by rows, of fills with elements of every size, and of copies to other devices.

#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::support::{assert_silent, runtime};
use aquifer::{
    DeviceBuffer, DeviceId, MemoryError, Runtime, Stream,
    driver::Call,
    sim::{Sim, SimConfig},
    stream::Grid,
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

/// Fills a buffer, and the middle of one.
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
}

#[test]
fn rows_are_copied_and_what_lies_between_them_stays() {
    for sim in [Sim::h200(1), Sim::h200(1).stepped(), Sim::h200(1).seeded(3)] {
        let rig = Rig::new(sim);
        let grid = Grid { width: 7, height: 11, from_pitch: 40, to_pitch: 10 };
        let (image, mut tile) = (rig.counted(40 * 30), rig.buffer::<u32>(107));
        rig.s.fill(&mut tile, 9).unwrap();
        // From the fourth row and the sixth column.
        rig.s.copy_2d(image.slice(3 * 40 + 5..40 * 30).unwrap(), &mut tile, grid).unwrap();
        let mut expected = vec![9; 107];
        for row in 0..11 {
            for column in 0..7 {
                expected[row * 10 + column] = ((row + 3) * 40 + column + 5) as u32;
            }
        }
        assert_eq!(rig.read(&tile), expected);
        assert_silent(&rig.sim);
    }
}

#[test]
fn rows_outside_of_a_side_or_onto_themselves_are_refused_and_nothing_is_queued() {
    let rig = Rig::new(Sim::h200(1).stepped());
    let (x, mut y) = (rig.buffer::<u32>(100), rig.buffer::<u32>(50));
    let before = rig.made(Call::CopyRows);
    let fits = Grid { width: 10, height: 5, from_pitch: 22, to_pitch: 10 };
    for (grid, len, bytes) in [
        (Grid { from_pitch: 23, ..fits }, 4 * 102, 400),
        (Grid { to_pitch: 11, ..fits }, 4 * 54, 200),
        (Grid { from_pitch: 9, ..fits }, u64::MAX, 400),
        (Grid { height: usize::MAX, ..fits }, u64::MAX, 400),
        (Grid { width: usize::MAX, ..fits }, u64::MAX, 400),
    ] {
        let refused = MemoryError::OutOfBounds { offset: 0, len, bytes };
        assert_eq!(rig.s.copy_2d(&x, &mut y, grid), Err(refused), "{grid:?}");
    }
    for nothing in [Grid { width: 0, ..fits }, Grid { height: 0, ..fits }] {
        rig.s.copy_2d(&x, &mut y, nothing).unwrap();
    }
    assert_eq!(rig.made(Call::CopyRows), before);
    rig.s.copy_2d(&x, &mut y, fits).unwrap();
    rig.sim.run_all();
    assert_silent(&rig.sim);
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
