//! A small GPU in software, and an oracle that says who touches memory out of turn.
//!
//! A real GPU does not say that a wait is missing. It computes with the wrong bytes, on some days,
//! on some machines. The simulator answers every call of the [`Driver`] as a real driver would,
//! runs the work that is queued on it, and holds every access against everything that the program
//! has *told* the driver about order. What is ordered only by luck is reported as a [`Violation`],
//! with both parties and the lines of the program that asked for them; [`Sim`] shows one.
//!
//! # Two timelines
//! A program acts on the host. What it queues happens later, stream by stream:
//!
//! ```text
//! host      ──launch scale on a──record e──wait e on b──launch sum on b───────────query e: done──▶
//!              │                  │         │            │                          ▲
//! stream a  ───┴─────────▶ scale ─┴─▶ e ····│············│··························╯
//!                                     ╰─────▼────╮       │
//! stream b  ─────────────────────────────────────┴───────┴─▶ sum ─────────────────────────────────▶
//! ```
//!
//! `sum` comes after `scale` because of the wait. The host knows that `scale` is done from the
//! moment at which the query has answered, and not before, however long ago that was. Nothing tells
//! the host that `sum` is done.
//!
//! Every stream and every host agent has a *vector clock*: for each other, how much of its work is
//! known to come before. Clocks are computed when work is queued, not when it runs, so the oracle's
//! answer is the same whether a race would have gone well this time or not, and the same for every
//! [`Schedule`]. One thing alone depends on how things went: a query's answer, which the program
//! gets to see too.
//!
//! # Who orders what
//! | edge | from | to |
//! |---|---|---|
//! | program order | what the host has done and knows | work that it queues after that |
//! | stream order | work in a stream | later work in the same stream |
//! | event wait | what was queued before the event's last record, as it was when the wait was queued | work queued after the wait |
//! | stream, event or device synchronisation | what is waited for | the host |
//! | a query that answers "done" | what was asked about | the host |
//! | legacy rule | blocking streams and the device's legacy stream | each other, both ways, not blocking streams among themselves |
//! | copy to pageable memory; [`copy_to_host_now`](Sim::copy_to_host_now) | the copy, and what comes before it | the host |
//! | [`copy_to_device_now`](Sim::copy_to_device_now) from pinned memory | the same | the host |
//! | callback | what comes before it in its stream | the host that has [seen it run](CallbackToken::has_run) |
//! | [`wait_value`](Sim::wait_value) | the first queued write that ends it, and what comes before that | work queued after the wait |
//! | graph launch | what is queued on its stream, and earlier launches of the same executable on any stream | its nodes, and through all of them what is queued on the stream afterwards |
//! | graph | a node, as it was captured | the nodes that come after it in its stream or by an event |
//! | [release of a graph](crate::Graphs::graph_on_release) | all launches | the host agent in whose call it is found |
//! | the driver's own pools | the free of a block | the work of whoever gets it next |
//! | [`host_edge`](Sim::host_edge) | one host agent | another |
//!
//! These are **not** edges, whatever they happen to wait for today: `cuMemFree`, `cuMemAlloc`,
//! allocation, free and unregistration of host memory, every mapping call; "synchronous" copies on
//! the device and fills; a copy from pageable memory once it is staged; a query that answers "not
//! ready"; and "it had finished by then". `cuMemFree` does wait for the whole device, and a program
//! that counts on it breaks on the day on which its allocator caches.
//!
//! # What is checked
//! * **Races.** For each interval of physical memory, and of pinned host memory, the last write and
//!   the reads since. Two accesses conflict if one of them writes. Records belong to the physical
//!   bytes, so a handle that is mapped twice conflicts with itself.
//! * **Mappings.** An access needs something mapped behind its addresses that its device may reach,
//!   when it is queued and again when it runs. Mapping and unmapping happen when the host calls,
//!   whatever is queued; so the *host* must know that work through those addresses is done, and a
//!   wait between streams does not help.
//! * **Ownership.** Order is not all: a kernel made for a block that has been freed may run long
//!   after everybody else and still destroy the block that lives there now. Pools tell whose a
//!   range is through the driver's [`observer`](crate::Driver::observer), and work names the block
//!   that it means by its generation. A block that is given out on a stream counts as a write by
//!   that stream, at its tail: that is how reuse before the last use is done is found at the reuse,
//!   and how a use on another stream before the block is ready is found at all.
//! * **Graphs.** What is captured touches nothing, and each launch touches everything: every node
//!   is checked at every launch, against the mappings, owners and uses that there are then. It
//!   means the blocks that were there when it was captured. So a launch that writes memory which
//!   has been freed or given to somebody else since is told, with the line of the capture, the line
//!   of the launch, and the line that gave the memory away; and one whose mappings are gone is not
//!   refused but reported. A pool that lets graphs reuse their memory says which ranges it [keeps
//!   for them](crate::Observer::kept_for_graphs): there the order counts, and not the blocks.
//! * **Registrations.** A range that a pool has told to be
//!   [`registered`](crate::Observer::registered) keeps its mappings: a map, an unmap or a free of
//!   any part of it is reported until the last registration ends.
//! * **Host memory.** A CPU access, a free or an unregistration under a queued copy; a copy across
//!   two registrations.
//!
//! Memory that no pool has spoken of is checked for order and mapping only.
//!
//! # What the oracle cannot see
//! * What work touches without saying so. A closure gets the bytes that it declares and no others;
//!   the library's own copies and fills declare themselves; real kernels would have to be told of.
//! * CPU accesses that nobody declares: the pools of this library declare the moments at which
//!   pinned memory changes hands, and users their own by [`Sim::host_read`] and
//!   [`Sim::host_write`].
//! * Order among host threads. All threads are one agent unless [several](Sim::host_agents) are
//!   asked for, and then only declared edges order them.
//! * A wait for a value that is queued before the write which ends it: it orders nothing here.
//! * Order within a kernel, atomics, and anything between processes.
//! * Memory that a graph allocates for itself: to allocate from a pool on a stream that captures is
//!   not supported.
//! * After its first violation on some bytes the oracle goes on, but it keeps only the last
//!   accesses: later reports about the same bytes may be echoes of the first. Mend the first, and
//!   look again.
//!
//! # Where it answers otherwise
//! Codes are those of a real driver (580 on an H200), for calls that make no sense too. An unmap
//! passes over holes. Access to a range that begins and ends with whole mappings is given up to the
//! first hole, without a word about the rest: who works behind the hole is told of it then. No
//! bytes of a pool lie at address 0, where a free does nothing.
//!
//! It is *stricter* in one thing: what is mapped, unmapped or opened must not reach past the end of
//! its reservation. A GPU allows it by what happens to lie behind.
//!
//! It is *milder* in another: a copy or fill by addresses that cannot be reached is reported as a
//! [`Violation`], and queued as work that does nothing; the driver refuses it with
//! `CUDA_ERROR_INVALID_VALUE`.
//!
//! What goes row by row is held against the order row by row: two streams may work on the two
//! halves of every row. It costs as many accesses as there are rows.
//!
//! # Who hears of it
//! A test takes what was found by [`Sim::violations`]. What is not taken is written to standard
//! error when the machine ends, or the process if that is earlier; [`OnViolation`] says what can be
//! done instead, [`Sim::on_violation`] chooses it, and so does `AQUIFER_SIM_VIOLATIONS` where the
//! program does not.
//!
//! # Which line is named
//! Methods of [`Sim`] name their caller. A driver call is made through a trait object, where that
//! ends: it names the line that was [entered](crate::site::enter) on its thread, which the public
//! functions of this library's other crates do for their callers. Without that it names a line in
//! here.
//!
//! # How it is made
//! One lock guards one machine, and no call waits while it holds that: what has to wait does so on
//! a condition. One item of work runs at a time, so that closures never race in Rust's own terms.
//! What the machine costs goes with how finely memory is cut, not with bytes: about half a
//! microsecond an access, where nothing lies behind the addresses.

mod agents;
mod callback;
mod capture;
mod clock;
mod codes;
mod config;
mod control;
mod cost;
mod family;
mod faults;
mod graph;
mod inside;
mod kernel;
mod ledger;
mod oracle;
mod outstanding;
mod ownership;
mod pinned;
mod pool;
mod queue;
mod registered;
mod reporting;
mod rows;
mod schedule;
mod shared;
mod space;
mod state;
mod store;
mod table;
mod values;
mod violation;
mod work;

pub use agents::{ActingAs, Agent};
pub use callback::{Callback, CallbackToken};
pub use config::{DeviceConfig, Mode, Schedule, SimConfig};
pub use control::StallGuard;
pub use cost::Costs;
pub use kernel::{Kernel, KernelMemory};
pub use outstanding::Outstanding;
pub use reporting::{BadOnViolation, OnViolation};
pub use violation::{Party, Place, Violation, ViolationKind};

use crate::Driver;
use shared::Shared;
use std::sync::Arc;

/// A simulated machine with GPUs. Clones are the same machine.
///
/// It is set up first, and then used: each method that changes what is simulated answers with a new
/// machine.
///
/// ```
/// use aquifer_driver::{Access, DeviceId, DeviceRange, sim::{Sim, ViolationKind}};
/// let sim = Sim::h200(1).symbolic();
/// let driver = sim.driver();
/// let (a, b) = (driver.stream_create(DeviceId(0), 0)?, driver.stream_create(DeviceId(0), 0)?);
/// let range = DeviceRange { device: DeviceId(0), address: driver.mem_alloc(DeviceId(0), 4096)?, bytes: 4096 };
/// sim.access(a, range, Access::Write, None)?;
/// sim.access(b, range, Access::Read, None)?; // and nothing makes b wait for a
/// let found = sim.violations();
/// assert_eq!(found[0].kind, ViolationKind::WriteRead);
/// assert_eq!(found[0].later.site.file(), file!());
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sim {
    shared: Arc<Shared>,
}

impl Sim {
    /// A machine of the user's own making.
    #[must_use]
    pub fn new(config: SimConfig) -> Self {
        crate::forks::hold_budgets();
        let shared = Arc::new(Shared::new(config));
        reporting::register(&shared);
        Self { shared }
    }

    /// A machine with `devices` H200s, with bytes, that runs work as soon as it can.
    #[must_use]
    pub fn h200(devices: u32) -> Self {
        Self::new(SimConfig::h200(devices))
    }

    fn with(self, change: impl FnOnce(&mut SimConfig)) -> Self {
        let mut config = self.shared.config.clone();
        change(&mut config);
        Self::new(config)
    }

    /// A new machine that runs work by random numbers from this seed.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        self.with(|config| config.schedule = Schedule::Seeded(seed))
    }

    /// A new machine that, with a [seed](Sim::seeded), lets work run at one in `calls` of the
    /// driver's calls: a device that falls behind a host that asks much.
    #[must_use]
    pub fn paced(self, calls: u32) -> Self {
        self.with(|config| config.pace = calls)
    }

    /// A new machine that runs work only when told to, or when the host waits for it.
    #[must_use]
    pub fn stepped(self) -> Self {
        self.with(|config| config.schedule = Schedule::Stepped)
    }

    /// A new machine with nothing behind its addresses.
    #[must_use]
    pub fn symbolic(self) -> Self {
        self.with(|config| config.mode = Mode::Symbolic)
    }

    /// A new machine whose devices have so many bytes each.
    #[must_use]
    pub fn capacity(self, bytes: u64) -> Self {
        self.with(|config| config.capacity = Some(bytes))
    }

    /// A new machine on which the host is `agents` agents, whose actions nothing orders but
    /// [`Sim::host_edge`]. A thread says which it is by [`Sim::act_as`]; it is the first until
    /// then. With one agent, all threads are that agent, and their actions count as ordered in the
    /// order in which they happen to come.
    #[must_use]
    pub fn host_agents(self, agents: u32) -> Self {
        self.with(|config| config.host_agents = agents.max(1))
    }

    /// Returns a new machine that does this with violations which the program does not
    /// [take](Sim::violations), whatever `AQUIFER_SIM_VIOLATIONS` says.
    ///
    /// ```should_panic
    /// use aquifer_driver::{Access, DeviceId, DeviceRange, sim::{OnViolation, Sim}};
    /// # fn main() -> aquifer_driver::Result<()> {
    /// let sim = Sim::h200(1).on_violation(OnViolation::Panic);
    /// let driver = sim.driver();
    /// let (a, b) = (driver.stream_create(DeviceId(0), 0)?, driver.stream_create(DeviceId(0), 0)?);
    /// let range = DeviceRange { device: DeviceId(0), address: driver.mem_alloc(DeviceId(0), 4096)?, bytes: 4096 };
    /// sim.access(a, range, Access::Write, None)?;
    /// sim.access(b, range, Access::Read, None)?; // panics: nothing makes b wait for a
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn on_violation(self, what: OnViolation) -> Self {
        self.with(|config| config.on_violation = Some(what))
    }

    /// What is simulated.
    #[must_use]
    pub fn config(&self) -> &SimConfig {
        &self.shared.config
    }

    /// The driver of this machine.
    #[must_use]
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.shared) as Arc<dyn Driver>
    }
}
