//! How much host memory the process may still allocate, and what limits it.

use super::{
    Found, Topology, TopologyError,
    files::{file, wrong_number},
    groups::{self, reclaimable},
    node::{self, FOLDER},
};
use std::path::Path;

impl Topology {
    /// Reads how many bytes of host memory the process may still allocate, and what limits it: the
    /// least of
    /// - what its control group and the groups above it leave below their limits (`memory.max`,
    ///   `memory.high`);
    /// - the free and reclaimable memory of the host's nodes that it may use (`meminfo`), without
    ///   that of devices;
    /// - the kernel's estimate of available memory on the whole machine (`MemAvailable`).
    ///
    /// Page cache counts as far as the kernel can reclaim it without harm: what was read only once,
    /// and half of what is in use. Unknown if all three are.
    ///
    /// ```
    /// use aquifer::host::Topology;
    /// println!("{} bytes are left", Topology::read()?.headroom()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be parsed. Values of missing files are unknown.
    pub fn headroom(&self) -> Result<Found<u64>, TopologyError> {
        let mut least = self.available()?;
        for Found { value, source } in [self.node_headroom()?, self.group_headroom()?] {
            if let Some(bytes) = value {
                least.lower(bytes, || source);
            }
        }
        Ok(least)
    }

    fn group_headroom(&self) -> Result<Found<u64>, TopologyError> {
        let files = &self.files;
        let mut least = Found::unknown(groups::MEMBERSHIP);
        for group in groups::all(files)? {
            let Found { value: Some(limit), source } = group.limit(files)? else { continue };
            let unreclaimable = group.used(files)?.saturating_sub(group.reclaimable(files)?);
            least.lower(limit.saturating_sub(unreclaimable), || source);
        }
        Ok(least)
    }

    fn node_headroom(&self) -> Result<Found<u64>, TopologyError> {
        let mut left = Found::unknown(FOLDER);
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

    /// Reads the maximum of the headroom: the smallest limit of the process's groups, or the memory
    /// of the host's nodes that it may use, whichever is less. `None` if both are unknown.
    ///
    /// # Errors
    /// [`TopologyError`] for a file that cannot be parsed.
    pub fn host_memory(&self) -> Result<Option<u64>, TopologyError> {
        let usable = self.host_nodes().filter(|node| node.memory_allowed);
        let nodes =
            Some(usable.filter_map(|node| node.memory).sum()).filter(|&bytes: &u64| bytes > 0);
        Ok(nodes.into_iter().chain(self.host_cap()?.value).min())
    }
}
