//! The mappings behind addresses, as the kernel lists them (`/proc/self/maps`).

use super::{Kernel, Result, Span, SystemCall};
use aquifer_core::SystemError;
use nix::{libc, sys::statfs};
use std::{fs, path::Path};

/// The backing of a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Ground {
    /// Anonymous memory: heap, stack, anonymous mappings.
    Anonymous,
    /// Shared memory: a memory file, shared anonymous memory, System V.
    Memory,
    /// Huge pages of the reserved pool.
    HugeTlb,
    /// A file of a file system.
    File,
}

/// One mapping of this process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MapEntry {
    /// Its addresses.
    pub span: Span,
    /// Whether it is writable.
    pub writable: bool,
    /// Whether writes are visible to other mappings of the same memory.
    pub shared: bool,
    /// Its backing.
    pub ground: Ground,
}

impl Kernel {
    /// Returns the mappings that overlap a range, in order (`/proc/self/maps`). Takes tens of
    /// microseconds, and more if the process has many mappings.
    ///
    /// # Errors
    /// `ENOENT` if there is no `/proc`.
    pub fn mappings(&self, span: Span) -> Result<Vec<MapEntry>> {
        self.intercept(SystemCall::Mappings)?;
        let text = fs::read("/proc/self/maps").map_err(|e| SystemError {
            call: SystemCall::Mappings.name(),
            errno: e.raw_os_error().unwrap_or(libc::EIO),
        })?;
        // File names may contain any bytes.
        let entries =
            text.split(|&b| b == b'\n').filter_map(|line| entry(&String::from_utf8_lossy(line)));
        Ok(entries
            .filter(|entry| entry.span.start < span.end() && span.start < entry.span.end())
            .collect())
    }
}

/// `7f00-7f10 rw-p 00000000 00:01 42   /memfd:name (deleted)`
fn entry(line: &str) -> Option<MapEntry> {
    let mut rest = line;
    let mut word = || {
        let trimmed = rest.trim_start();
        let (word, after) = trimmed.split_once(' ').unwrap_or((trimmed, ""));
        rest = after;
        word
    };
    let (range, access, _offset, _device, inode) = (word(), word(), word(), word(), word());
    let (start, end) = range.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let len = usize::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    let inode: u64 = inode.parse().ok()?;
    let ground = ground(inode, rest.trim());
    let access = access.as_bytes();
    Some(MapEntry {
        span: Span { start, len },
        writable: access.get(1) == Some(&b'w'),
        shared: access.get(3) == Some(&b's'),
        ground,
    })
}

fn ground(inode: u64, name: &str) -> Ground {
    const HUGETLBFS: statfs::FsType = statfs::HUGETLBFS_MAGIC;
    if name.starts_with("/anon_hugepage") {
        return Ground::HugeTlb;
    }
    if inode == 0 {
        return Ground::Anonymous;
    }
    if ["/memfd:", "/dev/zero", "/SYSV"].iter().any(|memory| name.starts_with(memory)) {
        return Ground::Memory;
    }
    // A file that was deleted, or that lies under another root, cannot be queried. It counts as a
    // file.
    match statfs::statfs(Path::new(name)).map(|found| found.filesystem_type()) {
        Ok(HUGETLBFS) => Ground::HugeTlb,
        Ok(statfs::TMPFS_MAGIC) => Ground::Memory,
        _ => Ground::File,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::MapPages;
    use std::os::fd::AsFd;

    #[test]
    fn mapping_entries_are_parsed_as_the_kernel_writes_them() {
        let table = [
            ("7f00-7f10 rw-p 00000000 00:00 0", Ground::Anonymous, true, false),
            ("7f00-7f10 rw-p 00000000 00:00 0      [heap]", Ground::Anonymous, true, false),
            (
                "7f00-7f10 rw-s 00000000 00:01 2048   /memfd:a b (deleted)",
                Ground::Memory,
                true,
                true,
            ),
            (
                "7f00-7f10 rw-s 00000000 00:01 9      /dev/zero (deleted)",
                Ground::Memory,
                true,
                true,
            ),
            (
                "7f00-7f10 rw-p 00000000 00:0f 42     /anon_hugepage (deleted)",
                Ground::HugeTlb,
                true,
                false,
            ),
            (
                "7f00-7f10 r--s 00000000 fe:00 42     /usr/share/some file",
                Ground::File,
                false,
                true,
            ),
            ("7f00-7f10 r-xp 00000000 fe:00 42     /usr/lib/libc.so.6", Ground::File, false, false),
        ];
        for (line, ground, writable, shared) in table {
            let span = Span { start: 0x7f00, len: 0x10 };
            assert_eq!(entry(line), Some(MapEntry { span, writable, shared, ground }), "{line}");
        }
        assert_eq!(entry(""), None);
        assert_eq!(entry("nonsense"), None);
    }

    #[test]
    fn vectors_memory_files_and_files_are_distinguished() {
        let kernel = Kernel::new();
        let look = |start: usize, len| kernel.mappings(Span { start, len }).unwrap();
        let own = vec![1u8; 1 << 20];
        let found = look(own.as_ptr() as usize, own.len());
        assert!(
            found.iter().all(|e| e.ground == Ground::Anonymous && e.writable && !e.shared),
            "{found:?}"
        );
        let file = kernel.memory_file(1 << 16, MapPages::Ordinary).unwrap();
        assert_eq!(kernel.look_at(file.as_fd()), Ok((1 << 16, MapPages::Ordinary)));
        let span = kernel.map_to_read(file.as_fd(), 1 << 16).unwrap();
        let [entry] = look(span.start, span.len)[..] else { unreachable!("one mapping") };
        assert_eq!((entry.ground, entry.writable, entry.shared), (Ground::Memory, false, true));
        let program = std::env::current_exe().unwrap();
        // A machine without a disk runs its programs from memory.
        let expected = match statfs::statfs(&program).unwrap().filesystem_type() {
            statfs::TMPFS_MAGIC => Ground::Memory,
            _ => Ground::File,
        };
        let own = fs::File::open(program).unwrap();
        assert_eq!(kernel.look_at(own.as_fd()).unwrap_err().errno, libc::EPERM, "not sealed");
        let read = kernel.map_to_read(own.as_fd(), 4096).unwrap();
        assert_eq!(look(read.start, 1)[0].ground, expected);
        #[expect(unsafe_code, reason = "ends its own mappings")]
        // SAFETY: 1. made above, and used only here.
        unsafe {
            kernel.unmap_file(span).unwrap();
            kernel.unmap_file(read).unwrap();
        }
    }
}
