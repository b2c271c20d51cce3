//! Tests of the available host memory and its scarcity, on synthetic machines.

use crate::machine::Machine;
use aquifer_driver::{DeviceId, DeviceInfo};
use aquifer_host::topology::{Found, TopologyError};
use std::path::PathBuf;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

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
    assert_eq!(headroom, Found::known(50 * GIB + GIB / 2, "/sys/devices/system/node"));
    assert_eq!(machine.read().host_memory().unwrap(), Some(64 * GIB));

    machine.write("proc/meminfo", &format!("MemTotal: 1 kB\nMemAvailable:   {} kB\n", 45 * MIB));
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(headroom, Found::known(45 * GIB, "/proc/meminfo"), "the kernel knows its reserves");
}

#[test]
fn a_group_tighter_than_the_machine_leaves_what_its_limit_does() {
    let machine = machine("tight");
    in_group(&machine, "/job");
    limit(&machine, "/job", &(8 * GIB).to_string(), 3 * GIB, "anon 3221225472\n");
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(headroom, Found::known(5 * GIB, "/sys/fs/cgroup/job/memory.max"));
    assert_eq!(machine.read().host_memory().unwrap(), Some(8 * GIB));
    // The limit that throttles threads counts as much as the one that kills them.
    machine.write("sys/fs/cgroup/job/memory.high", &format!("{}\n", 6 * GIB));
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(headroom, Found::known(3 * GIB, "/sys/fs/cgroup/job/memory.high"));
    // Above its limit, as happens when the limit is lowered.
    limit(&machine, "/job", &GIB.to_string(), 3 * GIB, "");
    assert_eq!(machine.read().headroom().unwrap().value, Some(0));
}

#[test]
fn of_nested_groups_the_one_that_leaves_least_counts_whatever_its_limit() {
    let machine = machine("nested");
    in_group(&machine, "/tenants/job");
    limit(&machine, "/tenants/job", &(8 * GIB).to_string(), 2 * GIB, "");
    limit(&machine, "/tenants", &(32 * GIB).to_string(), 30 * GIB, "");
    limit(&machine, "", "max", 50 * GIB, "");
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(headroom, Found::known(2 * GIB, "/sys/fs/cgroup/tenants/memory.max"));
    limit(&machine, "/tenants", "max", 30 * GIB, "");
    let headroom = machine.read().headroom().unwrap();
    assert_eq!(headroom, Found::known(6 * GIB, "/sys/fs/cgroup/tenants/job/memory.max"));
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
    assert_eq!(headroom.value, Some(5 * GIB + 512 * MIB + 256 * MIB));
    // Counters are read at different moments: if more is reclaimable than used, all of it is.
    limit(&machine, "/job", &(8 * GIB).to_string(), GIB, &stat);
    assert_eq!(machine.read().headroom().unwrap().value, Some(8 * GIB));
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
    let source = "/sys/fs/cgroup/memory/job/memory.limit_in_bytes";
    assert_eq!(headroom, Found::known(2 * GIB + GIB / 2, source));
}

#[test]
fn a_devices_memory_is_not_counted() {
    let machine = machine("apart");
    machine.write("sys/devices/system/node/online", "0-1\n");
    machine.write("sys/devices/system/node/node1/cpulist", "\n");
    let fields = [("MemTotal", 96 * GIB), ("MemFree", 90 * GIB)];
    machine.write("sys/devices/system/node/node1/meminfo", &meminfo(1, &fields));
    let both = machine.read().headroom().unwrap();
    assert_eq!(both.value, Some(140 * GIB + GIB / 2));
    let mut gpu = DeviceInfo::new(DeviceId(0), "gpu".into(), 96 * GIB);
    gpu.memory_node = Some(1);
    let host = machine.read().with_devices([&gpu]);
    let headroom = host.headroom().unwrap();
    assert_eq!(headroom.value, Some(50 * GIB + GIB / 2));
    assert_eq!(host.host_memory().unwrap(), Some(64 * GIB));
    assert_eq!(machine.read().without_nodes().headroom().unwrap().value, None);
}

#[test]
fn an_invalid_value_is_an_error_that_names_the_file() {
    let machine = machine("nonsense");
    in_group(&machine, "/");
    for (path, text, sane) in [
        ("sys/fs/cgroup/memory.high", "plenty", "max"),
        ("proc/meminfo", "MemAvailable: plenty kB", ""),
    ] {
        machine.write(path, text);
        let refused = machine.read().headroom().unwrap_err();
        let named =
            |found: &PathBuf| found.strip_prefix("/").unwrap() == std::path::Path::new(path);
        assert!(
            matches!(&refused, TopologyError::Number { path, .. } if named(path)),
            "{path}: {refused}"
        );
        machine.write(path, sane);
    }
}
