//! Tests of what the child of a fork has of its parent's pinned memory.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]
#![expect(unsafe_code, reason = "forks, and frees blocks by the allocator trait")]

use crate::support::{self, MIB};
use allocator_api2::alloc::Allocator;
use aquifer_core::{Budget, MemoryError};
use aquifer_host::{PinnedConfig, PinnedPool};
use nix::libc;
use std::{
    alloc::Layout,
    io::{Read, Write},
    os::unix::net::UnixStream,
};

fn pool(share_on_fork: bool) -> PinnedPool {
    let mut config = PinnedConfig::default();
    (config.chunk, config.share_on_fork) = (4 * MIB, share_on_fork);
    PinnedPool::new(&support::host(), &Budget::new("pinned", 64 << 20), config).unwrap()
}

/// Runs `work` in a child, with one end of a connection.
fn in_child(work: impl FnOnce(UnixStream)) -> (UnixStream, libc::pid_t) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    // SAFETY: 1. the child uses memory that the C library prepares for it, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: 1. takes a number. A child that blocks is ended by the alarm.
        unsafe { libc::alarm(120) };
        drop(ours);
        work(theirs);
        // SAFETY: 1. ends the child.
        unsafe { libc::_exit(0) };
    }
    (ours, child)
}

/// Returns how a child ended.
fn end(child: libc::pid_t) -> i32 {
    let mut status = -1;
    // SAFETY: 1. the child belongs to this process, and the status is a local.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

#[test]
fn a_child_reads_shared_blocks_of_its_parent_until_they_are_released_and_takes_none() {
    let pool = pool(true);
    let layout = Layout::array::<u8>(MIB).unwrap();
    let [read, freed] = [(); 2].map(|()| pool.allocate(layout).unwrap().cast::<u8>());
    let fill = |byte| {
        // SAFETY: 1. the block has this many bytes, and the child waits.
        unsafe { read.write_bytes(byte, MIB) };
    };
    fill(5);
    let (mut told, child) = in_child(|mut tell| {
        // SAFETY: 1. the mapping has this address and size here too. 2. nothing writes it now.
        let seen = || unsafe { [read.read(), read.add(MIB - 1).read()] };
        let refused = pool.allocate(layout) == Err(MemoryError::OtherProcess);
        // SAFETY: 1. a block of this allocator, with this layout. It is not used again here.
        unsafe { pool.allocator().deallocate(freed, layout) };
        let _ = tell.write_all(&[u8::from(refused), seen()[0], seen()[1]]);
        while tell.read(&mut [0]).is_ok_and(|bytes| bytes == 1) {
            let _ = tell.write_all(&seen());
        }
    });
    let mut first = [0; 3];
    told.read_exact(&mut first).unwrap();
    assert_eq!(first, [1, 5, 5], "refused, and what was there at the fork");
    let mut again = || {
        let mut seen = [9; 2];
        told.write_all(&[0]).unwrap();
        told.read_exact(&mut seen).unwrap();
        seen
    };
    fill(6);
    assert_eq!(again(), [6, 6], "the same pages");
    assert_eq!(
        pool.stats().memory.requested,
        2 * MIB as u64,
        "the child's free changes nothing here"
    );
    for block in [read, freed] {
        // SAFETY: 1. the block belongs to this allocator and has that layout. It is not used again.
        unsafe { pool.allocator().deallocate(block, layout) };
    }
    pool.trim(0).unwrap();
    assert_eq!(pool.budget().used(), 0);
    assert_eq!(again(), [0, 0], "a child keeps no memory that its parent has released");
    drop(told);
    assert_eq!(end(child), 0);
}

#[test]
fn a_child_has_none_of_the_memory_that_is_withheld() {
    let pool = pool(false);
    let block = pool.buffer::<u8>(MIB).unwrap();
    let (mut told, child) = in_child(|mut tell| {
        // The kernel reads the block, so that an address without memory is an error and no signal.
        let missing =
            tell.write(&block[..1]).is_err_and(|error| error.raw_os_error() == Some(libc::EFAULT));
        let _ = tell.write_all(&[u8::from(missing)]);
    });
    let mut seen = [0];
    told.read_exact(&mut seen).unwrap();
    assert_eq!((seen, end(child)), ([1], 0));
}
