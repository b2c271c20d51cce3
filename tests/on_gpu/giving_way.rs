//! Tests of reclaim between pools under one budget on a real GPU: bytes arrive, and the driver gets
//! the released memory. Each test prints how long its steps took.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::first_gpu::{self, RuntimeInTurn};
use aquifer::{Budget, DeviceBuffer, DevicePool, PoolConfig};
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// Returns two pools under one limit in MiB on the first GPU, or prints why there are none.
fn pools(limit: u64) -> Option<(RuntimeInTurn, Budget, [DevicePool; 2])> {
    let rt = first_gpu::runtime()?;
    let device = rt.device(0).unwrap().device();
    let budget = Budget::new("both", limit * MIB);
    let driver = rt.driver().unwrap().clone();
    let open = || {
        DevicePool::open(driver.clone(), device, PoolConfig::with_budget(budget.clone())).unwrap()
    };
    let both = [open(), open()];
    Some((rt, budget, both))
}

#[test]
fn two_pools_take_turns_with_memory_that_holds_one_of_them_and_no_byte_is_wrong() {
    let Some((_rt, budget, pools)) = pools(1536) else { return };
    let streams = pools.each_ref().map(|pool| pool.stream().unwrap());
    let mut took = Vec::new();
    for round in 0..8u8 {
        let at = usize::from(round % 2);
        let begin = Instant::now();
        let mut buffer: DeviceBuffer<u8> = pools[at].buffer(&streams[at], 1 << 30).unwrap();
        took.push(begin.elapsed());
        // Freed while this runs, so the next one has to wait for it.
        streams[at].fill(&mut buffer, round).unwrap();
        let mut back = vec![0; 1 << 20];
        let end = (1 << 30) - back.len();
        streams[at]
            .scope(|c| c.download(buffer.slice(end..1 << 30).unwrap(), &mut back))
            .unwrap()
            .unwrap();
        assert!(back.iter().all(|&byte| byte == round));
        assert!(budget.peak() <= 1536 * MIB);
    }
    println!("1 GiB from the other pool: {took:?}");
}

#[test]
fn released_memory_is_available_to_a_foreign_library() {
    let Some((rt, _budget, pools)) = pools(4096) else { return };
    let stream = pools[1].stream().unwrap();
    drop(pools[1].buffer::<u8>(&stream, 3 << 30).unwrap());
    let (driver, device) = (rt.driver().unwrap(), pools[0].device());
    let before = driver.memory_info(device).unwrap().free;
    let begin = Instant::now();
    let room = pools[0].give_back(2 << 30, None);
    let took = begin.elapsed();
    let after = driver.memory_info(device).unwrap().free;
    assert_eq!(room.missing, 0, "{room:?}");
    // Other programs may take some of it meanwhile.
    assert!(after >= before + (1 << 30), "{before} free before, {after} after");
    println!("2 GiB given back in {took:?}: {:?}", room.tried);
}
