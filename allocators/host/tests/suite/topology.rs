//! Tests of the topology, from fixtures and from the machine that runs the tests.
#![expect(clippy::unwrap_used, reason = "a fixture that cannot be read is a failed test")]

use crate::machine::Machine;
use aquifer_driver::{DeviceId, DeviceInfo};
use aquifer_host::topology::{
    DeviceMemory, Found, NodeId, Provenance, ThpMode, Topology, TopologyError,
};
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
fn the_last_level_cache_is_the_smallest_of_the_cpus_that_are_ours() {
    let parts = read("cpuset-container-v2");
    for node in [Some(NodeId(1)), None] {
        let found = parts.last_level_cache(node).unwrap();
        assert_eq!(found.value, Some(16 << 20));
        let path = "/sys/devices/system/cpu/cpu20/cache/index3/size";
        assert_eq!(found.source, Provenance::File(path.into()));
    }
    // A node without usable CPUs, or one that does not exist.
    assert_eq!(parts.last_level_cache(Some(NodeId(0))).unwrap().value, None);
    assert_eq!(parts.last_level_cache(Some(NodeId(9))).unwrap().value, None);
    // CPU 6 reports 300M and CPU 7 nothing.
    assert_eq!(read("cpuset-container").last_level_cache(None).unwrap().value, None);
    let nonsense = read("long-pci-domain").last_level_cache(None).unwrap_err();
    assert!(matches!(nonsense, TopologyError::Number { text, .. } if text == "huge"));
}

#[test]
fn the_memory_limit_is_the_smallest_up_to_the_root_and_names_its_file() {
    let topology = read("two-socket");
    let found = topology.memory_limit();
    let limit = found.value.unwrap();
    assert_eq!((limit.limit, limit.remaining), (64 << 30, 56 << 30));
    assert_eq!(found.source, Provenance::File("/sys/fs/cgroup/user.slice/memory.max".into()));
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
    assert!(matches!(told.source, Provenance::Driver(_)));
    let by_address = place(None, Some("00000000:9D:00.0"));
    assert_eq!(by_address.value, Some(NodeId(1)));
    assert_eq!(
        by_address.source,
        Provenance::File("/sys/bus/pci/devices/0000:9d:00.0/numa_node".into())
    );
    // −1, a node that is not online, a missing device, an invalid address, and an empty file.
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
    assert_eq!(
        topology.node_of_pci("00010000:3B:00.0".parse().unwrap()).unwrap().value,
        Some(NodeId(1))
    );
    assert_eq!(
        topology.node_of_pci("00000000:3B:00.0".parse().unwrap()).unwrap().value,
        Some(NodeId(0))
    );
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
fn missing_files_are_unknown_and_invalid_ones_are_errors() {
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
    let unknown = Found::unknown(Provenance::Variable("AQUIFER_NUMA"));
    assert_eq!(off.node_of_pci("0000:1b:00.0".parse().unwrap()).unwrap(), unknown);
    assert_eq!(off.node_of_device(&gpu(Some(0), None)).unwrap(), unknown);
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
    assert_eq!(before.allowed_cpus(NodeId(0)).unwrap().value.unwrap().to_string(), "2");
    assert_eq!(before.free_huge_pages(None, 2 << 20).unwrap().value, Some(7));
    let pci = "0000:01:00.0".parse().unwrap();
    assert_eq!(before.node_of_pci(pci).unwrap().value, None, "a node that was not there then");
    let after = machine.read();
    assert_eq!(after.node_of_pci(pci).unwrap().value, Some(NodeId(1)));
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

#[test]
fn nodes_inside_a_socket_are_told_apart_by_distance() {
    let topology = read("nps4");
    assert_eq!(topology.nodes().len(), 8);
    let node = topology.node(NodeId(5)).unwrap();
    assert_eq!(node.cpus.to_string(), "80-95,208-223");
    let far: Vec<_> = node.distances.iter().map(|&(_, far)| far).collect();
    assert_eq!(far, [32, 32, 32, 32, 12, 10, 12, 12]);
    let near = topology.node_of_device(&gpu(None, Some("0000:C1:00.0"))).unwrap();
    assert_eq!(near.value, Some(NodeId(5)));
    assert_eq!(topology.nearest_with_memory(NodeId(5)).unwrap().id, NodeId(5));
    assert_eq!(topology.host_nodes().count(), 8, "a list of initiators that is empty names nobody");
}

#[test]
fn memory_for_a_device_on_a_node_without_memory_goes_to_the_nearest_that_has_some() {
    let topology = read("memoryless-node");
    let bare = topology.node(NodeId(1)).unwrap();
    assert_eq!((bare.memory, bare.memory_allowed, bare.cpus.len()), (Some(0), false, 8));
    assert_eq!(bare.movable_only.value, Some(false));
    let device = gpu(None, Some("0000:61:00.0"));
    assert_eq!(
        topology.node_of_device(&device).unwrap().value,
        Some(NodeId(1)),
        "that is where it is"
    );
    let memory = topology.memory_near_device(&device).unwrap();
    assert_eq!(memory.value, Some(NodeId(0)), "11 is nearer than 12");
    assert_eq!(memory.source, Provenance::File("/sys/devices/system/node/node1/distance".into()));
}

#[test]
fn a_containers_second_version_group_limits_it_and_its_cpuset_keeps_it_from_a_devices_node() {
    let topology = read("cpuset-container-v2");
    let limit = topology.memory_limit().value.unwrap();
    assert_eq!((limit.limit, limit.remaining), (4 << 30, 3 << 30));
    assert_eq!(
        topology.memory_limit().source,
        Provenance::File("/sys/fs/cgroup/memory.max".into())
    );
    let (theirs, ours) = (&topology.nodes()[0], &topology.nodes()[1]);
    assert!(theirs.allowed_cpus.is_empty() && !theirs.memory_allowed);
    assert_eq!((ours.allowed_cpus.to_string().as_str(), ours.memory_allowed), ("18-21", true));
    let device = gpu(None, Some("0000:17:00.0"));
    assert_eq!(topology.node_of_device(&device).unwrap().value, Some(NodeId(0)));
    assert_eq!(topology.memory_near_device(&device).unwrap().value, Some(NodeId(1)));
    assert_eq!(topology.nearest_with_cpus(NodeId(0)).unwrap().id, NodeId(1));
}

#[test]
fn a_group_outside_of_what_is_mounted_limits_nothing_that_can_be_read() {
    let machine = Machine::new("moved-out");
    machine.write("proc/self/cgroup", "0::/../../another\n");
    machine.write("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    machine.write("sys/fs/cgroup/memory.max", "1000\n");
    machine.write("another/memory.max", "2000\n");
    let limit = machine.read().memory_limit().clone();
    assert_eq!(limit, Found::unknown(Provenance::File("/proc/self/cgroup".into())));
}

#[test]
fn memory_of_a_gpu_is_never_taken_for_the_hosts() {
    let topology = read("grace");
    let host: Vec<_> = topology.host_nodes().map(|node| node.id.0).collect();
    assert_eq!(host, [0], "firmware ties the others to the device");
    let theirs = topology.node(NodeId(1)).unwrap();
    assert!(theirs.memory_allowed, "the kernel would hand it out");
    assert_eq!(theirs.movable_only.value, Some(true));
    assert!(
        matches!(&theirs.device_memory.source, Provenance::File(path) if path.ends_with("has_generic_initiator"))
    );
    // The driver's answer, the kernel's, and a firmware that places the device on its own memory.
    let mut device = gpu(Some(0), Some("0009:01:00.0"));
    device.memory_node = Some(1);
    assert_eq!(topology.node_of_device(&device).unwrap().value, Some(NodeId(0)));
    device.host_node = None;
    assert_eq!(topology.node_of_device(&device).unwrap().value, Some(NodeId(0)));
    device.host_node = Some(1);
    let near = topology.node_of_device(&device).unwrap();
    assert_eq!(near.value, Some(NodeId(0)));
    assert_eq!(near.source, Provenance::File("/sys/devices/system/node/node1/distance".into()));
    for asked in [0, 1, 8] {
        assert_eq!(topology.nearest_with_memory(NodeId(asked)).unwrap().id, NodeId(0));
        assert_eq!(topology.nearest_with_cpus(NodeId(asked)).unwrap().id, NodeId(0));
    }
    assert_eq!(topology.memory_of_device(&device).value, Some(DeviceMemory::Node(NodeId(1))));
    device.memory_node = None;
    assert_eq!(topology.memory_of_device(&device).value, None, "there are nodes that it could be");
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
    assert_eq!(
        bare.node(NodeId(252)).unwrap().device_memory.value,
        None,
        "the kernel does not know"
    );
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
    assert_eq!(topology.nearest_with_memory(NodeId(252)).unwrap().id, NodeId(0));
    assert_eq!(topology.node_of_device(&gpus[1]).unwrap().value, Some(NodeId(8)));
    assert!(matches!(
        topology.node(NodeId(255)).unwrap().device_memory.source,
        Provenance::Driver(_)
    ));
}

#[test]
fn a_device_that_shares_the_hosts_memory_does_not_take_its_node_away() {
    let mut device = gpu(None, None);
    (device.integrated, device.memory_node) = (true, Some(0));
    let topology = read("jetson").with_devices([&device]);
    assert_eq!(topology.host_nodes().count(), 1);
    assert_eq!(topology.memory_of_device(&device).value, Some(DeviceMemory::Host));
    assert_eq!(
        topology.node_of_device(&device).unwrap().value,
        None,
        "one node is no reason to guess"
    );
    (device.integrated, device.memory_node) = (false, None);
    assert_eq!(topology.memory_of_device(&device).value, Some(DeviceMemory::Apart));
    assert_eq!(topology.without_nodes().memory_of_device(&device).value, None);
}

#[test]
fn the_wsl_kernel_is_recognised_by_its_name_and_has_no_nodes() {
    let topology = read("wsl");
    assert_eq!(topology.is_wsl(), &Found::known(true, Provenance::File("/proc/version".into())));
    assert!(topology.nodes().is_empty());
    assert_eq!(topology.cpus_allowed().value.as_ref().map(|cpus| cpus.len()), Some(16));
    assert_eq!(topology.node_of_device(&gpu(Some(0), Some("0000:01:00.0"))).unwrap().value, None);
    assert_eq!(topology.limits().locked_memory.value, Some(64 << 10));
    assert_eq!(read("no-numa").is_wsl().value, None);
}

#[cfg(all(target_endian = "little", target_pointer_width = "64"))]
#[test]
fn the_size_of_a_base_page_is_the_one_that_the_machine_told_its_programs() {
    for (machine, page) in [("grace", 64 << 10), ("power9", 64 << 10), ("nps4", 4 << 10)] {
        let found = read(machine).page_size().clone();
        assert_eq!(
            found,
            Found::known(page, Provenance::File("/proc/self/auxv".into())),
            "{machine}"
        );
    }
    assert_eq!(read("grace").thp_size().value, Some(512 << 20));
    assert_eq!(read("two-socket").page_size().source, Provenance::SystemCall("sysconf"));
    let here = Topology::read_under(Path::new("/")).unwrap();
    assert_eq!(
        here.page_size().value,
        read("two-socket").page_size().value,
        "both ways tell the same"
    );
}

#[test]
fn memory_that_pins_would_leave_is_told_where_the_kernel_tells_it() {
    let expander = read("cpuless-node");
    assert_eq!(expander.node(NodeId(2)).unwrap().movable_only.value, Some(true));
    assert_eq!(expander.node(NodeId(0)).unwrap().movable_only.value, Some(false));
    assert_eq!(
        expander.node(NodeId(2)).unwrap().device_memory.value,
        None,
        "not every expander is a GPU"
    );
    assert_eq!(read("two-socket").node(NodeId(0)).unwrap().movable_only.value, None);
}

#[test]
fn the_variable_hides_the_nodes_of_a_real_read_and_a_wrong_one_is_an_error() {
    const CHILD: &str =
        "topology::the_variable_hides_the_nodes_of_a_real_read_and_a_wrong_one_is_an_error";
    const MARK: &str = "AQUIFER_TEST_CHILD";
    if env::var_os(MARK).is_some() {
        match Topology::read() {
            Ok(topology) => {
                println!("read: {} {}", topology.nodes().len(), topology.numa_setting());
            }
            Err(error) => println!("read: {error}"),
        }
        return;
    }
    let real = Topology::read_under(Path::new("/")).unwrap().nodes().len();
    for (value, told) in [
        (Some("off"), "read: 0 false (environment variable AQUIFER_NUMA)".to_owned()),
        (Some("on"), format!("read: {real} true (environment variable AQUIFER_NUMA)")),
        (Some("0"), "read: AQUIFER_NUMA is \"0\"; it can be on or off".to_owned()),
        (None, format!("read: {real} unknown (no source)")),
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
fn distances_are_those_of_their_nodes_where_the_line_also_lists_nodes_that_are_offline() {
    // With the folder of the offline node, without it, and as the kernel writes it.
    let offline_first =
        [(0, "", 0, "10 21 31"), (1, "0-3", 8, "21 10 31"), (2, "4-7", 8, "31 31 10")];
    for (name, nodes) in [("offline-folder", &offline_first[..]), ("offline", &offline_first[1..])]
    {
        let topology = odd(name, "1-2\n", nodes).read();
        assert_eq!(topology.nodes().len(), 2, "{name}");
        let far = |from, to| topology.distance(NodeId(from), NodeId(to));
        assert_eq!((far(1, 1), far(1, 2), far(2, 1)), (Some(10), Some(31), Some(31)), "{name}");
    }
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
fn a_node_that_the_gpu_driver_lists_as_its_memory_is_never_a_host_node() {
    let nodes = [(0, "0-71", 4000, "10 80 80"), (1, "", 900, "80 10 80"), (2, "", 500, "80 80 10")];
    let machine = odd("numa-status", "0-2\n", &nodes);
    let expander = machine.read();
    assert_eq!(expander.host_nodes().count(), 3, "not every memory-only node is a GPU");
    let status = "proc/driver/nvidia/gpus/0009:01:00.0/numa_status";
    machine.write(status, "Node:      1\nStatus:    online\nAddress:   2000000\nSize: 1000\n");
    // A GPU whose memory is no node, and one that names a node with CPUs.
    machine.write("proc/driver/nvidia/gpus/0019:01:00.0/numa_status", "Node:      -1\n");
    machine.write("proc/driver/nvidia/gpus/0029:01:00.0/numa_status", "Node:      0\n");
    let topology = machine.read();
    let host: Vec<u32> = topology.host_nodes().map(|node| node.id.0).collect();
    assert_eq!(host, [0, 2]);
    let theirs = &topology.node(NodeId(1)).unwrap().device_memory;
    assert_eq!(theirs, &Found::known(true, Provenance::File(format!("/{status}").into())));
    assert_eq!(topology.nearest_with_memory(NodeId(1)).unwrap().id, NodeId(0));
    let near = topology.memory_near_device(&gpu(Some(1), None)).unwrap();
    assert_eq!(
        near.value,
        Some(NodeId(0)),
        "a GPU on its own memory has its host memory elsewhere"
    );
    machine.write(status, "Node:      many\n");
    match Topology::read_under(machine.root()) {
        Err(TopologyError::Number { path, .. }) => assert!(path.ends_with("numa_status")),
        other => panic!("{other:?}"),
    }
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
    assert!(matches!(Topology::read_under(machine.root()), Err(TopologyError::List { .. })));
}

#[test]
fn at_equal_distances_the_firmwares_initiators_say_which_cpus_are_near_memory_without_any() {
    let nodes = [(0, "0-3", 8, "10 20 20"), (1, "4-7", 8, "20 10 20"), (2, "", 8, "20 20 10")];
    let machine = odd("initiators", "0-2\n", &nodes);
    let near = |topology: &Topology, of| topology.nearest_with_cpus(NodeId(of)).unwrap().id.0;
    assert_eq!(near(&machine.read(), 2), 0, "the first, where nothing tells");
    machine.write(&format!("{NODES}/node2/access0/initiators/read_latency"), "100\n");
    machine.write(&format!("{NODES}/node2/access0/initiators/node1/cpulist"), "4-7\n");
    let topology = machine.read();
    assert_eq!(near(&topology, 2), 1);
    assert_eq!((near(&topology, 0), near(&topology, 1)), (0, 1), "a node with CPUs has its own");
    // Distances that differ decide first.
    machine.write(&format!("{NODES}/node2/distance"), "20 30 10\n");
    assert_eq!(near(&machine.read(), 2), 0);
}

#[test]
fn nodes_without_cpus_or_memory_are_left_out_of_what_needs_either() {
    let nodes = [(0, "0-3", 0, "10 20 30"), (1, "", 8, "20 10 30"), (2, "4-7", 8, "30 30 10")];
    let topology = odd("partial", "0-2\n", &nodes).read();
    assert_eq!(topology.nearest_with_memory(NodeId(0)).unwrap().id, NodeId(1));
    assert_eq!(topology.nearest_with_cpus(NodeId(1)).unwrap().id, NodeId(0));
    let device = gpu(Some(0), None);
    assert_eq!(topology.memory_near_device(&device).unwrap().value, Some(NodeId(1)));
    assert_eq!(topology.host_memory().unwrap().value, Some(16 << 10));
}
