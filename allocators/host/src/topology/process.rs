//! What this process may use: CPUs, nodes, memory, and other limits.

use super::{
    Bitmap, Found, Provenance,
    files::{Files, TopologyError, file, parse_list, wrong_number},
    groups,
};
use std::path::Path;

const STATUS: &str = "/proc/self/status";

/// Reads the CPUs and nodes that the process's main thread may use, by cpuset, affinity and memory
/// policy together.
pub(super) fn allowed(files: &Files) -> Result<(Found<Bitmap>, Found<Bitmap>), TopologyError> {
    let path = Path::new(STATUS);
    let Some(text) = files.text(path)? else {
        return Ok((Found::unknown(file(path)), Found::unknown(file(path))));
    };
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let value = line.map(|list| parse_list(path, list)).transpose()?;
        Ok(Found { value, source: file(path) })
    };
    Ok((field("Cpus_allowed_list:")?, field("Mems_allowed_list:")?))
}

/// The memory limit of the process's control groups.
///
/// Populating memory beyond this limit ends in a kill, not in an error. Compare with it before
/// pages are touched.
///
/// See [`Topology`](super::Topology) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MemoryLimit {
    /// The smallest limit of the process's group and the groups above it, in bytes.
    pub limit: u64,
    /// The minimum that any of those groups has left below its own limit, in bytes.
    pub remaining: u64,
}

/// Reads the limits of the process's group and of all groups above it, version 2 before version 1.
pub(super) fn memory_limit(files: &Files) -> Result<Found<MemoryLimit>, TopologyError> {
    let mut found = Found::unknown(file(groups::MEMBERSHIP));
    for group in groups::all(files)? {
        let Some(limit) = group.limit(files)? else { continue };
        let level = MemoryLimit { limit, remaining: limit.saturating_sub(group.used(files)?) };
        found = match found.value {
            None => Found::known(level, group.limit_file()),
            Some(so_far) => {
                let tighter = level.limit < so_far.limit;
                let value = MemoryLimit {
                    limit: so_far.limit.min(level.limit),
                    remaining: so_far.remaining.min(level.remaining),
                };
                Found::known(value, if tighter { group.limit_file() } else { found.source })
            }
        };
    }
    Ok(found)
}

/// Reads whether this is the kernel of the Windows Subsystem for Linux.
pub(super) fn wsl(files: &Files) -> Result<Found<bool>, TopologyError> {
    let path = Path::new("/proc/version");
    let value = files.text(path)?.map(|text| text.to_lowercase().contains("microsoft"));
    Ok(Found { value, source: file(path) })
}

/// Limits that may affect pinned memory.
///
/// See [`Topology`](super::Topology) for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ProcessLimits {
    /// The soft `RLIMIT_MEMLOCK` in bytes, or `u64::MAX` if unlimited. Memory that the GPU driver
    /// pins does not count against it.
    pub locked_memory: Found<u64>,
    /// `vm.max_map_count`: maximum number of mappings of the process.
    pub mappings: Found<u64>,
    /// `vm.overcommit_memory`: 0 heuristic, 1 always, 2 never.
    pub overcommit: Found<u64>,
}

pub(super) fn limits(files: &Files) -> Result<ProcessLimits, TopologyError> {
    let number = |path: &'static str| {
        Ok(Found { value: files.number(Path::new(path))?, source: file(path) })
    };
    Ok(ProcessLimits {
        locked_memory: locked_memory(files)?,
        mappings: number("/proc/sys/vm/max_map_count")?,
        overcommit: number("/proc/sys/vm/overcommit_memory")?,
    })
}

fn locked_memory(files: &Files) -> Result<Found<u64>, TopologyError> {
    let path = Path::new("/proc/self/limits");
    let source: Provenance = file(path);
    let Some(text) = files.text(path)? else { return Ok(Found::unknown(source)) };
    let Some(rest) = text.lines().find_map(|line| line.strip_prefix("Max locked memory")) else {
        return Ok(Found::unknown(source));
    };
    match rest.split_whitespace().next() {
        Some("unlimited") => Ok(Found::known(u64::MAX, source)),
        Some(soft) => {
            soft.parse().map(|n| Found::known(n, source)).map_err(|_| wrong_number(path, soft))
        }
        None => Ok(Found::unknown(source)),
    }
}
