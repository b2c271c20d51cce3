//! Which memory is near which CPU and which device, and what of it this process may use.
//!
//! [`Topology::read`] looks at sysfs and procfs once and answers from what stood there: read it
//! again where CPUs, nodes or limits may have changed, nothing is kept between reads. Under
//! [`Topology::read_under`] the same files are read below another root, for fixtures and for a
//! host's files mounted into a container.
//!
//! Some things surprise:
//! - sysfs shows the whole machine whatever the container: nodes and CPUs are intersected with the
//!   process's own allowed sets here.
//! - A node may have no CPUs, or no memory, and a machine more than 64 nodes or 1024 CPUs.
//! - A node may be the memory of a GPU ([`Node::device_memory`]): the kernel would hand it out like
//!   any other, so no question here is answered with such a node unless it was named.
//! - Memory that came by hotplug may be movable only ([`Node::movable_only`]): pages that are
//!   pinned leave it.
//! - A device's node is often unknown (`-1`), in virtual machines nearly always. That is answered
//!   as unknown, with the source that did not know, and never guessed.
//!
//! `AQUIFER_NUMA=off` in the environment makes [`Topology::read`] see no nodes, so that nothing is
//! bound or placed.

mod bitmap;
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
pub use found::{Found, Source};
pub use groups::GroupEvents;
pub use headroom::Headroom;
pub use node::{HugePool, Node, NodeId};
pub use pages::ThpMode;
pub use pci::{PciAddress, PciAddressError};
pub use process::{Limits, MemoryLimit};
pub use strain::{Stalls, Strain};

use files::{Files, file};
use std::{
    env,
    path::{Path, PathBuf},
};

/// The environment variable that turns NUMA handling off.
pub const NUMA_VARIABLE: &str = "AQUIFER_NUMA";

/// The machine as the kernel described it at one moment.
///
/// ```
/// use aquifer_host::topology::Topology;
/// let topology = Topology::read()?;
/// for node in topology.nodes() {
///     println!("{}: CPUs {}, of which {} are ours", node.id, node.cpus, node.allowed_cpus);
/// }
/// # Ok::<(), aquifer_host::topology::TopologyError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Topology {
    files: Files,
    /// Whether nodes are looked at, and who said so.
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
    limits: Limits,
}

impl Topology {
    /// The machine this runs on, unless `AQUIFER_NUMA=off` hides its nodes.
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be understood, or a value of `AQUIFER_NUMA` other
    /// than `on` and `off`.
    pub fn read() -> Result<Self, TopologyError> {
        let numa = match env::var_os(NUMA_VARIABLE) {
            None => Found::unknown(Source::Nobody),
            Some(value) => Found::known(
                Self::parse_switch(&value.to_string_lossy())?,
                Source::Variable(NUMA_VARIABLE),
            ),
        };
        Self::read_with(Path::new("/"), numa)
    }

    /// What the files below `root` say; the environment is not looked at.
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be understood.
    pub fn read_under(root: &Path) -> Result<Self, TopologyError> {
        Self::read_with(root, Found::unknown(Source::Nobody))
    }

    /// The same without its nodes, as `AQUIFER_NUMA=off` shows it.
    #[must_use]
    pub fn without_nodes(mut self) -> Self {
        self.numa = Found::known(false, Source::Variable(NUMA_VARIABLE));
        self.nodes.clear();
        self
    }

    /// What a value of `AQUIFER_NUMA` means: `on` or `off`.
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
            files,
        })
    }

    /// The nodes that are online, in order. None on a kernel without NUMA, and when NUMA handling
    /// is off.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The nodes whose memory is the host's, as far as anybody knows: all but those that are a
    /// device's memory.
    pub fn host_nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.device_memory.value != Some(true))
    }

    /// One node; `None` if it is not there.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// Whether a setting turned NUMA handling on or off; unknown where none did, which is on.
    #[must_use]
    pub fn numa_setting(&self) -> &Found<bool> {
        &self.numa
    }

    /// The CPUs that the process may run on.
    #[must_use]
    pub fn cpus_allowed(&self) -> &Found<Bitmap> {
        &self.cpus_allowed
    }

    /// The nodes that the process may take memory from.
    #[must_use]
    pub fn mems_allowed(&self) -> &Found<Bitmap> {
        &self.mems_allowed
    }

    /// What the process's control groups grant; unknown where they set no limit.
    #[must_use]
    pub fn memory_limit(&self) -> &Found<MemoryLimit> {
        &self.memory_limit
    }

    /// The machine's pools of huge pages, all nodes together.
    #[must_use]
    pub fn huge_pools(&self) -> &[HugePool] {
        &self.huge_pools
    }

    /// Bytes of a base page, as the kernel told this process when it began (`/proc/self/auxv`),
    /// else by `sysconf`.
    #[must_use]
    pub fn page_size(&self) -> &Found<u64> {
        &self.page_size
    }

    /// When anonymous memory gets transparent huge pages.
    #[must_use]
    pub fn thp(&self) -> &Found<ThpMode> {
        &self.thp
    }

    /// Bytes of a transparent huge page.
    #[must_use]
    pub fn thp_size(&self) -> &Found<u64> {
        &self.thp_size
    }

    /// Whether this is Windows' own Linux kernel: no nodes, no addresses apart from memory on its
    /// GPUs, little to pin.
    #[must_use]
    pub fn is_wsl(&self) -> &Found<bool> {
        &self.wsl
    }

    /// Limits that pinned memory may meet.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// How far `to` is from `from`, in the firmware's units (10 is the node itself).
    #[must_use]
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        self.node(from)?.distances.iter().find(|(id, _)| *id == to).map(|&(_, far)| far)
    }

    /// The node itself if the process may run on a CPU of it, else the nearest where it may. `None`
    /// for a node that is not there.
    #[must_use]
    pub fn nearest_with_cpus(&self, id: NodeId) -> Option<&Node> {
        self.nearest(id, |node| !node.allowed_cpus.is_empty())
    }

    /// The node itself if it has memory of the host's that the process may take, else the nearest
    /// that has: never a device's. `None` for a node that is not there.
    #[must_use]
    pub fn nearest_with_memory(&self, id: NodeId) -> Option<&Node> {
        self.nearest(id, |node| node.memory_allowed && node.device_memory.value != Some(true))
    }

    /// Of nodes that are equally near, or whose distance is unknown, the first.
    fn nearest(&self, id: NodeId, fits: impl Fn(&Node) -> bool) -> Option<&Node> {
        let far =
            |node: &&Node| (node.id != id, self.distance(id, node.id).unwrap_or(u32::MAX), node.id);
        self.node(id)?;
        self.nodes.iter().filter(|node| fits(node)).min_by_key(far)
    }

    /// The node whose CPU the calling thread runs on now (`getcpu`, without entering the kernel);
    /// it may be moved at any time. `None` where nodes are hidden or the CPU is none of theirs.
    #[must_use]
    pub fn node_of_caller(&self) -> Option<NodeId> {
        let cpu = u32::try_from(nix::sched::sched_getcpu().ok()?).ok()?;
        self.nodes.iter().find(|node| node.cpus.contains(cpu)).map(|node| node.id)
    }

    /// The CPUs of a node that the process may run on, read now: control groups change and CPUs
    /// come and go.
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be understood.
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

    /// Bytes of the last-level cache of a node's CPUs that the process may use, or of all of them
    /// (`index3/size`), read now. Where they have several, it is one of them, the smallest; unknown
    /// where a CPU's is.
    ///
    /// # Errors
    /// [`TopologyError::Number`] for a file that holds no size.
    pub fn last_level_cache(&self, node: Option<NodeId>) -> Result<Found<u64>, TopologyError> {
        let cpus = match node {
            Some(id) => self.node(id).map(|node| &node.allowed_cpus),
            None => self.cpus_allowed.value.as_ref(),
        };
        let mut smallest = Found::unknown(Source::Nobody);
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

    /// Huge pages of `page_size` bytes that nobody has, on one node or on all, read now.
    ///
    /// # Errors
    /// [`TopologyError::Number`] for a file that holds no number.
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
