//! Everything wired together.

use crate::{
    Placer, Policy,
    placement::{Fleet, MAX_DEVICES},
    staging,
};
use aquifer_core::{Budget, DeviceId, MemoryError, Result};
use aquifer_device::{DevicePool, PoolConfig};
use aquifer_driver::{Driver, sim::Sim};
use aquifer_host::{
    PinnedConfig, PinnedPool, Stager, StagerConfig,
    kernel::Kernel,
    region::Host,
    topology::{NodeId, Topology},
};
use std::{fmt, sync::Arc, time::Duration};

/// A driver, a pool for each of its devices, and pinned memory near each.
///
/// Clones share it. Building one takes no device memory beyond the driver's own context and starts no thread; without a
/// GPU it has no devices, and host memory is pageable and says so. Pools may outlive it, and blocks their pools: things
/// may be dropped in any order.
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
    driver: Option<Arc<dyn Driver>>,
    /// As they were opened.
    pools: Vec<DevicePool>,
    fleet: Arc<Fleet>,
    host: Host,
    /// A pool for each node that some device is near, and first the one for no node in particular.
    pinned: Vec<PinnedPool>,
    /// Which of `pinned` each device is near.
    near: Vec<usize>,
}

/// How a [`Runtime`] is to be built.
#[derive(Debug)]
pub struct RuntimeBuilder {
    driver: Option<Arc<dyn Driver>>,
    or_sim: bool,
    devices: Option<Vec<DeviceId>>,
    device_budget: Option<u64>,
    pinned_budget: Option<u64>,
    pool: PoolConfig,
    pinned: PinnedConfig,
    topology: Option<Topology>,
    sampled: Duration,
}

impl Default for RuntimeBuilder {
    fn default() -> Self {
        Self {
            driver: None,
            or_sim: false,
            devices: None,
            device_budget: None,
            pinned_budget: None,
            pool: PoolConfig::default(),
            pinned: PinnedConfig::default(),
            topology: None,
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

    /// On a simulated GPU where the machine has none.
    #[must_use]
    pub fn or_sim(mut self) -> Self {
        self.or_sim = true;
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

    /// At most so many bytes of pinned host memory in all, instead of half of the machine's memory or of what its
    /// control group allows.
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

    /// With the devices' free memory asked of the driver (`cuMemGetInfo`, 3.6 µs a device) by whoever places when the last
    /// answer is so old, instead of 100 ms. What this process takes and gives counts at once in any case.
    #[must_use]
    pub fn sample_every(mut self, interval: Duration) -> Self {
        self.sampled = interval;
        self
    }

    /// Opens the driver, reads the machine, and makes the pools. Takes the driver's own time for a context per device,
    /// and little more.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a variable of the environment, or a machine, that cannot be read;
    /// [`MemoryError::NoDevice`] for a device that is not there; the driver's. That there is no GPU is no error.
    pub fn build(self) -> Result<Runtime> {
        let driver =
            self.driver.or_else(machine_driver).or_else(|| self.or_sim.then(|| Sim::h200(1).driver()));
        let pools = match &driver {
            Some(driver) => open_pools(driver, self.devices, self.device_budget, &self.pool)?,
            None => Vec::new(),
        };
        let topology = match self.topology {
            Some(topology) => topology,
            None => Topology::read().map_err(|e| MemoryError::BadSetting {
                name: "the machine's topology",
                value: e.to_string(),
                expected: "what the kernel tells under /sys and /proc",
            })?,
        };
        let (host, pinned, near) = pinned_pools(&driver, &pools, topology, self.pinned_budget, &self.pinned)?;
        let fleet = Arc::new(Fleet::new(&pools, host.topology.clone(), self.sampled));
        let inner = Inner { driver, pools, fleet, host, pinned, near };
        Ok(Runtime { inner: Arc::new(inner) })
    }
}

/// The machine's CUDA driver, if this build has it and it opens.
fn machine_driver() -> Option<Arc<dyn Driver>> {
    #[cfg(feature = "cuda")]
    if let Ok(driver) = aquifer_driver::cuda::CudaDriver::open() {
        return Some(driver);
    }
    None
}

fn open_pools(
    driver: &Arc<dyn Driver>,
    devices: Option<Vec<DeviceId>>,
    budget: Option<u64>,
    config: &PoolConfig,
) -> Result<Vec<DevicePool>> {
    let count = driver.device_count().map_err(MemoryError::Driver)?;
    let devices = devices.unwrap_or_else(|| (0..count).map(DeviceId).collect());
    if devices.len() > MAX_DEVICES {
        let (name, value) = ("devices", devices.len().to_string());
        return Err(MemoryError::BadSetting { name, value, expected: "at most 64 of them" });
    }
    let open = |device: DeviceId| {
        if device.0 >= count {
            return Err(MemoryError::NoDevice { asked: device.0, count });
        }
        let mut config = config.clone();
        config.budget = config.budget.or_else(|| budget.map(|bytes| Budget::new("the device", bytes)));
        DevicePool::open(driver.clone(), device, config)
    };
    devices.into_iter().map(open).collect()
}

/// A pinned pool for no node in particular, and one for each node that a device is near.
fn pinned_pools(
    driver: &Option<Arc<dyn Driver>>,
    pools: &[DevicePool],
    topology: Topology,
    budget: Option<u64>,
    config: &PinnedConfig,
) -> Result<(Host, Vec<PinnedPool>, Vec<usize>)> {
    let topology = topology.with_devices(pools.iter().map(DevicePool::info));
    let nodes: Vec<Option<NodeId>> = pools
        .iter()
        .map(|pool| topology.memory_near_device(pool.info()).ok().and_then(|found| found.value))
        .collect();
    let budget = Budget::new("pinned memory", budget.unwrap_or_else(|| headroom(&topology) / 2));
    let mut host = Host::new(topology, Kernel::new());
    if let (Some(driver), Some(first)) = (driver, pools.first()) {
        host = host.with_driver(driver.clone(), first.device());
    }
    let mut pinned = vec![PinnedPool::new(&host, &budget, config.clone())?];
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
        pinned.push(PinnedPool::new(&host, &budget, config)?);
        of_node.push((node, pinned.len() - 1));
        near.push(pinned.len() - 1);
    }
    Ok((host, pinned, near))
}

/// Bytes of host memory that the process may have: what a device counts as its own is not the host's.
fn headroom(topology: &Topology) -> u64 {
    let nodes: u64 =
        topology.host_nodes().filter(|node| node.memory_allowed).filter_map(|node| node.memory).sum();
    let all = if nodes == 0 { 16 << 30 } else { nodes };
    topology.memory_limit().value.map_or(all, |limit| limit.limit.min(all))
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
    pub fn on(driver: Arc<dyn Driver>) -> Result<Self> {
        Self::builder().driver(driver).build()
    }

    /// The pool of the device at `index` among this runtime's devices: the new one, where a lost device was [put
    /// back](Placer::restore).
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`].
    pub fn device(&self, index: usize) -> Result<&DevicePool> {
        let missing = || MemoryError::NoDevice {
            asked: u32::try_from(index).unwrap_or(u32::MAX),
            count: u32::try_from(self.inner.pools.len()).unwrap_or(u32::MAX),
        };
        self.inner.fleet.pool(index).ok_or_else(missing)
    }

    /// The pool of the device with this ordinal; the new one, where a lost device was put back.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`].
    pub fn by_ordinal(&self, device: DeviceId) -> Result<&DevicePool> {
        let count = u32::try_from(self.inner.pools.len()).unwrap_or(u32::MAX);
        let index = self.inner.pools.iter().position(|pool| pool.device() == device);
        let found = index.and_then(|index| self.inner.fleet.pool(index));
        found.ok_or(MemoryError::NoDevice { asked: device.0, count })
    }

    /// The pools of all devices, as they were opened.
    #[must_use]
    pub fn devices(&self) -> &[DevicePool] {
        &self.inner.pools
    }

    /// Pinned memory on the node that the device at `index` is near, or on the next that has memory for this process.
    /// Where that is not known, or there is no such device, on no node in particular.
    #[must_use]
    pub fn pinned_near(&self, index: usize) -> &PinnedPool {
        let at = self.inner.near.get(index).copied().unwrap_or(0);
        &self.inner.pinned[at]
    }

    /// A stager between pageable memory or files and the device at `index`. Its slots come from the process's [staging
    /// allocator](crate::staging::install), or, if none is installed, from pinned memory near the device. Starts no thread
    /// and takes no memory yet; clones of one share its workers and slots, so make one for each device and clone it.
    ///
    /// Where devices are near different nodes, one pool serves some of them from afar: [`Stager::new`] on
    /// [this machine](Runtime::host) takes another.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`]; [`MemoryError::BadSetting`] for a configuration that cannot be followed.
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
