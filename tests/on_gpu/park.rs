//! Tests of parked memory on a real GPU.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]
#![expect(unsafe_code, reason = "parks what no work is about to use")]

use crate::first_gpu::{self, RuntimeInTurn};
use aquifer::{
    Access, Budget, DeviceBuffer, DevicePool, MemoryError, Operand, Park, Parkable, PoolConfig,
    Stream, Tag,
};

const MIB: usize = 1 << 20;

/// Returns a pool under a limit in MiB on the first GPU, or prints why there is none.
fn pool(limit: u64) -> Option<(RuntimeInTurn, DevicePool)> {
    let rt = first_gpu::runtime()?;
    let first = rt.device(0).unwrap();
    if !first.info().virtual_memory {
        println!("skipped: {} cannot map", first.info().name);
        return None;
    }
    let config = PoolConfig::with_budget(Budget::new("the device", limit << 20));
    let driver = rt.driver().unwrap().clone();
    let pool = DevicePool::open(driver, first.device(), config).unwrap();
    Some((rt, pool))
}

fn park(pool: &DevicePool, tag: Tag, how: Park) -> Result<aquifer_device::ParkReport, MemoryError> {
    // SAFETY: 1. and 2. one thread queues work for the tag's blocks, and has queued all of it.
    unsafe { pool.park(tag, how) }
}

/// Returns block `n`, which holds its own number and the position of each word.
fn filled(s: &Stream, parkable: &Parkable, n: u32, words: usize) -> DeviceBuffer<u32> {
    let mut buffer = parkable.buffer(s, words).unwrap();
    let contents: Vec<u32> = (0..words as u32).map(|at| at ^ n << 24).collect();
    s.scope(|c| c.upload(&contents, &mut buffer)).unwrap().unwrap();
    buffer
}

#[track_caller]
fn assert_filled(s: &Stream, buffer: &DeviceBuffer<u32>, n: u32) {
    let mut back = vec![0; buffer.len()];
    s.scope(|c| c.download(buffer, &mut back)).unwrap().unwrap();
    let wrong = back.iter().zip(0..).position(|(&word, at): (_, u32)| word != at ^ n << 24);
    assert_eq!(wrong, None, "block {n}");
}

#[test]
fn a_gibibyte_is_parked_in_pinned_memory_and_restored_at_the_same_addresses() {
    let Some((rt, pool)) = pool(4 << 10) else { return };
    let (s, tag) = (pool.stream().unwrap(), Tag::named("parked on a GPU"));
    let parkable = pool.parkable(tag).unwrap();
    let sizes = [100, 60 * MIB, 1000, 30 * MIB + 7, 130 * MIB, 5 * MIB];
    let all: Vec<_> = (0..).zip(sizes).map(|(n, words)| filled(&s, &parkable, n, words)).collect();
    let addresses: Vec<u64> = all.iter().map(|buffer| buffer.range().address).collect();
    let driver = rt.driver().unwrap();
    let free = || driver.memory_info(pool.device()).unwrap().free;
    for _ in 0..3 {
        let before = free();
        let report = park(&pool, tag, Park::save_in(rt.pinned_near(0).allocator())).unwrap();
        println!("{report:?}");
        assert_eq!((report.refused, pool.budget().used()), (0, 0));
        // Other programs take and free memory too, but not as much.
        assert!(free() >= before + report.released / 2, "{} of {}", free(), before);
        let resumed = pool.resume(tag, None).unwrap();
        println!("{resumed:?}");
        assert_eq!((resumed.restored, resumed.taken), (report.parked, pool.budget().used()));
        assert_eq!(all.iter().map(|buffer| buffer.range().address).collect::<Vec<_>>(), addresses);
        (0..).zip(&all).for_each(|(n, buffer)| assert_filled(&s, buffer, n));
    }
}

#[test]
fn a_park_waits_for_queued_work_and_others_use_the_memory_meanwhile() {
    let Some((rt, pool)) = pool(1 << 10) else { return };
    let (s, u, tag) = (pool.stream().unwrap(), pool.stream().unwrap(), Tag::named("lent GPU"));
    let parkable = pool.parkable(tag).unwrap();
    let mut server: DeviceBuffer<u8> = parkable.buffer(&s, 600 * MIB).unwrap();
    for round in 1..20u8 {
        // Queued on two streams, without a wait.
        for byte in 0..round {
            s.fill(&mut server, byte).unwrap();
        }
        u.fill(&mut server, round).unwrap();
        park(&pool, tag, Park::save_in(rt.pinned_near(0).allocator())).unwrap();
        assert_eq!(
            server.block().prepare(&u, Access::Read).err(),
            Some(MemoryError::Parked { tag })
        );
        let mut training: DeviceBuffer<u8> = pool.buffer(&u, 900 * MIB).unwrap();
        u.fill(&mut training, !round).unwrap();
        assert!(matches!(pool.resume(tag, None), Err(MemoryError::OutOfMemory(_))));
        drop(training);
        pool.resume(tag, None).unwrap();
        let mut back = vec![0; server.len()];
        u.scope(|c| c.download(&server, &mut back)).unwrap().unwrap();
        assert!(back.iter().all(|&byte| byte == round), "round {round}");
    }
}

#[test]
fn discarded_memory_is_restored_as_writable_memory() {
    let Some((_rt, pool)) = pool(1 << 10) else { return };
    let (s, tag) = (pool.stream().unwrap(), Tag::named("cache that is dropped"));
    let parkable = pool.parkable(tag).unwrap();
    let mut cache: DeviceBuffer<u8> = parkable.buffer(&s, 300 * MIB).unwrap();
    for round in 0..5 {
        s.fill(&mut cache, round).unwrap();
        let report = park(&pool, tag, Park::discard()).unwrap();
        assert_eq!((report.saved, pool.stats().physical), (0, 0));
        pool.resume(tag, None).unwrap();
        s.fill(&mut cache, round + 1).unwrap();
        let mut back = vec![0; cache.len()];
        s.scope(|c| c.download(&cache, &mut back)).unwrap().unwrap();
        assert!(back.iter().all(|&byte| byte == round + 1));
    }
}
