//! How much host memory the process may still allocate, and what limits it.

use super::{
    Found, Provenance, Topology, TopologyError,
    files::{file, wrong_number},
    groups::{self, reclaimable},
    node::{self, FOLDER},
    process,
};
use std::path::Path;

/// How much host memory the process may still allocate, in bytes, as the kernel reports it.
///
/// Page cache counts as far as the kernel can reclaim it without harm: what was read only once, and
/// half of what is in use. Reserved huge pages are not included in the three parts, because they
/// serve only huge pages.
///
/// See [`Topology::headroom`] for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Headroom {
    /// The minimum of the three values below, with its source. Unknown if all three are unknown.
    pub bytes: Found<u64>,
    /// The minimum that the process's control group and the groups above it leave below their
    /// limits (`memory.max`, `memory.high`), with that file. Unknown if no group has a limit.
    pub group: Found<u64>,
    /// Free and reclaimable memory of the host's nodes that the process may use (`meminfo`).
    /// Memory of devices is not included. Unknown on a kernel without nodes, and when NUMA
    /// handling is off.
    pub nodes: Found<u64>,
    /// The kernel's estimate of available memory on the whole machine (`MemAvailable`).
    pub machine: Found<u64>,
    /// Bytes of free reserved huge pages on those nodes, or on the machine.
    pub huge_pages: u64,
}

impl Topology {
    /// Reads how much host memory the process may still allocate.
    ///
    /// ```
    /// use aquifer::host::Topology;
    /// let headroom = Topology::read()?.headroom()?;
    /// println!("{}; of huge pages {} B", headroom.bytes, headroom.huge_pages);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be parsed. Values of missing files are unknown.
    pub fn headroom(&self) -> Result<Headroom, TopologyError> {
        let (group, nodes, machine) =
            (self.group_headroom()?, self.node_headroom()?, self.available()?);
        let known = [&group, &nodes, &machine].into_iter().filter(|found| found.value.is_some());
        let bytes = known.min_by_key(|found| found.value).unwrap_or(&machine).clone();
        Ok(Headroom { bytes, group, nodes, machine, huge_pages: self.free_huge_bytes()? })
    }

    fn group_headroom(&self) -> Result<Found<u64>, TopologyError> {
        let files = &self.files;
        let mut least = Found::unknown(file(groups::MEMBERSHIP));
        for group in groups::all(files)? {
            let limit = group.limit(files)?.map(|limit| (limit, group.limit_file()));
            let limits = [limit, group.high(files)?];
            let Some((limit, source)) =
                limits.into_iter().flatten().min_by_key(|(limit, _)| *limit)
            else {
                continue;
            };
            let unreclaimable = group.used(files)?.saturating_sub(group.reclaimable(files)?);
            let left = limit.saturating_sub(unreclaimable);
            if least.value.is_none_or(|least| left < least) {
                least = Found::known(left, source);
            }
        }
        Ok(least)
    }

    fn node_headroom(&self) -> Result<Found<u64>, TopologyError> {
        let mut left = Found::unknown(file(FOLDER));
        for node in self.host_nodes().filter(|node| node.memory_allowed) {
            let path = Path::new(FOLDER).join(format!("node{}/meminfo", node.id.0));
            let Some(text) = self.files.text(&path)? else { continue };
            let of = |name: &str| node::field(&path, &text, name);
            let Some(free) = of("MemFree:")? else { continue };
            let known = |name| of(name).map(Option::unwrap_or_default);
            let back = reclaimable(
                known("Inactive(file):")?,
                known("Active(file):")?,
                known("SReclaimable:")?,
            );
            let so_far: u64 = left.value.unwrap_or(0);
            left.value = Some(so_far.saturating_add(free).saturating_add(back));
        }
        Ok(left)
    }

    fn available(&self) -> Result<Found<u64>, TopologyError> {
        let path = Path::new("/proc/meminfo");
        let text = self.files.text(path)?.unwrap_or_default();
        let Some(line) = text.lines().find(|line| line.starts_with("MemAvailable:")) else {
            return Ok(Found::unknown(file(path)));
        };
        let kib = line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok());
        let bytes =
            kib.and_then(|kib| kib.checked_mul(1024)).ok_or_else(|| wrong_number(path, line))?;
        Ok(Found::known(bytes, file(path)))
    }

    fn free_huge_bytes(&self) -> Result<u64, TopologyError> {
        let bytes = |folder: &Path| {
            let pools = node::huge_pools(&self.files, folder)?;
            Ok(pools.iter().map(|pool| pool.free.saturating_mul(pool.page_size)).sum::<u64>())
        };
        if self.nodes().is_empty() {
            return bytes(Path::new("/sys/kernel/mm/hugepages"));
        }
        let usable = self.host_nodes().filter(|node| node.memory_allowed);
        usable
            .map(|node| bytes(&Path::new(FOLDER).join(format!("node{}/hugepages", node.id.0))))
            .sum()
    }

    /// Reads the maximum of the headroom: the smallest limit of the process's groups, or the memory
    /// of the host's nodes that it may use, whichever is less.
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be parsed.
    pub fn host_memory(&self) -> Result<Found<u64>, TopologyError> {
        let nodes: u64 = self
            .host_nodes()
            .filter(|node| node.memory_allowed)
            .filter_map(|node| node.memory)
            .sum();
        let limit = process::memory_limit(&self.files)?;
        Ok(match limit.value.map(|group| group.limit) {
            Some(bytes) if nodes == 0 || bytes < nodes => Found::known(bytes, limit.source),
            _ if nodes > 0 => Found::known(nodes, file(FOLDER)),
            _ => Found::unknown(Provenance::Nobody),
        })
    }
}
