//! Tests of the available host memory and its scarcity, on synthetic machines.

use crate::machine::Machine;
use aquifer_driver::{DeviceId, DeviceInfo};
use aquifer_host::topology::{Found, Provenance, TopologyError};
use std::{path::PathBuf, time::Duration};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn file(path: &str) -> Provenance {
    Provenance::File(path.into())
}

/// Returns lines like `Node 0 MemFree: 4096 kB`.
fn meminfo(node: u32, fields: &[(&str, u64)]) -> String {
    fields
        .iter()
        .map(|(name, bytes)| format!("Node {node} {name}: {} kB\n", bytes / 1024))
        .collect()
}

/// Returns a machine with one node of 64 GiB: 40 are free, 8 hold files that were read once, and 4
/// hold files in use.
fn machine(name: &str) -> Machine {
    let machine = Machine::new(name);
    machine.write("sys/devices/system/node/online", "0\n");
    machine.write("sys/devices/system/node/node0/cpulist", "0-7\n");
    let fields = [
        ("MemTotal", 64 * GIB),
        ("MemFree", 40 * GIB),
        ("Active(file)", 4 * GIB),
        ("Inactive(file)", 8 * GIB),
        ("SReclaimable", GIB),
    ];
    machine.write("sys/devices/system/node/node0/meminfo", &meminfo(0, &fields));
    machine
}

/// Places the process in this group of version 2.
fn in_group(machine: &Machine, group: &str) {
    machine.write("proc/self/cgroup", &format!("0::{group}\n"));
    machine.write("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
}

fn limit(machine: &Machine, group: &str, max: &str, current: u64, stat: &str) {
    let folder = format!("sys/fs/cgroup{group}");
    machine.write(&format!("{folder}/memory.max"), &format!("{max}\n"));
    machine.write(&format!("{folder}/memory.current"), &format!("{current}\n"));
    machine.write(&format!("{folder}/memory.stat"), stat);
}

#[test]
fn without_a_group_the_nodes_count_with_reclaimable_page_cache() {
    let machine = machine("no-group");
    let headroom = machine.read().headroom().unwrap();
    // 40 free, 8 read once, half of 4 in use, and half of 1 of the kernel's own.
    let nodes = Found::known(50 * GIB + GIB / 2, file("/sys/devices/system/node"));
    assert_eq!((headroom.bytes, headroom.nodes), (nodes.clone(), nodes));
    assert_eq!(headroom.group, Found::unknown(file("/proc/self/cgroup")));
    assert_eq!(headroom.machine, Found::unknown(file("/proc/meminfo")));
    assert_eq!(
        machine.read().host_memory().unwrap(),
        Found::known(64 * GIB, file("/sys/devices/system/node"))
    );

    machine.write("proc/meminfo", &format!("MemTotal: 1 kB\nMemAvailable:   {} kB\n", 45 * MIB));
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(
        headroom.bytes,
        Found::known(45 * GIB, file("/proc/meminfo")),
        "the kernel knows its reserves"
    );
}

#[test]
fn a_group_tighter_than_the_machine_leaves_what_its_limit_does() {
    let machine = machine("tight");
    in_group(&machine, "/job");
    limit(&machine, "/job", &(8 * GIB).to_string(), 3 * GIB, "anon 3221225472\n");
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(headroom.bytes, Found::known(5 * GIB, file("/sys/fs/cgroup/job/memory.max")));
    assert_eq!(headroom.nodes.value, Some(50 * GIB + GIB / 2));
    assert_eq!(machine.read().host_memory().unwrap().value, Some(8 * GIB));
    // The limit that throttles threads counts as much as the one that kills them.
    machine.write("sys/fs/cgroup/job/memory.high", &format!("{}\n", 6 * GIB));
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(headroom.bytes, Found::known(3 * GIB, file("/sys/fs/cgroup/job/memory.high")));
    // Above its limit, as happens when the limit is lowered.
    limit(&machine, "/job", &GIB.to_string(), 3 * GIB, "");
    assert_eq!(machine.read().headroom().unwrap().bytes.value, Some(0));
}

#[test]
fn of_nested_groups_the_one_that_leaves_least_counts_whatever_its_limit() {
    let machine = machine("nested");
    in_group(&machine, "/tenants/job");
    limit(&machine, "/tenants/job", &(8 * GIB).to_string(), 2 * GIB, "");
    limit(&machine, "/tenants", &(32 * GIB).to_string(), 30 * GIB, "");
    limit(&machine, "", "max", 50 * GIB, "");
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(headroom.bytes, Found::known(2 * GIB, file("/sys/fs/cgroup/tenants/memory.max")));
    limit(&machine, "/tenants", "max", 30 * GIB, "");
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(
        headroom.bytes,
        Found::known(6 * GIB, file("/sys/fs/cgroup/tenants/job/memory.max"))
    );
}

#[test]
fn a_group_that_is_full_of_page_cache_has_room() {
    let machine = machine("page-cache");
    in_group(&machine, "/job");
    let stat = format!(
        "anon {}\nfile {}\nshmem 0\ninactive_file {}\nactive_file {}\nslab_reclaimable {}\n",
        GIB,
        6 * GIB,
        5 * GIB,
        GIB,
        512 * MIB
    );
    limit(&machine, "/job", &(8 * GIB).to_string(), 8 * GIB, &stat);
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(headroom.bytes.value, Some(5 * GIB + 512 * MIB + 256 * MIB));
    // Counters are read at different moments: if more is reclaimable than used, all of it is.
    limit(&machine, "/job", &(8 * GIB).to_string(), GIB, &stat);
    assert_eq!(machine.read().headroom().unwrap().bytes.value, Some(8 * GIB));
}

#[test]
fn a_group_of_version_1_counts_like_any_other_and_its_number_for_no_limit_is_none() {
    let machine = machine("version-1");
    machine.write("proc/self/cgroup", "4:memory:/job\n0::/\n");
    machine.write(
        "proc/self/mountinfo",
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    );
    let folder = "sys/fs/cgroup/memory";
    machine.write(&format!("{folder}/memory.limit_in_bytes"), "9223372036854771712\n");
    machine.write(&format!("{folder}/memory.usage_in_bytes"), "4096\n");
    machine.write(&format!("{folder}/job/memory.limit_in_bytes"), &format!("{}\n", 4 * GIB));
    machine.write(&format!("{folder}/job/memory.usage_in_bytes"), &format!("{}\n", 3 * GIB));
    let stat = format!("inactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n");
    machine.write(&format!("{folder}/job/memory.stat"), &stat);
    let headroom = machine.read().headroom().unwrap();
    let source = file("/sys/fs/cgroup/memory/job/memory.limit_in_bytes");
    assert_eq!(headroom.bytes, Found::known(2 * GIB + GIB / 2, source));
    let strain = machine.read().strain().unwrap();
    assert_eq!(strain.events, Found::unknown(file("/proc/self/cgroup")), "it keeps no such counts");
    assert_eq!(strain.stalls, Found::unknown(file("/proc/pressure/memory")));
}

#[test]
fn huge_pages_are_counted_apart_and_a_devices_memory_not_at_all() {
    let machine = machine("apart");
    machine.write("sys/devices/system/node/online", "0-1\n");
    machine.write("sys/devices/system/node/node1/cpulist", "\n");
    let fields = [("MemTotal", 96 * GIB), ("MemFree", 90 * GIB)];
    machine.write("sys/devices/system/node/node1/meminfo", &meminfo(1, &fields));
    for (node, pages) in [(0, 512), (1, 1024)] {
        let pool = format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB");
        machine.write(&format!("{pool}/nr_hugepages"), "2000\n");
        machine.write(&format!("{pool}/free_hugepages"), &format!("{pages}\n"));
    }
    let both = machine.read().headroom().unwrap();
    assert_eq!((both.nodes.value, both.huge_pages), (Some(140 * GIB + GIB / 2), 3 * GIB));
    let mut gpu = DeviceInfo::new(DeviceId(0), "gpu".into(), 96 * GIB);
    gpu.memory_node = Some(1);
    let host = machine.read().with_devices([&gpu]);
    let headroom = host.headroom().unwrap();
    assert_eq!((headroom.nodes.value, headroom.huge_pages), (Some(50 * GIB + GIB / 2), GIB));
    assert_eq!(host.host_memory().unwrap().value, Some(64 * GIB));
    // Without nodes, the pools of the machine count.
    machine.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "1\n");
    let without = machine.read().without_nodes().headroom().unwrap();
    assert_eq!((without.bytes.value, without.huge_pages), (None, 2 * MIB));
}

#[test]
fn stalls_and_events_are_told_by_the_group_and_those_above_and_read_anew() {
    let machine = machine("strain");
    in_group(&machine, "/tenants/job");
    let host = machine.read();
    let events = |max: u64, kills: u64| {
        format!("low 0\nhigh 7\nmax {max}\noom 1\noom_kill {kills}\noom_group_kill 9\n")
    };
    machine.write("sys/fs/cgroup/tenants/job/memory.events", &events(2, 0));
    machine.write("sys/fs/cgroup/tenants/memory.events", &events(40, 3));
    machine
        .write("proc/pressure/memory", "some avg10=1.77 avg60=0.37 avg300=0.08 total=18128159\n");
    let strain = host.strain().unwrap();
    let told = strain.events.value.unwrap();
    assert_eq!((told.high, told.max, told.oom, told.oom_kill), (14, 42, 2, 3));
    assert_eq!(strain.events.source, file("/sys/fs/cgroup/tenants/job/memory.events"));
    let stalls = strain.stalls.value.unwrap();
    assert_eq!((stalls.some, stalls.full), (177, 0));
    assert_eq!(stalls.some_total, Duration::from_micros(18_128_159));
    assert_eq!(strain.stalls.source, file("/proc/pressure/memory"));

    let own = "some avg10=12.05 avg60=0.00 avg300=0.00 total=5\nfull avg10=3.00 avg60=0.00 avg300=0.00 total=4\n";
    machine.write("sys/fs/cgroup/tenants/job/memory.pressure", own);
    let strain = host.strain().unwrap();
    let stalls = strain.stalls.value.unwrap();
    assert_eq!((stalls.some, stalls.full), (1205, 300));
    assert_eq!(strain.stalls.source, file("/sys/fs/cgroup/tenants/job/memory.pressure"));
}

#[test]
fn an_invalid_value_is_an_error_that_names_the_file() {
    let machine = machine("nonsense");
    in_group(&machine, "/");
    for (path, text, sane) in [
        ("sys/fs/cgroup/memory.high", "plenty", "max"),
        ("sys/fs/cgroup/memory.events", "max plenty", "max 1"),
        ("proc/pressure/memory", "some avg10=plenty avg60=0.37 avg300=0.08 total=18128159", ""),
        ("proc/meminfo", "MemAvailable: plenty kB", ""),
    ] {
        machine.write(path, text);
        let refused = machine.read().strain().unwrap_err();
        let named =
            |found: &PathBuf| found.strip_prefix("/").unwrap() == std::path::Path::new(path);
        assert!(
            matches!(&refused, TopologyError::Number { path, .. } if named(path)),
            "{path}: {refused}"
        );
        machine.write(path, sane);
    }
}
