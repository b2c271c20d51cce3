//! Tests that all sources of device memory refuse with the same error, and that following its
//! advice makes the request succeed.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use crate::support::{MIB, Rig};
use aquifer_adapters::Limit;
use aquifer_core::{
    Budget, Bytes, MemoryError, OutOfMemory, Result, Tag,
    error::{Remedy, RequiredLimits},
};
use aquifer_device::{Adoption, Direct, Opaque, Request, Reserved, StreamOrdered};
use aquifer_driver::{Call, sim::Sim};
use aquifer_stream::Stream;
use std::time::Duration;

fn plain() -> Sim {
    crate::support::plain().symbolic()
}

fn mapping() -> Sim {
    Sim::h200(1).symbolic()
}

/// Returns a pool that never waits, with its own budget below another one.
fn rig(sim: Sim, limit_mib: u64, above_mib: u64) -> (Rig, Budget) {
    let above = Budget::new("the machine", above_mib * MIB);
    let own = above.child("device 0", limit_mib * MIB);
    let mut rig = Rig::on(sim, limit_mib, |config| {
        (config.budget, config.wait) = (Some(own.clone()), Duration::ZERO);
    });
    rig.budget = own;
    (rig, above)
}

#[track_caller]
fn refused<T>(answer: Result<T>) -> OutOfMemory {
    match answer {
        Err(MemoryError::OutOfMemory(error)) => *error,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it is served"),
    }
}

/// Returns the number of bytes that the text of an error states, as a reader would set it.
fn as_written(bytes: u64) -> u64 {
    let text = Bytes(bytes).rounded_up().to_string();
    let (number, unit) = text.split_once(' ').unwrap();
    let unit = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|name| *name == unit).unwrap();
    (number.parse::<f64>().unwrap() * 1024f64.powi(unit as i32)) as u64
}

fn follow(limits: RequiredLimits<'_>, budgets: &[&Budget]) {
    let all = std::iter::once((limits.budget, limits.to))
        .chain(limits.more.iter().map(|r| (r.budget, r.to)));
    for (name, to) in all {
        let budget = budgets.iter().find(|budget| budget.name() == name).unwrap();
        assert!(as_written(to) > budget.limit());
        budget.set_limit(as_written(to));
    }
}

pub(crate) fn limits<'a>(remedy: &Remedy<'a>) -> RequiredLimits<'a> {
    match *remedy {
        Remedy::RaiseLimit { raise }
        | Remedy::Raise { raise }
        | Remedy::FreeOrRaise { raise, .. } => raise,
        Remedy::Free { or_raise: Some(raise), .. }
        | Remedy::FreeWholeHandles { or_raise: Some(raise), .. }
        | Remedy::AskForLess { or_raise: Some(raise), .. } => raise,
        other => panic!("{other:?}"),
    }
}

type Takes = fn(&Rig, &Stream, u64) -> Result<Box<dyn std::any::Any>>;

const TAKES: [Takes; 4] = [
    |rig, s, bytes| Ok(Box::new(rig.pool.alloc(s, Request::bytes(bytes))?)),
    |rig, s, bytes| Ok(Box::new(rig.pool.alloc_stable(s, Request::bytes(bytes))?)),
    |rig, s, bytes| {
        Ok(Box::new(rig.pool.parkable(Tag::named("parkable"))?.alloc(s, Request::bytes(bytes))?))
    },
    |rig, s, bytes| {
        let mut memory: Reserved<u8> = rig.pool.reserve(s, bytes as usize)?;
        memory.commit_to(bytes as usize)?;
        Ok(Box::new(memory))
    },
];

#[test]
fn limits_raised_as_advised_admit_the_request() {
    for (limit, above) in [(64, 96), (64, 64), (96, 64), (1024, 1100)] {
        for (way, take) in TAKES.iter().enumerate() {
            for ask in [22 * MIB, 30 * MIB + 1, 63 * MIB + 12_345, 70 * MIB, 1500 * MIB] {
                let sims = if way < 2 { vec![mapping(), plain()] } else { vec![mapping()] };
                for sim in sims {
                    let (rig, above) = rig(sim, limit, above);
                    let (s, u) = (rig.stream(), rig.stream());
                    // The first use fixes the slot size from the limit.
                    let _parkable = rig.pool.parkable(Tag::named("parkable")).ok();
                    // Live blocks of odd sizes with free ranges between them, until no further
                    // block fits.
                    let mut live = Vec::new();
                    while let Ok(block) = rig.pool.alloc(&s, Request::bytes(3 * MIB + 700_000)) {
                        live.push(block);
                    }
                    let mut nth = 0;
                    live.retain(|_| {
                        nth += 1;
                        nth % 3 > 0
                    });
                    let Err(error) = take(&rig, &u, ask) else { continue };
                    let error = refused::<()>(Err(error));
                    if let Remedy::AskForLess { largest, .. } = error.remedy() {
                        assert!(take(&rig, &u, largest).is_ok(), "{largest} by way {way}: {error}");
                    }
                    follow(limits(&error.remedy()), &[&rig.budget, &above]);
                    let again = take(&rig, &u, ask);
                    assert!(
                        again.is_ok(),
                        "{ask} by way {way}: {error}\nand then {}",
                        again.err().unwrap()
                    );
                    rig.assert_silent();
                }
            }
        }
    }
}

#[test]
fn freeing_the_advised_amount_admits_the_request() {
    for sim in [mapping(), plain()] {
        let (rig, _) = rig(sim, 256, 256);
        let s = rig.stream();
        let mut kv: Vec<_> = Vec::new();
        while let Ok(block) =
            rig.pool.alloc(&s, Request::bytes(32 * MIB - 512).tag(Tag::named("kv")))
        {
            kv.push(block);
        }
        let error = refused(rig.pool.alloc(&s, Request::bytes(60 * MIB)));
        let Remedy::Free { holder, missing, .. } = error.remedy() else { panic!("{error}") };
        assert_eq!(holder.tag, Tag::named("kv"));
        assert!(missing <= 64 * MIB, "{error}");
        let mut freed = 0;
        while freed < missing {
            freed += kv.pop().unwrap().bytes();
        }
        assert!(rig.pool.alloc(&s, Request::bytes(60 * MIB)).is_ok(), "{error}");
    }
}

#[test]
fn stable_memory_beside_a_live_block_in_each_handle_needs_neighbours_freed_or_a_higher_limit() {
    let handle = 2 * MIB;
    let (rig, above) = rig(mapping(), 256, 1024);
    let (s, u) = (rig.stream(), rig.stream());
    let mut live: Vec<_> = std::iter::from_fn(|| {
        let request = Request::bytes(MIB);
        rig.pool.alloc(&s, request).or_else(|_| rig.pool.alloc(&u, request)).ok()
    })
    .collect();
    live.sort_by_key(|block| block.address());
    // One in each handle.
    let mut live: Vec<_> = live.into_iter().step_by((handle / MIB) as usize).collect();
    assert_eq!(live.len() as u64, 256 * MIB / handle);
    let error = refused(rig.pool.alloc_stable(&u, Request::bytes(1000)));
    let free = 256 * MIB - live.len() as u64 * MIB;
    assert!(
        matches!(error.remedy(), Remedy::FreeWholeHandles { free: told, .. } if told == free),
        "{error}"
    );
    follow(limits(&error.remedy()), &[&rig.budget, &above]);
    drop(rig.stable(&u, 1000));
    rig.budget.set_limit(256 * MIB);
    drop(live.pop());
    drop(rig.stable(&u, 1000));
    rig.assert_silent();
}

#[test]
fn synchronising_the_advised_stream_admits_the_request() {
    let rig = Rig::on(Sim::h200(1).stepped(), 64, |config| {
        (config.wait, config.adoption) = (Duration::ZERO, Adoption::DoneOnly);
    });
    let (s, u) = (rig.stream(), rig.stream());
    let mut buffer = rig.bytes(&s, 40 * MIB);
    s.fill(&mut buffer, 1).unwrap();
    drop(buffer);
    let error = refused(rig.pool.alloc(&u, Request::bytes(60 * MIB)));
    assert_eq!(error.remedy(), Remedy::Synchronise { stream: Some(s.number()), bytes: 40 * MIB });
    s.synchronize().unwrap();
    assert!(rig.pool.alloc(&u, Request::bytes(60 * MIB)).is_ok());
    rig.assert_silent();
}

#[test]
fn a_request_larger_than_the_device_is_refused_and_trims_no_cache() {
    for budget in [64 * MIB, u64::MAX] {
        for (way, take) in TAKES.iter().enumerate() {
            let rig = Rig::on(mapping(), 64, |config| {
                config.budget = Some(Budget::new("device 0", budget));
            });
            let s = rig.stream();
            drop(rig.alloc(&s, 30 * MIB));
            let error = refused(take(&rig, &s, 1 << 40));
            let capacity = rig.pool.info().memory;
            assert_eq!(
                error.remedy(),
                Remedy::BeyondPlace { place: "device 0", capacity },
                "{budget} by way {way}"
            );
            let last = format!("ask for less at a time: device 0 has {} in all", Bytes(capacity));
            assert!(error.to_string().ends_with(&last), "{error}");
            assert_eq!(rig.calls(Call::HandleRelease), 0);
            assert_eq!(rig.pool.stats().cached, 30 * MIB);
        }
    }
}

#[test]
fn every_source_of_device_memory_refuses_with_the_same_error() {
    let rig = Rig::on(mapping(), 8, |config| config.wait = Duration::ZERO);
    let s = rig.stream();
    let ask = Request::bytes(9 * MIB);
    let tenant = rig.pool.for_tenant(&Budget::new("tenant a", 8 * MIB)).unwrap();
    let limit = Limit::new(rig.pool.clone(), Budget::new("tenant b", 8 * MIB));
    let (driver, streams) = (rig.sim.driver(), rig.pool.streams().clone());
    let direct = Direct::new(driver.clone(), streams.clone(), Some(Budget::new("direct", 8 * MIB)));
    let ordered = StreamOrdered::new(driver, streams, Budget::new("ordered", 8 * MIB)).unwrap();
    let bypass = Rig::on(mapping(), 8, |config| config.bypass = true);
    let errors = [
        refused(rig.pool.alloc(&s, ask)),
        refused(rig.pool.alloc_stable(&s, ask)),
        refused(rig.pool.warm(9 * MIB)),
        refused(tenant.alloc(&s, ask)),
        refused(limit.allocate(&s, ask)),
        refused(direct.allocate(&s, ask)),
        refused(ordered.allocate(&s, ask)),
        refused(bypass.pool.alloc(&bypass.stream(), ask)),
    ];
    for error in errors {
        assert!(matches!(error.remedy(), Remedy::RaiseLimit { .. }), "{error}");
        assert_eq!(error.place, "device 0");
    }
}

/// Blocks whose last use has ended are free for the next request, although a refused request never
/// reaches the pool.
#[test]
fn a_limit_above_a_pool_admits_requests_after_a_use_on_a_second_stream() {
    let rig = Rig::new(64);
    let (s, u) = (rig.stream(), rig.stream());
    let limit = Limit::new(rig.pool.clone(), Budget::new("tenant", 8 * MIB));
    for _ in 0..50 {
        let block = limit.allocate(&s, Request::bytes(6 * MIB)).unwrap();
        block.prepare(&u, aquifer_driver::Access::Write).unwrap().finish().unwrap();
        drop(block);
    }
    rig.pool.trim(0).unwrap();
    assert_eq!(limit.budget().used(), 0);
    rig.assert_silent();
}

#[test]
fn a_tenant_that_follows_the_advice_is_served() {
    let rig = Rig::new(256);
    let s = rig.stream();
    let all = Budget::new("all tenants", 20 * MIB);
    let tenant = all.child("tenant a", 16 * MIB);
    let held = rig.pool.for_tenant(&tenant).unwrap();
    let limit = Limit::new(rig.pool.clone(), tenant.clone());
    let _live = held.alloc(&s, Request::bytes(9 * MIB)).unwrap();
    for ask in [10 * MIB, 30 * MIB + 1] {
        let error = refused(held.alloc(&s, Request::bytes(ask)));
        follow(limits(&error.remedy()), &[&tenant, &all]);
        assert!(held.alloc(&s, Request::bytes(ask)).is_ok(), "{error}");
        let error = refused(limit.allocate(&s, Request::bytes(2 * ask)));
        follow(limits(&error.remedy()), &[&tenant, &all]);
        assert!(limit.allocate(&s, Request::bytes(2 * ask)).is_ok(), "{error}");
    }
}
