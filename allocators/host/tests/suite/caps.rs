//! Tests of the caps that administrators set, on synthetic machines.

use crate::machine::Machine;
use aquifer_driver::{DeviceId, DeviceInfo};
use aquifer_host::topology::{Found, TopologyError};

const GIB: u64 = 1 << 30;
const MPS: &str = "environment variable CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";

fn gpu(ordinal: u32, address: &str) -> DeviceInfo {
    let mut info = DeviceInfo::new(DeviceId(ordinal), "a GPU".into(), 140 * GIB);
    info.pci_address = Some(address.to_owned());
    info
}

fn in_group(name: &str) -> Machine {
    let machine = Machine::new(name);
    machine.write("proc/self/cgroup", "0::/tenants/job\n");
    machine.write("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    machine
}

#[test]
fn the_least_cap_of_all_groups_counts_for_the_regions_of_the_device() {
    let machine = in_group("dmem");
    let job = "drm/0000:03:00.0/vram0 max\ndrm/0000:04:00.0/vram0 1073741824\n";
    machine.write("sys/fs/cgroup/tenants/job/dmem.max", job);
    let tenants = format!("drm/0000:03:00.0/vram0 {}\ndrm/0000:03:00.0/stolen {}\n", 9 * GIB, GIB);
    machine.write("sys/fs/cgroup/tenants/dmem.max", &tenants);
    let host = machine.read();
    let source = || "/sys/fs/cgroup/tenants/dmem.max";
    let cap = |ordinal, address| host.device_cap(&gpu(ordinal, address));
    assert_eq!(cap(0, "00000000:03:00.0"), Ok(Found::known(GIB, source())), "all its regions");
    let own = Found::known(GIB, "/sys/fs/cgroup/tenants/job/dmem.max");
    assert_eq!(cap(1, "0000:04:00.0"), Ok(own));
    assert_eq!(cap(2, "0000:05:00.0"), Ok(Found::unknown("no source")));
    assert_eq!(cap(3, "no address"), Ok(Found::unknown("no source")));
    machine.write("sys/fs/cgroup/tenants/dmem.max", "drm/0000:03:00.0/vram0 some\n");
    let refused = machine.read().device_cap(&gpu(0, "0000:03:00.0"));
    assert!(matches!(refused, Err(TopologyError::Number { .. })), "{refused:?}");
}

#[test]
fn a_limit_for_mps_clients_counts_beside_that_of_the_groups() {
    let machine = in_group("mps");
    machine
        .write("sys/fs/cgroup/tenants/dmem.max", &format!("drm/0000:03:00.0/vram {}\n", 2 * GIB));
    let capped = |text: &str, ordinal| {
        machine.read().with_mps_limit(text).device_cap(&gpu(ordinal, "0000:03:00.0"))
    };
    let group = || Found::known(2 * GIB, "/sys/fs/cgroup/tenants/dmem.max");
    assert_eq!(capped("0=1G,1=512MB", 0), Ok(Found::known(GIB, MPS)));
    assert_eq!(capped("0=1G, 1=512mb", 1), Ok(Found::known(GIB / 2, MPS)));
    assert_eq!(capped("1=1048576", 1), Ok(Found::known(1 << 20, MPS)));
    for other in ["0=3G", "", "7=1"] {
        assert_eq!(capped(other, 0), Ok(group()), "{other}");
    }
    for wrong in ["1G", "0=", "0=G", "x=1G", "0=1X", "0=1GG", "0=-1", "0=99999999999999T"] {
        let refused = capped(wrong, 0);
        assert!(matches!(refused, Err(TopologyError::Setting { .. })), "{wrong}: {refused:?}");
    }
}

#[test]
fn host_memory_is_capped_by_the_least_limit_of_all_groups() {
    let machine = in_group("host-cap");
    assert_eq!(machine.read().host_cap(), Ok(Found::unknown("/proc/self/cgroup")));
    machine.write("sys/fs/cgroup/tenants/job/memory.max", "max\n");
    machine.write("sys/fs/cgroup/tenants/memory.max", &format!("{}\n", 8 * GIB));
    let source = "/sys/fs/cgroup/tenants/memory.max";
    assert_eq!(machine.read().host_cap(), Ok(Found::known(8 * GIB, source)));
    machine.write("sys/fs/cgroup/tenants/job/memory.high", &format!("{}\n", 6 * GIB));
    let source = || "/sys/fs/cgroup/tenants/job/memory.high";
    assert_eq!(machine.read().host_cap(), Ok(Found::known(6 * GIB, source())));
    assert_eq!(machine.read().pinned_cap(), Ok(Found::known(3 * GIB, source())));
}

#[test]
fn the_address_of_a_gpu_is_found_by_its_uuid_where_the_kernel_driver_lists_it() {
    let machine = in_group("gpus");
    let uuid = |last: u8| format!("00010203-0405-0607-0809-0a0b0c0d0e{last:02x}");
    assert_eq!(machine.read().gpu_address(&uuid(1)), Ok(None), "no such driver");
    let information = |last: u8| {
        format!(
            "Model: \t\t NVIDIA H100\nIRQ:   \t\t 12\n\
             GPU UUID: \t GPU-00010203-0405-0607-0809-0A0B0C0D0E{last:02x}\nBus Type: \t PCIe\n"
        )
    };
    for (address, last) in [("0000:1b:00.0", 1), ("0001:3b:00.0", 2)] {
        machine
            .write(&format!("proc/driver/nvidia/gpus/{address}/information"), &information(last));
    }
    machine.write("proc/driver/nvidia/gpus/0002:00:00.0/information", "GPU UUID: \t GPU-??\n");
    let host = machine.read();
    let address = |text: &str| Ok(Some(text.to_owned()));
    assert_eq!(host.gpu_address(&uuid(1)), address("0000:1b:00.0"));
    assert_eq!(host.gpu_address(&uuid(2)), address("0001:3b:00.0"));
    assert_eq!(host.gpu_address(&uuid(3)), Ok(None));
}
