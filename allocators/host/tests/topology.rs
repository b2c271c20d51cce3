//! Topology from fixtures, and from the machine that runs the tests.
#![expect(clippy::unwrap_used, reason = "a fixture that cannot be read is a failed test")]

use aquifer_driver::{DeviceId, DeviceInfo};
use aquifer_host::topology::{Found, NodeId, Source, ThpMode, Topology, TopologyError};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn read(name: &str) -> Topology {
    Topology::read_under(&fixture(name)).unwrap()
}

fn gpu(host_node: Option<u32>, pci: Option<&str>) -> DeviceInfo {
    let mut info = DeviceInfo::new(DeviceId(0), "gpu".into(), 1 << 30);
    info.host_node = host_node;
    info.pci_address = pci.map(Into::into);
    info
}

#[test]
fn nodes_have_their_cpus_memory_huge_pages_and_distances() {
    let topology = read("two-socket");
    assert_eq!(topology.nodes().len(), 2);
    let far = topology.node(NodeId(1)).unwrap();
    assert_eq!(far.cpus.to_string(), "32-63,96-127");
    assert_eq!((far.memory, far.free), (Some(528_482_304 * 1024), Some(512_000_000 * 1024)));
    let pools: Vec<_> = far.huge_pools.iter().map(|p| (p.page_size, p.total, p.free)).collect();
    assert_eq!(pools, [(2 << 20, 512, 16), (1 << 30, 4, 4)]);
    assert_eq!(topology.huge_pools()[0].free, 528);
    assert_eq!(topology.distance(NodeId(0), NodeId(1)), Some(21));
    assert_eq!(topology.distance(NodeId(0), NodeId(9)), None);
    assert_eq!(topology.thp().value, Some(ThpMode::Madvise));
    assert_eq!(topology.thp_size().value, Some(2 << 20));
    assert_eq!(topology.limits().locked_memory.value, Some(8 << 20));
    assert_eq!(topology.limits().mappings.value, Some(65_530));
}

#[test]
fn the_memory_limit_is_the_smallest_up_to_the_root_and_names_its_file() {
    let topology = read("two-socket");
    let found = topology.memory_limit();
    let limit = found.value.unwrap();
    assert_eq!((limit.limit, limit.remaining), (64 << 30, 56 << 30));
    assert_eq!(found.source, Source::File("/sys/fs/cgroup/user.slice/memory.max".into()));
    let container = read("cpuset-container");
    let limit = container.memory_limit().value.unwrap();
    assert_eq!((limit.limit, limit.remaining), (2_147_483_648, 2_000_000_000));
    assert_eq!(read("cpuless-node").memory_limit().value, None);
}

#[test]
fn a_device_is_placed_by_the_driver_then_by_pci_and_never_by_guess() {
    let topology = read("two-socket");
    let place = |host_node, pci| topology.node_of_device(&gpu(host_node, pci)).unwrap();
    let told = place(Some(1), Some("0000:1B:00.0"));
    assert_eq!(told.value, Some(NodeId(1)));
    assert!(matches!(told.source, Source::Driver(_)));
    let by_address = place(None, Some("00000000:9D:00.0"));
    assert_eq!(by_address.value, Some(NodeId(1)));
    assert_eq!(by_address.source, Source::File("/sys/bus/pci/devices/0000:9d:00.0/numa_node".into()));
    // −1, a node that is not online, a device that is not there, an address that is none, nothing at all.
    for (node, pci) in [
        (None, Some("0000:00:02.0")),
        (None, Some("0000:5e:00.0")),
        (Some(5), Some("0000:77:00.0")),
        (None, Some("gpu0")),
        (None, None),
    ] {
        assert_eq!(place(node, pci).value, None, "{node:?} {pci:?}");
    }
}

#[test]
fn an_eight_digit_domain_is_not_taken_for_domain_zero() {
    let topology = read("long-pci-domain");
    assert_eq!(topology.node_of_pci("00010000:3B:00.0".parse().unwrap()).unwrap().value, Some(NodeId(1)));
    assert_eq!(topology.node_of_pci("00000000:3B:00.0".parse().unwrap()).unwrap().value, Some(NodeId(0)));
}

#[test]
fn nodes_without_cpus_are_nodes_and_have_a_nearest_with_some() {
    let topology = read("cpuless-node");
    let memory_only = topology.node(NodeId(2)).unwrap();
    assert!(memory_only.cpus.is_empty() && memory_only.memory_allowed);
    assert_eq!(topology.nearest_with_cpus(NodeId(2)).unwrap().id, NodeId(1), "79 is nearer than 80");
    assert_eq!(topology.nearest_with_cpus(NodeId(0)).unwrap().id, NodeId(0));
    assert!(topology.nearest_with_cpus(NodeId(3)).is_none(), "a node that is not there has no neighbours");
    let empty = read("empty-cpulist");
    assert!(empty.nodes()[0].cpus.is_empty());
    assert!(empty.nearest_with_cpus(NodeId(0)).is_none());
    assert_eq!(empty.thp().value.map(ThpMode::is_offered), Some(false));
}

#[test]
fn more_than_64_nodes_and_1024_cpus_are_told_apart() {
    let topology = read("wide-66");
    assert_eq!(topology.nodes().len(), 66);
    let last = topology.node(NodeId(65)).unwrap();
    assert_eq!(last.cpus.len(), 1280);
    assert_eq!(last.allowed_cpus.to_string(), "1280-1281");
    assert_eq!(topology.node(NodeId(0)).unwrap().allowed_cpus.to_string(), "1279");
    assert_eq!(topology.distance(NodeId(65), NodeId(65)), Some(10));
    assert!(topology.node(NodeId(1)).unwrap().cpus.is_empty());
}

#[test]
fn a_container_sees_only_what_it_may_use() {
    let topology = read("cpuset-container");
    let (theirs, ours) = (&topology.nodes()[0], &topology.nodes()[1]);
    assert!(theirs.allowed_cpus.is_empty() && !theirs.memory_allowed);
    assert_eq!((ours.allowed_cpus.to_string().as_str(), ours.memory_allowed), ("6-7", true));
    assert_eq!(topology.nearest_with_cpus(NodeId(0)).unwrap().id, NodeId(1));
}

#[test]
fn what_is_missing_is_unknown_and_what_makes_no_sense_is_an_error() {
    let bare = read("no-numa");
    assert!(bare.nodes().is_empty() && bare.huge_pools().is_empty());
    assert_eq!(bare.cpus_allowed().value, None);
    assert_eq!(bare.thp().value, None);
    assert_eq!(bare.node_of_device(&gpu(Some(0), None)).unwrap().value, None);
    match Topology::read_under(&fixture("senseless")) {
        Err(TopologyError::List { path, .. }) => {
            assert_eq!(path, Path::new("/sys/devices/system/node/node0/cpulist"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn numa_handling_can_be_switched_off_and_a_wrong_switch_is_reported() {
    let off = read("two-socket").without_nodes();
    assert!(off.nodes().is_empty());
    let unknown = Found::unknown(Source::Variable("AQUIFER_NUMA"));
    assert_eq!(off.node_of_pci("0000:1b:00.0".parse().unwrap()).unwrap(), unknown);
    assert_eq!(off.node_of_device(&gpu(Some(0), None)).unwrap(), unknown);
    assert_eq!((Topology::parse_switch("off"), Topology::parse_switch("on\n")), (Ok(false), Ok(true)));
    for wrong in ["", "0", "OFF", "no"] {
        assert!(matches!(Topology::parse_switch(wrong), Err(TopologyError::Setting { .. })), "{wrong:?}");
    }
}

#[test]
fn two_reads_see_two_machines_since_nothing_is_cached() {
    let root = std::env::temp_dir().join(format!("aquifer-topology-{}", std::process::id()));
    let list = root.join("sys/devices/system/node/node0/cpulist");
    std::fs::create_dir_all(list.parent().unwrap()).unwrap();
    std::fs::write(root.join("sys/devices/system/node/online"), "0\n").unwrap();
    let mut seen = Vec::new();
    for cpus in ["0-3", "0-1"] {
        std::fs::write(&list, cpus).unwrap();
        seen.push(Topology::read_under(&root).unwrap().nodes()[0].cpus.to_string());
    }
    std::fs::remove_dir_all(&root).unwrap();
    assert_eq!(seen, ["0-3", "0-1"]);
}

#[test]
fn a_pci_device_of_this_machine_is_on_the_node_that_the_kernel_names() {
    let topology = Topology::read_under(Path::new("/")).unwrap();
    let Ok(devices) = std::fs::read_dir("/sys/bus/pci/devices") else {
        println!("skipped: no PCI bus");
        return;
    };
    for device in devices.flatten() {
        let name = device.file_name().into_string().unwrap();
        let told: i64 = match std::fs::read_to_string(device.path().join("numa_node")) {
            Ok(text) => text.trim().parse().unwrap(),
            Err(_) => -1,
        };
        let found = topology.node_of_pci(name.parse().unwrap()).unwrap();
        assert_eq!(found.value.map_or(-1, |node| i64::from(node.0)), told, "{name}");
        if let Some(node) = found.value {
            println!("pci: {name} is on {node}");
        }
    }
}

#[test]
fn the_machine_that_runs_this_has_a_page_size_and_somewhere_to_run() {
    let topology = Topology::read_under(Path::new("/")).unwrap();
    assert!(topology.page_size().value.is_some_and(u64::is_power_of_two));
    for node in topology.nodes() {
        assert!(node.memory.is_some());
        assert_eq!(topology.distance(node.id, node.id), Some(10));
    }
    if let Some(allowed) = &topology.cpus_allowed().value {
        assert!(!allowed.is_empty());
    }
}
