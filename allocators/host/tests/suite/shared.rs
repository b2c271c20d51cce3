//! Tests of regions that several processes map and register.
#![expect(unsafe_code, reason = "looks into memory that others have too")]

use crate::support::{self, MIB};
use aquifer_core::Budget;
use aquifer_driver::{DeviceId, HostFlags, sim::Sim};
use aquifer_host::{
    kernel::SystemCall,
    region::{
        Cause, Host, InPlace, PageTier, PinnedBy, Pinning, PlacedBy, RegionRequest, SharedRegion,
        Step, window,
    },
};
use nix::libc;
use std::{
    env,
    fs::File,
    io::stdin,
    os::fd::AsFd,
    process::{Command, Stdio},
};

const GPU: DeviceId = DeviceId(0);
const CHILD: &str = "AQUIFER_SHARED_CHILD";

fn machine() -> (Sim, Host, Budget) {
    let sim = Sim::h200(1);
    let host = support::host().with_driver(sim.driver(), GPU);
    (sim, host, Budget::new("pinned", 64 * MIB as u64))
}

fn request(bytes: usize) -> RegionRequest {
    let mut request = RegionRequest::bytes(bytes);
    request.registration = 2 * MIB;
    request
}

#[test]
fn a_region_is_shared_with_another_process_that_registers_it_too() {
    let (sim, host, budget) = machine();
    let mut ours = SharedRegion::new(&host, &budget, &request(5 * MIB)).unwrap();
    assert_eq!(ours.report().pinned_by, PinnedBy::Registration(3));
    assert_eq!((budget.used(), sim.outstanding().registrations), (5 * MIB as u64, 3));
    assert!(window::contains(ours.start().addr().get()));
    // SAFETY: 1. the child has not begun.
    unsafe { ours.bytes_mut() }.fill(0x5a);
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "shared::the_other_process", "--nocapture"])
        .env(CHILD, "1")
        .stdin(Stdio::from(ours.as_fd().try_clone_to_owned().unwrap()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned();
    assert!(child.status.success() && said.contains("registered 3"), "{said}{child:?}");
    // SAFETY: 1. the child has ended.
    let bytes = unsafe { ours.bytes() };
    assert!(
        bytes[..MIB].iter().all(|&byte| byte == 0xa5)
            && bytes[MIB..].iter().all(|&byte| byte == 0x5a)
    );
    ours.close().unwrap();
    assert!(sim.outstanding().is_empty() && budget.used() == 0);
}

/// The part of the test above that runs in another process. Run directly, it does nothing.
#[test]
fn the_other_process() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    let (sim, host, budget) = machine();
    let file = stdin().as_fd().try_clone_to_owned().unwrap();
    // The size in the request is ignored in favour of the file's size.
    let mut theirs = SharedRegion::open(&host, &budget, file, &request(1)).unwrap();
    assert_eq!((theirs.span().len, budget.used()), (5 * MIB, 5 * MIB as u64));
    assert_eq!(theirs.report().placement.by, PlacedBy::Nobody, "their maker placed the pages");
    println!("registered {}", sim.outstanding().registrations);
    // SAFETY: 1. the parent waits.
    let bytes = unsafe { theirs.bytes_mut() };
    assert!(bytes.iter().all(|&byte| byte == 0x5a));
    bytes[..MIB].fill(0xa5);
    theirs.close().unwrap();
    assert_eq!(budget.used(), 0);
}

#[test]
fn its_size_is_sealed_and_a_file_whose_size_is_not_is_refused() {
    let (sim, host, budget) = machine();
    let ours = SharedRegion::new(&host, &budget, &request(2 * MIB)).unwrap();
    let file = File::from(ours.as_fd().try_clone_to_owned().unwrap());
    for size in [0, MIB as u64, 4 * MIB as u64] {
        assert_eq!(file.set_len(size).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }
    drop(ours);
    let own = File::open(env::current_exe().unwrap()).unwrap();
    let refused = SharedRegion::open(&host, &budget, own.into(), &request(1)).unwrap_err();
    assert!(
        matches!((refused.step, refused.cause), (Step::Map, Cause::System(e)) if e.errno == libc::EPERM)
    );
    assert!(sim.outstanding().is_empty() && budget.used() == 0);
}

#[test]
fn shared_memory_outlives_its_creator_while_it_is_mapped() {
    let (_sim, host, budget) = machine();
    let mut ours = SharedRegion::new(&host, &budget, &request(2 * MIB)).unwrap();
    // SAFETY: 1. no other process has it yet.
    unsafe { ours.bytes_mut() }.fill(9);
    let file = ours.as_fd().try_clone_to_owned().unwrap();
    ours.close().unwrap();
    assert_eq!(budget.used(), 0, "a file is no mapping of ours");
    let theirs = SharedRegion::open(&host, &budget, file, &request(1)).unwrap();
    // SAFETY: 1. no other process has it any more.
    assert!(unsafe { theirs.bytes() }.iter().all(|&byte| byte == 9));
}

#[test]
fn a_shared_region_never_falls_back_to_private_memory() {
    let (sim, host, budget) = machine();
    sim.fail_every(aquifer_driver::Call::HostRegister, 1, 2);
    let region = SharedRegion::new(&host, &budget, &request(2 * MIB)).unwrap();
    assert!(!region.is_pinned() && region.report().pages != PageTier::DriverChosen);
    drop(region);
    let mut request = request(2 * MIB);
    request.pinning = Pinning::Required;
    assert_eq!(SharedRegion::new(&host, &budget, &request).unwrap_err().step, Step::Register);
    assert_eq!(sim.driver().calls().get(aquifer_driver::Call::HostAlloc), 0);
    sim.clear_failures();
    let mut flags = HostFlags::default();
    flags.write_combined = true;
    request.flags = flags;
    let cached = SharedRegion::new(&host, &budget, &request).unwrap();
    assert!(
        cached.is_pinned() && cached.report().shortfalls.iter().any(|s| s.cause == Cause::Cached)
    );
}

#[test]
fn an_old_kernel_writes_no_zeros_over_what_others_wrote() {
    let (_sim, host, budget) = machine();
    let mut ours = SharedRegion::new(&host, &budget, &request(2 * MIB)).unwrap();
    // SAFETY: 1. no other process has it yet.
    unsafe { ours.bytes_mut() }.fill(9);
    let (old, faults) = support::faulty_host();
    faults.fail_from(SystemCall::Populate, 1, libc::EINVAL);
    let file = ours.as_fd().try_clone_to_owned().unwrap();
    let _ = SharedRegion::open(&old, &budget, file, &request(1));
    // SAFETY: 1. it is not written now.
    assert!(unsafe { ours.bytes() }.iter().all(|&byte| byte == 9));
}

#[test]
fn a_pool_or_a_scope_pins_no_region_a_second_time() {
    let (_sim, host, budget) = machine();
    let ours = SharedRegion::new(&host, &budget, &request(2 * MIB)).unwrap();
    // SAFETY: 1. it is not written.
    let bytes = unsafe { ours.bytes() };
    let again = aquifer_host::region::scope(&host, &budget, bytes, HostFlags::default(), |_| ());
    assert!(matches!(again.unwrap_err().cause, Cause::AlreadyPinned(_)));
    assert!(InPlace::new(&host, &budget, vec![1u8; 64], HostFlags::default()).is_ok());
}
