//! Everything wired together.

mod budgets;

use crate::{
    Placer, Policy,
    environment::{self, Environment, Fallback},
    placement::{Fleet, MAX_DEVICES},
    pressure::{HostWatch, KeepFree, Pressure, WatchedDevice, WatchedHost},
    staging,
};
use aquifer_core::{Budget, DeviceId, MemoryError, NoGpu, Result};
use aquifer_device::{DevicePool, PoolConfig};
use aquifer_driver::{
    DeviceInfo, Driver,
    sim::{OnViolation, Sim},
    site,
};
use aquifer_host::{
    PinnedConfig, PinnedPool, Stager, StagerConfig,
    kernel::Kernel,
    region::Host,
    topology::{NodeId, Topology},
};
use budgets::{Above, Limits};
use std::{fmt, sync::Arc, time::Duration};

/// A driver, a pool for each of its devices, and pinned memory near each.
///
/// Clones share it. Building one takes no device memory beyond the driver's own context and starts
/// no thread, unless it is to [keep memory free](RuntimeBuilder::keep_free) or to [watch the
/// host](RuntimeBuilder::watch_host); without a GPU it has no devices, and host memory is pageable
/// and says so. Pools may outlive it, and blocks their pools: things may be dropped in any order.
///
/// ```
/// use aquifer::Runtime;
/// let rt = Runtime::builder().or_sim().build()?;
/// let pool = rt.device(0)?;
/// println!("{} of {}", pool.budget().limit(), pool.info().name);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct Runtime {
    inner: Arc<Inner>,
}

struct Inner {
    /// Their threads hold pools, and end before those go.
    keep_free: Option<KeepFree>,
    watched_host: Option<WatchedHost>,
    driver: Option<Arc<dyn Driver>>,
    /// Why there is no driver, or none with a device.
    no_gpu: Option<NoGpu>,
    /// As they were opened.
    pools: Vec<DevicePool>,
    fleet: Arc<Fleet>,
    host: Host,
    /// A pool for each node that some device is near, and first the one for no node in particular.
    pinned: Vec<PinnedPool>,
    /// Which of `pinned` each device is near.
    near: Vec<usize>,
    /// The last to go, when the pools have closed.
    _reported: Option<ReportedAtEnd>,
}

/// A simulated machine of the runtime's own, whose violations are reported when the runtime ends.
struct ReportedAtEnd(Sim);

impl Drop for ReportedAtEnd {
    fn drop(&mut self) {
        self.0.report();
    }
}

/// How a [`Runtime`] is to be built.
#[derive(Debug)]
pub struct RuntimeBuilder {
    driver: Option<Arc<dyn Driver>>,
    or_sim: bool,
    fallback: Option<Fallback>,
    on_violation: Option<OnViolation>,
    devices: Option<Vec<DeviceId>>,
    device_budget: Option<u64>,
    pinned_budget: Option<u64>,
    pool: PoolConfig,
    pinned: PinnedConfig,
    topology: Option<Topology>,
    keep_free: Option<u64>,
    keep_free_may_stall: bool,
    watch_host: Option<HostWatch>,
    kernel: Kernel,
    sampled: Duration,
}

impl Default for RuntimeBuilder {
    fn default() -> Self {
        Self {
            driver: None,
            or_sim: false,
            fallback: None,
            on_violation: None,
            devices: None,
            device_budget: None,
            pinned_budget: None,
            pool: PoolConfig::default(),
            pinned: PinnedConfig::default(),
            topology: None,
            keep_free: None,
            keep_free_may_stall: false,
            watch_host: None,
            kernel: Kernel::new(),
            sampled: Duration::from_millis(100),
        }
    }
}

impl RuntimeBuilder {
    /// On this driver, instead of the machine's own.
    #[must_use]
    pub fn driver(mut self, driver: Arc<dyn Driver>) -> Self {
        self.driver = Some(driver);
        self
    }

    /// On a simulated GPU where the machine has none. That is said once on standard error, with the
    /// reason, unless `AQUIFER_SIM_FALLBACK=quiet`.
    #[must_use]
    pub fn or_sim(mut self) -> Self {
        self.or_sim = true;
        self
    }

    /// The same, and says nothing of it, whatever the environment says.
    #[must_use]
    pub fn or_sim_quietly(mut self) -> Self {
        self.fallback = Some(Fallback::Quiet);
        self.or_sim()
    }

    /// Does this with the violations that a simulated GPU of [`or_sim`](Self::or_sim) finds and the
    /// program does not take by [`Runtime::simulator`], whatever `AQUIFER_SIM_VIOLATIONS` says.
    /// They are reported when the runtime ends, and what is found later when the last of its blocks
    /// does.
    ///
    /// ```
    /// use aquifer::{Runtime, driver::sim::OnViolation};
    /// let rt = Runtime::builder().or_sim_quietly().on_violation(OnViolation::Panic).build()?;
    /// if let Some(sim) = rt.simulator() {
    ///     assert!(sim.violations().is_empty());
    /// }
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn on_violation(mut self, what: OnViolation) -> Self {
        self.on_violation = Some(what);
        self
    }

    /// With these devices, in this order, instead of all.
    #[must_use]
    pub fn devices(mut self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        self.devices = Some(devices.into_iter().collect());
        self
    }

    /// At most so many bytes of each device, instead of 80 % of what it has free now.
    #[must_use]
    pub fn device_budget(mut self, bytes: u64) -> Self {
        self.device_budget = Some(bytes);
        self
    }

    /// At most so many bytes of pinned host memory in all, instead of half of what the process may
    /// still take of the host's memory ([`Topology::headroom`]).
    #[must_use]
    pub fn pinned_budget(mut self, bytes: u64) -> Self {
        self.pinned_budget = Some(bytes);
        self
    }

    /// With these settings for each device's pool. A budget in them is shared by all devices.
    #[must_use]
    pub fn pools(mut self, config: PoolConfig) -> Self {
        self.pool = config;
        self
    }

    /// With these settings for pinned pools. Their node is each device's own.
    #[must_use]
    pub fn pinned(mut self, config: PinnedConfig) -> Self {
        self.pinned = config;
        self
    }

    /// On this picture of the machine, instead of reading it.
    #[must_use]
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// With the devices' free memory asked of the driver (`cuMemGetInfo`, 3.6 µs a device) by
    /// whoever places when the last answer is so old, instead of 100 ms. What this process takes
    /// and gives counts at once in any case.
    #[must_use]
    pub fn sample_every(mut self, interval: Duration) -> Self {
        self.sampled = interval;
        self
    }

    /// Keeps so many bytes of each device free in the driver's hands, for other processes and
    /// libraries: `AQUIFER_KEEP_FREE` unless set, and none unless that is. 0 keeps none, whatever
    /// the environment says.
    ///
    /// A thread, one for all devices, asks the driver every 10 to 50 ms (`cuMemGetInfo`, some 4
    /// µs). When less is free, the pool and others who have memory of the device under the same
    /// budgets are asked to [give some back](DevicePool::give_back), without waiting for any work
    /// of the device; the [warm reserve](PoolConfig::warm_reserve) goes too. What the pool and
    /// everything else under its budget may hold is limited to what leaves as much free, so that
    /// nobody here takes it back. Devices that cannot map are limited too, but give nothing back:
    /// see [`keep_free_may_stall`](Self::keep_free_may_stall). [`Runtime::pressure`] tells what was
    /// seen and done.
    ///
    /// The budget of each pool is below one of the watch's own then; where the
    /// [settings](Self::pools) name a budget, each pool has a node below that.
    #[must_use]
    pub fn keep_free(mut self, bytes: u64) -> Self {
        self.keep_free = Some(bytes);
        self
    }

    /// Also gives back the segments of devices that cannot map, though the driver waits for all
    /// work of the device then.
    #[must_use]
    pub fn keep_free_may_stall(mut self) -> Self {
        self.keep_free_may_stall = true;
        self
    }

    /// Watches the host's memory on a thread: control groups, stalls and what nodes have free, once
    /// a second, four times where memory is scarce, and at once when the kernel tells of stalls.
    /// [`Runtime::pressure`] tells what was seen. Unless set, `AQUIFER_WATCH_HOST=1` has it watched
    /// by [the default](HostWatch::default).
    #[must_use]
    pub fn watch_host(mut self, watch: HostWatch) -> Self {
        self.watch_host = Some(watch);
        self
    }

    /// With the system calls of this kernel, for pinned memory and for the threads that watch: one
    /// with planned failures, in tests.
    #[must_use]
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel;
        self
    }

    /// Opens the driver, reads the machine, and makes the pools. Takes the driver's own time for a
    /// context per device, and little more.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a variable of the environment, or a machine, that cannot be
    /// read; [`MemoryError::NoDevice`] for a device that is not there; the driver's. That there is
    /// no GPU is no error.
    #[track_caller]
    pub fn build(self) -> Result<Runtime> {
        // What its pools do when they end is named by the line that built it.
        let _site = site::enter();
        let environment = Environment::read()?;
        let keep_free = self.keep_free.or(environment.keep_free).filter(|bytes| *bytes > 0);
        let watch_host =
            self.watch_host.or_else(|| environment.watch_host.then(HostWatch::default));
        let opened = match self.driver {
            Some(driver) => Ok(driver),
            None => machine_driver(),
        };
        let (driver, no_gpu, own) = match opened {
            Ok(driver) => (Some(driver), None, None),
            Err(why) if self.or_sim => {
                if self.fallback.unwrap_or(environment.fallback) == Fallback::Tell {
                    environment::tell_fallback(&why);
                }
                let sim = match self.on_violation {
                    Some(what) => Sim::h200(1).on_violation(what),
                    None => Sim::h200(1),
                };
                (Some(sim.driver()), None, Some(ReportedAtEnd(sim)))
            }
            Err(why) => (None, Some(why), None),
        };
        let topology = match self.topology {
            Some(topology) => topology,
            None => Topology::read().map_err(|e| MemoryError::BadSetting {
                name: "the machine's topology",
                value: e.to_string(),
                expected: "what the kernel tells under /sys and /proc",
            })?,
        };
        let no_gpu = match &driver {
            Some(driver) if driver.device_count() == Ok(0) => Some(NoGpu::NoDevices),
            _ => no_gpu,
        };
        let infos = match &driver {
            Some(driver) => chosen(&**driver, self.devices)?,
            None => Vec::new(),
        };
        let topology = topology.with_devices(&infos);
        let above = Above::read(driver.as_deref(), &infos, &topology)?;
        let (mut pools, mut watched) = (Vec::new(), Vec::new());
        if let Some(driver) = &driver {
            for info in &infos {
                let mut config = self.pool.clone();
                let limits = Limits { own: config.budget.take(), bytes: self.device_budget };
                let (budget, ceiling) =
                    above.of_device(&**driver, info, limits, keep_free.is_some())?;
                config.budget = budget;
                let pool = DevicePool::open(driver.clone(), info.device, config)?;
                if let Some(ceiling) = ceiling {
                    let may_stall = self.keep_free_may_stall;
                    watched.push(WatchedDevice { pool: pool.clone(), ceiling, may_stall });
                }
                pools.push(pool);
            }
        }
        let (budget, host_ceiling) = above.of_pinned(self.pinned_budget, watch_host.is_some());
        let (host, pinned, near) =
            pinned_pools(&driver, &pools, topology, &self.kernel, &budget, &self.pinned)?;
        let keep_free = match keep_free {
            Some(bytes) if !watched.is_empty() => {
                Some(KeepFree::start(&self.kernel, bytes, watched)?)
            }
            _ => None,
        };
        let watched_host = match (watch_host, host_ceiling) {
            (Some(mut watch), Some(ceiling)) => {
                // Without a device nothing is registered that would have to wait for one.
                watch.may_stall |= pools.is_empty();
                let topology = host.topology.clone();
                Some(WatchedHost::start(&self.kernel, topology, watch, ceiling, pinned.clone())?)
            }
            _ => None,
        };
        let fleet = Arc::new(Fleet::new(&pools, host.topology.clone(), self.sampled));
        let inner = Inner {
            keep_free,
            watched_host,
            driver,
            no_gpu,
            pools,
            fleet,
            host,
            pinned,
            near,
            _reported: own,
        };
        Ok(Runtime { inner: Arc::new(inner) })
    }
}

/// The machine's CUDA driver, if this build has it and it opens.
fn machine_driver() -> Result<Arc<dyn Driver>, NoGpu> {
    #[cfg(feature = "cuda")]
    return Ok(aquifer_driver::cuda::CudaDriver::open()?);
    #[cfg(not(feature = "cuda"))]
    Err(NoGpu::NotBuilt)
}

/// The devices that are asked for, or all.
fn chosen(driver: &dyn Driver, devices: Option<Vec<DeviceId>>) -> Result<Vec<DeviceInfo>> {
    let count = driver.device_count().map_err(MemoryError::Driver)?;
    let devices = devices.unwrap_or_else(|| (0..count).map(DeviceId).collect());
    if devices.len() > MAX_DEVICES {
        let (name, value) = ("devices", devices.len().to_string());
        return Err(MemoryError::BadSetting { name, value, expected: "at most 64 of them" });
    }
    let look = |device: DeviceId| {
        if device.0 >= count {
            return Err(MemoryError::NoDevice { asked: device.0, count });
        }
        driver.device_info(device).map_err(|e| MemoryError::driver(device, e))
    };
    devices.into_iter().map(look).collect()
}

/// A pinned pool for no node in particular, and one for each node that a device is near.
fn pinned_pools(
    driver: &Option<Arc<dyn Driver>>,
    pools: &[DevicePool],
    topology: Topology,
    kernel: &Kernel,
    budget: &Budget,
    config: &PinnedConfig,
) -> Result<(Host, Vec<PinnedPool>, Vec<usize>)> {
    let nodes: Vec<Option<NodeId>> = pools
        .iter()
        .map(|pool| topology.memory_near_device(pool.info()).ok().and_then(|found| found.value))
        .collect();
    let mut host = Host::new(topology, kernel.clone());
    if let (Some(driver), Some(first)) = (driver, pools.first()) {
        host = host.with_driver(driver.clone(), first.device());
    }
    let mut pinned = vec![PinnedPool::new(&host, budget, config.clone())?];
    let mut of_node: Vec<(NodeId, usize)> = Vec::new();
    let mut near = Vec::with_capacity(nodes.len());
    for node in nodes {
        let Some(node) = node else {
            near.push(0);
            continue;
        };
        if let Some(&(_, at)) = of_node.iter().find(|(known, _)| *known == node) {
            near.push(at);
            continue;
        }
        let mut config = config.clone();
        config.node = Some(node);
        pinned.push(PinnedPool::new(&host, budget, config)?);
        of_node.push((node, pinned.len() - 1));
        near.push(pinned.len() - 1);
    }
    Ok((host, pinned, near))
}

impl Runtime {
    /// Starts a description of a runtime.
    #[must_use]
    pub fn builder() -> RuntimeBuilder {
        RuntimeBuilder::default()
    }

    /// A runtime on `driver` with all of its devices.
    ///
    /// # Errors
    /// As [`RuntimeBuilder::build`].
    #[track_caller]
    pub fn on(driver: Arc<dyn Driver>) -> Result<Self> {
        Self::builder().driver(driver).build()
    }

    /// The pool of the device at `index` among this runtime's devices: the new one, where a lost
    /// device was [put back](Placer::restore).
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`]; [`MemoryError::NoGpu`] where there is none, with the reason.
    pub fn device(&self, index: usize) -> Result<&DevicePool> {
        self.inner
            .fleet
            .pool(index)
            .ok_or_else(|| self.missing(u32::try_from(index).unwrap_or(u32::MAX)))
    }

    /// The pool of the device with this ordinal; the new one, where a lost device was put back.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`]; [`MemoryError::NoGpu`] where there is none, with the reason.
    pub fn by_ordinal(&self, device: DeviceId) -> Result<&DevicePool> {
        let index = self.inner.pools.iter().position(|pool| pool.device() == device);
        let found = index.and_then(|index| self.inner.fleet.pool(index));
        found.ok_or_else(|| self.missing(device.0))
    }

    /// Why there is no such device.
    fn missing(&self, asked: u32) -> MemoryError {
        let count = u32::try_from(self.inner.pools.len()).unwrap_or(u32::MAX);
        match self.inner.no_gpu {
            Some(why) => MemoryError::NoGpu { asked, why: Box::new(why) },
            None => MemoryError::NoDevice { asked, count },
        }
    }

    /// The pools of all devices, as they were opened.
    #[must_use]
    pub fn devices(&self) -> &[DevicePool] {
        &self.inner.pools
    }

    /// Pinned memory on the node that the device at `index` is near, or on the next that has memory
    /// for this process. Where that is not known, or there is no such device, on no node in
    /// particular.
    #[must_use]
    pub fn pinned_near(&self, index: usize) -> &PinnedPool {
        let at = self.inner.near.get(index).copied().unwrap_or(0);
        &self.inner.pinned[at]
    }

    /// A stager between pageable memory or files and the device at `index`. Its slots come from the
    /// process's [staging allocator](crate::staging::install), or, if none is installed, from
    /// pinned memory near the device. Starts no thread and takes no memory yet; clones of one share
    /// its workers and slots, so make one for each device and clone it.
    ///
    /// Where devices are near different nodes, one pool serves some of them from afar:
    /// [`Stager::new`] on [this machine](Runtime::host) takes another.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`]; [`MemoryError::BadSetting`] for a configuration that cannot be
    /// followed.
    pub fn stager(&self, index: usize, config: StagerConfig) -> Result<Stager> {
        let streams = self.device(index)?.streams();
        let pinned = staging::installed().unwrap_or_else(|| self.pinned_near(index));
        Stager::new(&self.inner.host, pinned, streams, config)
    }

    /// The machine that its pinned pools are on, for more of them.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.inner.host
    }

    /// Picks devices by `policy`.
    #[must_use]
    pub fn placer(&self, policy: Policy) -> Placer {
        Placer::new(self.inner.fleet.clone(), policy)
    }

    /// What the watches for [neighbours](RuntimeBuilder::keep_free) and for [the
    /// host](RuntimeBuilder::watch_host) have seen and done so far. Never blocks.
    #[must_use]
    pub fn pressure(&self) -> Pressure {
        let mut pressure = Pressure::default();
        if let Some(keep_free) = &self.inner.keep_free {
            keep_free.report(&mut pressure);
        }
        if let Some(host) = &self.inner.watched_host {
            host.report(&mut pressure);
        }
        pressure
    }

    /// Keeps so many bytes of each device free from now on, instead of what the
    /// [builder](RuntimeBuilder::keep_free) said; 0 for none. The watch looks at once.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] where the runtime was built to keep none: nothing watches then.
    pub fn set_keep_free(&self, bytes: u64) -> Result<()> {
        let Some(keep_free) = &self.inner.keep_free else {
            let (name, value) = ("keep_free", bytes.to_string());
            return Err(MemoryError::BadSetting {
                name,
                value,
                expected: "set when the runtime is built",
            });
        };
        keep_free.set(bytes);
        Ok(())
    }

    /// Says that no kernels are being launched: the time for what stalls those. Pinned memory that
    /// the host [was seen to lack](RuntimeBuilder::watch_host) is given back; where none was,
    /// pinned pools [grow ahead](PinnedPool::quiet_point). Answers with the bytes given back.
    /// Blocks meanwhile, and until devices are idle.
    ///
    /// # Errors
    /// The driver's or the kernel's.
    pub fn quiet_point(&self) -> Result<u64> {
        if let Some(host) = self.inner.watched_host.as_ref().filter(|host| host.is_short()) {
            return host.give_back();
        }
        for pool in &self.inner.pinned {
            pool.quiet_point()?;
        }
        Ok(0)
    }

    /// Returns the simulated machine that the runtime is on, to look at what it has found, fail its
    /// calls or run its work; `None` on GPUs.
    ///
    /// ```
    /// use aquifer::{Runtime, driver::sim::Sim};
    /// let rt = Runtime::on(Sim::h200(2).driver())?;
    /// let sim = rt.simulator().ok_or(aquifer::MemoryError::Closed)?;
    /// assert!(sim.violations().is_empty());
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn simulator(&self) -> Option<Sim> {
        self.inner.driver.clone()?.simulator()
    }

    /// Returns why there is no GPU to use, as `aquifer doctor` says it; `None` where there is one,
    /// simulated ones included.
    #[must_use]
    pub fn no_gpu(&self) -> Option<NoGpu> {
        self.inner.no_gpu
    }

    /// The driver, if there is one.
    #[must_use]
    pub fn driver(&self) -> Option<&Arc<dyn Driver>> {
        self.inner.driver.as_ref()
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime")
            .field("driver", &self.inner.driver.as_ref().map(|d| d.name()))
            .field("pools", &self.inner.pools)
            .field("pinned", &self.inner.pinned)
            .finish_non_exhaustive()
    }
}
