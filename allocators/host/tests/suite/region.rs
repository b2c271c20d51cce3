//! Tests of regions: each step, its failure and fall-back, and the release.

use crate::support::{self, MIB};
use aquifer_core::{Budget, MemoryError, SystemError};
use aquifer_host::{
    StageError,
    kernel::SystemCall,
    region::{Cause, Host, PageTier, Pinning, Region, RegionReport, RegionRequest, retry_stranded},
    topology::{NodeId, ThpMode, Topology},
};
use nix::libc;
use std::{num::NonZeroUsize, time::Duration};

fn request(bytes: usize) -> RegionRequest {
    let mut request = RegionRequest::bytes(bytes);
    request.piece = 2 * MIB;
    request
}

fn budget() -> Budget {
    Budget::new("pinned", 64 * MIB as u64)
}

fn fell_short(report: &RegionReport, call: SystemCall, errno: i32) -> bool {
    let failed = SystemError { call: call.name(), errno };
    report.shortfalls.contains(&Cause::System(failed))
}

#[test]
fn every_page_of_a_region_is_on_its_node() {
    let (topology, budget) = (support::topology(), budget());
    let nodes: Vec<_> =
        topology.nodes().iter().filter(|node| node.memory_allowed).cloned().collect();
    let host = support::host();
    for node in &nodes {
        let region = Region::new(&host, &budget, &request(8 * MIB).on(node.id)).unwrap();
        let placement = &region.report().placement;
        assert_eq!(
            (placement.wanted, placement.elsewhere(), placement.unknown),
            (Some(node.id), 0, 0)
        );
        assert_eq!(placement.on_node(), 8 * MIB as u64 / 4096);
        // The report equals the kernel's answer when it is queried again.
        let pages: Vec<usize> = (region.span().start..region.span().end()).step_by(4096).collect();
        let placed = host.kernel.nodes_of(&pages).unwrap();
        assert!(placed.iter().all(|&n| n == node.id.0 as i32), "{}: {placed:?}", node.id);
        println!("placed: {} pages on {}", placement.on_node(), node.id);
    }
    if nodes.len() < 2 {
        println!("skipped: one NUMA node");
    }
}

#[test]
fn without_a_policy_first_touch_by_the_nodes_own_workers_places_the_pages() {
    let topology = support::topology();
    for node in topology.nodes().iter().filter(|n| n.memory_allowed && !n.allowed_cpus.is_empty()) {
        let (host, faults) = support::faulty_host();
        for errno in [libc::EPERM, libc::ENOSYS] {
            faults.fail(SystemCall::Prefer, 1, errno);
            let region = Region::new(&host, &budget(), &request(4 * MIB).on(node.id)).unwrap();
            assert_eq!(region.report().placement.on_node(), 1024);
            assert!(fell_short(region.report(), SystemCall::Prefer, errno));
        }
    }
}

#[test]
fn pages_that_cannot_be_verified_are_unknown_and_refused_by_a_strict_region_that_asks_for_all() {
    let (host, faults) = support::faulty_host();
    let budget = budget();
    faults.fail_from(SystemCall::Query, 1, libc::EPERM);
    let mut request = request(4 * MIB);
    request.pages = PageTier::Transparent;
    let region = Region::new(&host, &budget, &request).unwrap();
    let placement = &region.report().placement;
    assert_eq!((placement.unknown, placement.pages.len()), (1024, 0));
    drop(region);
    if let Some(node) = support::some_node(&host.topology) {
        let mut strict = request.clone().on(node);
        strict.strict = true;
        let refused = Region::new(&host, &budget, &strict).unwrap_err();
        assert_eq!(refused.cause, Cause::Misplaced { elsewhere: 0, unknown: 1024 });
        assert_eq!(budget.used(), 0);
        faults.clear();
        strict.bytes = 32 * MIB;
        let placement = Region::new(&host, &budget, &strict).unwrap().report().placement.clone();
        assert_eq!((placement.on_node(), placement.elsewhere()), (8192, 0), "every page");
    }
    faults.clear();
    request.bytes = 32 * MIB;
    let sampled = Region::new(&host, &budget, &request).unwrap();
    let asked: u64 = sampled.report().placement.pages.iter().map(|(_, n)| n).sum();
    assert_eq!(asked, 4096, "every other page");
}

#[test]
fn each_step_that_has_a_fall_back_falls_back_and_says_so() {
    for (call, errno) in [
        (SystemCall::DontDump, libc::EINVAL),
        (SystemCall::HugePage, libc::EINVAL),
        (SystemCall::Prefer, libc::EPERM),
        (SystemCall::Query, libc::ENOSYS),
    ] {
        let (host, faults) = support::faulty_host();
        let node = support::some_node(&host.topology);
        let offered = host.topology.thp().is_some_and(|mode| mode != ThpMode::Never);
        if (call == SystemCall::Prefer && node.is_none())
            || (call == SystemCall::HugePage && !offered)
        {
            println!("skipped: {call:?} has no part in a region here");
            continue;
        }
        faults.fail(call, 1, errno);
        let budget = budget();
        let mut request = request(4 * MIB);
        request.node = node;
        request.pages = PageTier::Transparent;
        let mut region = Region::new(&host, &budget, &request).unwrap();
        assert!(fell_short(region.report(), call, errno), "{call:?}: {:?}", region.report());
        if call == SystemCall::HugePage {
            assert_eq!(region.report().pages, PageTier::Base);
        }
        region.bytes_mut().fill(1);
        drop(region);
        assert_eq!(budget.used(), 0);
    }
}

#[test]
fn a_kernel_that_cannot_populate_has_each_page_written_instead() {
    let (host, faults) = support::faulty_host();
    faults.fail_from(SystemCall::Populate, 1, libc::EINVAL);
    let region = Region::new(&host, &budget(), &request(8 * MIB)).unwrap();
    assert!(region.report().shortfalls.contains(&Cause::Touched));
    assert_eq!(support::present(region.span()), 2048);
}

#[test]
fn without_workers_the_calling_thread_populates() {
    let (host, faults) = support::faulty_host();
    faults.fail_from(SystemCall::Spawn, 1, libc::EAGAIN);
    let region = Region::new(&host, &budget(), &request(8 * MIB)).unwrap();
    assert!(region.report().shortfalls.iter().any(|s| matches!(s, Cause::Workers(_))));
    assert_eq!(support::present(region.span()), 2048);
}

#[test]
fn each_step_without_a_fall_back_is_an_error_that_names_it_and_leaves_nothing() {
    for (call, errno) in [
        (SystemCall::Map, libc::ENOMEM),
        (SystemCall::DontFork, libc::EINVAL),
        (SystemCall::Populate, libc::ENOMEM),
        (SystemCall::Populate, libc::EFAULT),
    ] {
        for nth in [1, 3] {
            let (host, faults) = support::faulty_host();
            faults.fail(call, nth, errno);
            let budget = budget();
            let mut request = request(8 * MIB);
            // Huge pages from the pool would fall back to ordinary ones.
            request.pages = PageTier::Transparent;
            match Region::new(&host, &budget, &request) {
                Ok(_) => assert!(nth > 1 && call != SystemCall::Populate, "{call:?} {nth}"),
                Err(error) => {
                    let failed = SystemError { call: call.name(), errno };
                    assert_eq!(error.cause, Cause::System(failed));
                }
            }
            assert_eq!(budget.used(), 0, "{call:?} {nth}");
        }
    }
}

#[test]
fn a_mapping_that_the_kernel_keeps_is_stranded_with_its_charge_and_tried_again() {
    let (host, faults) = support::faulty_host();
    let budget = budget();
    let region = Region::new(&host, &budget, &request(4 * MIB)).unwrap();
    faults.fail_from(SystemCall::Unmap, 1, libc::ENOMEM);
    let error = region.close().unwrap_err();
    assert!(matches!(error.cause, Cause::System(_)), "{error}");
    assert_eq!(budget.used(), 4 * MIB as u64, "what was not given back stays charged");
    retry_stranded();
    assert_eq!(budget.used(), 4 * MIB as u64);
    faults.clear();
    support::retry_out(&budget);
}

#[test]
fn the_budget_is_asked_first_and_senseless_requests_are_refused() {
    let (host, faults) = support::faulty_host();
    let budget = Budget::new("pinned", MIB as u64);
    let refused = Region::new(&host, &budget, &request(2 * MIB)).unwrap_err();
    assert!(
        matches!(MemoryError::from(refused), MemoryError::OutOfBudget(e) if e.remaining == MIB as u64)
    );
    assert_eq!(faults.made(SystemCall::Map), 0, "nothing was touched");
    let none = Region::new(&host, &budget, &request(0)).unwrap_err();
    assert_eq!(MemoryError::from(none), MemoryError::ZeroSize);
    let huge = Region::new(&host, &Budget::unlimited("pinned"), &request(usize::MAX)).unwrap_err();
    assert!(matches!(MemoryError::from(huge), MemoryError::TooLarge { .. }));
    let nowhere = Region::new(&host, &budget, &request(4096).on(NodeId(4000))).unwrap_err();
    assert_eq!(nowhere.cause, Cause::UnknownNode(NodeId(4000)));
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_required_pin_without_a_driver_is_an_error_and_an_unwanted_one_is_not_missed() {
    let (host, budget) = (support::host(), budget());
    let mut request = request(MIB);
    request.pinning = Pinning::Required;
    assert_eq!(Region::new(&host, &budget, &request).unwrap_err().cause, Cause::NoDriver);
    assert_eq!(budget.used(), 0);
    request.pinning = Pinning::Off;
    let region = Region::new(&host, &budget, &request).unwrap();
    assert!(!region.report().shortfalls.contains(&Cause::NoDriver));
}

#[test]
fn with_numa_switched_off_nothing_is_bound_and_the_report_says_so() {
    let host = Host::new(support::topology().without_nodes(), aquifer_host::kernel::Kernel::new());
    let mut strict = request(MIB).on(NodeId(0));
    strict.strict = true;
    let refused = Region::new(&host, &budget(), &strict).unwrap_err();
    assert!(matches!(refused.cause, Cause::Misplaced { .. }), "strict cannot be kept: {refused}");
    let region = Region::new(&host, &budget(), &request(MIB).on(NodeId(0))).unwrap();
    assert!(region.report().shortfalls.contains(&Cause::NumaOff));
    assert_eq!(region.report().placement.wanted, None);
}

#[test]
fn huge_pages_come_from_the_pool_where_it_has_enough_and_else_the_report_says_why_not() {
    let (host, budget) = (support::host(), budget());
    let region = Region::new(&host, &budget, &request(4 * MIB)).unwrap();
    let free = host.topology.free_huge_pages(None, 2 << 20).unwrap();
    let report = region.report();
    println!("pages: {}", report.pages);
    match report.pages {
        PageTier::HugeTlb => {
            assert!(!report.shortfalls.iter().any(|s| matches!(s, Cause::HugePages { .. })));
        }
        _ => assert!(
            report.shortfalls.iter().any(|s| matches!(s, Cause::HugePages { needed: 2, .. })),
            "{free:?} free: {report:?}"
        ),
    }
    let odd = Region::new(&host, &budget, &request(3 * MIB)).unwrap();
    assert!(odd.report().shortfalls.contains(&Cause::NotHuge));
    let mut base = request(4 * MIB);
    base.pages = PageTier::Base;
    assert_eq!(Region::new(&host, &budget, &base).unwrap().report().pages, PageTier::Base);
}

#[test]
fn huge_pages_that_take_longer_than_base_pages_are_given_up_for_the_rest() {
    let topology = support::topology();
    if !topology.thp().is_some_and(|mode| mode != ThpMode::Never) {
        println!("skipped: no transparent huge pages");
        return;
    }
    let faults = std::sync::Arc::new(aquifer_host::kernel::Faults::new());
    let kernel = aquifer_host::kernel::Kernel::with_faults(faults.clone());
    let mut host = Host::new(topology, kernel.clone());
    let one = NonZeroUsize::MIN;
    host.workers = std::sync::Arc::new(aquifer_host::workers::Workers::with_threads(
        &host.topology,
        kernel,
        one,
    ));
    let mut request = request(16 * MIB);
    request.pages = PageTier::Transparent;
    let stalled = |report: &RegionReport| {
        report.shortfalls.iter().find_map(|s| match s {
            Cause::Stalled { bytes } => Some(*bytes),
            _ => None,
        })
    };
    let (quick, slow) = (Duration::from_millis(1), Duration::from_secs(600));
    let pieces = 8;
    faults.seem_to_take(SystemCall::Populate, pieces, quick);
    let region = Region::new(&host, &budget(), &request).unwrap();
    assert_eq!((stalled(region.report()), faults.made(SystemCall::NoHugePage)), (None, 0));
    drop(region);
    // The first piece of eight seems to take ten minutes. The second is tried with base pages,
    // which the rest then use.
    faults.seem_to_take(SystemCall::Populate, 1, slow);
    faults.seem_to_take(SystemCall::Populate, pieces - 1, quick);
    let region = Region::new(&host, &budget(), &request).unwrap();
    assert_eq!(stalled(region.report()), Some(14 * MIB as u64));
    assert_eq!(faults.made(SystemCall::NoHugePage), pieces - 1);
    assert_eq!(support::present(region.span()), 4096);
    drop(region);
    // If base pages are as slow, huge ones are kept.
    faults.seem_to_take(SystemCall::Populate, pieces, slow);
    let region = Region::new(&host, &budget(), &request).unwrap();
    assert_eq!((stalled(region.report()), faults.made(SystemCall::NoHugePage)), (None, pieces));
}

#[test]
fn a_pool_of_huge_pages_that_breaks_its_promise_is_left_for_ordinary_pages() {
    // A machine that claims a pool: on a machine without one the first mapping of huge pages fails.
    let root = std::env::temp_dir().join(format!("aquifer-huge-{}", std::process::id()));
    let pool = root.join("sys/kernel/mm/hugepages/hugepages-2048kB");
    std::fs::create_dir_all(&pool).unwrap();
    std::fs::write(pool.join("free_hugepages"), "1000\n").unwrap();
    let topology = Topology::read_under(&root).unwrap();
    let faults = std::sync::Arc::new(aquifer_host::kernel::Faults::new());
    let host = Host::new(topology, aquifer_host::kernel::Kernel::with_faults(faults.clone()));
    faults.fail(SystemCall::MapHuge, 1, libc::ENOMEM);
    let region = Region::new(&host, &budget(), &request(4 * MIB));
    std::fs::remove_dir_all(&root).unwrap();
    let region = region.unwrap();
    assert_eq!(faults.made(SystemCall::MapHuge), 1);
    assert!(region.report().pages < PageTier::HugeTlb);
    assert!(fell_short(region.report(), SystemCall::MapHuge, libc::ENOMEM));
    assert_eq!(support::present(region.span()), 1024);
}

#[test]
fn errors_read_the_same_in_debug_so_that_main_may_return_them() {
    let region = Region::new(&support::host(), &budget(), &request(0)).unwrap_err();
    assert_eq!(format!("{region:?}"), region.to_string());
    let topology = Topology::parse_switch("perhaps").unwrap_err();
    assert_eq!(format!("{topology:?}"), topology.to_string());
    let staging = StageError::Memory(MemoryError::TimedOut);
    assert_eq!(format!("{staging:?}"), staging.to_string());
}
