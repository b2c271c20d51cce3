//! NUMA topology of the machine: nodes, CPUs, devices, distances, and what this process may use.
//!
//! [`Topology::read`] reads sysfs and procfs once. Nothing is cached between reads: read it again
//! when CPUs, nodes or limits may have changed. [`Topology::read_under`] reads the same files below
//! another root, for fixtures and for files of a host that are mounted into a container.
//!
//! Some points to know:
//! - sysfs shows the whole machine, even in a container. Nodes and CPUs are therefore intersected
//!   with the process's own allowed sets.
//! - A node may have no CPUs or no memory. A machine may have more than 64 nodes or 1024 CPUs.
//! - A node may be the memory of a GPU ([`Node::device_memory`]). The kernel would allocate from it
//!   as from any other node, so no method here returns such a node unless the caller named it.
//! - Hotplugged memory may be only movable ([`Node::movable_only`]): pages that are pinned are
//!   moved to another node.
//! - A device's node is often unknown (`-1`), nearly always in virtual machines. It is then
//!   reported as unknown, with the source, and never guessed.
//!
//! With `AQUIFER_NUMA=off` in the environment, [`Topology::read`] reports no nodes, so that nothing
//! is bound or placed.

mod bitmap;
mod caps;
mod devices;
mod files;
mod found;
mod groups;
mod headroom;
mod node;
mod pages;
mod pci;
mod process;
mod strain;

pub use bitmap::{Bitmap, ListError};
pub use devices::DeviceMemory;
pub use files::TopologyError;
pub use found::{Found, Provenance};
pub use groups::GroupEvents;
pub use headroom::Headroom;
pub use node::{HugePool, Node, NodeId};
pub use pages::ThpMode;
pub use pci::{PciAddress, PciAddressError};
pub use process::{MemoryLimit, ProcessLimits};
pub use strain::{Stalls, Strain};

use files::{Files, file};
use std::{
    env,
    path::{Path, PathBuf},
};

/// The environment variable that disables NUMA handling.
pub const NUMA_VARIABLE: &str = "AQUIFER_NUMA";
/// The variable by which an administrator limits the memory of MPS clients.
const MPS_VARIABLE: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";

/// The topology of the machine, as the kernel described it at one moment.
///
/// ```
/// use aquifer::host::Topology;
/// let topology = Topology::read()?;
/// for node in topology.nodes() {
///     println!("{}: CPUs {}, of which {} are ours", node.id, node.cpus, node.allowed_cpus);
/// }
/// for pages in topology.huge_pools() {
///     println!("{} of {} pages of {} bytes are free", pages.free, pages.total, pages.page_size);
/// }
/// if let Some(group) = topology.memory_limit().value {
///     println!("{} bytes are left of the control group's {}", group.remaining, group.limit);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Topology {
    files: Files,
    /// Whether nodes are reported, and which setting decides it.
    numa: Found<bool>,
    nodes: Vec<Node>,
    cpus_allowed: Found<Bitmap>,
    mems_allowed: Found<Bitmap>,
    memory_limit: Found<MemoryLimit>,
    huge_pools: Vec<HugePool>,
    page_size: Found<u64>,
    thp: Found<ThpMode>,
    thp_size: Found<u64>,
    wsl: Found<bool>,
    limits: ProcessLimits,
    /// The value of `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`.
    mps_limit: Option<String>,
}

impl Topology {
    /// Reads the topology of this machine, without nodes if `AQUIFER_NUMA=off`.
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be parsed, or a value of `AQUIFER_NUMA` other than
    /// `on` and `off`.
    pub fn read() -> Result<Self, TopologyError> {
        let numa = match env::var_os(NUMA_VARIABLE).filter(|value| !value.is_empty()) {
            None => Found::unknown(Provenance::Nobody),
            Some(value) => Found::known(
                Self::parse_switch(&value.to_string_lossy())?,
                Provenance::Variable(NUMA_VARIABLE),
            ),
        };
        let mut topology = Self::read_with(Path::new("/"), numa)?;
        topology.mps_limit =
            env::var_os(MPS_VARIABLE).map(|value| value.to_string_lossy().into_owned());
        Ok(topology)
    }

    /// Reads the topology from the files below `root`. Ignores the environment.
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be parsed.
    pub fn read_under(root: &Path) -> Result<Self, TopologyError> {
        Self::read_with(root, Found::unknown(Provenance::Nobody))
    }

    /// Returns the topology without its nodes, as with `AQUIFER_NUMA=off`.
    #[must_use]
    pub fn without_nodes(mut self) -> Self {
        self.numa = Found::known(false, Provenance::Variable(NUMA_VARIABLE));
        self.nodes.clear();
        self
    }

    /// Parses a value of `AQUIFER_NUMA`: `on` or `off`.
    ///
    /// # Errors
    /// [`TopologyError::Setting`] for anything else.
    pub fn parse_switch(value: &str) -> Result<bool, TopologyError> {
        match value.trim() {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err(TopologyError::Setting {
                name: NUMA_VARIABLE,
                value: value.into(),
                expected: "on or off",
            }),
        }
    }

    fn read_with(root: &Path, numa: Found<bool>) -> Result<Self, TopologyError> {
        let files = Files::under(root);
        let (cpus_allowed, mems_allowed) = process::allowed(&files)?;
        let nodes = if numa.value == Some(false) {
            Vec::new()
        } else {
            node::read(&files, cpus_allowed.value.as_ref(), mems_allowed.value.as_ref())?
        };
        Ok(Self {
            numa,
            nodes,
            cpus_allowed,
            mems_allowed,
            memory_limit: process::memory_limit(&files)?,
            huge_pools: node::huge_pools(&files, Path::new("/sys/kernel/mm/hugepages"))?,
            page_size: pages::page_size(&files)?,
            thp: pages::thp(&files)?,
            thp_size: pages::thp_size(&files)?,
            wsl: process::wsl(&files)?,
            limits: process::limits(&files)?,
            mps_limit: None,
            files,
        })
    }

    /// Returns the online nodes, in order. Empty on a kernel without NUMA, and when NUMA handling
    /// is off.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// An iterator over the nodes that are not known to be a device's memory.
    pub fn host_nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.device_memory.value != Some(true))
    }

    /// Returns a node, or `None` if it does not exist.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// Returns the setting that turned NUMA handling on or off. Unknown if there is none, which
    /// means on.
    #[must_use]
    pub fn numa_setting(&self) -> &Found<bool> {
        &self.numa
    }

    /// Returns the CPUs that the process may run on.
    #[must_use]
    pub fn cpus_allowed(&self) -> &Found<Bitmap> {
        &self.cpus_allowed
    }

    /// Returns the nodes that the process may allocate memory from.
    #[must_use]
    pub fn mems_allowed(&self) -> &Found<Bitmap> {
        &self.mems_allowed
    }

    /// Returns the memory limit of the process's control groups. Unknown if they set none.
    #[must_use]
    pub fn memory_limit(&self) -> &Found<MemoryLimit> {
        &self.memory_limit
    }

    /// Returns the machine's pools of huge pages, summed over all nodes.
    #[must_use]
    pub fn huge_pools(&self) -> &[HugePool] {
        &self.huge_pools
    }

    /// Returns the bytes of a base page, from the auxiliary vector of the process
    /// (`/proc/self/auxv`) or else from `sysconf`.
    #[must_use]
    pub fn page_size(&self) -> &Found<u64> {
        &self.page_size
    }

    /// Returns when anonymous memory gets transparent huge pages.
    #[must_use]
    pub fn thp(&self) -> &Found<ThpMode> {
        &self.thp
    }

    /// Returns the bytes of a transparent huge page.
    #[must_use]
    pub fn thp_size(&self) -> &Found<u64> {
        &self.thp_size
    }

    /// Returns whether this is the kernel of the Windows Subsystem for Linux. It has no nodes, no
    /// separate addresses for GPU memory, and little memory that can be pinned.
    #[must_use]
    pub fn is_wsl(&self) -> &Found<bool> {
        &self.wsl
    }

    /// Returns the limits that may affect pinned memory.
    #[must_use]
    pub fn limits(&self) -> &ProcessLimits {
        &self.limits
    }

    /// Returns the distance from `from` to `to` in the firmware's units (10 is the node itself).
    #[must_use]
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        self.node(from)?.distances.iter().find(|(id, _)| *id == to).map(|&(_, far)| far)
    }

    /// Returns the node itself if the process may run on one of its CPUs, else the nearest such
    /// node. `None` if the node does not exist.
    #[must_use]
    pub fn nearest_with_cpus(&self, id: NodeId) -> Option<&Node> {
        self.nearest(id, |node| !node.allowed_cpus.is_empty())
    }

    /// Returns the node itself if it has host memory that the process may use, else the nearest
    /// such node. Never a node that is a device's memory. `None` if the node does not exist.
    #[must_use]
    pub fn nearest_with_memory(&self, id: NodeId) -> Option<&Node> {
        self.nearest(id, |node| node.memory_allowed && node.device_memory.value != Some(true))
    }

    /// Among nodes of equal or unknown distance, returns one that the firmware names as an
    /// initiator of the other, or else the first.
    fn nearest(&self, id: NodeId, fits: impl Fn(&Node) -> bool) -> Option<&Node> {
        let from = self.node(id)?;
        let far = |node: &&Node| {
            let distance = self.distance(id, node.id).unwrap_or(u32::MAX);
            let reaches = from.initiators.contains(node.id.0) || node.initiators.contains(id.0);
            (node.id != id, distance, !reaches, node.id)
        };
        self.nodes.iter().filter(|node| fits(node)).min_by_key(far)
    }

    /// Returns the node of the CPU that the calling thread runs on (`getcpu`, without entering the
    /// kernel). The thread may move at any time. `None` if nodes are hidden or no node has this
    /// CPU.
    #[must_use]
    pub fn node_of_caller(&self) -> Option<NodeId> {
        let cpu = u32::try_from(nix::sched::sched_getcpu().ok()?).ok()?;
        self.nodes.iter().find(|node| node.cpus.contains(cpu)).map(|node| node.id)
    }

    /// Reads the CPUs of a node that the process may run on now, since control groups and CPUs may
    /// change.
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be parsed.
    pub fn allowed_cpus(&self, node: NodeId) -> Result<Found<Bitmap>, TopologyError> {
        let path = Path::new(node::FOLDER).join(format!("node{}/cpulist", node.0));
        let cpus = self.files.list(&path)?;
        let (allowed, _) = process::allowed(&self.files)?;
        let value = cpus.map(|cpus| match &allowed.value {
            Some(allowed) => cpus.intersection(allowed),
            None => cpus,
        });
        Ok(Found { value, source: file(path) })
    }

    /// Reads the bytes of the last-level cache of a node's CPUs that the process may use, or of all
    /// CPUs that it may use (`index3/size`). Of several caches it returns the smallest. Unknown if
    /// that of any CPU is unknown.
    ///
    /// # Errors
    /// [`TopologyError::Number`] for a file that contains no size.
    pub fn last_level_cache(&self, node: Option<NodeId>) -> Result<Found<u64>, TopologyError> {
        let cpus = match node {
            Some(id) => self.node(id).map(|node| &node.allowed_cpus),
            None => self.cpus_allowed.value.as_ref(),
        };
        let mut smallest = Found::unknown(Provenance::Nobody);
        for cpu in cpus.into_iter().flat_map(Bitmap::iter) {
            let path = PathBuf::from(format!("/sys/devices/system/cpu/cpu{cpu}/cache/index3/size"));
            let Some(bytes) = self.files.size(&path)? else {
                return Ok(Found { value: None, source: file(path) });
            };
            if smallest.value.is_none_or(|least| bytes < least) {
                smallest = Found { value: Some(bytes), source: file(path) };
            }
        }
        Ok(smallest)
    }

    /// Reads the number of free huge pages of `page_size` bytes, of one node or of the machine.
    ///
    /// # Errors
    /// [`TopologyError::Number`] for a file that contains no number.
    pub fn free_huge_pages(
        &self,
        node: Option<NodeId>,
        page_size: u64,
    ) -> Result<Found<u64>, TopologyError> {
        let folder = match node {
            Some(NodeId(id)) => Path::new(node::FOLDER).join(format!("node{id}/hugepages")),
            None => PathBuf::from("/sys/kernel/mm/hugepages"),
        };
        let path = folder.join(format!("hugepages-{}kB/free_hugepages", page_size / 1024));
        Ok(Found { value: self.files.number(&path)?, source: file(path) })
    }
}
