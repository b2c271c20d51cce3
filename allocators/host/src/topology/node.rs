//! NUMA nodes, from `/sys/devices/system/node`.

use super::{
    Bitmap, Found,
    files::{Files, TopologyError, file, wrong_number},
};
use std::{
    fmt,
    path::{Path, PathBuf},
};

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
    /// All its CPUs. Empty on memory-only nodes.
    pub cpus: Bitmap,
    /// Its CPUs that the process may run on.
    pub allowed_cpus: Bitmap,
    /// Whether it has memory that the process may use.
    pub memory_allowed: bool,
    /// Whether its memory is a device's. The kernel reports nodes that the firmware assigns to a
    /// device (`has_generic_initiator`), and the driver reports its own, in a file
    /// (`/proc/driver/nvidia/gpus/…/numa_status`) and when it is open
    /// ([`Topology::with_devices`](super::Topology::with_devices)). Unknown if none reports it.
    pub device_memory: Found<bool>,
    /// Whether all its memory is movable, as is mostly so for hotplugged memory of expanders and
    /// GPUs (`has_normal_memory`). Long-term pins first move pages to other nodes.
    pub movable_only: Found<bool>,
    /// Bytes of memory (`MemTotal`). `None` if the kernel does not report them.
    pub memory: Option<u64>,
    /// Bytes that are unused, even as cache (`MemFree`).
    pub free: Option<u64>,
    /// Its pools of huge pages, by ascending page size.
    pub huge_pools: Vec<HugePool>,
    /// The distance of each node, including itself (10), in the firmware's units. Empty if the
    /// kernel reports none, or none that can be assigned to nodes.
    pub distances: Vec<(NodeId, u32)>,
    /// The nodes whose CPUs or devices reach its memory best (`access0/initiators`), if the
    /// firmware reports them.
    pub initiators: Bitmap,
}

/// A pool of huge pages of one size.
///
/// See [`Topology`](super::Topology) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HugePool {
    /// Bytes of one page.
    pub page_size: u64,
    /// Pages in the pool.
    pub total: u64,
    /// Free pages. Some of them may already be reserved by mappings.
    pub free: u64,
}

pub(super) const FOLDER: &str = "/sys/devices/system/node";
/// The distance of a node from itself.
const LOCAL: u32 = 10;
/// A folder for each GPU, named by its address, of NVIDIA's kernel driver.
pub(super) const GPUS: &str = "/proc/driver/nvidia/gpus";

/// Reads all online nodes, in order. Empty on a kernel without NUMA.
pub(super) fn read(
    files: &Files,
    cpus_allowed: Option<&Bitmap>,
    mems_allowed: Option<&Bitmap>,
) -> Result<Vec<Node>, TopologyError> {
    let folder = Path::new(FOLDER);
    let present = numbered(files, folder);
    // Old kernels and some containers have the folders alone.
    let online = files.list(&folder.join("online"))?.unwrap_or_else(|| present.clone());
    let sets = NodeSets::read(files, folder)?;
    let mut nodes = Vec::new();
    for id in online.iter() {
        let folder = folder.join(format!("node{id}"));
        let cpus = files.list(&folder.join("cpulist"))?.unwrap_or_default();
        let (memory, free) = memory(files, &folder.join("meminfo"))?;
        nodes.push(Node {
            id: NodeId(id),
            allowed_cpus: cpus_allowed
                .map_or_else(|| cpus.clone(), |allowed| cpus.intersection(allowed)),
            memory_allowed: memory != Some(0)
                && mems_allowed.is_none_or(|allowed| allowed.contains(id)),
            device_memory: sets.device_memory(id, &cpus),
            initiators: numbered(files, &folder.join("access0/initiators")),
            movable_only: sets.movable_only(id, memory),
            cpus,
            memory,
            free,
            huge_pools: huge_pools(files, &folder.join("hugepages"))?,
            distances: distances(files, &folder.join("distance"), id, [&online, &present])?,
        });
    }
    Ok(nodes)
}

/// Returns the numbers of the entries `node0`, `node1` … of a folder.
fn numbered(files: &Files, folder: &Path) -> Bitmap {
    let number = |name: &String| name.strip_prefix("node")?.parse().ok();
    files.names(folder).iter().filter_map(number).collect()
}

/// Properties that the kernel reports as lists of nodes. Older kernels lack some of these files.
struct NodeSets {
    initiators: Found<Bitmap>,
    /// Nodes that the GPU driver has put its memory on, with the files that say so.
    gpus: Vec<(u32, PathBuf)>,
    normal_memory: Found<Bitmap>,
}

impl NodeSets {
    fn read(files: &Files, folder: &Path) -> Result<Self, TopologyError> {
        let list = |name: &str| {
            let path = folder.join(name);
            Ok(Found { value: files.list(&path)?, source: file(path) })
        };
        Ok(Self {
            initiators: list("has_generic_initiator")?,
            gpus: gpu_nodes(files)?,
            normal_memory: list("has_normal_memory")?,
        })
    }

    /// An initiator without CPUs is a device. Devices may be missing from the list.
    fn device_memory(&self, id: u32, cpus: &Bitmap) -> Found<bool> {
        if let Some((_, path)) = self.gpus.iter().find(|(gpu, _)| *gpu == id && cpus.is_empty()) {
            return Found::known(true, file(path));
        }
        let listed = self.initiators.value.as_ref().is_some_and(|set| set.contains(id));
        let value = if !cpus.is_empty() { Some(false) } else { listed.then_some(true) };
        Found { value, source: self.initiators.source.clone() }
    }

    fn movable_only(&self, id: u32, memory: Option<u64>) -> Found<bool> {
        let value =
            self.normal_memory.value.as_ref().map(|set| memory != Some(0) && !set.contains(id));
        Found { value, source: self.normal_memory.source.clone() }
    }
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

/// Reads the pools below a `hugepages` folder of a node or of the machine, as in
/// `hugepages-2048kB/free_hugepages`.
pub(super) fn huge_pools(files: &Files, folder: &Path) -> Result<Vec<HugePool>, TopologyError> {
    let mut pools = Vec::new();
    for name in files.names(folder) {
        let Some(kib) = name.strip_prefix("hugepages-").and_then(|n| n.strip_suffix("kB")) else {
            continue;
        };
        let pool = folder.join(&name);
        let kib: u64 = kib.parse().map_err(|_| wrong_number(&pool, &name))?;
        pools.push(HugePool {
            page_size: kib.saturating_mul(1024),
            total: files.number(&pool.join("nr_hugepages"))?.unwrap_or(0),
            free: files.number(&pool.join("free_hugepages"))?.unwrap_or(0),
        });
    }
    pools.sort_unstable_by_key(|pool| pool.page_size);
    Ok(pools)
}

/// Reads the line of distances of node `own`. The kernel writes one for each online node, in their
/// order. Other lines list all nodes that have a folder, or all numbers, also those of nodes that
/// are offline. Where the node would not be [`LOCAL`] from itself, the distances are unknown.
fn distances(
    files: &Files,
    path: &Path,
    own: u32,
    [online, present]: [&Bitmap; 2],
) -> Result<Vec<(NodeId, u32)>, TopologyError> {
    let Some(text) = files.text(path)? else { return Ok(Vec::new()) };
    let words = text.trim_end_matches('\0').split_whitespace();
    let far = words.map(|n| n.parse::<u32>().map_err(|_| wrong_number(path, n)));
    let far = far.collect::<Result<Vec<u32>, _>>()?;
    let all: Bitmap = (0..).take(far.len()).collect();
    let assigned = |nodes: &Bitmap| -> Vec<(NodeId, u32)> {
        nodes.iter().map(NodeId).zip(far.iter().copied()).collect()
    };
    let fits = |nodes: &&Bitmap| {
        nodes.len() == far.len() && assigned(nodes).contains(&(NodeId(own), LOCAL))
    };
    Ok([online, present, &all].into_iter().find(fits).map(assigned).unwrap_or_default())
}

/// Reads the nodes that NVIDIA's kernel driver has made of the memory of GPUs, as on POWER9 and
/// Grace, from lines such as `Node:      255`. A GPU without one has -1.
fn gpu_nodes(files: &Files) -> Result<Vec<(u32, PathBuf)>, TopologyError> {
    let mut nodes = Vec::new();
    for name in files.names(Path::new(GPUS)) {
        let path = Path::new(GPUS).join(name).join("numa_status");
        let text = files.text(&path)?.unwrap_or_default();
        let Some(node) = text.lines().find_map(|line| line.strip_prefix("Node:")) else { continue };
        let node: i64 = node.trim().parse().map_err(|_| wrong_number(&path, node.trim()))?;
        nodes.extend(u32::try_from(node).ok().map(|node| (node, path)));
    }
    Ok(nodes)
}
