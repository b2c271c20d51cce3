//! The control groups of the process, from its own group up to the root of the mounted hierarchy.

use super::{
    Found,
    files::{Files, TopologyError, file, wrong_number},
};
use std::path::{Component, Path, PathBuf};

/// The file that lists the process's groups.
pub(super) const MEMBERSHIP: &str = "/proc/self/cgroup";

/// The version of a control group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Version {
    Two,
    One,
}

/// A group that may limit the process's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Group {
    version: Version,
    pub(super) folder: PathBuf,
}

impl Group {
    fn file_of(&self, two: &str, one: &str) -> PathBuf {
        self.folder.join(match self.version {
            Version::Two => two,
            Version::One => one,
        })
    }

    /// Returns the least of its limits with its file: the bytes beyond which allocations fail or
    /// processes are killed, and those beyond which the kernel throttles its threads (version 2
    /// only). Unknown if it has neither.
    pub(super) fn limit(&self, files: &Files) -> Result<Found<u64>, TopologyError> {
        let mut least = Found::unknown(MEMBERSHIP);
        let max = self.file_of("memory.max", "memory.limit_in_bytes");
        for path in [max, self.folder.join("memory.high")] {
            if let Some(limit) = limit_of(files, &path)? {
                least.lower(limit, || file(path));
            }
        }
        Ok(least)
    }

    /// Returns the bytes that it uses, including page cache. 0 if the kernel does not report them.
    pub(super) fn used(&self, files: &Files) -> Result<u64, TopologyError> {
        Ok(files.number(&self.file_of("memory.current", "memory.usage_in_bytes"))?.unwrap_or(0))
    }

    /// Returns the used bytes that the kernel reclaims before it refuses an allocation (see
    /// [`reclaimable`]). 0 if the kernel does not report them.
    pub(super) fn reclaimable(&self, files: &Files) -> Result<u64, TopologyError> {
        let path = self.folder.join("memory.stat");
        let Some(text) = files.text(&path)? else { return Ok(0) };
        let of = |name: &str| field(&path, &text, name);
        Ok(match self.version {
            Version::Two => {
                reclaimable(of("inactive_file")?, of("active_file")?, of("slab_reclaimable")?)
            }
            Version::One => reclaimable(of("total_inactive_file")?, of("total_active_file")?, 0),
        })
    }
}

/// Returns the bytes of the page cache and of kernel caches that the kernel can reclaim: what was
/// read only once, and half of what is in use. Without that half the machine would read the data
/// again and again.
pub(super) fn reclaimable(inactive_file: u64, active_file: u64, slab: u64) -> u64 {
    inactive_file.saturating_add(active_file / 2).saturating_add(slab / 2)
}

/// Returns the number after a name, as in `inactive_file 4096`. 0 if the name is missing.
fn field(path: &Path, text: &str, name: &str) -> Result<u64, TopologyError> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.map_or(Ok(0), |number| number.trim().parse().map_err(|_| wrong_number(path, number)))
}

/// Returns all groups of the process that may be mounted, version 2 before version 1, and each time
/// its own group first.
pub(super) fn all(files: &Files) -> Result<Vec<Group>, TopologyError> {
    let Some(membership) = files.text(Path::new(MEMBERSHIP))? else { return Ok(Vec::new()) };
    let mounts = files.text(Path::new("/proc/self/mountinfo"))?.unwrap_or_default();
    // `4:memory:/path`, and `0::/path` for version 2.
    let group = |controller: &str| {
        membership.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let names = fields.next()?;
            let path = fields.next()?;
            names.split(',').any(|name| name == controller).then(|| PathBuf::from(path))
        })
    };
    let mut all = Vec::new();
    for (version, controller, kind) in
        [(Version::Two, "", "cgroup2"), (Version::One, "memory", "cgroup")]
    {
        let (Some(group), Some(mount)) = (group(controller), mount(&mounts, kind, controller))
        else {
            continue;
        };
        // In a container the mount shows the group as its root, or shows a part of the tree.
        let below = group.strip_prefix(&mount.root).unwrap_or(Path::new("")).to_path_buf();
        let below = below.strip_prefix("/").map(Path::to_path_buf).unwrap_or(below);
        // The process was moved out of the tree of its namespace. The groups that limit it are not
        // mounted here.
        if below.components().any(|part| part == Component::ParentDir) {
            continue;
        }
        all.extend(below.ancestors().map(|part| Group { version, folder: mount.point.join(part) }));
    }
    Ok(all)
}

/// Returns a limit in bytes. `None` for `max`, for the number that means unlimited in version 1,
/// and if there is no file.
fn limit_of(files: &Files, path: &Path) -> Result<Option<u64>, TopologyError> {
    let Some(text) = files.text(path)? else { return Ok(None) };
    let text = text.trim();
    if text == "max" {
        return Ok(None);
    }
    let bytes: u64 = text.parse().map_err(|_| wrong_number(path, text))?;
    Ok((bytes < 1 << 62).then_some(bytes))
}

/// A mounted hierarchy of control groups, and the root of the mounted part.
struct Mount {
    point: PathBuf,
    root: PathBuf,
}

/// Returns the first mount of a kind, as in `35 30 0:32 / /sys/fs/cgroup/memory rw,relatime -
/// cgroup cgroup rw,memory`.
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
