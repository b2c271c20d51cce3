//! Settings of a pool.

use crate::{Debugging, sharing_policy::DEFAULT_SLACK};
use aquifer_core::{Budget, DeviceId, MemoryError, Recorder, Result};
use aquifer_driver::{DeviceInfo, Driver, ExportTypes};
use aquifer_formats::plan::Plan;
use std::{path::PathBuf, sync::Arc, time::Duration};

/// How far a stream that has no room may take over memory of other streams' caches.
///
/// ```
/// use aquifer::{DeviceId, DevicePool, PoolConfig, device::Adoption, sim::Sim};
/// let mut config = PoolConfig::default();
/// config.adoption = Adoption::DoneOnly;    // streams never wait for each other's frees
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config)?;
/// # drop(pool);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Adoption {
    /// Never. Needed by streams that must not be ordered with each other, such as those of
    /// collectives. Memory whose work is known to be done still reaches other streams through the
    /// driver before a request is refused, and at once if its stream is gone.
    ///
    /// Removes from [step 3] of an allocation without room: the caches of other streams, the
    /// orders in which all free memory is shared or shared free memory comes first, and all waits
    /// on the device. Its own cache, the memory of streams that are gone, [warmed
    /// memory](PoolConfig::warm_reserve), new memory, and handles from under any of these are left.
    ///
    /// [step 3]: crate#when-an-allocation-does-not-fit
    Never,
    /// Memory whose work the host has seen done. No stream waits for another.
    ///
    /// Removes from step 3 all waits on the device, and with them all memory that is still in use.
    DoneOnly,
    /// Also memory that is still in use: the taking stream waits on the device for the giving
    /// stream.
    ///
    /// Removes nothing. A stream that is isolated or captures a graph is treated as with
    /// [`Adoption::DoneOnly`].
    #[default]
    Wait,
}

/// The settings of a pool.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolConfig {
    /// The budget that physical memory is charged to. `None` means 80 % of the device's free
    /// memory when the pool is opened.
    ///
    /// Code that can release memory when the pool is short of it registers there
    /// ([`Budget::on_need`]). Pools register themselves.
    pub budget: Option<Budget>,
    /// How far streams share memory. Each value of [`Adoption`] states what it removes from the
    /// steps of an allocation. Default: [`Adoption::Wait`].
    pub adoption: Adoption,
    /// How long an allocation that finds no room waits in all, at most. Default: 10 s. The time
    /// begins when the first search without waiting has failed.
    ///
    /// A wait for the whole device begins in this time, but may end later: the driver has no such
    /// wait with a deadline. An allocation makes one for memory whose work nothing else can prove
    /// to be done ([`Block`](crate::Block) has an example).
    pub wait: Duration,
    /// Bytes of every physical handle, rounded up to the device's granularity. 0 selects from the
    /// granularity, usually 2 MiB, up to 64 MiB, by how much memory is held and left to take.
    /// Default: 0.
    pub handle_bytes: u64,
    /// The memory that the pool may hold beyond the peak of its live bytes, in per cent of that
    /// peak. Default: 17, and 64 MiB if that is more.
    ///
    /// The pool treats this bound as a limit of its budget: streams share free memory, a block
    /// waits on the device for memory that another stream still uses, and free memory moves to
    /// where it is missing, at some 40 to 80 µs for each handle. Memory in a handle with a live
    /// block cannot move, and may exceed the bound by some per cent.
    ///
    /// 6 packs as tightly as is sensible, in handles an eighth as large. Then a first round makes
    /// twice as many memory calls, several streams take slow paths, threads that allocate at once
    /// take turns, and handles move in later rounds too.
    /// A value below the default has no least of 64 MiB. With a larger one, a pool waits and moves
    /// less and holds more.
    ///
    /// With [`Adoption::Never`], only a value below the default is a bound. Only on devices with
    /// virtual memory. At most [`MAX_SLACK`](Self::MAX_SLACK).
    ///
    /// ```
    /// use aquifer::{DeviceId, DevicePool, MemoryError, PoolConfig, sim::Sim};
    /// let mut config = PoolConfig::default();
    /// config.slack = 6;    // hold at most 1.06 times the peak of live bytes
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config.clone())?;
    /// config.slack = PoolConfig::MAX_SLACK + 1;
    /// let refused = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config);
    /// assert!(matches!(refused, Err(MemoryError::BadSetting { name: "slack", .. })));
    /// # drop(pool);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    pub slack: u32,
    /// Bytes that may be idle in the pool: held, and not in live blocks. When a slow path of any
    /// stream has served its request, after a stream of the pool is
    /// [synchronised](aquifer_stream::Stream::synchronize), and in
    /// [`DevicePool::poll`](crate::DevicePool::poll), whole handles above this bound go back to the
    /// driver as far as their work is known to be done (`cuMemUnmap`, `cuMemRelease`). Nothing
    /// blocks, and a request served by a stream's cache does not check the bound.
    ///
    /// [`DevicePool::trim`](crate::DevicePool::trim) gives back as much, whatever its argument.
    /// What is needed again is mapped anew, so a loop should find its idle memory below this bound.
    ///
    /// Default: `u64::MAX`, which keeps all.
    pub release_threshold: u64,
    /// Bytes taken from the driver and mapped when the pool is opened, which takes about 1 ms a
    /// GiB or more. [`DevicePool::warm`](crate::DevicePool::warm) does the same later, and lists
    /// what may take these bytes.
    ///
    /// At most the budget's limit and the release threshold. Only on devices with virtual memory,
    /// and not beside bypass. Default: 0.
    pub warm_reserve: u64,
    /// Bytes that may be idle in the cache of one stream. When a slow path of any stream finds
    /// more, free ranges whose work is known to be done become shared by all streams, the largest
    /// first. The next blocks there come from a slow path, which makes no memory call. Makes no
    /// driver call and never waits. A request served by a stream's cache does not check the bound.
    ///
    /// Only on devices with virtual memory. Default: `u64::MAX`, which is no cap.
    pub stream_cache: u64,
    /// The file of a plan: the pool serves the blocks of a recorded program at the places that
    /// `aquifer plan` found for them. One range of exactly the plan's size, rounded up to the
    /// device's granularity, is mapped and charged to the budget when the pool is opened. The rest
    /// of the budget is for all other blocks.
    ///
    /// - A block that comes in the recorded order gets its place without a driver call. If another
    ///   stream used the place before, the block's stream waits for it on the device.
    /// - A block that the plan does not have, whose place is still held, or which would have to
    ///   wait for another stream without a record of that, is allocated as in a pool without a
    ///   plan.
    /// - A plan that more than a fifth of the allocations miss, in each of two rounds in a row, is
    ///   dropped for new blocks ([`Action::DropPlan`](aquifer_core::Action::DropPlan)). When no
    ///   block lives in its range any more, trims and reclaims give the range back.
    ///
    /// [`PoolStats`](aquifer_core::PoolStats) has the counts. While a plan is in use, each
    /// allocation takes the full path. Streams of the program take the places of those of the
    /// record in the order in which their first blocks match. While a capture is announced, the
    /// plan is not used.
    ///
    /// Not beside bypass or debugging. Default: the file that `AQUIFER_PLAN` names, or none.
    pub plan: Option<PathBuf>,
    /// A plan that has been read, in place of a file.
    pub(crate) loaded_plan: Option<Arc<Plan>>,
    /// Other devices whose kernels may access the pool's memory: each mapping grants them access.
    /// Copies between devices do not need it ([`Stream::copy`](aquifer_stream::Stream::copy)).
    ///
    /// It is expensive: `cuMemSetAccess` takes about 1 ms for each peer, whatever a handle's size.
    /// Growth and moves cost that much more. So use a large [`handle_bytes`](Self::handle_bytes)
    /// with it, or put what peers access into [stable](crate::DevicePool::alloc_stable) memory of
    /// a pool of its own.
    ///
    /// Only on devices with virtual memory, and not beside bypass. Each device must list the
    /// pool's device among its [peers](aquifer_driver::DeviceInfo::peers). Default: none.
    pub peers: Vec<DeviceId>,
    /// The handle types that stable blocks can be exported as. No memory can be made exportable
    /// later, so it is set here. Default: none.
    pub export: ExportTypes,
    /// Creates all memory so that other processes of this machine can map it
    /// ([`DevicePool::share`](crate::DevicePool::share)), where the device and the system support
    /// it. No memory can be made so later. Default: `false`.
    pub shareable: bool,
    /// Maximum number of streams leased at once.
    pub streams: u32,
    /// Makes each block an allocation of its own from the driver. This is slow, but visible to
    /// memory checkers. Default: `false`, but devices without virtual memory mapping have nothing
    /// else.
    pub bypass: bool,
    /// The checks of blocks. Default: none, which costs nothing. The environment can enable checks
    /// too.
    pub debug: Debugging,
    /// The recorder of all events. Default: `None`.
    pub recorder: Option<Arc<Recorder>>,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            budget: None,
            adoption: Adoption::default(),
            wait: Duration::from_secs(10),
            handle_bytes: 0,
            slack: DEFAULT_SLACK,
            release_threshold: u64::MAX,
            warm_reserve: 0,
            stream_cache: u64::MAX,
            plan: None,
            loaded_plan: None,
            peers: Vec::new(),
            export: ExportTypes::NONE,
            shareable: false,
            streams: aquifer_stream::DEFAULT_CAP,
            bypass: false,
            debug: Debugging::default(),
            recorder: None,
        }
    }
}

impl PoolConfig {
    /// The maximum of [`slack`](Self::slack), in per cent.
    pub const MAX_SLACK: u32 = 10_000;

    /// Returns the default settings with this budget.
    #[must_use]
    pub fn with_budget(budget: Budget) -> Self {
        Self { budget: Some(budget), ..Self::default() }
    }

    /// Sets a plan that has been read or made, in place of the file of
    /// [`plan`](PoolConfig::plan).
    #[doc(hidden)]
    #[must_use]
    pub fn with_plan(self, plan: Arc<Plan>) -> Self {
        Self { loaded_plan: Some(plan), ..self }
    }

    /// Returns what memory that is not asked to be exportable is created for.
    pub(crate) fn default_export(&self, supported: ExportTypes) -> ExportTypes {
        if self.shareable && supported.posix_fd { ExportTypes::POSIX_FD } else { ExportTypes::NONE }
    }

    /// Returns the devices that mappings grant access to, the pool's own first.
    ///
    /// # Errors
    /// A peer that does not exist or cannot access the pool's device, or peers on a device without
    /// virtual memory.
    pub(crate) fn accessors(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        maps: bool,
    ) -> Result<Arc<[DeviceId]>> {
        let mut accessors = vec![device];
        for &peer in &self.peers {
            if !maps {
                return Err(MemoryError::Unsupported {
                    feature: "virtual memory management (cuMemMap)",
                });
            }
            let bad = |expected| {
                let (name, value) = ("peers", peer.to_string());
                Err(MemoryError::BadSetting { name, value, expected })
            };
            if self.bypass {
                return bad("none beside bypass, where every block is an allocation of its own");
            }
            let info = driver.device_info(peer).map_err(|e| MemoryError::driver(peer, e))?;
            if peer != device && !info.peers.contains(&device) {
                return bad("devices whose kernels can reach the pool's");
            }
            if !accessors.contains(&peer) {
                accessors.push(peer);
            }
        }
        Ok(accessors.into())
    }

    /// Returns the size of the slots that memory is mapped in; 0 without virtual memory.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a [`handle_bytes`](Self::handle_bytes) that is not possible.
    pub(crate) fn slot(&self, info: &DeviceInfo) -> Result<u64> {
        if !info.virtual_memory || info.granularity == 0 {
            return Ok(0);
        }
        let largest = info.memory.max(info.granularity);
        let slot = self.handle_bytes.max(1).checked_next_multiple_of(info.granularity);
        slot.filter(|slot| slot.is_power_of_two() && *slot <= largest).ok_or_else(|| {
            let (name, value) = ("handle_bytes", self.handle_bytes.to_string());
            let expected = "0 or a power of two, at most the device's memory";
            MemoryError::BadSetting { name, value, expected }
        })
    }

    /// Checks that [`slack`](Self::slack) is not above its maximum.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`].
    pub(crate) fn check_slack(&self) -> Result<()> {
        if self.slack <= Self::MAX_SLACK {
            return Ok(());
        }
        let (name, value) = ("slack", self.slack.to_string());
        Err(MemoryError::BadSetting { name, value, expected: "at most 10000 per cent" })
    }

    /// Checks the retention settings against each other, the budget's limit and the device.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] or [`MemoryError::Unsupported`].
    pub(crate) fn check_retention(&self, limit: u64, maps: bool) -> Result<()> {
        if (self.warm_reserve > 0 || self.stream_cache < u64::MAX) && !maps {
            return Err(MemoryError::Unsupported {
                feature: "virtual memory management (cuMemMap)",
            });
        }
        let expected = match self.warm_reserve {
            0 => return Ok(()),
            _ if self.bypass => "0 beside bypass, where every block is an allocation of its own",
            warm if warm > limit => "at most the limit of the budget",
            warm if warm > self.release_threshold => "at most release_threshold",
            _ => return Ok(()),
        };
        Err(MemoryError::BadSetting {
            name: "warm_reserve",
            value: self.warm_reserve.to_string(),
            expected,
        })
    }
}
