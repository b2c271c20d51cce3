//! Tests of the debugging modes.
//!
//! - Faults of blocks are found, reported with their source lines, and harm no other block.
//! - Correct code is not reported.
//! - With debugging off, behaviour does not change.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::itself::{itself, texts};
use crate::support::{MIB, Rig, assert_returned, assert_silent, range, read};
use aquifer_adapters::Limit;
use aquifer_core::{Action, Budget, MemoryError, Recorder, Tag, event::RingSink};
use aquifer_device::{
    Adoption, CANARY, Debugging, DeviceBuffer, DevicePool, Fault, Finding, GUARD_BYTES, Opaque,
    POISON_ALLOCATED, POISON_FREED, PoolConfig, Request,
};
use aquifer_driver::{
    Access, Call, CallCounts, DeviceId, DeviceRange,
    sim::{OnViolation, Sim, SimKernel, ViolationKind},
};
use aquifer_stream::{Stream, StreamLifetime};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

fn rig(sim: Sim, limit_mib: u64, debug: Debugging) -> Rig {
    Rig::on(sim, limit_mib, |config| {
        config.debug = debug;
        config.wait = Duration::from_millis(50);
    })
}

fn only(set: impl FnOnce(&mut Debugging)) -> Debugging {
    let mut debug = Debugging::default();
    set(&mut debug);
    debug
}

/// Queues a kernel that writes one byte at any address.
fn write(sim: &Sim, stream: &Stream, address: u64, value: u8) {
    let at = DeviceRange { device: DeviceId(0), address, bytes: 1 };
    let kernel =
        SimKernel::new("stray").writes(at, None).run(move |memory| memory.write(0)[0] = value);
    sim.launch(stream.raw(), kernel).unwrap();
}

#[track_caller]
fn one(mut findings: Vec<Finding>) -> Finding {
    assert_eq!(findings.len(), 1, "{findings:?}");
    findings.remove(0)
}

/// Asserts that the oracle found violations of this kind and no others.
#[track_caller]
fn assert_violations(rig: &Rig, kind: ViolationKind) {
    let found = rig.sim.take_violations();
    assert!(!found.is_empty() && found.iter().all(|violation| violation.kind == kind), "{found:?}");
}

// ---- canaries

#[test]
fn a_byte_written_right_before_or_right_behind_a_block_is_found_with_its_offset_and_its_lines() {
    for (offset, bytes) in
        [(-1, 1000), (1000, 1000), (-512, 1000), (1511, 1000), (4096, 4096), (1, 1)]
    {
        let rig = rig(Sim::h200(1), 64, only(|d| d.canaries = true));
        let s = rig.stream();
        let tag = Tag::named("debugged");
        let _first = rig.alloc(&s, 77);
        let line = line!() + 1;
        let block = rig.pool.alloc(&s, Request::bytes(bytes).tag(tag)).unwrap();
        let address = block.address();
        write(&rig.sim, &s, address.wrapping_add_signed(offset), 7);
        let freed = line!() + 1;
        rig.pool.free(block);
        assert!(rig.pool.findings().is_empty(), "a free looks at nothing");
        // The next allocation reads its guards.
        drop(rig.alloc(&s, 1));
        let finding = one(rig.pool.findings());
        match finding.fault {
            Fault::Underrun { offset: at, found } => assert_eq!((at, found), (offset, 7)),
            Fault::Overrun { offset: at, found } => assert_eq!((at as i64, found), (offset, 7)),
            ref other => panic!("{other:?}"),
        }
        assert_eq!(matches!(finding.fault, Fault::Underrun { .. }), offset < 0);
        let told = &finding.block;
        assert_eq!((told.address, told.bytes, told.tag, told.number), (address, bytes, tag, 2));
        assert_eq!((told.allocated_at.file(), told.allocated_at.line()), (file!(), line));
        assert_eq!(told.freed_at.map(|at| (at.file(), at.line())), Some((file!(), freed)));
        let text = finding.to_string();
        for part in [
            format!("{address:#x}"),
            format!("{offset}"),
            "debugged".into(),
            format!("{}:{line}:", file!()),
        ] {
            assert!(text.contains(&part), "{part} is not in {text}");
        }
        assert_violations(&rig, ViolationKind::OutsideBlock);
    }
}

#[test]
fn a_buffer_is_named_by_its_allocation_line_through_wrappers_too() {
    let rig = rig(Sim::h200(1), 64, only(|d| d.leaks = true));
    let s = rig.stream();
    let limit = Limit::new(rig.pool.clone(), Budget::new("a tenant", MIB));
    let lines = line!();
    let _a: DeviceBuffer<u8> = rig.pool.buffer(&s, 3000).unwrap();
    let _b: DeviceBuffer<u8> = DeviceBuffer::new_in(&rig.pool, &s, 2000).unwrap();
    let _c: DeviceBuffer<u8> = DeviceBuffer::new_in(&limit, &s, 1000).unwrap();
    let leaks = rig.pool.leaks().unwrap();
    let at: Vec<_> = leaks.groups().iter().map(|g| (g.at.file(), g.at.line() - lines)).collect();
    assert_eq!(at, [(file!(), 1), (file!(), 2), (file!(), 3)]);
}

#[test]
fn a_check_finds_a_broken_guard_of_a_live_block_once_and_leaves_the_block_alone() {
    let rig = rig(Sim::stepped(Sim::h200(1)), 64, only(|d| d.canaries = true));
    let s = rig.stream();
    let mut x: DeviceBuffer<u8> = rig.pool.buffer(&s, 1000).unwrap();
    s.fill(&mut x, 9).unwrap();
    assert!(rig.pool.check().unwrap().is_empty());
    // The write is still queued when the check begins.
    write(&rig.sim, &s, x.block().address() + 1003, 1);
    let finding = one(rig.pool.check().unwrap());
    assert!(matches!(finding.fault, Fault::Overrun { offset: 1003, found: 1 }), "{finding:?}");
    assert_eq!(finding.block.freed_at, None);
    assert!(rig.pool.check().unwrap().is_empty());
    assert_eq!(read(&s, &x), vec![9; 1000]);
    drop(x);
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.pool.findings().len(), 1, "it is told once");
    assert_violations(&rig, ViolationKind::OutsideBlock);
}

#[test]
fn guards_lie_next_to_the_block_and_keep_its_alignment() {
    let rig = rig(Sim::h200(1), 64, only(|d| d.canaries = true));
    let s = rig.stream();
    for (bytes, align) in [(1, 1), (513, 512), (1000, 4096), (100, 2 << 20)] {
        let block = rig.pool.alloc(&s, Request::bytes(bytes).align(align)).unwrap();
        assert_eq!(block.address() % align.max(512), 0);
        assert_eq!(
            (block.bytes(), block.capacity()),
            (bytes, bytes),
            "what is behind it is not its own"
        );
        for address in [block.address() - GUARD_BYTES, block.address() + bytes] {
            let guard = DeviceRange { device: DeviceId(0), address, bytes: GUARD_BYTES };
            assert_eq!(rig.sim.read_back(guard).unwrap(), vec![CANARY; GUARD_BYTES as usize]);
        }
    }
}

// ---- poison

#[test]
fn unwritten_and_freed_memory_reads_as_poison() {
    let rig = rig(Sim::h200(1), 64, only(|d| d.poison = true));
    let s = rig.stream();
    let mut x: DeviceBuffer<u8> = rig.pool.buffer(&s, 5000).unwrap();
    assert_eq!(read(&s, &x), vec![POISON_ALLOCATED; 5000]);
    s.fill(&mut x, 1).unwrap();
    let there = range(x.block());
    drop(x);
    assert_eq!(rig.sim.read_back(there).unwrap(), vec![POISON_FREED; 5000]);
    let again: DeviceBuffer<u8> = rig.pool.buffer(&s, 5000).unwrap();
    assert_eq!(again.block().address(), there.address, "poison alone keeps nothing from use");
    assert_eq!(read(&s, &again), vec![POISON_ALLOCATED; 5000]);
    rig.assert_silent();
}

#[test]
fn the_stack_of_a_plain_drop_is_reported_if_stacks_are_enabled() {
    let rig = rig(Sim::h200(1), 64, only(|d| (d.canaries, d.backtraces) = (true, true)));
    let s = rig.stream();
    let block = rig.alloc(&s, 1000);
    write(&rig.sim, &s, block.address() + 1000, 2);
    drop(block);
    rig.pool.trim(0).unwrap();
    let finding = one(rig.pool.findings());
    assert!(finding.block.allocated_by.is_some() && finding.block.freed_by.is_some());
    let text = finding.to_string();
    assert!(text.contains("the_stack_of_a_plain_drop"), "{text}");
    let stack = finding.block.freed_by.unwrap().to_string();
    assert!(stack.contains("the_stack_of_a_plain_drop"), "{stack}");
    assert_violations(&rig, ViolationKind::OutsideBlock);
}

#[test]
fn under_pressure_the_pool_waits_for_other_streams_and_a_refusal_reports_pending_bytes() {
    for adoption in [Adoption::Wait, Adoption::Never] {
        // Work runs when the host waits for it, or as time passes where the host only polls.
        let sim = if adoption == Adoption::Wait {
            Sim::h200(1).stepped()
        } else {
            Sim::h200(1).seeded(1)
        };
        let rig = Rig::on(sim, 16, |config| {
            config.debug = Debugging::all();
            (config.adoption, config.wait) = (adoption, Duration::from_millis(500));
        });
        let (s, u) = (rig.stream(), rig.stream());
        for _ in 0..4 {
            let block = rig.alloc(&s, 10 * MIB);
            rig.uses(&u, &block, Access::Write);
        }
        let block = rig.alloc(&s, 10 * MIB);
        let open = block.prepare(&u, Access::Write).unwrap();
        drop(block);
        match rig.pool.alloc(&s, Request::bytes(10 * MIB)) {
            Err(MemoryError::OutOfMemory(error)) => {
                assert_eq!((error.requested, error.live), (10 * MIB, 0));
                assert!(error.pending > 10 * MIB);
            }
            other => panic!("{other:?}"),
        }
        drop(open);
        drop(rig.alloc(&s, 10 * MIB));
        assert!(rig.pool.findings().is_empty(), "{:?}", rig.pool.findings());
        rig.assert_silent();
    }
}

#[test]
fn a_tenants_limit_is_not_charged_for_freed_blocks_whose_guards_were_not_read() {
    let rig = rig(Sim::h200(1), 64, Debugging::all());
    let s = rig.stream();
    let tenant = Budget::new("a tenant", MIB);
    let limit = Limit::new(rig.pool.clone(), tenant.clone());
    for _ in 0..4 {
        let block = limit.allocate(&s, Request::bytes(MIB)).unwrap();
        assert_eq!(tenant.used(), MIB);
        drop(block);
        assert_eq!(tenant.used(), 0);
        assert!(rig.pool.stats().pending > MIB);
    }
}

#[test]
fn blocks_with_open_uses_outlive_the_pool_and_return_with_them() {
    let rig = rig(Sim::h200(1), 64, Debugging::all());
    let (sim, budget) = (rig.sim.clone(), rig.budget.clone());
    let (s, u) = (rig.stream(), rig.stream());
    let block = rig.alloc(&s, MIB);
    let kept = rig.alloc(&s, MIB);
    block.record_use(&u, Access::Read).unwrap();
    drop(block);
    drop(rig);
    assert!(budget.used() > 0);
    drop(kept);
    drop((s, u));
    assert_returned(&sim, &budget);
}

#[test]
fn a_stream_whose_handle_may_be_gone_gets_no_work_but_the_event_of_the_free() {
    let rig = rig(Sim::h200(1), 64, Debugging::all());
    let driver = rig.sim.driver();
    let raw = driver.stream_create(DeviceId(0), 0).unwrap();
    #[expect(unsafe_code, reason = "adopts a stream and destroys it")]
    let adopted = {
        // SAFETY: 1. a stream of this device. 2. it is destroyed while no call is in progress.
        let adopted = unsafe { rig.pool.streams().adopt(raw, StreamLifetime::Fenced) }.unwrap();
        let block = rig.alloc(&adopted, 1000);
        adopted.synchronize().unwrap();
        let before = driver.calls().made();
        assert!(rig.pool.check().unwrap().is_empty());
        assert_eq!(driver.calls().made(), before);
        drop(block);
        let fills = |calls: &CallCounts| calls.get(Call::Fill);
        assert_eq!(
            fills(driver.calls()),
            before.iter().find(|(call, _)| *call == Call::Fill).map_or(0, |c| c.1)
        );
        // SAFETY: 1. the free was the last call to need it.
        unsafe { driver.stream_destroy(raw) }.unwrap();
        let before = driver.calls().made();
        assert!(rig.pool.check().unwrap().is_empty());
        assert_eq!(driver.calls().made(), before);
        adopted
    };
    assert_eq!((rig.pool.stats().live, rig.pool.stats().pending), (0, 0));
    assert!(rig.pool.findings().is_empty());
    rig.assert_silent();
    drop(adopted);
}

#[test]
fn a_block_that_cannot_be_read_back_is_released_and_reported() {
    let rig = rig(Sim::h200(1), 64, only(|d| d.canaries = true));
    let s = rig.stream();
    rig.sim.fail_every(Call::CopyToHost, 1, 2);
    drop(rig.bytes(&s, 1000));
    assert!(rig.pool.findings().is_empty());
    let next = rig.bytes(&s, 1000);
    let finding = one(rig.pool.findings());
    assert!(
        matches!(finding.fault, Fault::Unchecked { error: MemoryError::Driver(_) }),
        "{finding:?}"
    );
    assert_eq!(finding.block.number, 1);
    rig.sim.clear_failures();
    drop((next, s));
    rig.assert_empty();
    assert_eq!(rig.pool.findings().len(), 1);
    close(rig);
}

// ---- leaks

#[test]
fn live_blocks_are_reported_by_line_largest_first_and_again_when_the_pool_closes() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hook = heard.clone();
    let debug =
        only(|d| d.leaks = true).on_finding(move |f| hook.lock().unwrap().push(f.to_string()));
    let rig = rig(Sim::h200(1), 64, debug);
    let s = rig.stream();
    let alloc =
        |bytes, tag| rig.pool.alloc(&s, Request::bytes(bytes).tag(Tag::named(tag))).unwrap();
    let small = [alloc(100, "one"), alloc(300, "two"), alloc(200, "two")];
    let large = rig.alloc(&s, 5000);
    drop(alloc(1 << 20, "freed"));
    let leaks = rig.pool.leaks().unwrap();
    assert_eq!((leaks.bytes(), leaks.blocks(), leaks.groups().len()), (5600, 4, 2));
    assert_eq!(leaks.groups()[0].blocks[0].address, large.address());
    let second: Vec<_> =
        leaks.groups()[1].blocks.iter().map(|b| (b.bytes, b.tag.name(), b.number)).collect();
    assert_eq!(second, [(300, "two", 2), (200, "two", 3), (100, "one", 1)]);
    let text = leaks.to_string();
    assert!(text.contains("600 B in 3 blocks") && text.contains(file!()), "{text}");
    assert!(heard.lock().unwrap().is_empty());
    let Rig { pool, .. } = rig;
    drop(pool);
    let heard = heard.lock().unwrap().clone();
    assert_eq!(heard.len(), 4);
    assert!(heard[0].starts_with("never freed") && heard[0].contains("4.88 KiB"), "{}", heard[0]);
    drop((small, large));
}

// ---- where findings go

#[test]
fn a_finding_is_listed_recorded_and_passed_to_the_hook_whose_panic_is_caught() {
    let ring = Arc::new(RingSink::new(100));
    let rig = Rig::on(Sim::h200(1), 64, |config| {
        config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
        config.debug = only(|d| d.canaries = true).on_finding(|_| panic!("a hook of the user's"));
    });
    let s = rig.stream();
    let block = rig.alloc(&s, 1000);
    let address = block.address();
    write(&rig.sim, &s, address + 1000, 1);
    drop(block);
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.pool.findings().len(), 1);
    let events = ring.take();
    let told: Vec<_> = events.iter().filter(|e| e.action == Action::Finding).collect();
    assert_eq!(told.len(), 1);
    assert_eq!((told[0].address, told[0].bytes), (address, 1000));
    assert_violations(&rig, ViolationKind::OutsideBlock);
}

// ---- settings

#[test]
fn bypass_allows_poison_and_leaks_and_refuses_guards_that_blind_the_memory_checker() {
    let open = |debug: Debugging| {
        let mut config = PoolConfig::with_budget(Budget::new("the device", 16 * MIB));
        (config.bypass, config.debug) = (true, debug);
        let sim = Sim::h200(1);
        DevicePool::open(sim.driver(), DeviceId(0), config).map(|pool| (sim, pool))
    };
    match open(only(|d| d.canaries = true)) {
        Err(MemoryError::BadSetting { name, .. }) => assert_eq!(name, "canaries"),
        other => panic!("{other:?}"),
    }
    let (sim, pool) = open(only(|d| (d.poison, d.leaks) = (true, true))).unwrap();
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let x: DeviceBuffer<u8> = pool.buffer(&s, 1000).unwrap();
    assert_eq!(read(&s, &x), vec![POISON_ALLOCATED; 1000]);
    assert_eq!(sim.driver().calls().get(Call::MemAlloc), 1);
    assert_eq!(pool.leaks().unwrap().bytes(), 1000);
    x.block().prepare(&u, Access::Read).unwrap().finish().unwrap();
    drop(x);
    assert_eq!(pool.stats().blocks, 0);
    // More memory than fits beside the block that waits for its other stream.
    drop(pool.alloc(&s, Request::bytes(16 * MIB)).unwrap());
    pool.trim(0).unwrap();
    assert_eq!((pool.stats().physical, pool.budget().used()), (0, 0));
    assert_silent(&sim);
}

/// Runs one of the ignored tests below in a separate process and returns its output.
fn child(name: &str, value: &str) -> (String, String) {
    let output = itself(&format!("debugging::{name}")).env("AQUIFER_DEBUG", value).output();
    let output = output.unwrap();
    let [told, errors] = texts(&output);
    assert!(output.status.success() && told.contains("1 passed"), "{told}{errors}");
    (told, errors)
}

#[test]
#[ignore = "half of another test"]
fn child_overruns() {
    let sim = Sim::h200(1).on_violation(OnViolation::Quiet);
    match DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default()) {
        Ok(pool) => {
            let s = pool.stream().unwrap();
            let block = pool.alloc(&s, Request::bytes(1000)).unwrap();
            write(&sim, &s, block.address() + 1000, 1);
            drop(block);
            pool.trim(0).unwrap();
            println!("found {}", pool.findings().len());
        }
        Err(error) => println!("refused: {error:?}"),
    }
}

#[test]
fn the_environment_enables_the_named_modes_and_prints_findings_without_a_hook() {
    for list in ["canaries", "all", "poison,canaries"] {
        let (told, errors) = child("child_overruns", list);
        assert!(told.contains("found 1\n"), "{list}: {told}");
        assert!(
            errors.contains("aquifer: written past its end: 0x01 at byte 1000 of 1000"),
            "{errors}"
        );
        assert!(errors.contains("debugging.rs:"), "{errors}");
    }
    for list in ["", "0", "off", "poison,leaks"] {
        let (told, errors) = child("child_overruns", list);
        assert!(told.contains("found 0\n"), "{list}: {told}");
        assert!(!errors.contains("aquifer: "), "{errors}");
    }
}

#[test]
fn an_invalid_list_of_modes_is_an_error_of_open() {
    for list in ["banana", "poison,", "quarantine=64MiB", "overlap", "canaries poison", "all=1"] {
        let (told, _) = child("child_overruns", list);
        let refused = format!("refused: AQUIFER_DEBUG is {list:?}; it can be poison");
        assert!(told.contains(&refused), "{told}");
    }
}

// ---- no bytes are lost

fn close(rig: Rig) {
    rig.assert_silent();
    let Rig { sim, pool, .. } = rig;
    drop(pool);
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    assert_silent(&sim);
}

fn everything() -> Debugging {
    only(|d| (d.poison, d.canaries, d.leaks) = (true, true, true))
}

#[test]
fn a_lost_device_loses_the_blocks_and_nothing_else() {
    let rig = rig(Sim::h200(1), 64, everything());
    let s = rig.stream();
    let kept = rig.alloc(&s, MIB);
    for _ in 0..4 {
        drop(rig.alloc(&s, 100_000));
    }
    rig.sim.lose_device(DeviceId(0));
    drop(kept);
    assert!(matches!(
        rig.pool.alloc(&s, Request::bytes(3 * MIB)),
        Err(MemoryError::DeviceLost { .. })
    ));
    assert!(rig.pool.findings().is_empty(), "{:?}", rig.pool.findings());
    let budget = rig.budget.clone();
    drop((rig, s));
    assert_eq!(budget.used(), 0);
}

#[test]
fn threads_free_while_others_check_and_every_block_is_returned() {
    let rig = rig(Sim::h200(1), 256, everything());
    std::thread::scope(|scope| {
        for id in 0..4u64 {
            let rig = &rig;
            scope.spawn(move || {
                let s = rig.stream();
                let mut held = Vec::new();
                for round in 0..60u64 {
                    held.push(rig.bytes(&s, 1000 * (1 + (round + id) % 50)));
                    if round % 3 == 2 {
                        held.swap_remove((round as usize * 7) % held.len());
                    }
                    if id == 0 && round % 4 == 0 {
                        assert!(rig.pool.check().unwrap().is_empty());
                    }
                }
            });
        }
    });
    rig.pool.trim(0).unwrap();
    let stats = rig.pool.stats();
    assert_eq!(
        (stats.live, stats.pending, stats.physical, stats.blocks),
        (0, 0, 0, 0),
        "{stats:?}"
    );
    assert_eq!((stats.allocations, stats.frees), (240, 240));
    assert!(rig.pool.findings().is_empty(), "{}", rig.pool.findings()[0]);
    close(rig);
}
