//! Tests of stable memory on a real GPU.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

use crate::first_gpu::{self, RuntimeInTurn};
use aquifer::{Budget, DevicePool, PoolConfig, Request, StableBlock, Stream, driver::ExportTypes};

const MIB: usize = 1 << 20;

/// Returns a pool under a limit in MiB on the first GPU, or prints why there is none.
fn pool(limit: u64, export: ExportTypes) -> Option<(RuntimeInTurn, DevicePool)> {
    let rt = first_gpu::runtime()?;
    let first = rt.device(0).unwrap();
    if !first.info().virtual_memory || first.info().export_types.missing(export).is_some() {
        println!("skipped: {} cannot export {export:?}", first.info().name);
        return None;
    }
    let mut config = PoolConfig::with_budget(Budget::new("the device", limit << 20));
    config.export = export;
    let driver = rt.driver().unwrap().clone();
    let pool = DevicePool::open(driver, first.device(), config).unwrap();
    Some((rt, pool))
}

fn fill(s: &Stream, block: &mut StableBlock, byte: u8) {
    let len = block.bytes() as usize;
    s.fill(&mut block.slice_mut::<u8>(0..len).unwrap(), byte).unwrap();
}

fn read(s: &Stream, block: &StableBlock) -> Vec<u8> {
    let len = block.bytes() as usize;
    let mut back = vec![0; len];
    s.scope(|c| c.download(block.slice::<u8>(0..len).unwrap(), &mut back)).unwrap().unwrap();
    back
}

#[test]
fn memory_for_network_cards_is_available_if_the_device_supports_it() {
    let Some((_rt, pool)) = pool(16, ExportTypes::POSIX_FD.with_rdma()) else { return };
    let s = pool.stream().unwrap();
    let mut block = pool.alloc_stable(&s, Request::bytes(MIB as u64)).unwrap();
    fill(&s, &mut block, 3);
    assert!(read(&s, &block).iter().all(|&byte| byte == 3));
}

#[test]
fn a_registered_block_keeps_its_bytes_after_the_free_while_others_need_the_room() {
    let Some((_rt, pool)) = pool(32, ExportTypes::NONE) else { return };
    let s = pool.stream().unwrap();
    let mut block = pool.alloc_stable(&s, Request::bytes(8 * MIB as u64)).unwrap();
    fill(&s, &mut block, 0x77);
    let token = block.register();
    assert!(pool.share(block.block(), "").is_err());
    drop(block);
    // All that is left.
    let left = 24 * MIB;
    for _ in 0..8 {
        let mut other = pool.buffer::<u8>(&s, left).unwrap();
        s.fill(&mut other, 0xff).unwrap();
    }
    assert!(pool.alloc(&s, Request::bytes(30 * MIB as u64)).is_err());
    s.synchronize().unwrap();
    let mut back = [0_u8; 64];
    let to = std::ptr::NonNull::from(&mut back[..]).cast();
    #[expect(unsafe_code, reason = "reads memory that only the registration keeps")]
    // SAFETY: 1. `back` is writable until the stream is idle, just below; the token keeps the
    // device's side.
    // 2. nothing else uses it.
    unsafe { pool.driver().copy_to_host(s.raw(), to, token.range().address, 64) }.unwrap();
    s.synchronize().unwrap();
    assert_eq!(back, [0x77; 64]);
    drop(token);
    pool.trim(0).unwrap();
    assert!(pool.alloc(&s, Request::bytes(30 * MIB as u64)).is_ok());
}

#[test]
fn reserved_elements_grow_and_shrink_while_other_work_runs_on_what_is_committed() {
    let Some((_rt, pool)) = pool(1024, ExportTypes::NONE) else { return };
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let part = 32 * MIB;
    let mut r = pool.reserve::<u8>(&s, 1 << 36).unwrap();
    let address = r.address();
    r.commit_to(part).unwrap();
    // Long fills, so that the device is far behind the host, whose speed does not matter.
    let mut other = pool.buffer::<u8>(&u, 12 * part).unwrap();
    let mut grown_beside_work = 0;
    for round in 1..16_u8 {
        let at = usize::from(round - 1) * part;
        for _ in 0..400 {
            u.fill(&mut other, 0).unwrap();
        }
        u.fill(&mut r.slice_mut(at..at + part).unwrap(), round).unwrap();
        r.commit(at + part..at + 2 * part).unwrap();
        grown_beside_work += u32::from(!u.is_idle().unwrap());
    }
    assert!(grown_beside_work > 0, "every commit waited for the other stream's work");
    drop(other);
    assert_eq!((r.address(), r.committed_bytes()), (address, 16 * part as u64));
    let mut back = vec![0_u8; part];
    for round in 1..16_u8 {
        let at = usize::from(round - 1) * part;
        // While the copy of one part is queued, the next one is decommitted and committed again.
        s.scope(|c| c.download(r.slice(at..at + part).unwrap(), &mut back)).unwrap().unwrap();
        assert!(back.iter().all(|&byte| byte == round), "part {round}");
        u.fill(&mut r.slice_mut(at..at + part).unwrap(), 0xee).unwrap();
        assert_eq!(r.decommit(at..at + part), Ok(part as u64));
    }
    u.synchronize().unwrap();
    s.synchronize().unwrap();
    pool.trim(0).unwrap();
    assert_eq!(pool.budget().used(), part as u64);
    r.commit_to(part).unwrap();
    s.fill(&mut r.slice_mut(0..part).unwrap(), 9).unwrap();
    s.scope(|c| c.download(r.slice(0..part).unwrap(), &mut back)).unwrap().unwrap();
    assert!(back.iter().all(|&byte| byte == 9));
}
