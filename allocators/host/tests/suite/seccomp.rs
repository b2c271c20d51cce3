//! Tests under a sandbox whose filter refuses system calls that place memory, as containers do.
//! Pinned memory is still allocated, and its placement is reported as far as it is known.
//!
//! A filter applies to the thread that installs it and to all threads started by it, and cannot be
//! removed. Each test therefore runs in a thread of its own, whose workers are under the filter as
//! well.
#![expect(unsafe_code, reason = "installs a filter")]
#![expect(clippy::print_stdout, reason = "a helper says what is skipped")]

use crate::support::{self, MIB};
use aquifer_core::{Budget, SystemError};
use aquifer_driver::{DeviceId, sim::Sim};
use aquifer_host::{
    PinnedBuf, PinnedConfig, PinnedPool,
    kernel::Kernel,
    region::{Cause, Host, PageTier, PinnedBy, Region, RegionReport, RegionRequest},
    topology::NodeId,
    workers::WorkerError,
};
use nix::libc::{self, c_int, c_long, sock_filter, sock_fprog};
use std::{mem::offset_of, thread};

/// System calls that set and query policies.
const POLICY: [c_long; 3] = [libc::SYS_mbind, libc::SYS_set_mempolicy, libc::SYS_get_mempolicy];
/// System calls that Docker and others refuse without `CAP_SYS_NICE`.
const MEMORY: [c_long; 4] =
    [libc::SYS_mbind, libc::SYS_set_mempolicy, libc::SYS_get_mempolicy, libc::SYS_move_pages];

/// Makes each of `calls` fail with `errno` in this thread and in those that it starts.
fn refuse(calls: &[c_long], errno: c_int) {
    #[cfg(target_arch = "x86_64")]
    const ARCHITECTURE: u32 = 0xc000_003e;
    #[cfg(target_arch = "aarch64")]
    const ARCHITECTURE: u32 = 0xc000_00b7;
    let load = |at: usize| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at as u32);
    // One instruction for other architectures, two for each call, and the results.
    let mut program = vec![
        load(offset_of!(libc::seccomp_data, arch)),
        unless_equal(ARCHITECTURE, 2 * calls.len() as u8 + 1),
        load(offset_of!(libc::seccomp_data, nr)),
    ];
    for &call in calls {
        program.push(unless_equal(call as u32, 1));
        program.push(statement(libc::BPF_RET, libc::SECCOMP_RET_ERRNO | errno as u32));
    }
    program.push(statement(libc::BPF_RET, libc::SECCOMP_RET_ALLOW));
    let filter = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: 1. takes numbers only.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: 1. the program has as many instructions as stated, and the kernel copies it.
    let installed =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
    assert_eq!(installed, 0, "{}", std::io::Error::last_os_error());
}

fn statement(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Continues with the next instruction if the loaded word is `k`, and otherwise skips `past`
/// instructions.
fn unless_equal(k: u32, past: u8) -> sock_filter {
    sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt: 0, jf: past, k }
}

/// Runs `work` in a thread under the filter, with a machine on a simulated driver.
fn under(calls: &'static [c_long], errno: c_int, work: impl FnOnce(&Sim, &Host) + Send + 'static) {
    let thread = thread::spawn(move || {
        refuse(calls, errno);
        let sim = Sim::h200(1);
        let host = support::host().with_driver(sim.driver(), DeviceId(0));
        work(&sim, &host);
        drop(host);
        assert_eq!(sim.outstanding().registrations, 0, "all has been given back");
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Returns the nodes on which a first touch is possible. On a kernel without NUMA it returns none
/// and prints a message.
fn nodes() -> Vec<NodeId> {
    let topology = support::topology();
    let nodes: Vec<_> = topology
        .nodes()
        .iter()
        .filter(|node| node.memory_allowed && !node.allowed_cpus.is_empty())
        .map(|node| node.id)
        .collect();
    if nodes.is_empty() {
        println!("skipped: a kernel without NUMA");
    }
    nodes
}

fn request(node: NodeId) -> RegionRequest {
    let mut request = RegionRequest::bytes(4 * MIB).on(node);
    request.pages = PageTier::Transparent;
    request
}

fn budget() -> Budget {
    Budget::new("pinned", 64 * MIB as u64)
}

fn fell_short(report: &RegionReport, call: &'static str, errno: c_int) -> bool {
    report.shortfalls.contains(&Cause::System(SystemError { call, errno }))
}

#[test]
fn where_policies_are_refused_pinned_memory_is_on_its_node_by_first_touch() {
    for node in nodes() {
        for errno in [libc::EPERM, libc::ENOSYS] {
            under(&POLICY, errno, move |_, host| {
                let region = Region::new(host, &budget(), &request(node)).unwrap();
                let report = region.report();
                assert!(fell_short(report, "mbind", errno), "{report:?}");
                assert!(matches!(report.pinned_by, PinnedBy::Registration(_)));
                // The kernel's answer for every page, which is not refused here.
                let pages: Vec<usize> =
                    (region.span().start..region.span().end()).step_by(4096).collect();
                let placed = Kernel::new().nodes_of(&pages).unwrap();
                assert!(placed.iter().all(|&n| n == node.0 as c_int), "{node}: {placed:?}");
                println!("sandboxed: {} pages on {node}", pages.len());
            });
        }
    }
}

#[test]
fn without_page_queries_the_placement_is_unknown() {
    for node in nodes() {
        for errno in [libc::EPERM, libc::ENOSYS] {
            under(&MEMORY, errno, move |sim, host| {
                let budget = budget();
                let mut region = Region::new(host, &budget, &request(node)).unwrap();
                let report = region.report().clone();
                assert!(
                    fell_short(&report, "mbind", errno) && fell_short(&report, "move_pages", errno)
                );
                assert_eq!((report.placement.unknown, report.placement.on_node()), (1024, 0));
                assert!(region.is_pinned());
                region.bytes_mut().fill(7);
                drop(region);
                assert_eq!((budget.used(), sim.outstanding().registrations), (0, 0));
            });
        }
    }
}

#[test]
fn a_pool_under_the_filter_gives_pinned_memory() {
    for node in nodes() {
        under(&MEMORY, libc::EPERM, move |_, host| {
            let budget = budget();
            let mut config = PinnedConfig::default();
            (config.node, config.chunk) = (Some(node), 4 * MIB);
            let pool = PinnedPool::new(host, &budget, config).unwrap();
            let block: PinnedBuf<u64> = pool.buffer(1000).unwrap();
            assert!(block.iter().all(|&word| word == 0));
            assert!(budget.used() >= 4 * MIB as u64);
            drop(block);
            drop(pool);
        });
    }
}

#[test]
fn workers_that_may_not_be_bound_are_reported_and_touch_the_pages_all_the_same() {
    const BOUND: [c_long; 2] = [libc::SYS_mbind, libc::SYS_sched_setaffinity];
    for node in nodes() {
        under(&BOUND, libc::EPERM, move |_, host| {
            let region = Region::new(host, &budget(), &request(node)).unwrap();
            let report = region.report();
            let told = report.shortfalls.iter().any(|s| {
                matches!(s, Cause::Workers(WorkerError::Bind { node: n, error })
                    if *n == node && error.errno == libc::EPERM)
            });
            assert!(told && fell_short(report, "mbind", libc::EPERM), "{report:?}");
            assert_eq!(support::present(region.span()), 1024, "it is there all the same");
        });
    }
}
