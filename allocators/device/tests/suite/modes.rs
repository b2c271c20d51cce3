//! Tests every mistake under every debugging mode: a fault found without a mode is found with it,
//! and each mode finds what it promises.
#![expect(unsafe_code, reason = "captures by hand, and parks")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use crate::support::{MIB, Rig};
use aquifer_core::{MemoryError, Tag};
use aquifer_device::{Debugging, Fault, Park, PoolConfig, Request};
use aquifer_driver::{
    CaptureMode, DeviceId, DeviceRange,
    sim::{Sim, SimKernel, ViolationKind},
};
use aquifer_stream::Stream;

/// How a mistake is detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Told {
    /// The oracle reports a violation of this kind.
    Oracle(ViolationKind),
    /// The pool has a finding of this kind, given as the name of the fault.
    Finding(&'static str),
    /// A call is refused as a double free.
    DoubleFree,
    /// A call is refused because the address is no block's.
    Foreign,
    /// The list of live blocks has this many bytes more.
    Leak(u64),
}
use Told::{DoubleFree, Finding, Foreign, Leak, Oracle};

const LATE: Told = Oracle(ViolationKind::UseAfterFree);
const OUTSIDE: Told = Oracle(ViolationKind::OutsideBlock);

/// Returns the modes by name.
fn modes() -> Vec<(&'static str, PoolConfig)> {
    let mode = |set: &dyn Fn(&mut PoolConfig)| {
        let mut config = PoolConfig::default();
        set(&mut config);
        config
    };
    vec![
        ("none", mode(&|_| ())),
        ("poison", mode(&|c| c.debug.poison = true)),
        ("canaries", mode(&|c| c.debug.canaries = true)),
        ("leaks", mode(&|c| c.debug.leaks = true)),
        ("all", mode(&|c| c.debug = Debugging::all())),
        ("bypass", mode(&|c| c.bypass = true)),
        (
            "bypass with checks",
            mode(&|c| {
                c.bypass = true;
                (c.debug.poison, c.debug.leaks) = (true, true);
            }),
        ),
    ]
}

fn write(sim: &Sim, stream: &Stream, address: u64) {
    let at = DeviceRange { device: DeviceId(0), address, bytes: 1 };
    let kernel = SimKernel::new("stray").writes(at, None).run(|memory| memory.write(0)[0] = 0x11);
    sim.launch(stream.raw(), kernel).unwrap();
}

fn read(sim: &Sim, stream: &Stream, address: u64) {
    let at = DeviceRange { device: DeviceId(0), address, bytes: 1 };
    sim.launch(stream.raw(), SimKernel::new("stray").reads(at, None)).unwrap();
}

fn refusal<T>(answer: Result<T, MemoryError>) -> Vec<Told> {
    match answer.map(drop) {
        Err(MemoryError::DoubleFree { .. }) => vec![DoubleFree],
        Err(MemoryError::ForeignBlock { .. }) => vec![Foreign],
        other => panic!("{other:?}"),
    }
}

fn leaked(rig: &Rig) -> Vec<Told> {
    rig.pool
        .leaks()
        .filter(|leaks| !leaks.is_empty())
        .map(|leaks| Leak(leaks.bytes()))
        .into_iter()
        .collect()
}

/// A mistake, how it is detected without any mode, and additionally under some modes.
struct Mistake {
    name: &'static str,
    make: fn(&Rig) -> Vec<Told>,
    always: &'static [Told],
    with: &'static [(&'static str, Told)],
}

const LEAKS: [&str; 3] = ["leaks", "all", "bypass with checks"];

fn mistakes() -> Vec<Mistake> {
    vec![
        Mistake {
            name: "a write after the free on the block's own stream",
            make: |rig| {
                let s = rig.stream();
                let block = rig.pool.alloc(&s, Request::bytes(4096)).unwrap();
                let address = block.address();
                drop(block);
                write(&rig.sim, &s, address + 100);
                Vec::new()
            },
            always: &[LATE],
            with: &[],
        },
        Mistake {
            name: "a write after the free on another stream, which waits for the first",
            make: |rig| {
                let (s, u) = (rig.stream(), rig.stream());
                let block = rig.pool.alloc(&s, Request::bytes(4096)).unwrap();
                let address = block.address();
                drop(block);
                u.wait_for(&s).unwrap();
                write(&rig.sim, &u, address + 100);
                Vec::new()
            },
            always: &[LATE],
            with: &[],
        },
        Mistake {
            name: "a read after the free",
            make: |rig| {
                let s = rig.stream();
                let block = rig.pool.alloc(&s, Request::bytes(4096)).unwrap();
                let address = block.address();
                drop(block);
                read(&rig.sim, &s, address);
                Vec::new()
            },
            always: &[LATE],
            with: &[],
        },
        Mistake {
            name: "a write after the free that waited for another stream's use",
            make: |rig| {
                let (s, u) = (rig.stream(), rig.stream());
                let block = rig.pool.alloc(&s, Request::bytes(4096)).unwrap();
                let address = block.address();
                u.wait_for(&s).unwrap();
                block.record_use(&u, aquifer_driver::Access::Read).unwrap();
                drop(block);
                u.synchronize().unwrap();
                // The pool collects the block.
                drop(rig.pool.alloc(&s, Request::bytes(1 << 16)).unwrap());
                write(&rig.sim, &s, address + 100);
                Vec::new()
            },
            always: &[LATE],
            with: &[],
        },
        Mistake {
            name: "a write right behind a block",
            make: |rig| {
                let s = rig.stream();
                let block = rig.pool.alloc(&s, Request::bytes(4000)).unwrap();
                write(&rig.sim, &s, block.address() + 4000);
                drop(block);
                Vec::new()
            },
            always: &[],
            with: &[
                ("canaries", OUTSIDE),
                ("canaries", Finding("Overrun")),
                ("all", OUTSIDE),
                ("all", Finding("Overrun")),
            ],
        },
        Mistake {
            name: "a write right before a block",
            make: |rig| {
                let s = rig.stream();
                let _first = rig.pool.alloc(&s, Request::bytes(4096)).unwrap();
                let block = rig.pool.alloc(&s, Request::bytes(4096)).unwrap();
                // Without guards the byte is the last of another block, or has no owner.
                if rig.pool.stats().live > 2 * 4096 {
                    write(&rig.sim, &s, block.address() - 1);
                }
                drop(block);
                Vec::new()
            },
            always: &[],
            with: &[
                ("canaries", OUTSIDE),
                ("canaries", Finding("Underrun")),
                ("all", OUTSIDE),
                ("all", Finding("Underrun")),
            ],
        },
        Mistake {
            name: "a second free of an address",
            make: |rig| {
                let s = rig.stream();
                let address = rig.pool.alloc_raw(&s, Request::bytes(4096)).unwrap();
                rig.pool.free_raw(address).unwrap();
                refusal(rig.pool.free_raw(address))
            },
            always: &[DoubleFree],
            with: &[],
        },
        Mistake {
            name: "a second free of an address whose block has long gone home",
            make: |rig| {
                let s = rig.stream();
                let address = rig.pool.alloc_raw(&s, Request::bytes(4096)).unwrap();
                let _neighbour = rig.pool.alloc(&s, Request::bytes(4096)).unwrap();
                rig.pool.free_raw(address).unwrap();
                rig.pool.trim(MIB).unwrap();
                refusal(rig.pool.free_raw(address))
            },
            always: &[DoubleFree],
            with: &[],
        },
        Mistake {
            name: "a block out of an address that has been freed",
            make: |rig| {
                let s = rig.stream();
                let address = rig.pool.alloc(&s, Request::bytes(4096)).unwrap().into_raw();
                drop(rig.pool.from_raw(address).unwrap());
                refusal(rig.pool.from_raw(address))
            },
            always: &[DoubleFree],
            with: &[],
        },
        Mistake {
            name: "a free of an address inside a block",
            make: |rig| {
                let s = rig.stream();
                let address = rig.pool.alloc_raw(&s, Request::bytes(4096)).unwrap();
                let told = refusal(rig.pool.free_raw(address + 512));
                rig.pool.free_raw(address).unwrap();
                told
            },
            always: &[Foreign],
            with: &[],
        },
        Mistake {
            name: "a free of an address of nobody's",
            make: |rig| refusal(rig.pool.free_raw(0x1234_5678)),
            always: &[Foreign],
            with: &[],
        },
        Mistake {
            name: "a block that is kept",
            make: |rig| {
                let s = rig.stream();
                let _kept = rig.pool.alloc(&s, Request::bytes(4000)).unwrap();
                leaked(rig)
            },
            always: &[],
            with: &[(LEAKS[0], Leak(4000)), (LEAKS[1], Leak(4000)), (LEAKS[2], Leak(4000))],
        },
        Mistake {
            name: "reserved memory that is kept",
            make: |rig| {
                let s = rig.stream();
                let mut kept = rig.pool.reserve::<u8>(&s, 64 << 20).unwrap();
                assert_eq!(leaked(rig), [], "addresses cost nothing");
                kept.commit_to(3 << 20).unwrap();
                let told = leaked(rig);
                drop(kept);
                assert_eq!(leaked(rig), []);
                told
            },
            always: &[],
            with: &[
                (LEAKS[0], Leak(4 << 20)),
                (LEAKS[1], Leak(4 << 20)),
                (LEAKS[2], Leak(4 << 20)),
            ],
        },
        Mistake {
            name: "a stable block that is kept",
            make: |rig| {
                let s = rig.stream();
                let kept = rig.pool.alloc_stable(&s, Request::bytes(3 << 20)).unwrap();
                let told = leaked(rig);
                drop(kept);
                assert_eq!(leaked(rig), []);
                told
            },
            always: &[],
            with: &[
                (LEAKS[0], Leak(3 << 20)),
                (LEAKS[1], Leak(3 << 20)),
                (LEAKS[2], Leak(3 << 20)),
            ],
        },
        Mistake {
            name: "a block that is kept and parked",
            make: |rig| {
                let (s, tag) = (rig.stream(), Tag::named("parked"));
                let parkable = rig.pool.parkable(tag).unwrap();
                let kept = parkable.alloc(&s, Request::bytes(5000)).unwrap();
                // SAFETY: 1. and 2. nothing is queued for it.
                unsafe { rig.pool.park(tag, Park::discard()) }.unwrap();
                let told = leaked(rig);
                drop(kept);
                assert_eq!(leaked(rig), []);
                told
            },
            always: &[],
            with: &[(LEAKS[0], Leak(5000)), (LEAKS[1], Leak(5000)), (LEAKS[2], Leak(5000))],
        },
        Mistake {
            name: "a graph's block that is kept",
            make: |rig| {
                let s = rig.stream();
                let graphs = rig.pool.graph_pool().unwrap();
                let announced = graphs.announce(&s).unwrap();
                rig.sim.driver().capture_begin(s.raw(), CaptureMode::Relaxed).unwrap();
                let kept = rig.pool.alloc(&s, Request::bytes(6000)).unwrap();
                assert_eq!(graphs.stats().blocks, 1);
                let graph = rig.sim.driver().capture_end(s.raw()).unwrap();
                // SAFETY: 1. known only here.
                unsafe { rig.sim.driver().graph_destroy(graph) }.unwrap();
                drop(announced.end());
                let told = leaked(rig);
                drop(kept);
                assert_eq!(leaked(rig), []);
                told
            },
            always: &[],
            with: &[(LEAKS[0], Leak(6000)), (LEAKS[1], Leak(6000)), (LEAKS[2], Leak(6000))],
        },
    ]
}

/// Returns every detection of a mistake under a mode.
fn told(mistake: &Mistake, config: &PoolConfig) -> Vec<Told> {
    let mut config = config.clone();
    let rig = Rig::on(Sim::h200(1), 256, |of_rig| {
        config.budget = of_rig.budget.take();
        *of_rig = config;
    });
    let mut told = (mistake.make)(&rig);
    rig.pool.check().unwrap();
    rig.pool.trim(0).unwrap();
    told.extend(rig.sim.take_violations().into_iter().map(|violation| Oracle(violation.kind)));
    told.extend(rig.pool.findings().into_iter().map(|finding| match finding.fault {
        Fault::Overrun { .. } => Finding("Overrun"),
        Fault::Underrun { .. } => Finding("Underrun"),
        other => panic!("{other:?}"),
    }));
    told.dedup();
    told
}

#[test]
fn every_mode_finds_what_is_found_without_it_and_what_it_promises() {
    let modes = modes();
    let mut wrong = Vec::new();
    for mistake in mistakes() {
        let name = mistake.name;
        for (mode, config) in &modes {
            let told = told(&mistake, config);
            let promised =
                mistake.with.iter().filter(|(with, _)| with == mode).map(|(_, told)| told);
            let expected: Vec<_> = mistake.always.iter().chain(promised).collect();
            let missing: Vec<_> =
                expected.iter().filter(|told_of| !told.contains(told_of)).collect();
            if !missing.is_empty() {
                wrong.push(format!("{name} under {mode}: {missing:?} is missing of {told:?}"));
            }
            let more: Vec<_> = told.iter().filter(|told| !expected.contains(told)).collect();
            if *mode == "none" && !more.is_empty() {
                wrong.push(format!(
                    "{name} without a mode is found as {more:?} too, which no other is asked for"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn correct_use_is_silent_under_every_mode_and_its_figures_add_up() {
    for (mode, config) in modes() {
        let rig = Rig::on(Sim::h200(1), 256, |of_rig| {
            let mut config = config;
            config.budget = of_rig.budget.take();
            *of_rig = config;
        });
        let (s, u) = (rig.stream(), rig.stream());
        let mut buffer = rig.bytes(&s, 1 << 20);
        s.fill(&mut buffer, 3).unwrap();
        u.fill(&mut buffer, 4).unwrap();
        let mut reserved = rig.pool.reserve::<u8>(&s, 64 << 20).unwrap();
        reserved.commit_to(8 << 20).unwrap();
        let stable = rig.pool.alloc_stable(&s, Request::bytes(4 << 20)).unwrap();
        let stats = rig.pool.stats();
        let own = 13 << 20;
        assert!(stats.live >= own && stats.live < own + MIB, "{mode}: {stats:?}");
        assert_eq!(stats.requested, own, "{mode}: {stats:?}");
        assert!(stats.peak_live >= stats.live && stats.peak_requested == own, "{mode}: {stats:?}");
        assert!(stats.pending < MIB, "{mode}: reserved and stable memory is live: {stats:?}");
        assert_eq!(stats.physical, rig.budget.used(), "{mode}: {stats:?}");
        assert_eq!(rig.pool.physical(), stats.physical, "{mode}");
        drop((buffer, reserved, stable));
        s.synchronize().unwrap();
        u.synchronize().unwrap();
        rig.pool.trim(0).unwrap();
        rig.pool.trim(0).unwrap();
        let stats = rig.pool.stats();
        assert_eq!((stats.live, stats.physical, rig.budget.used()), (0, 0, 0), "{mode}: {stats:?}");
        assert!(rig.pool.findings().is_empty(), "{mode}: {:?}", rig.pool.findings());
        rig.assert_silent();
    }
}
