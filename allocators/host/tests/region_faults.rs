//! Tests of every step of creating and releasing pinned memory, and of every way in which it can
//! fail.
//!
//! A clean run counts the calls that a kind of region makes. Then each of them fails, once and from
//! then on, with each of a few errors, alone and together with the rollback. The invariants are:
//!
//! - Memory that was created is charged for exactly its bytes, is completely present, and is pinned
//!   if that was required.
//! - A refusal leaves nothing: no charge, no registration, no memory in the window.
//! - Memory that the driver or kernel refuses to release stays charged until they release it.
//!
//! The tests form a separate process because they count what the process has mapped in the window.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]

#[path = "suite/support/mod.rs"]
mod support;

use aquifer_core::Budget;
use aquifer_driver::{Call, DeviceId, sim::Sim};
use aquifer_host::{
    kernel::{Faults, Kernel, SystemCall},
    region::{
        Host, PageTier, Pinning, Region, RegionError, RegionRequest, end_retired, retry_stranded,
        window,
    },
    topology::Topology,
};
use nix::libc;
use std::{sync::Arc, time::Instant};
use support::MIB;

const GPU: DeviceId = DeviceId(0);
const BYTES: usize = 2 * MIB;
const ERRNOS: [i32; 3] = [libc::ENOMEM, libc::EPERM, libc::EINVAL];
const CODES: [u32; 4] = [1, 2, 712, 999];
const DRIVER_CALLS: [Call; 4] =
    [Call::HostRegister, Call::HostUnregister, Call::HostAlloc, Call::HostFree];

/// The kind of memory that is created.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Plain(Pinning),
    HugePages,
}

const KINDS: [Kind; 4] = [
    Kind::Plain(Pinning::Preferred),
    Kind::Plain(Pinning::Required),
    Kind::Plain(Pinning::Off),
    Kind::HugePages,
];

struct Machine {
    sim: Sim,
    host: Host,
    faults: Arc<Faults>,
    budget: Budget,
}

/// Returns a machine that claims a pool of huge pages without having one.
fn boastful() -> Topology {
    let root = std::env::temp_dir().join(format!("aquifer-boast-{}", std::process::id()));
    let pool = root.join("sys/kernel/mm/hugepages/hugepages-2048kB");
    std::fs::create_dir_all(&pool).unwrap();
    std::fs::write(pool.join("free_hugepages"), "1000\n").unwrap();
    Topology::read_under(&root).unwrap()
}

impl Machine {
    fn new(kind: Kind, [real, boastful]: &[Topology; 2]) -> Self {
        let faults = Arc::new(Faults::new());
        let sim = Sim::h200(1);
        let topology = if kind == Kind::HugePages { boastful } else { real };
        let host = Host::new(topology.clone(), Kernel::with_faults(faults.clone()));
        let host = host.with_driver(sim.driver(), GPU);
        Self { sim, host, faults, budget: Budget::new("pinned", 64 * MIB as u64) }
    }

    fn make(&self, kind: Kind) -> Result<Region, RegionError> {
        let mut request = RegionRequest::bytes(BYTES);
        request.registration = 2 * MIB;
        request.piece = 2 * MIB;
        request.pages = PageTier::Transparent;
        request.node = support::some_node(&self.host.topology);
        match kind {
            Kind::Plain(pinning) => request.pinning = pinning,
            Kind::HugePages => {
                request.pages = PageTier::HugeTlb;
                request.node = None;
            }
        }
        Region::new(&self.host, &self.budget, &request)
    }

    /// Creates and drops one object under the planned faults, and checks the invariants.
    fn live(&self, kind: Kind, what: &str) {
        let made = self.make(kind);
        match made {
            Ok(mut made) => {
                let pages = made.span();
                assert_eq!(
                    self.budget.used(),
                    pages.len as u64,
                    "{what}: charged for what is there"
                );
                // Memory of the simulated driver is populated when it is touched.
                if made.report().pages != PageTier::DriverChosen {
                    assert_eq!(support::present(pages), pages.len / 4096, "{what}: there in whole");
                }
                if let Kind::Plain(Pinning::Required) = kind {
                    assert!(made.is_pinned(), "{what}");
                }
                let pinned = self.sim.outstanding();
                assert_eq!(
                    made.is_pinned(),
                    pinned.registrations + pinned.host_allocations > 0,
                    "{what}: told as it is"
                );
                made.bytes_mut().fill(1);
                if let Err(error) = made.close() {
                    assert!(self.budget.used() > 0, "{what}: what is kept stays charged: {error}");
                }
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        self.faults.clear();
        self.sim.clear_failures();
        let deadline = Instant::now() + support::PATIENCE;
        while self.budget.used() > 0 {
            assert!(Instant::now() < deadline, "{what}: {} bytes stay charged", self.budget.used());
            retry_stranded();
            std::thread::yield_now();
        }
        assert!(self.sim.outstanding().is_empty(), "{what}: {}", self.sim.outstanding());
        assert!(self.sim.violations().is_empty(), "{what}");
        assert_eq!(mapped_in_window(), 0, "{what}: memory stays in the window");
    }
}

/// Returns the bytes of the window that hold memory.
fn mapped_in_window() -> usize {
    let Some(bounds) = window::bounds() else { return 0 };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let writable = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        let inside = bounds.contains(&start) || (start..end).contains(&bounds.start);
        (inside && rest.as_bytes().get(1) == Some(&b'w')).then(|| end - start)
    };
    maps.lines().filter_map(writable).sum()
}

/// One test, because the window and the stranded memory belong to the process.
#[test]
fn whatever_fails_nothing_stays_charged_mapped_or_registered() {
    let machines = [support::topology(), boastful()];
    let mut lives = 0;
    for kind in KINDS {
        let clean = Machine::new(kind, &machines);
        clean.live(kind, "nothing fails");
        let system: Vec<_> =
            SystemCall::ALL.iter().map(|&call| (call, clean.faults.made(call))).collect();
        let made = clean.sim.driver().calls().made();
        let driver = DRIVER_CALLS
            .map(|call| (call, made.iter().find(|(c, _)| *c == call).map_or(0, |c| c.1)));
        // No clean run makes the calls of a fall-back.
        let system = system.iter().map(|&(call, made)| (call, made.clamp(1, 5)));
        let driver = driver.map(|(call, made)| (call, made.max(1)));

        for (call, times) in system {
            for nth in 1..=times {
                for errno in ERRNOS {
                    for lasting in [false, true] {
                        let machine = Machine::new(kind, &machines);
                        if lasting {
                            machine.faults.fail_from(call, nth, errno);
                        } else {
                            machine.faults.fail(call, nth, errno);
                        }
                        machine.live(
                            kind,
                            &format!("{kind:?}, {call:?} {nth} {errno} lasting: {lasting}"),
                        );
                        lives += 1;
                    }
                }
            }
        }
        for (call, times) in driver {
            for nth in 1..=times {
                for code in CODES {
                    for lasting in [false, true] {
                        // The rollback fails as well: not at all, in the kernel, or in the driver.
                        for back in 0..3 {
                            let machine = Machine::new(kind, &machines);
                            if lasting {
                                machine.sim.fail_every(call, 1, code);
                            } else {
                                machine.sim.fail(call, nth, code);
                            }
                            match back {
                                0 => {}
                                1 => machine.faults.fail_from(SystemCall::Unmap, 1, libc::ENOMEM),
                                _ => {
                                    machine.sim.fail_every(Call::HostUnregister, 1, 999);
                                    machine.sim.fail_every(Call::HostFree, 1, 999);
                                }
                            }
                            let what =
                                format!("{kind:?}, {call:?} {nth} {code} {lasting}, back: {back}");
                            machine.live(kind, &what);
                            lives += 1;
                        }
                    }
                }
            }
        }
    }
    assert_eq!(end_retired(), 0);
    println!("{lives} lives");
    assert!(lives > 700, "{lives}");
}
