//! A simulated GPU, with an oracle that reports unordered and invalid memory accesses.
//!
//! A real GPU does not report a missing wait. It computes with wrong bytes, but only on some runs
//! and some machines. The simulator implements the [`Driver`](crate::Driver), runs the work that is
//! queued on it, and checks every access against the order that the program has *declared* to the
//! driver. Order that is only accidental is reported as a [`Violation`], with both sides and the
//! source lines of the program that caused them. [`Sim`] has an example.
//!
//! # Two timelines
//! A program acts on the host. The work it queues happens later, in each stream:
//!
//! ```text
//! host      ──launch scale on a──record e──wait e on b──launch sum on b───────────query e: done──▶
//!              │                  │         │            │                          ▲
//! stream a  ───┴─────────▶ scale ─┴─▶ e ····│············│··························╯
//!                                     ╰─────▼────╮       │
//! stream b  ─────────────────────────────────────┴───────┴─▶ sum ─────────────────────────────────▶
//! ```
//!
//! `sum` comes after `scale` because of the wait. The host knows that `scale` is done only from the
//! moment at which the query has returned, even if the work finished long before. Nothing has shown
//! the host that `sum` is done.
//!
//! Every stream and the host have a *vector clock*: for each other one, how much of its work
//! is known to come before. Clocks are computed when work is queued, not when it runs. So the
//! findings are the same whether a race happens in this run or not, and the same for every
//! [`Schedule`]. Only the result of a query depends on the run, and the program sees that result
//! too.
//!
//! # Order
//! | edge | from | to |
//! |---|---|---|
//! | program order | what the host has done and knows | work that it queues afterwards |
//! | stream order | work in a stream | later work in the same stream |
//! | event wait | work queued before the event's last record, as it was when the wait was queued | work queued after the wait |
//! | stream, event or device synchronisation | the work that is waited for | the host |
//! | a query that returns "done" | the queried work | the host |
//! | legacy rule | blocking streams and the device's legacy stream | each other, both ways, not blocking streams among themselves |
//! | copy to pageable memory | the copy, and the work before it | the host |
//! | graph launch | work queued on its stream, and earlier launches of the same executable on any stream | its nodes, and through all of them the work queued on the stream afterwards |
//! | graph | a node, as it was captured | the nodes after it in its stream or by an event |
//! | the driver's own pools | the free of a block | the work of the next owner |
//!
//! These are **not** edges, even if a driver waits there today: `cuMemFree` and `cuMemAlloc`;
//! allocation, free and unregistration of host memory; all mapping calls; "synchronous" copies on
//! the device and fills; a copy from pageable memory after it is staged; a query that returns "not
//! ready"; and work that happens to have finished. `cuMemFree` does wait for the whole device, but
//! a program that depends on it breaks as soon as its allocator caches.
//!
//! # What is checked
//! * **Races.** The oracle records the last write and the reads since for each interval of physical
//!   memory and of pinned host memory. Two accesses conflict if one of them writes. Records belong
//!   to the physical bytes, so a handle that is mapped twice conflicts with itself.
//! * **Mappings.** An access needs a mapping at its addresses that its device may access, when it
//!   is queued and again when it runs. Mapping and unmapping happen when the host calls, even if
//!   work is queued. So the *host* must know that work through those addresses is done. A wait
//!   between streams is not enough.
//! * **Ownership.** Order is not sufficient: a kernel for a block that has been freed may run long
//!   after all other work, and still corrupt the block that is there now. Pools report the owner of
//!   a range through the driver's `observer`, and work identifies its
//!   block by the generation. Allocating a block on a stream counts as a write by that stream at
//!   its tail. So reuse before the last use is done is found at the reuse, and a use on another
//!   stream before the block is ready is found too.
//! * **Graphs.** Capture accesses no memory. Each launch accesses all of it: every node is checked
//!   at every launch, against the current mappings, owners and uses. A node refers to the blocks
//!   that existed when it was captured. So a launch that writes memory which has since been freed
//!   or allocated to another owner is reported, with the lines of the capture, of the launch and of
//!   the free. A launch whose mappings are gone is not refused but reported. A pool that lets
//!   graphs reuse their memory declares which ranges it [keeps for
//!   them](crate::Observer::kept_for_graphs). In those ranges the order is checked, but not the
//!   blocks.
//! * **Registrations.** A range that a pool has [`registered`](crate::Observer::registered) keeps
//!   its mappings. A map, an unmap or a free of any part of it is reported until the last
//!   registration ends.
//! * **Host memory.** A CPU access, a free or an unregistration under a queued copy is reported,
//!   and so is a copy across two registrations.
//!
//! Memory that no pool has reported is checked for order and mappings only.
//!
//! # Limits of the oracle
//! * Undeclared accesses. A closure receives the bytes that it declares and no others, and the
//!   library's own copies and fills declare their accesses. Real kernels would have to declare
//!   theirs.
//! * Undeclared CPU accesses. The pools of this library declare when pinned memory changes its
//!   owner. Users declare their accesses by [`Sim::host_read`] and [`Sim::host_write`].
//! * Order among host threads: all of them are one agent, in the order in which they act.
//! * Order within a kernel, atomics, and order between processes.
//! * Memory that a graph allocates for itself. Allocation from a pool on a stream that captures is
//!   not supported.
//! * Consequences of an earlier violation. The oracle continues, but keeps only the last accesses,
//!   so later reports about the same bytes may be consequences of the first. Fix the first one and
//!   run again. Not reported is what certainly follows: that memory was unmapped or freed under
//!   work that has been reported, and that such work then finds it unmapped.
//!
//! # Differences from a driver
//! Codes are those of a real driver (580 on an H200), also for invalid calls. An unmap skips holes.
//! Setting access to a range that begins and ends with whole mappings applies up to the first hole
//! and succeeds. Work behind the hole is then reported. Pools never allocate address 0, and a free
//! of it has no effect.
//!
//! It is *stricter* in one case: a range that is mapped, unmapped or given access must not exceed
//! its reservation. On a GPU, the result depends on what follows the reservation.
//!
//! It is *more permissive* in another case: a copy or fill of inaccessible addresses is reported as
//! a [`Violation`] and queued as work without effect. The driver refuses it with
//! `CUDA_ERROR_INVALID_VALUE`.
//!
//! # Reporting
//! A test takes the findings by [`Sim::violations`]. Findings that are not taken are written to
//! standard error when the machine ends, or when the process ends if that is earlier. The process
//! then exits with status 86, so that a test program fails. [`OnViolation`] lists the alternatives.
//! [`Sim::on_violation`] selects one, or else `AQUIFER_SIM_VIOLATIONS`.
//!
//! # Source lines
//! Methods of [`Sim`] report the line of their caller. A driver call is made through a trait
//! object, which ends `#[track_caller]`. It reports the line that was [entered](crate::site::enter)
//! on its thread, which the public functions of this library's other crates do for their callers.
//! Otherwise it reports a line of this module.
//!
//! # Implementation
//! A check passes through these modules: `schedule` stamps the work that is queued; `oracle` checks
//! each use by `owner_map`, then `address_space` checks the mappings; `access_history` finds races;
//! `violation` names both sides.
//!
//! One lock guards one machine, and no call waits while it holds the lock: waits use a condition
//! variable. One item of work runs at a time, so closures never race in Rust's own terms. The cost
//! of the machine depends on the number of memory intervals, not on bytes: about half a microsecond
//! for each access in [`Mode::Symbolic`].

mod access_history;
mod address_space;
mod agents;
mod capture;
mod clock;
mod codes;
mod config;
mod control;
mod device_code;
mod driver_pool;
mod family;
mod faults;
mod graph;
mod handle_table;
mod kernel;
mod machine;
mod machine_state;
mod oracle;
mod outstanding;
mod owner_map;
mod pinned;
mod queue;
mod registrations;
mod reporting;
mod schedule;
mod store;
mod violation;
mod work;

pub use agents::Agent;
pub use config::{DeviceConfig, Mode, Schedule, SimConfig};
pub use control::StallGuard;
pub use kernel::{KernelMemory, SimKernel};
pub use outstanding::Outstanding;
pub use reporting::{BadOnViolation, OnViolation};
pub use violation::{Party, Violation, ViolationKind, ViolationLocation};

use machine::Machine;
use std::sync::Arc;

/// A simulated machine with GPUs. Clones refer to the same machine.
///
/// Configure it first, then use it: each method that changes the configuration returns a new
/// machine.
///
/// ```
/// use aquifer::{Access, DeviceId, DeviceRange, sim::{Sim, ViolationKind}};
/// let sim = Sim::h200(1).symbolic();
/// let driver = sim.driver();
/// let (a, b) = (driver.stream_create(DeviceId(0), 0)?, driver.stream_create(DeviceId(0), 0)?);
/// let range = DeviceRange { device: DeviceId(0), address: driver.mem_alloc(DeviceId(0), 4096)?, bytes: 4096 };
/// sim.access(a, range, Access::Write, None)?;
/// sim.access(b, range, Access::Read, None)?; // b does not wait for a
/// let found = sim.violations();
/// assert_eq!(found[0].kind, ViolationKind::WriteRead);
/// assert_eq!(found[0].later.site.file(), file!());
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sim {
    machine: Arc<Machine>,
}

impl Sim {
    /// Creates a machine from a configuration.
    #[must_use]
    pub fn new(config: SimConfig) -> Self {
        crate::forks::hold_budgets();
        let machine = Arc::new(Machine::new(config));
        reporting::register(&machine);
        Self { machine }
    }

    /// Creates a machine with `devices` H200s, in [`Mode::Bytes`], that runs work as soon as
    /// possible.
    #[must_use]
    pub fn h200(devices: u32) -> Self {
        Self::new(SimConfig::h200(devices))
    }

    fn with(self, change: impl FnOnce(&mut SimConfig)) -> Self {
        let mut config = self.machine.config.clone();
        change(&mut config);
        Self::new(config)
    }

    /// Returns a new machine that schedules work by random numbers from this seed.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        self.with(|config| config.schedule = Schedule::Seeded(seed))
    }

    /// Returns a new machine that, with a [seed](Sim::seeded), lets work run at one in `calls`
    /// driver calls. The device then lags behind a host that makes many calls.
    #[must_use]
    pub fn paced(self, calls: u32) -> Self {
        self.with(|config| config.pace = calls)
    }

    /// Returns a new machine that runs work only when it is stepped, or when the host waits for it.
    #[must_use]
    pub fn stepped(self) -> Self {
        self.with(|config| config.schedule = Schedule::Stepped)
    }

    /// Returns a new machine without bytes behind its addresses.
    #[must_use]
    pub fn symbolic(self) -> Self {
        self.with(|config| config.mode = Mode::Symbolic)
    }

    /// Returns a new machine whose devices have `bytes` bytes each.
    #[must_use]
    pub fn capacity(self, bytes: u64) -> Self {
        self.with(|config| config.capacity = Some(bytes))
    }

    /// Returns a new machine that handles violations which the program does not
    /// [take](Sim::violations) in this way, regardless of `AQUIFER_SIM_VIOLATIONS`.
    ///
    /// ```
    /// use aquifer::sim::{OnViolation, Sim};
    /// let sim = Sim::h200(1).on_violation(OnViolation::Exit(3));
    /// assert_eq!(sim.config().on_violation, Some(OnViolation::Exit(3)));
    /// ```
    #[must_use]
    pub fn on_violation(self, what: OnViolation) -> Self {
        self.with(|config| config.on_violation = Some(what))
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &SimConfig {
        &self.machine.config
    }
}
