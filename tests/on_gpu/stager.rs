//! Tests of staging on a real GPU: bytes, and order with kernels.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::first_gpu::{self, RuntimeInTurn};
use aquifer::{
    DeviceBuffer, DevicePool, FileSource, Stager, StagerConfig, Stream, staging::ReadMode,
};
use std::{env, fs, process, thread};

const MIB: usize = 1 << 20;

struct Gpu {
    rt: RuntimeInTurn,
}

/// Returns the first GPU, or prints why there is none.
fn gpu() -> Option<Gpu> {
    Some(Gpu { rt: first_gpu::runtime()? })
}

impl Gpu {
    fn pool(&self) -> &DevicePool {
        self.rt.device(0).unwrap()
    }

    fn stager(&self, config: StagerConfig) -> Stager {
        self.rt.stager(0, config).unwrap()
    }

    fn buffer(&self, s: &Stream, bytes: usize) -> DeviceBuffer<u8> {
        self.pool().buffer(s, bytes).unwrap()
    }
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 251 + at / 65_521) as u8 ^ seed).collect()
}

/// Returns the contents on the device, read by the driver's own copy.
fn download(s: &Stream, x: &DeviceBuffer<u8>) -> Vec<u8> {
    let mut back = vec![0; x.len()];
    s.scope(|c| c.download(x, &mut back)).unwrap().unwrap();
    back
}

#[test]
fn bytes_go_up_and_down_at_every_size() {
    let Some(gpu) = gpu() else { return };
    let s = gpu.pool().stream().unwrap();
    let mut small = StagerConfig::default();
    (small.slot, small.least_chunk, small.direct) = (MIB, 64 << 10, 4096);
    for config in [StagerConfig::default(), small] {
        let stager = gpu.stager(config);
        for bytes in [
            1,
            4096,
            4097,
            65_535,
            98_305,
            300_001,
            512 << 10,
            MIB + 3,
            9 * MIB + 77,
            200 * MIB + 1,
        ] {
            let up = pattern(bytes + 3, bytes as u8);
            let mut x = gpu.buffer(&s, bytes);
            stager.scope(|stage| stage.upload(&up[3..], &mut x).map(drop)).unwrap().unwrap();
            assert!(download(&s, &x) == up[3..], "{bytes} bytes up");
            let mut down = vec![0; bytes + 1];
            stager.scope(|stage| stage.download(&x, &mut down[1..]).map(drop)).unwrap().unwrap();
            assert!(down[1..] == up[3..], "{bytes} bytes down");
        }
    }
}

#[test]
fn a_transfer_comes_after_what_was_queued_before_and_before_what_comes_after() {
    let Some(gpu) = gpu() else { return };
    let stager = gpu.stager(StagerConfig::default());
    let (s, u) = (gpu.pool().stream().unwrap(), gpu.pool().stream().unwrap());
    let bytes = 256 * MIB;
    let (mut x, mut y) = (gpu.buffer(&s, bytes), gpu.buffer(&u, bytes));
    for round in 1..=8u8 {
        // Long enough that the host is far ahead.
        for fill in 0..40 {
            s.fill(&mut x, fill ^ round).unwrap();
        }
        let mut down = vec![0; bytes];
        stager.scope(|stage| stage.download(&x, &mut down).map(drop)).unwrap().unwrap();
        assert!(
            down.iter().all(|&byte| byte == 39 ^ round),
            "the last fill had been queued before"
        );
        for fill in 0..40 {
            s.fill(&mut x, fill).unwrap();
        }
        let up = pattern(bytes, round);
        stager.scope(|stage| stage.upload(&up, &mut x).map(drop)).unwrap().unwrap();
        u.copy(&x, &mut y).unwrap();
        s.fill(&mut x, 0).unwrap();
        assert!(download(&u, &y) == up, "no fill came late, and the copy not early");
    }
}

#[test]
fn both_directions_several_threads_and_tickets_at_once() {
    let Some(gpu) = gpu() else { return };
    let stager = gpu.stager(StagerConfig::default());
    let bytes = 48 * MIB + 5;
    thread::scope(|threads| {
        for seed in 0..6u8 {
            let (gpu, stager) = (&gpu, stager.clone());
            threads.spawn(move || {
                let s = gpu.pool().stream().unwrap();
                let mut held = (pattern(bytes, seed), gpu.buffer(&s, bytes));
                for _ in 0..4 {
                    held = stager.upload(held.0, held.1).unwrap().wait().unwrap();
                    let down = stager.download(held.1, vec![0; bytes]).unwrap();
                    let (x, down) = down.wait().unwrap();
                    assert!(down == held.0);
                    held = (down, x);
                }
            });
        }
    });
}

#[test]
fn a_file_and_many_pieces_arrive_whole() {
    let Some(gpu) = gpu() else { return };
    let stager = gpu.stager(StagerConfig::default());
    let s = gpu.pool().stream().unwrap();
    let path = env::temp_dir().join(format!("aquifer-stager-on-gpu-{}", process::id()));
    let bytes = pattern(70 * MIB + 1234, 9);
    fs::write(&path, &bytes).unwrap();
    for mode in [ReadMode::Cached, ReadMode::Direct] {
        let file = FileSource::open(&path, mode).unwrap();
        for (from, to) in [(0, bytes.len()), (4095, 40 * MIB), (17, 60_000)] {
            file.drop_cache().unwrap();
            let mut x = gpu.buffer(&s, to - from);
            stager
                .scope(|stage| stage.read(&file, from as u64, &mut x).map(drop))
                .unwrap()
                .unwrap();
            assert!(download(&s, &x) == bytes[from..to], "{mode:?} {from}..{to}");
        }
    }
    fs::remove_file(&path).unwrap();
    let mut x = gpu.buffer(&s, bytes.len());
    stager.scope(|stage| stage.gather(bytes.chunks(1001), &mut x).map(drop)).unwrap().unwrap();
    assert!(download(&s, &x) == bytes);
    let mut back = vec![0; bytes.len()];
    stager.scope(|stage| stage.scatter(&x, back.chunks_mut(1777)).map(drop)).unwrap().unwrap();
    assert!(back == bytes);
}

#[test]
fn a_cancelled_transfer_leaves_the_device_in_order() {
    let Some(gpu) = gpu() else { return };
    let stager = gpu.stager(StagerConfig::default());
    let s = gpu.pool().stream().unwrap();
    let bytes = 512 * MIB;
    let (mut up, mut x) = (pattern(bytes, 1), gpu.buffer(&s, bytes));
    for _ in 0..10 {
        let ticket = stager.upload(up, x).unwrap();
        ticket.cancel();
        (up, x) = match ticket.wait() {
            Ok(both) => both,
            Err(failed) => failed.back.unwrap(),
        };
        s.fill(&mut x, 7).unwrap();
        assert!(download(&s, &x).iter().all(|&byte| byte == 7), "nothing comes late");
    }
}
