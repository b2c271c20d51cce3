//! Tests of the accounting of tenants and tags: their live bytes are exact, for frees on any thread
//! or pool.
#![expect(clippy::panic, reason = "a broken promise is told by a panic")]

use crate::support::{MIB, Random, Reclaimer, Rig, range};
use aquifer_core::{
    Action, Budget, MemoryError, OutOfMemory, Recorder, Tag, event::RingSink, tagged,
};
use aquifer_device::{Block, Debugging, DevicePool, PoolConfig, Request, Resource, Tenant};
use aquifer_driver::{Access, Call, DeviceId, sim::Sim};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

#[track_caller]
fn refused<T: std::fmt::Debug>(answer: aquifer_core::Result<T>) -> OutOfMemory {
    match answer {
        Err(MemoryError::OutOfMemory(error)) => *error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_refusal_names_the_tenant_while_the_pool_has_room_for_others_and_changes_nothing() {
    let rig = Rig::new(256);
    let s = rig.stream();
    let all = Budget::new("all tenants", 24 * MIB);
    let (a, b) = (all.child("tenant a", 16 * MIB), all.child("tenant b", 16 * MIB));
    let (for_a, for_b) = (rig.pool.for_tenant(&a).unwrap(), rig.pool.for_tenant(&b).unwrap());
    let kv = Request::bytes(10 * MIB).tag(Tag::named("kv"));
    let x = for_a.alloc(&s, kv).unwrap();
    let before = rig.pool.stats();
    let told = refused(for_a.alloc(&s, kv));
    let by = told.refused.unwrap();
    assert_eq!(
        (by.budget, by.current, by.limit, told.of_live_bytes),
        ("tenant a", 10 * MIB, 16 * MIB, true)
    );
    assert_eq!((told.tenants[0].name, told.tenants[0].live), ("tenant a", 10 * MIB));
    assert_eq!((told.holders[0].tag, told.holders[0].bytes), (Tag::named("kv"), 10 * MIB));
    let last = "free 4.00 MiB or more of the 10.00 MiB that tenant a holds, or raise the limit of tenant a to 20.00 MiB";
    assert!(told.to_string().ends_with(last), "{told}");
    let after = rig.pool.stats();
    assert_eq!(
        (after.live, after.physical, after.failures),
        (before.live, before.physical, before.failures + 1)
    );
    assert_eq!((a.used(), for_a.live()), (10 * MIB, 10 * MIB));

    let y = for_b.alloc(&s, kv).unwrap();
    assert_eq!(
        refused(for_b.alloc(&s, Request::bytes(5 * MIB))).refused.unwrap().budget,
        "all tenants"
    );
    let _nobodys = rig.alloc(&s, 100 * MIB);
    assert_eq!(all.used(), 20 * MIB, "what is nobody's is not counted");
    drop((x, y));
    assert_eq!(all.used(), 0);
    rig.assert_silent();
}

#[test]
fn a_recorded_refusal_names_the_budget_that_refused_and_the_charged_one() {
    let ring = Arc::new(RingSink::new(256));
    let recorder = Arc::new(Recorder::new(ring.clone()));
    let machine = Budget::new("machine", 64 * MIB);
    let pool_budget = machine.child("pool", 96 * MIB);
    let rig = Rig::on(Sim::h200(1), 96, |config| {
        config.recorder = Some(recorder);
        config.budget = Some(pool_budget);
        config.wait = Duration::ZERO;
    });
    let s = rig.stream();
    let all = Budget::new("all tenants", 20 * MIB);
    let [a, b] = ["tenant a", "tenant b"].map(|name| all.child(name, 16 * MIB));
    let [for_a, for_b] = [&a, &b].map(|tenant| rig.pool.for_tenant(tenant).unwrap());
    let _held = for_a.alloc(&s, Request::bytes(10 * MIB)).unwrap();
    let refused_by = |failed: Option<MemoryError>| {
        assert!(matches!(failed, Some(MemoryError::OutOfMemory(_))), "{failed:?}");
        let failed = ring.take().into_iter().filter(|event| event.action == Action::Fail);
        failed.map(|event| event.refused_by.name()).collect::<Vec<_>>()
    };
    assert_eq!(refused_by(for_a.alloc(&s, Request::bytes(8 * MIB)).err()), ["tenant a"]);
    let above = for_b.alloc(&s, Request::bytes(12 * MIB)).err();
    assert_eq!(refused_by(above), ["all tenants/tenant b"]);
    let large = Request::bytes(80 * MIB);
    assert_eq!(refused_by(rig.pool.alloc(&s, large).err()), ["machine/pool"]);
    assert_eq!(refused_by(rig.pool.alloc_stable(&s, large).err()), ["machine/pool"]);
    // What exceeds the device is refused by no budget.
    assert_eq!(refused_by(rig.pool.alloc(&s, Request::bytes(1 << 50)).err()), ["untagged"]);
}

#[test]
fn live_bytes_end_with_the_block_even_while_others_use_its_memory() {
    let rig = Rig::stepped(64);
    let (s, u) = (rig.stream(), rig.stream());
    let a = Budget::new("tenant a", 8 * MIB);
    let tenant = rig.pool.for_tenant(&a).unwrap();
    let x = tenant.alloc(&s, Request::bytes(6 * MIB)).unwrap();
    let kernel = aquifer_driver::sim::SimKernel::new("reads").reads(range(&x), None);
    let prepared = x.prepare(&u, Access::Read).unwrap();
    rig.sim.launch(u.raw(), kernel).unwrap();
    prepared.finish().unwrap();
    thread::scope(|scope| scope.spawn(move || drop(x)).join()).unwrap();
    assert_eq!((a.used(), rig.pool.stats().pending), (0, 6 * MIB));
    // An error also names the tenant.
    let told = refused(tenant.alloc(&s, Request::bytes(9 * MIB)));
    let in_use: Vec<_> = told.in_use.iter().map(|user| (user.stream, user.bytes)).collect();
    assert_eq!(in_use, [(u.number(), 6 * MIB)]);
    let y = tenant.alloc(&s, Request::bytes(8 * MIB)).unwrap();
    assert_eq!(a.used(), 8 * MIB);
    drop(y);
    u.synchronize().unwrap();
    rig.assert_silent();
}

#[test]
fn bare_addresses_stable_blocks_buffers_and_wrapped_pools_end_their_live_bytes_once() {
    let settings: [fn(&mut PoolConfig); 4] = [
        |_| (),
        |config| config.bypass = true,
        |config| config.debug = Debugging::all(),
        |config| config.recorder = None,
    ];
    for set in settings {
        let rig = Rig::on(Sim::h200(1), 256, set);
        let s = rig.stream();
        let (a, tag) = (Budget::new("tenant a", 64 * MIB), Tag::named("limited"));
        let of_tag = rig.pool.limit_tag(tag, 64 * MIB);
        let tenant = rig.pool.for_tenant(&a).unwrap();
        let request = Request::bytes(MIB).tag(tag);
        let both = || (a.used(), of_tag.used());
        let raw = [(); 2].map(|()| tenant.alloc(&s, request).unwrap().into_raw());
        let stable = tenant.alloc_stable(&s, request).unwrap();
        let buffer = tenant.buffer::<u8>(&s, 100).unwrap();
        let wrapped: &dyn Resource = &tenant;
        let other = wrapped.allocate(&s, request).unwrap();
        assert_eq!(both(), (4 * MIB + 100, 4 * MIB));
        drop((buffer, other));
        let again = rig.pool.from_raw(raw[0]).unwrap();
        rig.pool.free_raw(raw[1]).unwrap();
        assert_eq!(both(), (2 * MIB, 2 * MIB));
        drop((again, stable.into_block()));
        assert_eq!(both(), (0, 0));
        rig.assert_silent();
    }
}

#[test]
fn a_tag_limit_applies_beside_its_tenant_and_can_be_changed() {
    let rig = Rig::new(256);
    let s = rig.stream();
    let (tag, other) = (Tag::named("kv-cache"), Tag::named("weights"));
    let alloc = |mib: u64, tag| rig.pool.alloc(&s, Request::bytes(mib * MIB).tag(tag));
    // Freed last, and therefore kept in front of the cache for the same request.
    drop(alloc(20, tag).unwrap());
    let before = alloc(6, tag).unwrap();
    let budget = rig.pool.limit_tag(tag, 10 * MIB);
    let x = alloc(8, tag).unwrap();
    let told = refused(alloc(3, tag));
    assert_eq!((told.refused.unwrap().budget, told.of_live_bytes), ("kv-cache", true));
    assert_eq!(
        refused(alloc(20, tag)).remedy().to_string(),
        "raise the limit of kv-cache to 28.00 MiB, or ask for less at a time"
    );
    drop((alloc(30, other).unwrap(), alloc(30, Tag::NONE).unwrap()));
    drop(before);
    assert_eq!(budget.used(), 8 * MIB, "what was there before does not count");
    let a = Budget::new("tenant a", 1);
    let small = Request::bytes(MIB).tag(tag);
    assert_eq!(
        refused(rig.pool.for_tenant(&a).unwrap().alloc(&s, small)).refused.unwrap().budget,
        "tenant a"
    );
    assert!(rig.pool.limit_tag(tag, 12 * MIB).is(&budget));
    let y = alloc(3, tag).unwrap();
    let held = Mutex::new(rig.budget.reserve(8 * MIB).unwrap());
    let drawn = rig.pool.alloc_reserved(&s, Request::bytes(2 * MIB).tag(tag), &held);
    assert_eq!(refused(drawn).refused.unwrap().budget, "kv-cache");
    drop((x, y));
    assert_eq!(budget.used(), 0);
}

#[test]
fn one_tenant_has_one_limit_over_several_pools_and_none_in_the_tree_that_pools_are_charged_to() {
    let sim = Sim::h200(2);
    let open =
        |device| DevicePool::open(sim.driver(), DeviceId(device), PoolConfig::default()).unwrap();
    let pools = [open(0), open(1)];
    let a = Budget::new("tenant a", 10 * MIB);
    let on = |at: usize| pools[at].for_tenant(&a).unwrap();
    let x = on(0).alloc(&pools[0].stream().unwrap(), Request::bytes(6 * MIB)).unwrap();
    let s = pools[1].stream().unwrap();
    let told = refused(on(1).alloc(&s, Request::bytes(6 * MIB)));
    assert_eq!((told.refused.unwrap().remaining, told.tenants[0].live), (4 * MIB, 6 * MIB));
    drop(x);
    drop(on(1).alloc(&s, Request::bytes(10 * MIB)).unwrap());
    let below = pools[0].budget().child("tenant b", MIB);
    for wrong in [&below, pools[0].budget()] {
        let answer = pools[0].for_tenant(wrong);
        assert!(matches!(answer, Err(MemoryError::BadSetting { .. })), "{answer:?}");
    }
    assert!(pools[1].for_tenant(&below).is_ok(), "it is another tree");
}

#[test]
fn a_registered_reclaimer_is_called_before_its_tenant_is_refused() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let a = Budget::new("tenant a", 8 * MIB);
    let tenant = rig.pool.for_tenant(&a).unwrap();
    let old = (0..2).map(|_| tenant.alloc(&s, Request::bytes(4 * MIB)).unwrap());
    let old = Arc::new(Mutex::new(old.collect::<Vec<_>>()));
    let evicted = old.clone();
    let cache = Reclaimer::new(move || drop(evicted.lock().unwrap().pop()));
    let _registration = a.on_need(&cache);
    let x = tenant.alloc(&s, Request::bytes(3 * MIB)).unwrap();
    assert_eq!((old.lock().unwrap().len(), a.used()), (1, 7 * MIB));
    let told = refused(tenant.alloc(&s, Request::bytes(8 * MIB)));
    assert_eq!((told.tried[0].step, told.tried[0].gave), ("a reclaimer", 4 * MIB));
    drop(x);
}

#[test]
fn threads_of_one_tenant_use_its_last_byte_and_leave_nothing() {
    const LIMIT: u64 = 4 * MIB;
    let rig = Rig::on(Sim::h200(1).symbolic(), 256, |_| ());
    let a = Budget::new("tenant a", LIMIT);
    let most = AtomicU64::new(0);
    let sum = AtomicU64::new(0);
    thread::scope(|scope| {
        for seed in 0..4u64 {
            let (tenant, s): (Tenant, _) = (rig.pool.for_tenant(&a).unwrap(), rig.stream());
            let (most, sum) = (&most, &sum);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                let mut next = |end: u64| random.below(end);
                let mut held: Vec<Block> = Vec::new();
                for _ in 0..2_000 {
                    if next(3) > 0 {
                        let bytes = 1 + next(300 << 10);
                        if let Ok(block) = tenant.alloc(&s, Request::bytes(bytes)) {
                            // Counted at the latest when it is granted, until right before it is
                            // returned.
                            most.fetch_max(
                                sum.fetch_add(bytes, Ordering::SeqCst) + bytes,
                                Ordering::SeqCst,
                            );
                            held.push(block);
                        }
                    } else if !held.is_empty() {
                        let block = held.swap_remove(next(held.len() as u64) as usize);
                        sum.fetch_sub(block.bytes(), Ordering::SeqCst);
                        drop(block);
                    }
                }
                for block in &held {
                    sum.fetch_sub(block.bytes(), Ordering::SeqCst);
                }
            });
        }
    });
    assert!((1..=LIMIT).contains(&most.into_inner()));
    assert_eq!(a.used(), 0);
    let s = rig.stream();
    let whole = rig.pool.for_tenant(&a).unwrap().alloc(&s, Request::bytes(LIMIT)).unwrap();
    assert_eq!((a.used(), a.spare()), (LIMIT, 0));
    drop(whole);
    drop(rig);
    assert_eq!((a.used(), a.children().count()), (0, 0), "leases go with their pool");
}

#[test]
fn parkable_blocks_and_committed_steps_are_under_the_limit_of_their_tag_and_leave_nothing() {
    let rig = Rig::new(256);
    let s = rig.stream();
    let tag = Tag::named("limited apart");
    let limit = rig.pool.limit_tag(tag, 8 * MIB);
    let parkable = rig.pool.parkable(tag).unwrap();
    let block = parkable.alloc(&s, Request::bytes(3 * MIB)).unwrap();
    assert_eq!(limit.used(), 3 * MIB);
    let mut cache = tagged(tag, || rig.pool.reserve_in_steps::<u8>(&s, 64 << 20, 2 * MIB)).unwrap();
    assert_eq!(limit.used(), 3 * MIB, "addresses are no bytes");
    cache.commit_to(4 << 20).unwrap();
    assert_eq!(limit.used(), 7 * MIB);
    // A commit gets all that is missing or nothing.
    let told = refused(cache.commit_to(8 << 20));
    assert_eq!((told.refused.unwrap().requested, told.of_live_bytes), (4 * MIB, true));
    assert_eq!((limit.used(), cache.committed().first().cloned()), (7 * MIB, Some(0..4 << 20)));
    assert!(refused(parkable.alloc(&s, Request::bytes(2 * MIB))).of_live_bytes);
    cache.decommit(2 << 20..cache.max_len()).unwrap();
    assert_eq!(limit.used(), 5 * MIB);
    cache.commit_to(5 << 20).unwrap_err();
    cache.commit_to(4 << 20).unwrap();
    drop(block);
    assert_eq!(limit.used(), 4 * MIB);
    // Memory that the driver refuses is not charged.
    rig.sim.fail_every(Call::HandleCreate, 1, 999);
    cache.commit_to(8 << 20).unwrap_err();
    rig.sim.clear_failures();
    assert_eq!(limit.used(), 4 * MIB);
    drop(cache);
    assert_eq!(limit.used(), 0);
    rig.assert_silent();
}

#[test]
fn committed_steps_are_the_tenants_live_bytes_until_they_are_decommitted() {
    let rig = Rig::new(256);
    let s = rig.stream();
    let all = Budget::new("all tenants", 24 * MIB);
    let (a, b) = (all.child("tenant a", 16 * MIB), all.child("tenant b", 16 * MIB));
    let (for_a, for_b) = (rig.pool.for_tenant(&a).unwrap(), rig.pool.for_tenant(&b).unwrap());
    let (mut x, mut y) =
        (for_a.reserve::<u8>(&s, 1 << 30).unwrap(), for_b.reserve::<u8>(&s, 1 << 30).unwrap());
    assert_eq!(all.used(), 0, "addresses are not counted");
    x.commit_to(15 << 20).unwrap();
    assert_eq!((for_a.live(), for_b.live()), (16 * MIB, 0));

    let (before, physical) = (rig.pool.stats().live, rig.budget.used());
    let told = refused(x.commit_to(17 << 20));
    let by = told.refused.unwrap();
    assert_eq!(
        (by.budget, by.current, by.limit, told.of_live_bytes),
        ("tenant a", 16 * MIB, 16 * MIB, true)
    );
    let of_block = refused(for_a.alloc(&s, Request::bytes(2 * MIB)));
    assert_eq!(of_block.refused, told.refused, "the same refusal as a block's");
    assert_eq!(
        (rig.pool.stats().live, rig.budget.used(), x.committed_bytes()),
        (before, physical, 16 * MIB)
    );

    y.commit_to(8 << 20).unwrap();
    assert_eq!(refused(y.commit_to(10 << 20)).refused.unwrap().budget, "all tenants");
    assert_eq!(x.decommit(4 << 20..1 << 30).unwrap(), 12 * MIB);
    assert_eq!(
        (for_a.live(), all.used()),
        (4 * MIB, 12 * MIB),
        "at the decommit, not when the memory is gone"
    );
    y.commit_to(16 << 20).unwrap();
    drop((x, y));
    assert_eq!(all.used(), 0);
    rig.assert_silent();
}

#[test]
fn a_commit_that_the_pool_or_the_tag_refuses_charges_no_tenant() {
    let rig = Rig::new(8);
    let s = rig.stream();
    let a = Budget::new("tenant a", 64 * MIB);
    let tenant = rig.pool.for_tenant(&a).unwrap();
    let mut x = tenant.reserve::<u8>(&s, 1 << 30).unwrap();
    assert!(!refused(x.commit_to(10 << 20)).of_live_bytes);
    assert_eq!((a.used(), rig.budget.used()), (0, 0));
    let tag = Tag::named("limited kv");
    let limit = rig.pool.limit_tag(tag, 2 * MIB);
    let mut y = tagged(tag, || tenant.reserve::<u8>(&s, 1 << 30)).unwrap();
    y.commit_to(1).unwrap();
    assert_eq!(refused(y.commit_to(3 << 20)).refused.unwrap().budget, "limited kv");
    assert_eq!((a.used(), limit.used()), (2 * MIB, 2 * MIB));
    drop(y);
    assert_eq!((a.used(), limit.used()), (0, 0));
}

#[test]
fn an_idle_tenant_uses_nothing_of_its_budget_nor_of_those_above() {
    let rig = Rig::new(256);
    let all = Budget::new("all tenants", 64 * MIB);
    let (a, s) = (all.child("tenant a", 16 * MIB), rig.stream());
    let tenant = rig.pool.for_tenant(&a).unwrap();
    let block = tenant.alloc(&s, Request::bytes(1000)).unwrap();
    let figures = |budget: &Budget| (budget.used(), budget.figures().used);
    assert_eq!((figures(&a), figures(&all)), ((1000, 1000), (1000, 1000)));
    assert!(a.spare() > 0, "a lease holds more in advance");
    drop(block);
    assert_eq!((figures(&a), figures(&all), tenant.live()), ((0, 0), (0, 0), 0));
}

#[test]
fn parkable_blocks_of_a_tenant_count_for_it_until_they_are_freed_parked_or_not() {
    let rig = Rig::new(256);
    let (a, s, tag) = (Budget::new("tenant a", 8 * MIB), rig.stream(), Tag::named("of tenants"));
    let tenant = rig.pool.for_tenant(&a).unwrap();
    let (parkable, others) = (tenant.parkable(tag).unwrap(), rig.pool.parkable(tag).unwrap());
    let (x, other) =
        (parkable.alloc(&s, Request::bytes(6 * MIB)), others.alloc(&s, Request::bytes(MIB)));
    assert_eq!(a.used(), 6 * MIB, "blocks of others are not the tenant's");
    let told = refused(parkable.alloc(&s, Request::bytes(3 * MIB)));
    assert_eq!((told.refused.unwrap().budget, told.of_live_bytes), ("tenant a", true));
    #[expect(unsafe_code, reason = "parks what nothing uses")]
    // SAFETY: 1. and 2. nothing uses the blocks.
    unsafe { rig.pool.park(tag, aquifer_device::Park::discard()) }.unwrap();
    assert_eq!((rig.pool.stats().physical, a.used()), (0, 6 * MIB));
    // A refusal by the parked tag gives the tenant's charge back.
    assert!(parkable.alloc(&s, Request::bytes(MIB)).is_err());
    assert_eq!(a.used(), 6 * MIB);
    drop(x.unwrap());
    assert_eq!(a.used(), 0);
    rig.pool.resume(tag, None).unwrap();
    drop(other.unwrap());
}
