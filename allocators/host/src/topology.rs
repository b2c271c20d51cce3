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
//! - A device's node is often unknown (`-1`), nearly always in virtual machines. It is then
//!   reported as unknown, and never guessed.
//!
//! With `AQUIFER_NUMA=off` in the environment, [`Topology::read`] reports no nodes, so that nothing
//! is bound or placed.

mod caps;
mod devices;
mod files;
mod found;
mod groups;
mod headroom;
mod id_set;
mod node;

pub use files::TopologyError;
pub use found::Found;
pub use id_set::IdSet;
pub use node::{Node, NodeId};

use files::Files;
use nix::unistd::{SysconfVar, sysconf};
use std::{env, path::Path};

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
/// println!("bytes of memory that are left: {}", topology.headroom()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Topology {
    files: Files,
    numa_off: bool,
    nodes: Vec<Node>,
    cpus_allowed: Option<IdSet>,
    thp: Option<ThpMode>,
    /// The value of `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`.
    mps_limit: Option<String>,
}

/// When anonymous memory gets transparent huge pages
/// (`/sys/kernel/mm/transparent_hugepage/enabled`).
///
/// See [`Topology`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ThpMode {
    /// Everywhere.
    Always,
    /// Where a program requests it by `MADV_HUGEPAGE`.
    Madvise,
    /// Nowhere.
    Never,
}

impl Topology {
    /// Reads the topology of this machine, without nodes if `AQUIFER_NUMA=off`.
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be parsed, or a value of `AQUIFER_NUMA` other than
    /// `on` and `off`.
    pub fn read() -> Result<Self, TopologyError> {
        let numa = match env::var_os(NUMA_VARIABLE).filter(|value| !value.is_empty()) {
            None => true,
            Some(value) => Self::parse_switch(&value.to_string_lossy())?,
        };
        let mut topology = Self::read_under(Path::new("/"))?;
        if !numa {
            topology = topology.without_nodes();
        }
        topology.mps_limit =
            env::var_os(MPS_VARIABLE).map(|value| value.to_string_lossy().into_owned());
        Ok(topology)
    }

    /// Reads the topology from the files below `root`. Ignores the environment.
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be parsed.
    pub fn read_under(root: &Path) -> Result<Self, TopologyError> {
        let files = Files::under(root);
        let [cpus_allowed, mems_allowed] = node::allowed(&files)?;
        Ok(Self {
            numa_off: false,
            nodes: node::read(&files, [cpus_allowed.as_ref(), mems_allowed.as_ref()])?,
            cpus_allowed,
            thp: thp(&files)?,
            mps_limit: None,
            files,
        })
    }

    /// Returns the topology without its nodes, as with `AQUIFER_NUMA=off`.
    #[must_use]
    pub fn without_nodes(mut self) -> Self {
        self.numa_off = true;
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

    /// Returns the online nodes, in order. Empty on a kernel without NUMA, and when NUMA handling
    /// is off.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// An iterator over the nodes that are not known to be a device's memory.
    pub fn host_nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| !node.device_memory)
    }

    /// Returns a node, or `None` if it does not exist.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// Returns whether `AQUIFER_NUMA=off` hides the nodes.
    #[must_use]
    pub fn is_numa_off(&self) -> bool {
        self.numa_off
    }

    /// Returns the CPUs that the process may run on, if they are known.
    #[must_use]
    pub fn cpus_allowed(&self) -> Option<&IdSet> {
        self.cpus_allowed.as_ref()
    }

    /// Returns the bytes of a base page (`sysconf`).
    #[must_use]
    pub fn page_size(&self) -> usize {
        sysconf(SysconfVar::PAGE_SIZE)
            .ok()
            .flatten()
            .and_then(|bytes| usize::try_from(bytes).ok())
            .unwrap_or(4096)
    }

    /// Returns when anonymous memory gets transparent huge pages. `None` if the kernel does not
    /// report it.
    #[must_use]
    pub fn thp(&self) -> Option<ThpMode> {
        self.thp
    }

    /// Returns the bytes of the nodes, without memory that the kernel itself reports to be a
    /// device's. All processes see the same, whichever devices they use.
    #[must_use]
    pub fn memory_by_kernel(&self) -> u64 {
        let host = self.nodes.iter().filter(|node| !node.device_memory_by_kernel);
        host.filter_map(|node| node.memory).sum()
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

    /// Among nodes of equal or unknown distance, returns the first.
    fn nearest(&self, id: NodeId, fits: impl Fn(&Node) -> bool) -> Option<&Node> {
        self.node(id)?;
        let far = |node: &&Node| {
            let distance = self.distance(id, node.id).unwrap_or(u32::MAX);
            (node.id != id, distance, node.id)
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

    /// Reads the bytes of the last-level cache of a node's CPUs that the process may use, or of all
    /// CPUs that it may use (`index3/size`). Of several caches it returns the smallest. `None` if
    /// that of any CPU is unknown.
    #[must_use]
    pub fn last_level_cache(&self, node: Option<NodeId>) -> Option<u64> {
        let cpus = match node {
            Some(id) => &self.node(id)?.allowed_cpus,
            None => self.cpus_allowed.as_ref()?,
        };
        let cache = |cpu| {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/cache/index3/size");
            let text = self.files.text(Path::new(&path)).ok()??;
            text.trim().strip_suffix('K')?.parse::<u64>().ok()?.checked_mul(1024)
        };
        cpus.iter().map(cache).collect::<Option<Vec<u64>>>()?.into_iter().min()
    }

    /// Reads the number of free huge pages of `page_size` bytes, of one node or of the machine.
    /// `None` if there is no such pool.
    ///
    /// # Errors
    /// [`TopologyError::Number`] for a file that contains no number.
    pub fn free_huge_pages(
        &self,
        node: Option<NodeId>,
        page_size: u64,
    ) -> Result<Option<u64>, TopologyError> {
        let folder = match node {
            Some(NodeId(id)) => Path::new(node::FOLDER).join(format!("node{id}/hugepages")),
            None => "/sys/kernel/mm/hugepages".into(),
        };
        self.files.number(&folder.join(format!("hugepages-{}kB/free_hugepages", page_size / 1024)))
    }
}

/// Reads the mode in brackets, as in `always [madvise] never`. An unexpected word is unknown.
fn thp(files: &Files) -> Result<Option<ThpMode>, TopologyError> {
    let text = files.text(Path::new("/sys/kernel/mm/transparent_hugepage/enabled"))?;
    let text = text.unwrap_or_default();
    let word = text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    Ok(word.and_then(|word| match word {
        "always" => Some(ThpMode::Always),
        "madvise" => Some(ThpMode::Madvise),
        "never" => Some(ThpMode::Never),
        _ => None,
    }))
}
