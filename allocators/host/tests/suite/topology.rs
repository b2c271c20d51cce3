//! Tests of the topology, from fixtures and from the machine that runs the tests.
#![expect(clippy::unwrap_used, reason = "a fixture that cannot be read is a failed test")]

use crate::machine::Machine;
use aquifer_driver::{DeviceId, DeviceInfo};
use aquifer_host::topology::{NodeId, ThpMode, Topology, TopologyError};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

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
    for (node, size, free) in
        [(Some(NodeId(1)), 2 << 20, 16), (Some(NodeId(1)), 1 << 30, 4), (None, 2 << 20, 528)]
    {
        assert_eq!(topology.free_huge_pages(node, size).unwrap(), Some(free));
    }
    assert_eq!(topology.distance(NodeId(0), NodeId(1)), Some(21));
    assert_eq!(topology.distance(NodeId(0), NodeId(9)), None);
    assert_eq!(topology.thp(), Some(ThpMode::Madvise));
}

#[test]
fn the_last_level_cache_is_the_smallest_of_the_cpus_that_are_ours() {
    let parts = read("cpuset-container-v2");
    for node in [Some(NodeId(1)), None] {
        assert_eq!(parts.last_level_cache(node), Some(16 << 20));
    }
    // A node without usable CPUs, or one that does not exist.
    assert_eq!(parts.last_level_cache(Some(NodeId(0))), None);
    assert_eq!(parts.last_level_cache(Some(NodeId(9))), None);
    // CPU 7 reports nothing, and another machine no number.
    assert_eq!(read("cpuset-container").last_level_cache(None), None);
    assert_eq!(read("long-pci-domain").last_level_cache(None), None);
}

#[test]
fn a_device_is_placed_by_the_driver_then_by_pci_and_never_by_guess() {
    let topology = read("two-socket");
    let place = |host_node, pci| topology.node_of_device(&gpu(host_node, pci)).unwrap();
    assert_eq!(place(Some(1), Some("0000:1B:00.0")), Some(NodeId(1)));
    assert_eq!(place(None, Some("00000000:9D:00.0")), Some(NodeId(1)));
    // −1, a node that is not online, a missing device, an invalid address, and an empty file.
    for (node, pci) in [
        (None, Some("0000:00:02.0")),
        (None, Some("0000:5e:00.0")),
        (Some(5), Some("0000:77:00.0")),
        (None, Some("gpu0")),
        (None, None),
    ] {
        assert_eq!(place(node, pci), None, "{node:?} {pci:?}");
    }
    let far = read("long-pci-domain");
    for (pci, node) in [("00010000:3B:00.0", 1), ("00000000:3B:00.0", 0)] {
        assert_eq!(far.node_of_device(&gpu(None, Some(pci))).unwrap(), Some(NodeId(node)));
    }
}

#[test]
fn nodes_without_cpus_are_nodes_and_have_a_nearest_with_some() {
    let topology = read("cpuless-node");
    let memory_only = topology.node(NodeId(2)).unwrap();
    assert!(memory_only.cpus.is_empty() && memory_only.memory_allowed);
    assert_eq!(
        topology.nearest_with_cpus(NodeId(2)).unwrap().id,
        NodeId(1),
        "79 is nearer than 80"
    );
    assert_eq!(topology.nearest_with_cpus(NodeId(0)).unwrap().id, NodeId(0));
    assert!(
        topology.nearest_with_cpus(NodeId(3)).is_none(),
        "a node that is not there has no neighbours"
    );
    let empty = read("empty-cpulist");
    assert!(empty.nodes()[0].cpus.is_empty());
    assert!(empty.nearest_with_cpus(NodeId(0)).is_none());
    assert_eq!(empty.thp(), Some(ThpMode::Never));
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
fn missing_files_are_unknown_and_invalid_ones_are_errors() {
    let bare = read("no-numa");
    assert!(bare.nodes().is_empty());
    assert_eq!(bare.cpus_allowed(), None);
    assert_eq!(bare.thp(), None);
    assert_eq!(bare.node_of_device(&gpu(Some(0), None)).unwrap(), None);
    match Topology::read_under(&fixture("senseless")) {
        Err(TopologyError::Number { path, .. }) => {
            assert_eq!(path, Path::new("/sys/devices/system/node/node0/cpulist"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_node_has_the_cpus_of_its_mask_where_there_is_no_list() {
    let machine = Machine::new("masks");
    machine.write("sys/devices/system/node/node0/cpumap", "00000001,0000000f\n");
    machine.write("sys/devices/system/node/node1/cpumap", "f0\n");
    machine.write("sys/devices/system/node/node1/cpulist", "4-6\n");
    let read = machine.read();
    let cpus: Vec<_> = read.nodes().iter().map(|node| node.cpus.to_string()).collect();
    assert_eq!(cpus, ["0-3,32", "4-6"]);
    machine.write("sys/devices/system/node/node0/cpumap", "all\n");
    assert!(matches!(Topology::read_under(machine.root()), Err(TopologyError::Number { .. })));
}

#[test]
fn offline_cpus_are_in_no_node() {
    let machine = Machine::new("offline");
    machine.write("sys/devices/system/node/node0/cpulist", "0-7\n");
    // An old kernel has a file for each CPU, often none for the first.
    machine.write("sys/devices/system/cpu/cpu1/online", "1\n");
    machine.write("sys/devices/system/cpu/cpu3/online", "0\n");
    assert_eq!(machine.read().nodes()[0].cpus.to_string(), "0-2,4-7");
    machine.write("sys/devices/system/cpu/online", "0-3,6\n");
    machine.write("sys/devices/system/cpu/cpu3/online", "1\n");
    assert_eq!(machine.read().nodes()[0].cpus.to_string(), "0-3,6");
    // A container may replace the list, but not the files.
    machine.write("sys/devices/system/cpu/cpu5/online", "1\n");
    assert_eq!(machine.read().nodes()[0].cpus.to_string(), "0-3,5-6");
    machine.write("sys/devices/system/cpu/online", "\n");
    assert_eq!(machine.read().nodes()[0].cpus.to_string(), "0-7");
}

#[test]
fn numa_handling_can_be_switched_off_and_a_wrong_switch_is_reported() {
    let off = read("two-socket").without_nodes();
    assert!(off.nodes().is_empty());
    assert!(off.is_numa_off());
    assert_eq!(off.node_of_device(&gpu(Some(0), Some("0000:1b:00.0"))).unwrap(), None);
    assert_eq!(
        (Topology::parse_switch("off"), Topology::parse_switch("on\n")),
        (Ok(false), Ok(true))
    );
    for wrong in ["", "0", "OFF", "no"] {
        assert!(
            matches!(Topology::parse_switch(wrong), Err(TopologyError::Setting { .. })),
            "{wrong:?}"
        );
    }
}

#[test]
fn two_reads_see_two_machines_since_nothing_is_cached() {
    let machine = Machine::new("changes");
    machine.write("sys/devices/system/node/online", "0\n");
    machine.write("sys/devices/system/node/node0/cpulist", "0-3\n");
    machine.write("sys/devices/system/node/node1/cpulist", "4-7\n");
    machine.write("proc/self/status", "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0\n");
    machine.write("sys/bus/pci/devices/0000:01:00.0/numa_node", "0\n");
    let before = machine.read();
    assert_eq!(
        (before.nodes().len(), before.nodes()[0].allowed_cpus.to_string().as_str()),
        (1, "0-3")
    );
    // A CPU goes offline, a node appears, the cpuset changes, and a device moves to another slot.
    machine.write("sys/devices/system/node/online", "0-1\n");
    machine.write("sys/devices/system/node/node0/cpulist", "0-2\n");
    machine.write("proc/self/status", "Cpus_allowed_list:\t2-5\nMems_allowed_list:\t1\n");
    machine.write("sys/bus/pci/devices/0000:01:00.0/numa_node", "1\n");
    machine.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "7\n");
    // A query of an earlier snapshot about changing values reads them now.
    assert_eq!(before.free_huge_pages(None, 2 << 20).unwrap(), Some(7));
    let device = gpu(None, Some("0000:01:00.0"));
    assert_eq!(before.node_of_device(&device).unwrap(), None, "a node that was not there then");
    let after = machine.read();
    assert_eq!(after.node_of_device(&device).unwrap(), Some(NodeId(1)));
    assert_eq!(after.nodes()[1].allowed_cpus.to_string(), "4-5");
    assert!(!after.nodes()[0].memory_allowed && after.nodes()[1].memory_allowed);
}

#[test]
fn a_pci_device_of_this_machine_is_on_the_node_that_the_kernel_names() {
    let topology = Topology::read_under(Path::new("/")).unwrap();
    let Ok(devices) = fs::read_dir("/sys/bus/pci/devices") else {
        println!("skipped: no PCI bus");
        return;
    };
    for device in devices.flatten() {
        let name = device.file_name().into_string().unwrap();
        let told: i64 = match fs::read_to_string(device.path().join("numa_node")) {
            Ok(text) => text.trim().parse().unwrap(),
            Err(_) => -1,
        };
        let found = topology.node_of_device(&gpu(None, Some(&name))).unwrap();
        assert_eq!(found.map_or(-1, |node| i64::from(node.0)), told, "{name}");
        if let Some(node) = found {
            println!("pci: {name} is on {node}");
        }
    }
}

#[test]
fn the_machine_that_runs_this_has_a_page_size_and_somewhere_to_run() {
    let topology = Topology::read_under(Path::new("/")).unwrap();
    assert!(topology.page_size().is_power_of_two());
    for node in topology.nodes() {
        assert!(node.memory.is_some());
        assert_eq!(topology.distance(node.id, node.id), Some(10));
    }
    if let Some(allowed) = topology.cpus_allowed() {
        assert!(!allowed.is_empty());
    }
}

#[test]
fn nodes_inside_a_socket_are_told_apart_by_distance() {
    let topology = read("nps4");
    assert_eq!(topology.nodes().len(), 8);
    let node = topology.node(NodeId(5)).unwrap();
    assert_eq!(node.cpus.to_string(), "80-95,208-223");
    let far: Vec<_> = node.distances.iter().map(|&(_, far)| far).collect();
    assert_eq!(far, [32, 32, 32, 32, 12, 10, 12, 12]);
    let near = topology.node_of_device(&gpu(None, Some("0000:C1:00.0"))).unwrap();
    assert_eq!(near, Some(NodeId(5)));
    assert_eq!(topology.host_nodes().count(), 8, "a list of initiators that is empty names nobody");
}

#[test]
fn memory_for_a_device_on_a_node_without_memory_goes_to_the_nearest_that_has_some() {
    let topology = read("memoryless-node");
    let bare = topology.node(NodeId(1)).unwrap();
    assert_eq!((bare.memory, bare.memory_allowed, bare.cpus.len()), (Some(0), false, 8));
    let device = gpu(None, Some("0000:61:00.0"));
    let at = topology.node_of_device(&device).unwrap();
    assert_eq!(at, Some(NodeId(1)), "that is where it is");
    let memory = topology.memory_near_device(&device).unwrap();
    assert_eq!(memory, Some(NodeId(0)), "11 is nearer than 12");
}

#[test]
fn a_containers_second_version_group_limits_it_and_its_cpuset_keeps_it_from_a_devices_node() {
    let topology = read("cpuset-container-v2");
    let limit = topology.host_cap().unwrap();
    assert_eq!((limit.value, limit.source.as_str()), (Some(4 << 30), "/sys/fs/cgroup/memory.max"));
    let (theirs, ours) = (&topology.nodes()[0], &topology.nodes()[1]);
    assert!(theirs.allowed_cpus.is_empty() && !theirs.memory_allowed);
    assert_eq!((ours.allowed_cpus.to_string().as_str(), ours.memory_allowed), ("18-21", true));
    let device = gpu(None, Some("0000:17:00.0"));
    assert_eq!(topology.node_of_device(&device).unwrap(), Some(NodeId(0)));
    assert_eq!(topology.memory_near_device(&device).unwrap(), Some(NodeId(1)));
    assert_eq!(topology.nearest_with_cpus(NodeId(0)).unwrap().id, NodeId(1));
}

#[test]
fn a_group_outside_of_what_is_mounted_limits_nothing_that_can_be_read() {
    let machine = Machine::new("moved-out");
    machine.write("proc/self/cgroup", "0::/../../another\n");
    machine.write("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    machine.write("sys/fs/cgroup/memory.max", "1000\n");
    machine.write("another/memory.max", "2000\n");
    assert_eq!(machine.read().host_cap().unwrap().value, None);
}

#[test]
fn memory_of_a_gpu_is_never_taken_for_the_hosts() {
    let topology = read("grace");
    let host: Vec<_> = topology.host_nodes().map(|node| node.id.0).collect();
    assert_eq!(host, [0], "firmware ties the others to the device");
    let theirs = topology.node(NodeId(1)).unwrap();
    assert!(theirs.memory_allowed, "the kernel would hand it out");
    assert!(theirs.device_memory, "firmware says so");
    // The driver's answer, the kernel's, and a firmware that places the device on its own memory.
    let mut device = gpu(Some(0), Some("0009:01:00.0"));
    device.memory_node = Some(1);
    assert_eq!(topology.node_of_device(&device).unwrap(), Some(NodeId(0)));
    device.host_node = None;
    assert_eq!(topology.node_of_device(&device).unwrap(), Some(NodeId(0)));
    device.host_node = Some(1);
    assert_eq!(topology.node_of_device(&device).unwrap(), Some(NodeId(0)));
    assert_eq!(topology.memory_near_device(&device).unwrap(), Some(NodeId(0)));
    for asked in [0, 1, 8] {
        assert_eq!(topology.nearest_with_cpus(NodeId(asked)).unwrap().id, NodeId(0));
    }
}

#[test]
fn nodes_that_only_the_driver_knows_as_a_devices_memory_are_marked_at_its_word() {
    let bare = read("power9");
    assert_eq!(
        bare.nodes().iter().map(|node| node.id.0).collect::<Vec<_>>(),
        [0, 8, 252, 253, 254, 255]
    );
    assert_eq!(
        bare.distance(NodeId(0), NodeId(8)),
        Some(40),
        "sparse nodes keep their places in a line"
    );
    assert_eq!(bare.node(NodeId(8)).unwrap().cpus.len(), 20);
    assert!(
        bare.node(NodeId(8)).unwrap().cpus.contains(84)
            && !bare.node(NodeId(8)).unwrap().cpus.contains(85)
    );
    assert!(!bare.node(NodeId(252)).unwrap().device_memory, "the kernel does not know");
    let known_to_all = bare.memory_by_kernel();
    let gpus: Vec<_> = [(255, "0004:04:00.0"), (252, "0035:03:00.0")]
        .map(|(node, pci)| {
            let mut device = gpu(None, Some(pci));
            device.memory_node = Some(node);
            device
        })
        .into();
    let topology = bare.with_devices(&gpus);
    let host: Vec<_> = topology.host_nodes().map(|node| node.id.0).collect();
    assert_eq!(host, [0, 8, 253, 254]);
    assert_eq!(topology.node_of_device(&gpus[1]).unwrap(), Some(NodeId(8)));
    assert!(topology.node(NodeId(255)).unwrap().device_memory);
    assert_eq!(topology.memory_by_kernel(), known_to_all, "a process with other devices");
}

#[test]
fn a_device_that_shares_the_hosts_memory_does_not_take_its_node_away() {
    let mut device = gpu(None, None);
    (device.integrated, device.memory_node) = (true, Some(0));
    let topology = read("jetson").with_devices([&device]);
    assert_eq!(topology.host_nodes().count(), 1);
    let near = topology.node_of_device(&device).unwrap();
    assert_eq!(near, None, "one node is no reason to guess");
}

#[test]
fn the_variable_hides_the_nodes_of_a_real_read_and_a_wrong_one_is_an_error() {
    const CHILD: &str =
        "topology::the_variable_hides_the_nodes_of_a_real_read_and_a_wrong_one_is_an_error";
    const MARK: &str = "AQUIFER_TEST_CHILD";
    if env::var_os(MARK).is_some() {
        match Topology::read() {
            Ok(topology) => {
                println!("read: {} {}", topology.nodes().len(), topology.is_numa_off());
            }
            Err(error) => println!("read: {error}"),
        }
        return;
    }
    let real = Topology::read_under(Path::new("/")).unwrap().nodes().len();
    for (value, told) in [
        (Some("off"), "read: 0 true".to_owned()),
        (Some("on"), format!("read: {real} false")),
        (Some("0"), "read: AQUIFER_NUMA is \"0\"; it can be on or off".to_owned()),
        (None, format!("read: {real} false")),
    ] {
        let mut child = Command::new(env::current_exe().unwrap());
        child.args([CHILD, "--exact", "--nocapture"]).env(MARK, "1").env_remove("AQUIFER_NUMA");
        child.envs(value.map(|value| ("AQUIFER_NUMA", value)));
        let said = String::from_utf8(child.output().unwrap().stdout).unwrap();
        assert!(said.contains(&told), "{value:?}: {said}");
    }
}

const NODES: &str = "sys/devices/system/node";

/// A machine whose online nodes have these numbers, CPUs, KiB of memory and distances. Nothing is
/// written for what is empty.
fn odd(name: &str, online: &str, nodes: &[(u32, &str, u64, &str)]) -> Machine {
    let machine = Machine::new(name);
    machine.write("proc/self/status", "Cpus_allowed_list:\t0-255\nMems_allowed_list:\t0-255\n");
    if !online.is_empty() {
        machine.write(&format!("{NODES}/online"), online);
    }
    for (id, cpus, memory, distance) in nodes {
        let write = |file: &str, text: &str| {
            machine.write(&format!("{NODES}/node{id}/{file}"), text);
        };
        write("cpulist", cpus);
        write("meminfo", &format!("Node {id} MemTotal: {memory} kB\nNode {id} MemFree: 0 kB\n"));
        write("distance", distance);
    }
    machine
}

#[test]
fn distances_are_those_of_the_online_nodes_or_none() {
    let own = odd("online-only", "1-2\n", &[(1, "0-3", 8, "10 31\n"), (2, "4-7", 8, "31 10\n")]);
    assert_eq!(own.read().distance(NodeId(1), NodeId(2)), Some(31));
    // A line that cannot be assigned gives no distance, rather than one of another node.
    let short =
        odd("short", "0-2\n", &[(0, "0", 8, "10 21"), (1, "1", 8, "21 10"), (2, "2", 8, "")]);
    assert_eq!(short.read().distance(NodeId(1), NodeId(2)), None);
    let wrong = odd("not-local", "1\n", &[(1, "0-3", 8, "21\n")]).read();
    assert_eq!(wrong.distance(NodeId(1), NodeId(1)), None);
}

#[test]
fn node_folders_are_the_nodes_where_an_old_kernel_lists_none_online() {
    let machine = odd("no-online", "", &[(0, "0-3", 8, "10 20"), (10, "4-7", 8, "20 10")]);
    let topology = machine.read();
    assert_eq!(topology.nodes().iter().map(|node| node.id.0).collect::<Vec<_>>(), [0, 10]);
    assert_eq!(topology.distance(NodeId(10), NodeId(0)), Some(20));
    assert_eq!(topology.node(NodeId(10)).unwrap().allowed_cpus.to_string(), "4-7");
}

#[test]
fn lists_may_end_in_a_zero_byte() {
    let machine =
        odd("zero-byte", "0-1\n\0", &[(0, "0-3\n\0", 8, "10 20\n\0"), (1, "\n\0", 8, "20 10\n\0")]);
    let topology = machine.read();
    assert_eq!(topology.nodes()[0].cpus.to_string(), "0-3");
    assert!(topology.nodes()[1].cpus.is_empty());
    assert_eq!(topology.distance(NodeId(1), NodeId(0)), Some(20));
    // Not a zero between numbers.
    machine.write(&format!("{NODES}/online"), "0\0-1\n");
    assert!(matches!(Topology::read_under(machine.root()), Err(TopologyError::Number { .. })));
}

#[test]
fn nodes_without_cpus_or_memory_are_left_out_of_what_needs_either() {
    let nodes = [(0, "0-3", 0, "10 20 30"), (1, "", 8, "20 10 30"), (2, "4-7", 8, "30 30 10")];
    let topology = odd("partial", "0-2\n", &nodes).read();
    assert_eq!(topology.nearest_with_cpus(NodeId(1)).unwrap().id, NodeId(0));
    let device = gpu(Some(0), None);
    assert_eq!(topology.memory_near_device(&device).unwrap(), Some(NodeId(1)));
    assert_eq!(topology.host_memory().unwrap(), Some(16 << 10));
}
