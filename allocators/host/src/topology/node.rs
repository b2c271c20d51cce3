//! NUMA nodes, from `/sys/devices/system/node`.

use super::{
    IdSet,
    files::{Files, TopologyError, parse_list, wrong_number},
};
use std::{fmt, path::Path};

/// The kernel's number of a NUMA node.
///
/// See [`Topology`](super::Topology) for an example.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// A NUMA node: its memory, its CPUs, and what the process may use of them.
///
/// See [`Topology`](super::Topology) for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// Its online CPUs. Empty on memory-only nodes.
    pub cpus: IdSet,
    /// Its CPUs that the process may run on.
    pub allowed_cpus: IdSet,
    /// Whether it has memory that the process may use.
    pub memory_allowed: bool,
    /// Whether its memory is known to be a device's. The kernel reports nodes that the firmware
    /// assigns to a device (`has_generic_initiator`), and an open driver reports its own
    /// ([`Topology::with_devices`](super::Topology::with_devices)).
    pub device_memory: bool,
    /// Whether the kernel reports that its memory is a device's.
    pub(super) device_memory_by_kernel: bool,
    /// Bytes of memory (`MemTotal`). `None` if the kernel does not report them.
    pub memory: Option<u64>,
    /// Bytes that are unused, even as cache (`MemFree`).
    pub free: Option<u64>,
    /// The distance of each node, including itself (10), in the firmware's units. Empty if the
    /// kernel reports none, or none that can be assigned to nodes.
    pub distances: Vec<(NodeId, u32)>,
}

pub(super) const FOLDER: &str = "/sys/devices/system/node";
const CPU_FOLDER: &str = "/sys/devices/system/cpu";
/// The distance of a node from itself.
const LOCAL: u32 = 10;

/// Reads the CPUs and nodes that the process's main thread may use, by cpuset, affinity and memory
/// policy together. `None` if the kernel does not report them.
pub(super) fn allowed(files: &Files) -> Result<[Option<IdSet>; 2], TopologyError> {
    let path = Path::new("/proc/self/status");
    let text = files.text(path)?.unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.map(|list| parse_list(path, list)).transpose()
    };
    Ok([field("Cpus_allowed_list:")?, field("Mems_allowed_list:")?])
}

/// Reads all online nodes, in order. Empty on a kernel without NUMA.
pub(super) fn read(
    files: &Files,
    [cpus_allowed, mems_allowed]: [Option<&IdSet>; 2],
) -> Result<Vec<Node>, TopologyError> {
    let folder = Path::new(FOLDER);
    // Old kernels and some containers have the folders alone.
    let online = files.list(&folder.join("online"))?.unwrap_or_else(|| {
        let number = |name: &String| name.strip_prefix("node")?.parse().ok();
        files.names(folder).iter().filter_map(number).collect()
    });
    // An initiator without CPUs is a device. Devices may be missing from the list, and older
    // kernels lack it.
    let initiators = files.list(&folder.join("has_generic_initiator"))?.unwrap_or_default();
    let online_cpus = files.list(&Path::new(CPU_FOLDER).join("online"))?;
    let mut nodes = Vec::new();
    for id in online.iter() {
        let folder = folder.join(format!("node{id}"));
        // Kernels before 2.6.26 and some containers have the mask alone.
        let cpus = match files.list(&folder.join("cpulist"))? {
            Some(cpus) => cpus,
            None => files.mask(&folder.join("cpumap"))?.unwrap_or_default(),
        };
        let cpus = without_offline(files, cpus, online_cpus.as_ref())?;
        let (memory, free) = memory(files, &folder.join("meminfo"))?;
        let device_memory = cpus.is_empty() && initiators.contains(id);
        nodes.push(Node {
            id: NodeId(id),
            allowed_cpus: cpus_allowed
                .map_or_else(|| cpus.clone(), |allowed| cpus.intersection(allowed)),
            memory_allowed: memory != Some(0)
                && mems_allowed.is_none_or(|allowed| allowed.contains(id)),
            device_memory,
            device_memory_by_kernel: device_memory,
            cpus,
            memory,
            free,
            distances: distances(files, &folder.join("distance"), id, &online)?,
        });
    }
    Ok(nodes)
}

/// Removes offline CPUs, which some kernels list in their node. Old kernels have no list of the
/// online ones, but a file for each CPU. That file also corrects a list that a container replaces.
fn without_offline(
    files: &Files,
    cpus: IdSet,
    online: Option<&IdSet>,
) -> Result<IdSet, TopologyError> {
    let online = online.filter(|online| !online.is_empty());
    let mut kept = Vec::new();
    for cpu in cpus.iter() {
        let is_online = if online.is_some_and(|online| online.contains(cpu)) {
            true
        } else {
            let state = files.text(Path::new(&format!("{CPU_FOLDER}/cpu{cpu}/online")))?;
            state.map_or(online.is_none(), |text| text.trim() != "0")
        };
        if is_online {
            kept.push(cpu);
        }
    }
    Ok(kept.into_iter().collect())
}

/// Reads `MemTotal` and `MemFree` of a node's meminfo, as in `Node 0 MemTotal:  4548820 kB`.
fn memory(files: &Files, path: &Path) -> Result<(Option<u64>, Option<u64>), TopologyError> {
    let Some(text) = files.text(path)? else { return Ok((None, None)) };
    Ok((field(path, &text, "MemTotal:")?, field(path, &text, "MemFree:")?))
}

/// Returns a field of a node's meminfo in bytes, or `None` if it is missing.
pub(super) fn field(path: &Path, text: &str, name: &str) -> Result<Option<u64>, TopologyError> {
    let Some(line) = text.lines().find(|line| line.split_whitespace().nth(2) == Some(name)) else {
        return Ok(None);
    };
    let kib = line.split_whitespace().nth(3).and_then(|n| n.parse::<u64>().ok());
    kib.and_then(|kib| kib.checked_mul(1024)).map(Some).ok_or_else(|| wrong_number(path, line))
}

/// Reads the line of distances of node `own`, which has one for each online node, in their order.
/// In a line of another length, or where the node would not be [`LOCAL`] from itself, the distances
/// are unknown.
fn distances(
    files: &Files,
    path: &Path,
    own: u32,
    online: &IdSet,
) -> Result<Vec<(NodeId, u32)>, TopologyError> {
    let text = files.text(path)?.unwrap_or_default();
    let words = text.trim_end_matches('\0').split_whitespace();
    let far = words.map(|n| n.parse::<u32>().map_err(|_| wrong_number(path, n)));
    let far = far.collect::<Result<Vec<u32>, _>>()?;
    let assigned: Vec<_> = online.iter().map(NodeId).zip(far.iter().copied()).collect();
    let fits = far.len() == online.len() && assigned.contains(&(NodeId(own), LOCAL));
    Ok(if fits { assigned } else { Vec::new() })
}
