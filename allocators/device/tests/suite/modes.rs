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

/// What a mistake must be found as.
enum Expected {
    /// This under every mode, and without any.
    Always(Told),
    /// A violation and this finding under the modes with guards.
    ByGuards(&'static str),
    /// This many bytes more in the list of live blocks, under the modes that have one.
    ByLeaks(u64),
}
use Expected::{Always, ByGuards, ByLeaks};

impl Expected {
    fn under(&self, mode: &str) -> Vec<Told> {
        match *self {
            Always(told) => vec![told],
            ByGuards(fault) if ["canaries", "all"].contains(&mode) => vec![OUTSIDE, Finding(fault)],
            ByLeaks(bytes) if ["leaks", "all", "bypass with checks"].contains(&mode) => {
                vec![Leak(bytes)]
            }
            ByGuards(_) | ByLeaks(_) => Vec::new(),
        }
    }
}

/// Returns the address of a block that was freed.
fn freed(rig: &Rig, stream: &Stream) -> u64 {
    rig.alloc(stream, 4096).address()
}

/// Returns how memory is told as a leak while it is kept.
fn told_while_kept<T>(rig: &Rig, kept: T) -> Vec<Told> {
    let told = leaked(rig);
    drop(kept);
    assert_eq!(leaked(rig), []);
    told
}

/// A mistake, and how it must be found.
type Mistake = (&'static str, Expected, fn(&Rig, &Stream) -> Vec<Told>);

const MISTAKES: [Mistake; 16] = [
    ("a write after the free on the block's own stream", Always(LATE), |rig, s| {
        write(&rig.sim, s, freed(rig, s) + 100);
        Vec::new()
    }),
    (
        "a write after the free on another stream, which waits for the first",
        Always(LATE),
        |rig, s| {
            let u = rig.stream();
            let address = freed(rig, s);
            u.wait_for(s).unwrap();
            write(&rig.sim, &u, address + 100);
            Vec::new()
        },
    ),
    ("a read after the free", Always(LATE), |rig, s| {
        read(&rig.sim, s, freed(rig, s));
        Vec::new()
    }),
    ("a write after the free that waited for another stream's use", Always(LATE), |rig, s| {
        let u = rig.stream();
        let block = rig.alloc(s, 4096);
        let address = block.address();
        u.wait_for(s).unwrap();
        block.record_use(&u, aquifer_driver::Access::Read).unwrap();
        drop(block);
        u.synchronize().unwrap();
        // The pool collects the block.
        drop(rig.alloc(s, 1 << 16));
        write(&rig.sim, s, address + 100);
        Vec::new()
    }),
    ("a write right behind a block", ByGuards("Overrun"), |rig, s| {
        let block = rig.alloc(s, 4000);
        write(&rig.sim, s, block.address() + 4000);
        Vec::new()
    }),
    ("a write right before a block", ByGuards("Underrun"), |rig, s| {
        let _first = rig.alloc(s, 4096);
        let block = rig.alloc(s, 4096);
        // Without guards the byte is the last of another block, or has no owner.
        if rig.pool.stats().live > 2 * 4096 {
            write(&rig.sim, s, block.address() - 1);
        }
        Vec::new()
    }),
    ("a second free of an address", Always(DoubleFree), |rig, s| {
        let address = rig.alloc(s, 4096).into_raw();
        rig.pool.free_raw(address).unwrap();
        refusal(rig.pool.free_raw(address))
    }),
    ("a second free of an address whose block has long gone home", Always(DoubleFree), |rig, s| {
        let address = rig.alloc(s, 4096).into_raw();
        let _neighbour = rig.alloc(s, 4096);
        rig.pool.free_raw(address).unwrap();
        rig.pool.trim(MIB).unwrap();
        refusal(rig.pool.free_raw(address))
    }),
    ("a block out of an address that has been freed", Always(DoubleFree), |rig, s| {
        let address = rig.alloc(s, 4096).into_raw();
        drop(rig.pool.from_raw(address).unwrap());
        refusal(rig.pool.from_raw(address))
    }),
    ("a free of an address inside a block", Always(Foreign), |rig, s| {
        let address = rig.alloc(s, 4096).into_raw();
        let told = refusal(rig.pool.free_raw(address + 512));
        rig.pool.free_raw(address).unwrap();
        told
    }),
    ("a free of an address of nobody's", Always(Foreign), |rig, _| {
        refusal(rig.pool.free_raw(0x1234_5678))
    }),
    ("a block that is kept", ByLeaks(4000), |rig, s| told_while_kept(rig, rig.alloc(s, 4000))),
    ("reserved memory that is kept", ByLeaks(4 << 20), |rig, s| {
        let mut kept = rig.pool.reserve::<u8>(s, 64 << 20).unwrap();
        assert_eq!(leaked(rig), [], "addresses cost nothing");
        kept.commit_to(3 << 20).unwrap();
        told_while_kept(rig, kept)
    }),
    ("a stable block that is kept", ByLeaks(3 << 20), |rig, s| {
        told_while_kept(rig, rig.stable(s, 3 << 20))
    }),
    ("a block that is kept and parked", ByLeaks(5000), |rig, s| {
        let tag = Tag::named("parked");
        let parkable = rig.pool.parkable(tag).unwrap();
        let kept = parkable.alloc(s, Request::bytes(5000)).unwrap();
        // SAFETY: 1. and 2. nothing is queued for it.
        unsafe { rig.pool.park(tag, Park::discard()) }.unwrap();
        told_while_kept(rig, kept)
    }),
    ("a graph's block that is kept", ByLeaks(6000), |rig, s| {
        let graphs = rig.pool.graph_pool().unwrap();
        let announced = graphs.announce(s).unwrap();
        rig.sim.driver().capture_begin(s.raw(), CaptureMode::Relaxed).unwrap();
        let kept = rig.alloc(s, 6000);
        assert_eq!(graphs.stats().blocks, 1);
        let graph = rig.sim.driver().capture_end(s.raw()).unwrap();
        // SAFETY: 1. known only here.
        unsafe { rig.sim.driver().graph_destroy(graph) }.unwrap();
        drop(announced.end());
        told_while_kept(rig, kept)
    }),
];

/// Returns a rig whose pool has these settings.
fn rig(mut config: PoolConfig) -> Rig {
    Rig::on(Sim::h200(1), 256, |of_rig| {
        config.budget = of_rig.budget.take();
        *of_rig = config;
    })
}

/// Returns every detection of a mistake under a mode.
fn told(make: fn(&Rig, &Stream) -> Vec<Told>, config: &PoolConfig) -> Vec<Told> {
    let rig = rig(config.clone());
    let mut told = make(&rig, &rig.stream());
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
    for (name, expected, make) in MISTAKES {
        for (mode, config) in &modes {
            let (told, expected) = (told(make, config), expected.under(mode));
            let is_complete = expected.iter().all(|expected| told.contains(expected));
            assert!(is_complete, "{name} under {mode}: {told:?} where {expected:?} is promised");
            // Nothing else is asked for without a mode.
            assert!(*mode != "none" || told == expected, "{name}: {told:?}, not {expected:?}");
        }
    }
}

#[test]
fn correct_use_is_silent_under_every_mode_and_its_figures_add_up() {
    for (mode, config) in modes() {
        let rig = rig(config);
        let (s, u) = (rig.stream(), rig.stream());
        let mut buffer = rig.bytes(&s, 1 << 20);
        s.fill(&mut buffer, 3).unwrap();
        u.fill(&mut buffer, 4).unwrap();
        let mut reserved = rig.pool.reserve::<u8>(&s, 64 << 20).unwrap();
        reserved.commit_to(8 << 20).unwrap();
        let stable = rig.stable(&s, 4 << 20);
        let stats = rig.pool.stats();
        let own = 13 << 20;
        assert!(stats.live >= own && stats.live < own + MIB, "{mode}: {stats:?}");
        // Guards count.
        assert!(stats.requested >= own && stats.requested < own + 4096, "{mode}: {stats:?}");
        assert!(stats.peak_live >= stats.live, "{mode}: {stats:?}");
        assert_eq!(stats.peak_requested, stats.requested, "{mode}: {stats:?}");
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
