//! Tests that the reported placement of pages equals the kernel's answer page for page, for every
//! request.
//!
//! Machines with several nodes show that placement works. Machines with one node show that the
//! report claims nothing false.
#![expect(clippy::unwrap_used, reason = "a page that cannot be asked about is a failed test")]

use crate::support::{self, MIB};
use aquifer_core::Budget;
use aquifer_driver::{DeviceId, DeviceInfo};
use aquifer_host::{
    kernel::{Kernel, Span},
    region::{PageTier, Region, RegionRequest},
    topology::{NodeId, Topology},
};
use std::collections::BTreeMap;

/// Returns the number of base pages on each node according to the kernel, and of those without an
/// answer.
fn asked(span: Span, topology: &Topology) -> (BTreeMap<NodeId, u64>, u64) {
    let page = topology.page_size();
    let pages: Vec<usize> = (span.start..span.end()).step_by(page).collect();
    let (mut counts, mut unknown) = (BTreeMap::new(), 0);
    for node in Kernel::new().nodes_of(&pages).unwrap() {
        match u32::try_from(node) {
            Ok(node) => *counts.entry(NodeId(node)).or_default() += 1,
            Err(_) => unknown += 1,
        }
    }
    (counts, unknown)
}

fn request(bytes: usize, node: NodeId, pages: PageTier) -> RegionRequest {
    let mut request = RegionRequest::bytes(bytes).on(node);
    request.pages = pages;
    request
}

#[test]
fn the_report_equals_the_kernels_answer_on_every_node_in_every_mode() {
    let host = support::host();
    let budget = Budget::new("pinned", 64 * MIB as u64);
    for node in host.topology.nodes() {
        for tier in [PageTier::Base, PageTier::Transparent, PageTier::HugeTlb] {
            let region = Region::new(&host, &budget, &request(4 * MIB, node.id, tier)).unwrap();
            let placement = &region.report().placement;
            let (counts, unknown) = asked(region.span(), &host.topology);
            assert_eq!(placement.pages, counts.into_iter().collect::<Vec<_>>(), "{}", node.id);
            assert_eq!((placement.unknown, unknown), (0, 0), "{}", node.id);
            println!(
                "told: {} of {} on {}, in {}",
                placement.on_node(),
                placement.on_node() + placement.elsewhere(),
                node.id,
                region.report().pages
            );
        }
    }
    match host.topology.nodes().len() {
        0 => println!("skipped: a kernel without NUMA"),
        1 => println!("skipped: one NUMA node"),
        _ => {}
    }
}

#[test]
fn a_region_larger_than_its_node_spills_with_a_report_or_is_refused_if_strict() {
    const SMALL: u64 = 128 << 20;
    let host = support::host();
    let of_size = |size: fn(u64) -> bool| {
        host.topology.host_nodes().filter(move |n| n.memory_allowed && n.memory.is_some_and(size))
    };
    let Some(node) = of_size(|bytes| bytes < SMALL).last() else {
        println!("skipped: no node is small enough to be overfilled");
        return;
    };
    let bytes = usize::try_from(node.memory.unwrap()).unwrap().next_multiple_of(MIB) + 16 * MIB;
    let others: u64 =
        host.topology.host_nodes().filter(|n| n.id != node.id).filter_map(|n| n.free).sum();
    if others < 4 * bytes as u64 {
        println!("skipped: the other nodes could not take what spills");
        return;
    }
    let budget = Budget::new("pinned", bytes as u64);
    let region = Region::new(&host, &budget, &request(bytes, node.id, PageTier::Base)).unwrap();
    let placement = &region.report().placement;
    let (counts, _) = asked(region.span(), &host.topology);
    assert!(placement.elsewhere() > 0 && placement.on_node() > 0, "{placement:?}");
    assert!(placement.pages.iter().all(|(node, pages)| counts[node] >= *pages), "{placement:?}");
    println!("spilled: {} pages from {}", placement.elsewhere(), node.id);
    drop(region);
    let mut strict = request(bytes, node.id, PageTier::Base);
    strict.strict = true;
    Region::new(&host, &budget, &strict).unwrap_err();
    assert_eq!(budget.used(), 0);
    assert_eq!(budget.used(), 0);
}

#[test]
fn memory_for_a_node_without_memory_is_found_by_distance() {
    let host = support::host();
    let topology = &host.topology;
    if topology.nodes().iter().all(|node| node.memory != Some(0)) {
        println!("skipped: every node has memory");
    }
    for node in topology.nodes().iter().filter(|node| node.memory == Some(0)) {
        let mut device = DeviceInfo::new(DeviceId(0), "a GPU there".into(), 1 << 30);
        device.host_node = Some(node.id.0);
        let near = topology.memory_near_device(&device).unwrap().unwrap();
        let far = |id| topology.distance(node.id, id).unwrap();
        assert!(topology.host_nodes().filter(|n| n.memory_allowed).all(|n| far(near) <= far(n.id)));
        println!("near: memory for {} is on {near}", node.id);
        // The kernel places pages in the same way on a first touch from there.
        let budget = Budget::new("pinned", 4 * MIB as u64);
        let region = Region::new(&host, &budget, &request(4 * MIB, near, PageTier::Base)).unwrap();
        assert_eq!(region.report().placement.on_node(), 1024);
    }
}
