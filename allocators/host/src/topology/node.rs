//! NUMA nodes, from `/sys/devices/system/node`.

use super::{
    Bitmap,
    files::{Files, TopologyError, wrong_number},
};
use std::{fmt, path::Path};

/// A NUMA node, by the kernel's number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// One node: its memory, its CPUs, and what the process may use of them.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// All its CPUs; none on nodes that are memory only.
    pub cpus: Bitmap,
    /// Those of them that the process may run on.
    pub allowed_cpus: Bitmap,
    /// Whether the process may take memory from it.
    pub memory_allowed: bool,
    /// Bytes of memory (`MemTotal`); `None` where the kernel does not say.
    pub memory: Option<u64>,
    /// Bytes that nobody uses, not even as cache (`MemFree`).
    pub free: Option<u64>,
    /// Its pools of huge pages, smallest pages first.
    pub huge_pools: Vec<HugePool>,
    /// How far each node is, this one (10) included, in the firmware's units.
    pub distances: Vec<(NodeId, u32)>,
}

/// A pool of huge pages of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HugePool {
    /// Bytes of one page.
    pub page_size: u64,
    /// Pages in the pool.
    pub total: u64,
    /// Pages that nobody has; some of them may be promised already.
    pub free: u64,
}

pub(super) const FOLDER: &str = "/sys/devices/system/node";

/// Every node that is online, in order; none on a kernel without NUMA.
pub(super) fn read(
    files: &Files,
    cpus_allowed: Option<&Bitmap>,
    mems_allowed: Option<&Bitmap>,
) -> Result<Vec<Node>, TopologyError> {
    let folder = Path::new(FOLDER);
    let Some(online) = files.list(&folder.join("online"))? else { return Ok(Vec::new()) };
    let mut nodes = Vec::new();
    for id in online.iter() {
        let folder = folder.join(format!("node{id}"));
        let cpus = files.list(&folder.join("cpulist"))?.unwrap_or_default();
        let (memory, free) = memory(files, &folder.join("meminfo"))?;
        nodes.push(Node {
            id: NodeId(id),
            allowed_cpus: cpus_allowed.map_or_else(|| cpus.clone(), |allowed| cpus.intersection(allowed)),
            cpus,
            memory_allowed: mems_allowed.is_none_or(|allowed| allowed.contains(id)),
            memory,
            free,
            huge_pools: huge_pools(files, &folder.join("hugepages"))?,
            distances: distances(files, &folder.join("distance"), &online)?,
        });
    }
    Ok(nodes)
}

/// `MemTotal` and `MemFree` of a node's meminfo: `Node 0 MemTotal:  4548820 kB`.
fn memory(files: &Files, path: &Path) -> Result<(Option<u64>, Option<u64>), TopologyError> {
    let Some(text) = files.text(path)? else { return Ok((None, None)) };
    let field = |name: &str| {
        let Some(line) = text.lines().find(|line| line.split_whitespace().nth(2) == Some(name)) else {
            return Ok(None);
        };
        let kib = line.split_whitespace().nth(3).and_then(|n| n.parse::<u64>().ok());
        kib.and_then(|kib| kib.checked_mul(1024)).map(Some).ok_or_else(|| wrong_number(path, line))
    };
    Ok((field("MemTotal:")?, field("MemFree:")?))
}

/// The pools below a `hugepages` folder, a node's or the machine's: `hugepages-2048kB/free_hugepages`.
pub(super) fn huge_pools(files: &Files, folder: &Path) -> Result<Vec<HugePool>, TopologyError> {
    let mut pools = Vec::new();
    for name in files.names(folder) {
        let Some(kib) = name.strip_prefix("hugepages-").and_then(|n| n.strip_suffix("kB")) else { continue };
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

/// A line of distances, one for each node that is online, in their order.
fn distances(files: &Files, path: &Path, online: &Bitmap) -> Result<Vec<(NodeId, u32)>, TopologyError> {
    let Some(text) = files.text(path)? else { return Ok(Vec::new()) };
    let far = text.split_whitespace().map(|n| n.parse::<u32>().map_err(|_| wrong_number(path, n)));
    online.iter().zip(far).map(|(id, far)| Ok((NodeId(id), far?))).collect()
}
