//! Findings on host memory: what each node and device gets, and why not more.

use super::{
    facts::{Facts, Finding, Gpu, gigabytes},
    probe::{PROBE_BYTES, Probe},
};
use aquifer_core::Bytes;
use aquifer_host::{
    region::{Cause, PinnedBy},
    topology::{IdSet, Node, NodeId, Topology},
    workers::Workers,
};

/// Reports the results of the probes of each device and node.
pub(super) fn tried(facts: &Facts, probes: &[Probe], findings: &mut Vec<Finding>) {
    for probe in probes {
        self::probe(probe, facts.host.as_ref().ok(), findings);
    }
    // Most shortfalls apply to all targets. Each is reported once, with all targets that have it.
    let mut shortfalls: Vec<(&Cause, Vec<String>)> = Vec::new();
    for probe in probes {
        for shortfall in probe.region.iter().flat_map(|made| &made.report.shortfalls) {
            let who = probe.target.to_string();
            match shortfalls.iter_mut().find(|(known, _)| *known == shortfall) {
                Some((_, all)) => all.push(who),
                None => shortfalls.push((shortfall, vec![who])),
            }
        }
    }
    for (shortfall, who) in shortfalls {
        let who = match who.len() {
            1 => who.concat(),
            all if all == probes.len() => "all host memory".to_owned(),
            _ => who.join(", "),
        };
        findings.extend(self::shortfall(shortfall, &who, facts.gpus.is_ok()));
    }
}

fn probe(probe: &Probe, host: Option<&Topology>, findings: &mut Vec<Finding>) {
    let target = probe.target;
    let made = match &probe.region {
        Ok(made) => made,
        Err(e) => {
            findings.push(Finding::mend(
                format!("{target}: a region of {} cannot be made: {e}", Bytes(PROBE_BYTES as u64)),
                "free memory, or lift the limit that it names",
            ));
            return;
        }
    };
    let report = &made.report;
    let pinned = match report.pinned_by {
        PinnedBy::Registration(_) => "pinned",
        PinnedBy::Driver => "pinned by the driver itself, slowly",
        PinnedBy::Nobody => "pageable",
    };
    let mut says = format!("{target}: {pinned}, in {}", report.pages);
    let placement = &report.placement;
    if let Some(node) = placement.wanted {
        let (there, elsewhere) = (placement.on_node(), placement.elsewhere());
        says += &format!(", {there} of {} pages on {node}", there + elsewhere + placement.unknown);
    }
    says += &format!(", made at {}", gigabytes(made.make));
    if let Some(most) = host.and_then(|host| most(host, target.node())) {
        says += &format!(", up to {} now", Bytes(most));
    }
    match &probe.link {
        Some(Ok(link)) => {
            says += &format!(
                "; copies run at {} up, {} down",
                gigabytes(link.up),
                gigabytes(link.down)
            );
        }
        Some(Err(e)) => findings.push(Finding::mend(
            format!("{target} is pinned but cannot be copied: {e}"),
            "look for NVRM in the kernel's log (dmesg), and free memory on the device",
        )),
        None => {}
    }
    findings.push(Finding::gets(says));
}

/// Returns how many bytes can be allocated on a node now: the minimum of what is free there and
/// what is left of the host for this process.
fn most(host: &Topology, node: Option<NodeId>) -> Option<u64> {
    let left = host.headroom().ok().and_then(|left| left.value);
    let free = node.and_then(|id| host.node(id)).and_then(|node| node.free);
    free.into_iter().chain(left).min()
}

/// Converts a shortfall to a finding. Returns `None` if another finding already reports it.
fn shortfall(shortfall: &Cause, who: &str, has_driver: bool) -> Option<Finding> {
    let told = format!("{who}, {shortfall}");
    match shortfall {
        // A better tier than the one in use is a limit, not a warning.
        Cause::HugePages { .. } | Cause::NotHuge => Some(Finding::limit(told)),
        Cause::NoDriver if !has_driver => Some(Finding::limit(told)),
        // Reported together with the kernel's mode, or with the node.
        Cause::NotOffered | Cause::NumaOff | Cause::NoCpus(_) => None,
        Cause::Touched => Some(Finding::accept(told)),
        Cause::System(error) if error.call == "mbind" => Some(Finding::accept(format!(
            "{told}: this sandbox forbids memory policies, so threads on the node touch the pages first"
        ))),
        Cause::Driver(error) if error.call == "cuMemHostRegister" => Some(Finding::mend(
            told,
            "free locked or registered memory, or see the kernel's log (dmesg) for NVRM",
        )),
        _ => Some(Finding::accept(told)),
    }
}

/// Reports why nodes give less than they could. Nodes with the same finding are named together.
pub(super) fn nodes(host: &Topology, findings: &mut Vec<Finding>) {
    if host.is_numa_off() {
        findings.push(Finding::mend(
            "NUMA handling is off (AQUIFER_NUMA): nothing is placed",
            "unset it, unless that is what you want",
        ));
    }
    let of = |so: fn(&Node) -> bool| {
        let ids: IdSet =
            host.nodes().iter().filter(|node| so(node)).map(|node| node.id.0).collect();
        (!ids.is_empty()).then_some(ids)
    };
    if let Some(ids) = of(is_device) {
        findings.push(Finding::limit(format!(
            "{}: a device's memory; host memory lies there only where it is asked for by name",
            named(&ids)
        )));
    }
    if let Some(ids) = of(|node| !is_device(node) && node.memory == Some(0)) {
        findings.push(Finding::limit(format!(
            "{}: no memory; what is wanted there lies on the nearest node that has some",
            named(&ids)
        )));
    }
    let memory_only =
        |node: &Node| !is_device(node) && node.memory != Some(0) && node.cpus.is_empty();
    if let Some(ids) = of(memory_only) {
        findings.push(Finding::limit(format!(
            "{}: no CPUs; threads on the nearest node that has some touch its memory first",
            named(&ids)
        )));
    }
    let few = |node: &Node| (1..Workers::PER_NODE.get()).contains(&node.allowed_cpus.len());
    if let Some(ids) = of(few) {
        findings.push(Finding::limit(format!(
            "{}: this process may run on fewer CPUs there than the {} threads that make memory ready soonest",
            named(&ids),
            Workers::PER_NODE
        )));
    }
    if let Some(ids) = of(|node| !node.cpus.is_empty() && node.allowed_cpus.is_empty()) {
        findings.push(Finding::mend(
            format!(
                "this process may not run on {}: memory there is touched first from elsewhere",
                named(&ids)
            ),
            "widen the cpuset (cpuset.cpus) by CPUs of it, or leave it alone",
        ));
    }
    let refused = |node: &Node| {
        !is_device(node) && !node.memory_allowed && node.memory.is_some_and(|all| all > 0)
    };
    if let Some(ids) = of(refused) {
        findings.push(Finding::mend(
            format!("this process may not take memory from {}", named(&ids)),
            format!("widen the cpuset's memory nodes (cpuset.mems) by {ids}"),
        ));
    }
}

fn is_device(node: &Node) -> bool {
    node.device_memory
}

fn named(ids: &IdSet) -> String {
    if ids.len() == 1 { format!("node {ids}") } else { format!("nodes {ids}") }
}

/// Reports why host memory for a device is not next to it.
pub(super) fn devices(facts: &Facts, findings: &mut Vec<Finding>) {
    for Gpu { info, node, memory_node, .. } in facts.gpus.iter().flatten() {
        let device = info.device;
        let at = |near| format!("{device} is at {near}, which has no memory for this process");
        match (*node, *memory_node) {
            (Some(near), Some(lies)) if near != lies => findings.push(Finding::limit(format!(
                "{}: host memory for it lies on {lies}, the nearest that has",
                at(near)
            ))),
            (Some(near), None) => findings.push(Finding::limit(format!(
                "{}, and nobody tells which node is the nearest that has",
                at(near)
            ))),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{
        facts::Kind,
        probe::{Link, ProbeResult, Target},
    };
    use aquifer_core::{Budget, SystemError};
    use aquifer_driver::{DeviceId, DeviceInfo, DriverError};
    use aquifer_host::{
        kernel::Kernel,
        region::{Host, Region, RegionRequest},
    };
    use std::path::Path;

    /// Reads a machine from the fixtures of the host crate.
    fn machine(name: &str) -> Topology {
        let fixtures =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../allocators/host/tests/fixtures");
        Topology::read_under(&fixtures.join(name)).unwrap()
    }

    fn said(kind: Kind, findings: &[Finding]) -> Vec<&str> {
        findings.iter().filter(|f| f.kind == kind).map(|f| f.says.as_str()).collect()
    }

    fn of(machine: &Topology) -> Vec<Finding> {
        let mut all = Vec::new();
        nodes(machine, &mut all);
        all
    }

    #[test]
    fn each_node_that_gives_less_is_named_with_the_reason() {
        for (name, word) in [
            ("grace", "nodes 1-8: a device's memory"),
            ("memoryless-node", "node 1: no memory"),
            ("cpuless-node", "node 2: no CPUs"),
            ("cpuset-container-v2", "node 1: this process may run on fewer CPUs"),
        ] {
            let all = of(&machine(name));
            assert!(
                said(Kind::Limit, &all).iter().any(|says| says.starts_with(word)),
                "{name}: {all:?}"
            );
        }
        let all = of(&machine("cpuset-container-v2"));
        let warnings = said(Kind::Warning, &all);
        assert!(
            warnings.iter().any(|says| says.starts_with("this process may not run on node 0")),
            "{all:?}"
        );
        assert!(warnings.iter().any(|says| says.ends_with("take memory from node 0")), "{all:?}");
        assert_eq!(of(&machine("nps4")), [], "nothing is amiss");
        let off = of(&machine("nps4").without_nodes());
        assert!(said(Kind::Warning, &off).concat().contains("NUMA handling is off"));
    }

    #[test]
    fn a_device_whose_node_has_no_memory_is_told_where_its_host_memory_lies() {
        for (name, pci, told) in [
            (
                "memoryless-node",
                "0000:61:00.0",
                "device 0 is at node 1, which has no memory for this process: host",
            ),
            (
                "cpuset-container-v2",
                "0000:17:00.0",
                "memory for it lies on node 1, the nearest that has",
            ),
        ] {
            let host = machine(name);
            let mut info = DeviceInfo::new(DeviceId(0), "gpu".into(), 1 << 30);
            info.pci_address = Some(pci.into());
            let gpu = Gpu {
                memory: None,
                node: host.node_of_device(&info).unwrap(),
                memory_node: host.memory_near_device(&info).unwrap(),
                cap: None,
                transports: Vec::new(),
                info,
            };
            let mut all = Vec::new();
            devices(&Facts { gpus: Ok(vec![gpu]), version: None, host: Ok(host) }, &mut all);
            assert!(
                said(Kind::Limit, &all).iter().any(|says| says.contains(told)),
                "{name}: {all:?}"
            );
        }
    }

    fn made(shortfalls: Vec<Cause>) -> ProbeResult {
        let host = Host::new(Topology::read().unwrap(), Kernel::new());
        let region =
            Region::new(&host, &Budget::new("a test", 1 << 20), &RegionRequest::bytes(4096))
                .unwrap();
        let mut report = region.report().clone();
        report.shortfalls = shortfalls;
        ProbeResult { report, make: 1e9, fill: 1e9 }
    }

    /// Returns the findings for regions of this machine with other shortfalls, and a link.
    fn probed(
        shortfalls: &[Cause],
        targets: &[Target],
        link: Option<Result<Link, DriverError>>,
    ) -> Vec<Finding> {
        let probe = |&target| Probe { target, region: Ok(made(shortfalls.to_vec())), link };
        let probes: Vec<_> = targets.iter().map(probe).collect();
        let mut all = Vec::new();
        let facts = Facts { gpus: Ok(Vec::new()), version: None, host: Topology::read() };
        tried(&facts, &probes, &mut all);
        all
    }

    #[test]
    fn a_shortfall_warns_only_where_something_is_amiss() {
        let refused = SystemError { call: "mbind", errno: 1 };
        let driver =
            DriverError { call: "cuMemHostRegister", code: 2, name: "CUDA_ERROR_OUT_OF_MEMORY" };
        let table = [
            (Cause::HugePages { needed: 32, free: Some(0) }, Some(Kind::Limit)),
            (Cause::NotOffered, None),
            (Cause::System(refused), Some(Kind::Warning)),
            (Cause::Driver(driver), Some(Kind::Warning)),
        ];
        for (cause, expected) in table {
            let told = probed(std::slice::from_ref(&cause), &[Target::Anywhere], None);
            let kinds: Vec<_> =
                told.iter().map(|f| f.kind).filter(|kind| *kind != Kind::Gets).collect();
            assert_eq!(kinds, expected.into_iter().collect::<Vec<_>>(), "{cause:?}");
        }
        let told = probed(&[], &[Target::Anywhere], Some(Err(driver)));
        assert!(
            told.iter().any(|f| f.kind == Kind::Warning && f.says.contains("cuMemHostRegister"))
        );
    }

    #[test]
    fn each_device_and_node_is_told_what_it_gets_and_a_common_reason_once() {
        let node = Target::Node(NodeId(1));
        let targets =
            [Target::Device(DeviceId(0), Some(NodeId(0))), Target::Device(DeviceId(1), None), node];
        let why = Cause::HugePages { needed: 32, free: Some(0) };
        let all = probed(std::slice::from_ref(&why), &targets, None);
        let gets = said(Kind::Gets, &all);
        for (says, who) in
            gets.iter().zip(["memory for device 0:", "memory for device 1:", "memory on node 1:"])
        {
            assert!(says.starts_with(&format!("host {who} pageable")), "{says}");
        }
        assert_eq!(gets.len(), 3);
        assert_eq!(said(Kind::Limit, &all), [format!("all host memory, {why}")]);
    }
}
