//! The runtime: driver, device pools, pinned pools and watches, connected.

mod budgets;
mod sharing;

use crate::{
    Placer, Policy,
    environment::{self, Environment, Fallback},
    placement::{DeviceSet, MAX_DEVICES},
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
    region::{Host, end_retired},
    topology::{NodeId, Topology, TopologyError},
};
use aquifer_status::ledger::{LedgerMemory, SharedBudget};
use budgets::{DeviceLimits, ParentBudgets};
use sharing::Sharing;
use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

/// A driver, a pool for each of its devices, and pinned memory near each device.
///
/// Clones share one runtime. Building it takes no device memory beyond the driver's own context. It
/// starts no thread, unless it has to [keep memory free](RuntimeBuilder::keep_free) or to [watch
/// the host](RuntimeBuilder::watch_host). Without a GPU it has no devices, and host memory is
/// pageable and reported as such. Pools may outlive the runtime, and blocks may outlive their
/// pools: all can be dropped in any order.
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
    inner: Arc<RuntimeCore>,
}

struct RuntimeCore {
    /// The threads of both watches hold pools. They end before the pools are dropped.
    keep_free: Option<KeepFree>,
    watched_host: Option<WatchedHost>,
    /// The threads that answer other processes.
    _shared: Vec<SharedBudget>,
    driver: Option<Arc<dyn Driver>>,
    /// The reason, if there is no driver or no device.
    no_gpu: Option<NoGpu>,
    /// The pools as they were opened, before any was replaced.
    pools: Vec<DevicePool>,
    device_set: Arc<DeviceSet>,
    host: Host,
    /// First the pool for no particular node, then one for each node that is near a device.
    pinned: Vec<PinnedPool>,
    /// For each device, the index in `pinned` of the pool near it.
    near: Vec<usize>,
    /// Dropped last, after the pools have closed.
    _sim_report: Option<ReportOnDrop>,
}

/// A simulated machine that the runtime created. Its violations are reported when the runtime ends.
struct ReportOnDrop(Sim);

impl Drop for ReportOnDrop {
    fn drop(&mut self) {
        self.0.report();
    }
}

/// The settings of a [`Runtime`] to be built.
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
    sample_interval: Duration,
    publish_status: bool,
    sharing: Sharing,
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
            sample_interval: Duration::from_millis(100),
            publish_status: true,
            sharing: Sharing::default(),
        }
    }
}

impl RuntimeBuilder {
    /// Sets the driver, instead of the machine's own.
    #[must_use]
    pub fn driver(mut self, driver: Arc<dyn Driver>) -> Self {
        self.driver = Some(driver);
        self
    }

    /// Uses a simulated GPU if the machine has none. This is reported once on standard error, with
    /// the reason, unless `AQUIFER_SIM_FALLBACK=quiet`.
    #[must_use]
    pub fn or_sim(mut self) -> Self {
        self.or_sim = true;
        self
    }

    /// Like [`or_sim`](Self::or_sim), but never reports it, regardless of the environment.
    #[must_use]
    pub fn or_sim_quietly(mut self) -> Self {
        self.fallback = Some(Fallback::Quiet);
        self.or_sim()
    }

    /// Sets what happens with the violations that a simulated GPU of [`or_sim`](Self::or_sim) finds
    /// and the program does not take by [`Runtime::simulator`]. Overrides `AQUIFER_SIM_VIOLATIONS`.
    ///
    /// Violations are reported when the runtime ends. Those found later are reported when the last
    /// of its blocks is dropped.
    ///
    /// ```
    /// use aquifer::{Runtime, sim::OnViolation};
    /// let rt = Runtime::builder().or_sim_quietly().on_violation(OnViolation::Exit(3)).build()?;
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

    /// Sets the devices and their order, instead of all devices.
    #[must_use]
    pub fn devices(mut self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        self.devices = Some(devices.into_iter().collect());
        self
    }

    /// Limits the pool of each device to `bytes`, instead of 80 % of the memory that is free now.
    #[must_use]
    pub fn device_budget(mut self, bytes: u64) -> Self {
        self.device_budget = Some(bytes);
        self
    }

    /// Limits pinned host memory to `bytes` in all, instead of half of the host memory that the
    /// process may still take ([`Topology::headroom`]).
    #[must_use]
    pub fn pinned_budget(mut self, bytes: u64) -> Self {
        self.pinned_budget = Some(bytes);
        self
    }

    /// Sets the configuration of each device's pool. A budget in it is shared by all devices.
    #[must_use]
    pub fn pools(mut self, config: PoolConfig) -> Self {
        self.pool = config;
        self
    }

    /// Sets the configuration of the pinned pools. The node of each pool is set by the runtime.
    #[must_use]
    pub fn pinned(mut self, config: PinnedConfig) -> Self {
        self.pinned = config;
        self
    }

    /// Sets the machine's topology, instead of reading it from the system.
    #[must_use]
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// Sets the maximum age of the driver's free-memory figure, 100 ms by default. A placement that
    /// finds an older figure queries the driver (`cuMemGetInfo`, a few µs per device). What this
    /// process allocates and releases is counted at once in any case.
    #[must_use]
    pub fn sample_every(mut self, interval: Duration) -> Self {
        self.sample_interval = interval;
        self
    }

    /// Keeps `bytes` of each device free in the driver, for other processes and libraries. The
    /// default is `AQUIFER_KEEP_FREE`, or none if that is not set. 0 keeps none free, regardless of
    /// the environment.
    ///
    /// One thread for all devices queries the driver every 10 to 50 ms (`cuMemGetInfo`, some 4 µs).
    /// When less is free, the pool and all others that hold memory of the device under the same
    /// budgets are asked to [give some back](DevicePool::give_back), without waiting for any work
    /// of the device. The [warm reserve](PoolConfig::warm_reserve) is released too. The total under
    /// the device's budget is limited so that this much stays free. So no pool of this process
    /// takes the released memory again. [`keep_free_may_stall`](Self::keep_free_may_stall) lets it
    /// wait.
    /// [`Runtime::pressure`] reports what the watch has seen and done.
    ///
    /// The budget of each pool becomes a child of the watch's own budget. If the
    /// [settings](Self::pools) contain a budget, each pool gets a node below that one.
    #[must_use]
    pub fn keep_free(mut self, bytes: u64) -> Self {
        self.keep_free = Some(bytes);
        self
    }

    /// Lets the watch of [`keep_free`](Self::keep_free) wait for queued work, and release pinned
    /// memory, although the driver then waits for all work of the device.
    #[must_use]
    pub fn keep_free_may_stall(mut self) -> Self {
        self.keep_free_may_stall = true;
        self
    }

    /// Watches the host's memory on a thread: control groups and the free memory of the nodes. It
    /// reads them once a second, and four times a second while memory is scarce.
    ///
    /// [`Runtime::pressure`] reports what was seen. Unless set, `AQUIFER_WATCH_HOST=1` starts the
    /// [default watch](HostWatch::default).
    #[must_use]
    pub fn watch_host(mut self, watch: HostWatch) -> Self {
        self.watch_host = Some(watch);
        self
    }

    /// Sets the kernel interface for pinned memory and for the watch threads. Tests use one with
    /// planned failures.
    #[must_use]
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel;
        self
    }

    /// Sets whether other processes of the user can [read](crate::guide::status) the memory figures
    /// of this process. The default is `true`, unless `AQUIFER_STATUS=off`. With `false`, the
    /// figures of the whole process are removed, and are not published again.
    #[must_use]
    pub fn publish_status(mut self, publish: bool) -> Self {
        self.publish_status = publish;
        self
    }

    /// Shares the memory of each device with the other processes of this user that do so. Each of
    /// them claims bytes before it takes them, up to the capacity of the device, and gives back
    /// what it has in caches on another's need. Its claims end with the process.
    ///
    /// `guarantee` bytes of each device are guaranteed to this process, 0 for none. While it does
    /// not use them, they are lent to others. A [device budget](Self::device_budget) limits what
    /// the process claims, by default to the capacity. [Sharing one GPU](crate::guide::sharing) is
    /// a page of the guide. One thread for each device answers other processes. It also has the
    /// driver count what is in use (`cuMemGetInfo`) every 50 ms, and what no process has claimed of
    /// it is taken from the capacity.
    ///
    /// With `AQUIFER_LEDGER=off` nothing is shared.
    ///
    /// ```
    /// use aquifer::{Request, Runtime};
    /// # let folder = std::env::temp_dir().join(format!("aquifer-runtime-{}", std::process::id()));
    /// let rt = Runtime::builder().or_sim_quietly().shared(1 << 30).ledger_folder(&folder).build()?;
    /// let pool = rt.device(0)?;
    /// let stream = pool.stream()?;
    /// let block = pool.alloc(&stream, Request::bytes(1 << 20))?;      // claimed, then taken
    /// # drop((block, stream, rt));
    /// # let _left = std::fs::remove_dir_all(&folder);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn shared(mut self, guarantee: u64) -> Self {
        self.sharing.devices = Some(guarantee);
        self
    }

    /// Shares pinned memory with the other processes of this user that do so: half of the host's
    /// memory. Otherwise as [`shared`](Self::shared). The [pinned budget](Self::pinned_budget)
    /// still limits this process.
    #[must_use]
    pub fn shared_pinned(mut self, guarantee: u64) -> Self {
        self.sharing.pinned = Some(guarantee);
        self
    }

    /// Sets the priority of this process among those that share a memory, 0 by default. Beyond
    /// guarantees, waiting processes with higher priorities are served first.
    #[must_use]
    pub fn shared_priority(mut self, priority: i32) -> Self {
        self.sharing.priority = priority;
        self
    }

    /// Keeps the guarantees of [`shared`](Self::shared) and [`shared_pinned`](Self::shared_pinned)
    /// free for this process even while it does not use them, instead of lending them.
    #[must_use]
    pub fn reserve_guarantees(mut self) -> Self {
        self.sharing.reserve = true;
        self
    }

    /// Sets the folder of the files by which processes share memory, instead of `AQUIFER_LEDGER`.
    /// It is created with mode 0700 if it does not exist.
    #[must_use]
    pub fn ledger_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.sharing.folder = Some(folder.into());
        self
    }

    /// Opens the driver, reads the machine's topology, and creates the pools. Most of the time is
    /// the driver's, for one context per device. An environment variable whose name is nearly
    /// [one that aquifer reads](crate::guide::environment) is reported on standard error.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for an invalid environment variable or an unreadable topology;
    /// [`MemoryError::NoDevice`] for a device that does not exist; the driver's error. A machine
    /// without a GPU is not an error.
    #[track_caller]
    pub fn build(self) -> Result<Runtime> {
        // What the pools do when they close is attributed to the caller's line.
        let _site = site::enter();
        let environment = Environment::read()?;
        environment::report_misspelt();
        if !self.publish_status {
            aquifer_status::disable();
        }
        aquifer_global::publish_status()?;
        let keep_free = self.keep_free.or(environment.keep_free).filter(|bytes| *bytes > 0);
        let watch_host =
            self.watch_host.or_else(|| environment.watch_host.then(HostWatch::default));
        let opened = match self.driver {
            Some(driver) => Ok(driver),
            None => machine_driver(),
        };
        let (driver, no_gpu, sim_report) = match opened {
            Ok(driver) => (Some(driver), None, None),
            Err(why) if self.or_sim => {
                if self.fallback.unwrap_or(environment.fallback) == Fallback::Report {
                    environment::report_fallback(&why);
                }
                let sim = match self.on_violation {
                    Some(what) => Sim::h200(1).on_violation(what),
                    None => Sim::h200(1),
                };
                (Some(sim.driver()), None, Some(ReportOnDrop(sim)))
            }
            Err(why) => (None, Some(why), None),
        };
        let topology = match self.topology {
            Some(topology) => topology,
            None => Topology::read().map_err(|error| match error {
                TopologyError::Setting { name, value, expected } => {
                    MemoryError::BadSetting { name, value, expected }
                }
                error => MemoryError::BadSetting {
                    name: "the machine's topology",
                    value: error.to_string(),
                    expected: "what the kernel tells under /sys and /proc",
                },
            })?,
        };
        let no_gpu = match &driver {
            Some(driver) if driver.device_count() == Ok(0) => Some(NoGpu::NoDevices),
            _ => no_gpu,
        };
        let infos = match &driver {
            Some(driver) => select_devices(&**driver, self.devices)?,
            None => Vec::new(),
        };
        let topology = topology.with_devices(&infos);
        let parents = ParentBudgets::read(driver.as_deref(), &infos, &topology)?;
        let sharing = self.sharing.resolve()?;
        let mut shared = Vec::new();
        let (mut pools, mut watched) = (Vec::new(), Vec::new());
        if let Some(driver) = &driver {
            for info in &infos {
                let mut config = self.pool.clone();
                let root = sharing.device(
                    driver,
                    info,
                    &topology,
                    config.budget.is_some(),
                    self.device_budget,
                )?;
                let limits = DeviceLimits {
                    budget: config.budget.take(),
                    bytes: self.device_budget,
                    shared: root.as_ref().map(|root| root.budget().clone()),
                };
                shared.extend(root);
                let (budget, ceiling) =
                    parents.for_device(&**driver, info, limits, keep_free.is_some())?;
                config.budget = budget;
                let pool = DevicePool::open(driver.clone(), info.device, config)?;
                if let Some(ceiling) = ceiling {
                    let may_stall = self.keep_free_may_stall;
                    watched.push(WatchedDevice { pool: pool.clone(), ceiling, may_stall });
                }
                pools.push(pool);
            }
        }
        let root = sharing.pinned(&topology, parents.is_shared())?;
        let (budget, host_ceiling) = parents.for_pinned(
            self.pinned_budget,
            watch_host.is_some(),
            root.as_ref().map(SharedBudget::budget),
        );
        shared.extend(root);
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
                // Without a device no memory is registered, so unregistering cannot stall.
                watch.may_stall |= pools.is_empty();
                let topology = host.topology.clone();
                Some(WatchedHost::start(&self.kernel, topology, watch, ceiling, pinned.clone())?)
            }
            _ => None,
        };
        let device_set =
            Arc::new(DeviceSet::new(&pools, host.topology.clone(), self.sample_interval));
        let inner = RuntimeCore {
            keep_free,
            watched_host,
            _shared: shared,
            driver,
            no_gpu,
            pools,
            device_set,
            host,
            pinned,
            near,
            _sim_report: sim_report,
        };
        Ok(Runtime { inner: Arc::new(inner) })
    }
}

/// Returns the machine's CUDA driver, if this build includes it and it can be opened.
fn machine_driver() -> Result<Arc<dyn Driver>, NoGpu> {
    #[cfg(feature = "cuda")]
    return Ok(aquifer_driver::cuda::CudaDriver::open()?);
    #[cfg(not(feature = "cuda"))]
    Err(NoGpu::NotBuilt)
}

/// Returns the requested devices, or all.
fn select_devices(driver: &dyn Driver, devices: Option<Vec<DeviceId>>) -> Result<Vec<DeviceInfo>> {
    let count = driver.device_count().map_err(MemoryError::Driver)?;
    let devices = devices.unwrap_or_else(|| (0..count).map(DeviceId).collect());
    if devices.len() > MAX_DEVICES {
        let (name, value) = ("devices", devices.len().to_string());
        return Err(MemoryError::BadSetting { name, value, expected: "at most 64 of them" });
    }
    let query = |device: DeviceId| {
        if device.0 >= count {
            return Err(MemoryError::NoDevice { asked: device.0, count });
        }
        driver.device_info(device).map_err(|e| MemoryError::driver(device, e))
    };
    devices.into_iter().map(query).collect()
}

/// Creates a pinned pool for no particular node, and one for each node that is near a device.
fn pinned_pools(
    driver: &Option<Arc<dyn Driver>>,
    pools: &[DevicePool],
    topology: Topology,
    kernel: &Kernel,
    budget: &Budget,
    config: &PinnedConfig,
) -> Result<(Host, Vec<PinnedPool>, Vec<usize>)> {
    let nodes: Vec<Option<NodeId>> =
        pools.iter().map(|pool| topology.memory_near_device(pool.info()).ok().flatten()).collect();
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
    /// Returns a builder with the default settings.
    #[must_use]
    pub fn builder() -> RuntimeBuilder {
        RuntimeBuilder::default()
    }

    /// Creates a runtime on `driver` with all of its devices.
    ///
    /// # Errors
    /// As [`RuntimeBuilder::build`].
    #[track_caller]
    pub fn on(driver: Arc<dyn Driver>) -> Result<Self> {
        Self::builder().driver(driver).build()
    }

    /// Returns the pool of the device at `index` among this runtime's devices. After
    /// [`Placer::restore`] this is the new pool.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`]; [`MemoryError::NoGpu`] with the reason, if there is no GPU.
    pub fn device(&self, index: usize) -> Result<&DevicePool> {
        self.inner
            .device_set
            .pool(index)
            .ok_or_else(|| self.missing(u32::try_from(index).unwrap_or(u32::MAX)))
    }

    /// Returns the pool of the device with this ordinal. After [`Placer::restore`] this is the new
    /// pool.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`]; [`MemoryError::NoGpu`] with the reason, if there is no GPU.
    pub fn by_ordinal(&self, device: DeviceId) -> Result<&DevicePool> {
        let index = self.inner.pools.iter().position(|pool| pool.device() == device);
        let found = index.and_then(|index| self.inner.device_set.pool(index));
        found.ok_or_else(|| self.missing(device.0))
    }

    /// Returns the name and the capacity in bytes of the [ledger](crate::guide::sharing) by which
    /// processes share the device with this index, whether this runtime does or not.
    ///
    /// ```
    /// use aquifer::{Runtime, sim::Sim};
    /// let rt = Runtime::on(Sim::h200(2).capacity(1 << 30).driver())?;
    /// assert_eq!(rt.ledger_of_device(1)?, ("simulated-1".to_owned(), 1 << 30));
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`]; [`MemoryError::NoGpu`].
    pub fn ledger_of_device(&self, index: usize) -> Result<(String, u64)> {
        let info = self.device(index)?.info();
        let driver = self.driver().ok_or_else(|| self.missing(info.device.0))?;
        Ok((crate::placement::memory_of(driver, info).to_string(), info.memory))
    }

    /// Returns the name and the capacity in bytes of the [ledger](crate::guide::sharing) by which
    /// processes share pinned memory, whether this runtime does or not: half of the host's memory.
    ///
    /// ```
    /// use aquifer::Runtime;
    /// let (name, capacity) = Runtime::builder().or_sim_quietly().build()?.ledger_of_pinned();
    /// assert!(name == "pinned-memory" && capacity > 0);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn ledger_of_pinned(&self) -> (String, u64) {
        let capacity = sharing::pinned_capacity(&self.inner.host.topology);
        (LedgerMemory::Pinned.to_string(), capacity)
    }

    /// Returns the error for a device that does not exist.
    fn missing(&self, asked: u32) -> MemoryError {
        let count = u32::try_from(self.inner.pools.len()).unwrap_or(u32::MAX);
        match self.inner.no_gpu {
            Some(why) => MemoryError::NoGpu { asked, why: Box::new(why) },
            None => MemoryError::NoDevice { asked, count },
        }
    }

    /// Returns the pools of all devices as they were opened.
    #[must_use]
    pub fn devices(&self) -> &[DevicePool] {
        &self.inner.pools
    }

    /// Returns the pinned pool of the NUMA node nearest to the device at `index` that has memory
    /// for this process. If that node is unknown, or there is no such device, returns the pool for
    /// no particular node.
    #[must_use]
    pub fn pinned_near(&self, index: usize) -> &PinnedPool {
        let at = self.inner.near.get(index).copied().unwrap_or(0);
        &self.inner.pinned[at]
    }

    /// Creates a stager between pageable memory or files and the device at `index`.
    ///
    /// Its slots come from the process's [staging allocator](crate::staging::install), or from
    /// pinned memory near the device if none is installed. Starts no thread and allocates nothing
    /// yet. Clones share workers and slots, so create one stager for each device and clone it.
    ///
    /// A staging allocator is one pool on one node, so it is remote for devices near other nodes.
    /// [`Stager::new`] with [this host](Runtime::host) accepts another pool.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`]; [`MemoryError::BadSetting`] for an invalid configuration.
    pub fn stager(&self, index: usize, config: StagerConfig) -> Result<Stager> {
        let streams = self.device(index)?.streams();
        let pinned = staging::installed().unwrap_or_else(|| self.pinned_near(index));
        Stager::new(&self.inner.host, pinned, streams, config)
    }

    /// Returns the host that the pinned pools are on, to create further pools.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.inner.host
    }

    /// Creates a placer that chooses devices by `policy`.
    #[must_use]
    pub fn placer(&self, policy: Policy) -> Placer {
        Placer::new(self.inner.device_set.clone(), policy)
    }

    /// Returns what the watches for [neighbour processes](RuntimeBuilder::keep_free) and for [the
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

    /// Sets how many bytes of each device are kept free from now on, instead of the
    /// [builder](RuntimeBuilder::keep_free)'s value; 0 for none. The watch reads the devices at
    /// once.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] if the runtime was built to keep none free: no watch runs then.
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

    /// Marks a moment at which no kernels are being launched, so that calls which stall launches
    /// can run.
    ///
    /// If the [watch](RuntimeBuilder::watch_host) has found the host short of memory, pinned memory
    /// is released. Otherwise the pinned memory that closed pools have left behind is. Returns the
    /// number of released bytes. Blocks until this is done and until the devices are idle.
    ///
    /// # Errors
    /// The error of the driver or of the kernel.
    pub fn quiet_point(&self) -> Result<u64> {
        if let Some(host) = self.inner.watched_host.as_ref().filter(|host| host.is_short()) {
            return host.release_wanted();
        }
        Ok(end_retired())
    }

    /// Returns the simulated machine of the runtime, to inspect its findings, fail its calls or run
    /// its work. Returns `None` on real GPUs.
    ///
    /// ```
    /// use aquifer::{Runtime, sim::Sim};
    /// let rt = Runtime::on(Sim::h200(2).driver())?;
    /// let sim = rt.simulator().ok_or(aquifer::MemoryError::Closed)?;
    /// assert!(sim.violations().is_empty());
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn simulator(&self) -> Option<Sim> {
        self.inner.driver.clone()?.simulator()
    }

    /// Returns why there is no usable GPU, as `aquifer doctor` reports it. Returns `None` if there
    /// is one, also if it is simulated.
    #[must_use]
    pub fn no_gpu(&self) -> Option<NoGpu> {
        self.inner.no_gpu
    }

    /// Returns the driver, if there is one.
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

// A runtime is fixed once it is built, but for pools and watches, whose own state outlives a panic.
aquifer_core::__unwind_safe! { [] Runtime }
