//! What this process may use: its CPUs and nodes, its memory limit, its other limits.

use super::{
    Bitmap, Found, Source,
    files::{Files, TopologyError, file, parse_list, wrong_number},
};
use std::path::{Component, Path, PathBuf};

const STATUS: &str = "/proc/self/status";

/// The CPUs and nodes of the process's main thread: cpuset, affinity and memory policy taken together.
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

/// How much memory the process's control groups grant it.
///
/// Populating past this limit ends in a kill, not in an error: it is for comparing before pages are touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MemoryLimit {
    /// The smallest limit from the process's group up to the root, in bytes.
    pub limit: u64,
    /// The least that any of those groups has left under its own limit, in bytes.
    pub remaining: u64,
}

/// A mounted hierarchy of control groups, and which part of it is mounted.
struct Mount {
    point: PathBuf,
    root: PathBuf,
}

/// The limits of the group that the process is in and of all above it, version 2 before version 1.
pub(super) fn memory_limit(files: &Files) -> Result<Found<MemoryLimit>, TopologyError> {
    let path = Path::new("/proc/self/cgroup");
    let Some(groups) = files.text(path)? else { return Ok(Found::unknown(file(path))) };
    let mounts = files.text(Path::new("/proc/self/mountinfo"))?.unwrap_or_default();
    // `4:memory:/path`, and `0::/path` for version 2.
    let group = |controller: &str| {
        groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let names = fields.next()?;
            let path = fields.next()?;
            names.split(',').any(|name| name == controller).then(|| PathBuf::from(path))
        })
    };
    let mut found = None;
    let mut asked = file(path);
    for (controller, kind, limit, usage) in [
        ("", "cgroup2", "memory.max", "memory.current"),
        ("memory", "cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ] {
        let (Some(group), Some(mount)) = (group(controller), mount(&mounts, kind, controller)) else {
            continue;
        };
        // Inside a container the mount shows the group as its root, or a part of the tree.
        let below = group.strip_prefix(&mount.root).unwrap_or(Path::new("")).to_path_buf();
        let below = below.strip_prefix("/").map(Path::to_path_buf).unwrap_or(below);
        // A process that was moved out of its own namespace's tree: what limits it is not mounted here.
        if below.components().any(|part| part == Component::ParentDir) {
            continue;
        }
        for part in below.ancestors() {
            let folder = mount.point.join(part);
            let Some(bytes) = limit_of(files, &folder.join(limit))? else { continue };
            let used = files.number(&folder.join(usage))?.unwrap_or(0);
            let level = MemoryLimit { limit: bytes, remaining: bytes.saturating_sub(used) };
            let tightest = found.is_none_or(|so_far: MemoryLimit| level.limit < so_far.limit);
            if tightest {
                asked = file(folder.join(limit));
            }
            found = Some(found.map_or(level, |so_far| MemoryLimit {
                limit: so_far.limit.min(level.limit),
                remaining: so_far.remaining.min(level.remaining),
            }));
        }
    }
    Ok(Found { value: found, source: asked })
}

/// A limit in bytes; `None` for `max`, for version 1's number that stands for it, and where there is no file.
fn limit_of(files: &Files, path: &Path) -> Result<Option<u64>, TopologyError> {
    let Some(text) = files.text(path)? else { return Ok(None) };
    let text = text.trim();
    if text == "max" {
        return Ok(None);
    }
    let bytes: u64 = text.parse().map_err(|_| wrong_number(path, text))?;
    Ok((bytes < 1 << 62).then_some(bytes))
}

/// The first mount of a kind: `35 30 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory`.
fn mount(mountinfo: &str, kind: &str, controller: &str) -> Option<Mount> {
    mountinfo.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut filesystem = filesystem.split(' ');
        let options = (filesystem.next()? == kind).then(|| filesystem.nth(1)).flatten()?;
        if !controller.is_empty() && !options.split(',').any(|option| option == controller) {
            return None;
        }
        let mut mount = mount.split(' ').skip(3);
        Some(Mount { root: unescape(mount.next()?), point: unescape(mount.next()?) })
    })
}

/// Mountinfo writes space, tab, newline and backslash as three octal digits.
fn unescape(text: &str) -> PathBuf {
    [(r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", r"\")]
        .iter()
        .fold(text.to_owned(), |text, (escaped, plain)| text.replace(escaped, plain))
        .into()
}

/// Whether the kernel calls itself Windows' own.
pub(super) fn wsl(files: &Files) -> Result<Found<bool>, TopologyError> {
    let path = Path::new("/proc/version");
    let value = files.text(path)?.map(|text| text.to_lowercase().contains("microsoft"));
    Ok(Found { value, source: file(path) })
}

/// Limits that pinned memory may meet.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// `RLIMIT_MEMLOCK`, soft, in bytes; `u64::MAX` for unlimited. The GPU driver's pins do not count against it.
    pub locked_memory: Found<u64>,
    /// `vm.max_map_count`: mappings that the process may have.
    pub mappings: Found<u64>,
    /// `vm.overcommit_memory`: 0 heuristic, 1 always, 2 never.
    pub overcommit: Found<u64>,
}

pub(super) fn limits(files: &Files) -> Result<Limits, TopologyError> {
    let number = |path: &'static str| Ok(Found { value: files.number(Path::new(path))?, source: file(path) });
    Ok(Limits {
        locked_memory: locked_memory(files)?,
        mappings: number("/proc/sys/vm/max_map_count")?,
        overcommit: number("/proc/sys/vm/overcommit_memory")?,
    })
}

fn locked_memory(files: &Files) -> Result<Found<u64>, TopologyError> {
    let path = Path::new("/proc/self/limits");
    let source: Source = file(path);
    let Some(text) = files.text(path)? else { return Ok(Found::unknown(source)) };
    let Some(rest) = text.lines().find_map(|line| line.strip_prefix("Max locked memory")) else {
        return Ok(Found::unknown(source));
    };
    match rest.split_whitespace().next() {
        Some("unlimited") => Ok(Found::known(u64::MAX, source)),
        Some(soft) => soft.parse().map(|n| Found::known(n, source)).map_err(|_| wrong_number(path, soft)),
        None => Ok(Found::unknown(source)),
    }
}
