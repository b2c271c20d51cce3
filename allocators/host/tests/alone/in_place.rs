//! Tests of foreign memory that is pinned in place.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]
#![expect(unsafe_code, reason = "makes mappings of every kind, and queues copies by hand")]

use crate::{
    alone,
    support::{
        self, MIB,
        on_device::{GPU, OnDevice, stream},
    },
};
use aquifer_core::Budget;
use aquifer_driver::{
    Call, HostFlags,
    sim::{Sim, ViolationKind},
};
use aquifer_host::{
    kernel::{Faults, Ground, Kernel, MapPages, SystemCall},
    region::{
        Cause, FileMap, Host, InPlace, Pinnable, PinnableMut, RegionError, Step, Unfit,
        end_retired, retired_bytes, retry_stranded, scope, scope_mut,
    },
};
use nix::libc;
use std::{
    fs::File,
    io::{Read, Seek, Write},
    mem::ManuallyDrop,
    os::fd::AsRawFd,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

const PAGE: usize = 4096;

struct Machine {
    sim: Sim,
    host: Host,
    faults: Arc<Faults>,
    budget: Budget,
    _alone: MutexGuard<'static, ()>,
}

fn machine() -> Machine {
    let alone = alone();
    let sim = Sim::h200(1).stepped();
    let (host, faults) = support::faulty_host();
    let host = host.with_driver(sim.driver(), GPU);
    Machine { sim, host, faults, budget: Budget::new("pinned", 4 << 30), _alone: alone }
}

impl Machine {
    fn pin<T: Pinnable>(&self, memory: T) -> Result<InPlace<T>, RegionError> {
        Ok(InPlace::new(&self.host, &self.budget, memory, HostFlags::default())?)
    }

    fn is_clean(&self) -> bool {
        self.budget.used() == 0 && self.sim.outstanding().registrations == 0
    }
}

/// A mapping made directly by `mmap`.
struct Map {
    at: NonNull<u8>,
    len: usize,
}

impl Map {
    fn new(len: usize, access: i32, flags: i32, file: Option<&File>) -> Option<Self> {
        let file = file.map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: 1. no address is requested.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, file, 0) };
        (at != libc::MAP_FAILED).then(|| Self { at: NonNull::new(at.cast()).unwrap(), len })
    }

    fn anonymous(len: usize, access: i32, more: i32) -> Option<Self> {
        Self::new(
            len,
            access,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | more,
            None,
        )
    }

    /// Maps pages that no other memory shares.
    fn filled(len: usize, byte: u8) -> Self {
        let map = Self::anonymous(len, WRITE, 0).unwrap();
        // SAFETY: 1. mapped writable, and owned by this value alone.
        unsafe { map.at.write_bytes(byte, len) };
        map
    }

    fn slice(&self) -> &[u8] {
        // SAFETY: 1. mapped readable by every test that calls this. 2. it is not written meanwhile.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: 1. mapped above.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

// SAFETY: 1. a mapping stays until it is dropped, and has this owner only. 2. it is therefore not
// written.
unsafe impl Pinnable for Map {
    type Item = u8;
    fn items(&self) -> &[u8] {
        self.slice()
    }
}

// SAFETY: 1. the same bytes. Only writable ones are written here.
unsafe impl PinnableMut for Map {
    fn items_mut(&mut self) -> &mut [u8] {
        // SAFETY: 1. mapped, and writable wherever a test calls this. 2. this owner has exclusive
        // access.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

// SAFETY: 1. it owns its mapping.
unsafe impl Send for Map {}

const READ: i32 = libc::PROT_READ;
const WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Returns a file with contents on a file system that is not in memory, or `None` if there is none.
fn file(bytes: usize) -> Option<File> {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = path.join(format!("in-place-{}-{bytes}", std::process::id()));
    let mut file =
        File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let pattern: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
    file.write_all(&pattern).unwrap();
    file.rewind().unwrap();
    let on = nix::sys::statfs::fstatfs(&file).unwrap().filesystem_type();
    (on != nix::sys::statfs::TMPFS_MAGIC).then_some(file)
}

#[test]
fn a_vector_is_pinned_in_whole_pages_charged_and_returned_unchanged() {
    let m = machine();
    let data: Vec<u32> = (0..3 << 18).collect();
    let at = data.as_ptr() as usize;
    let mut pinned = m.pin(data).unwrap();
    let pages = pinned.registered().unwrap();
    assert!(pages.start <= at && pages.end() >= at + 3 * MIB);
    assert!(
        pages.start.is_multiple_of(PAGE)
            && pages.len.is_multiple_of(PAGE)
            && pages.len <= 3 * MIB + 2 * PAGE
    );
    assert_eq!((m.budget.used(), m.sim.outstanding().registrations), (pages.len as u64, 1));
    assert_eq!((pinned.ground(), pinned.shortfalls().len()), (Ground::Anonymous, 0));
    pinned.items_mut()[5] = 99;
    assert_eq!(m.faults.made(SystemCall::DontFork), 0, "children keep other people's memory");
    let data = pinned.close().unwrap();
    assert_eq!((data.as_ptr() as usize, data[5], data[6]), (at, 99, 6));
    assert!(m.is_clean());
    drop(m.pin(vec![1u8; 100].into_boxed_slice()).unwrap());
    assert!(m.is_clean());
}

#[test]
fn memory_dropped_during_its_copy_is_unregistered_after_the_copy() {
    let m = machine();
    let (_streams, stream) = stream(&m.sim);
    let mut target = OnDevice::new(m.sim.driver(), MIB as u64);
    let up = m.pin(Map::filled(MIB, 0xab)).unwrap();
    let up = stream.upload(up, &mut target).unwrap().wait().unwrap();
    let down = m.pin(Map::filled(MIB, 0)).unwrap();
    let down = stream.download(&target, down).unwrap().wait().unwrap();
    assert_eq!(down.items(), up.items());
    drop(down);
    // Dropped during the copy: the memory, its charge and its registration stay.
    drop(stream.upload(up, &mut target).unwrap());
    assert_eq!((m.sim.outstanding().registrations, end_retired()), (1, 0));
    assert!(m.budget.used() >= MIB as u64 && retired_bytes() == m.budget.used());
    stream.synchronize().unwrap();
    assert_eq!(m.sim.outstanding().registrations, 1, "not before somebody asks");
    assert!(end_retired() >= MIB as u64);
    assert!(m.is_clean() && retired_bytes() == 0);
    drop(target);
    assert_eq!(m.sim.violations(), []);
}

#[test]
fn a_region_dropped_during_a_copy_waits_for_the_copy() {
    let m = machine();
    let (_streams, stream) = stream(&m.sim);
    let mut target = OnDevice::new(m.sim.driver(), 2 * MIB as u64);
    let region = || {
        let request = aquifer_host::region::RegionRequest::bytes(2 * MIB);
        aquifer_host::region::Region::new(&m.host, &m.budget, &request).unwrap()
    };
    drop(stream.upload(region(), &mut target).unwrap());
    assert_eq!((end_retired(), m.sim.outstanding().registrations), (0, 1));
    stream.synchronize().unwrap();
    region().retire();
    assert_eq!((m.sim.outstanding().registrations, end_retired()), (2, 4 * MIB as u64));
    assert!(m.is_clean());
    // A budget that refuses causes the retired memory to be collected.
    let small = Budget::new("pinned", 2 * MIB as u64);
    let request = aquifer_host::region::RegionRequest::bytes(2 * MIB);
    aquifer_host::region::Region::new(&m.host, &small, &request).unwrap().retire();
    drop(aquifer_host::region::Region::new(&m.host, &small, &request).unwrap());
    assert_eq!(small.used(), 0);
    drop(target);
    assert_eq!(m.sim.violations(), []);
}

#[test]
fn a_scope_pins_while_it_runs_and_not_after_a_panic_either() {
    let m = machine();
    let flags = HostFlags::default();
    let (_streams, stream) = stream(&m.sim);
    let mut target = OnDevice::new(m.sim.driver(), MIB as u64);
    let mut data = vec![3u8; MIB];
    scope(&m.host, &m.budget, &data, flags, |data| {
        assert_eq!(m.sim.outstanding().registrations, 1);
        stream.scope(|c| c.upload(data, &mut target)).unwrap().unwrap();
    })
    .unwrap();
    assert!(m.is_clean());
    data.fill(0);
    let landed = scope_mut(&m.host, &m.budget, &mut data, flags, |data| {
        stream.scope(|c| c.download(&target, &mut *data)).unwrap().unwrap();
        data[MIB - 1]
    });
    assert_eq!((landed.unwrap(), data[0], m.is_clean()), (3, 3, true));
    let thrown = catch_unwind(AssertUnwindSafe(|| {
        let _ = scope(&m.host, &m.budget, &data, flags, |_| std::panic::resume_unwind(Box::new(7)));
    }));
    assert!(thrown.is_err() && m.is_clean());
    drop(target);
    assert_eq!(m.sim.violations(), []);
}

#[test]
fn two_registrations_never_share_a_page() {
    let m = machine();
    let map = Map::anonymous(8 * PAGE, WRITE, 0).unwrap();
    let (flags, all) = (HostFlags::default(), map.slice());
    let pin =
        |part: &[u8], then: &mut dyn FnMut()| scope(&m.host, &m.budget, part, flags, |_| then());
    let mut refused = 0;
    pin(&all[..5000], &mut || {
        for part in [&all[8000..9000], &all[5000..5001], all, &all[..1]] {
            let error = pin(part, &mut || ()).unwrap_err();
            assert_eq!(error.step, Step::Register);
            assert!(
                matches!(error.cause, Cause::AlreadyPinned(pages) if pages.len == 2 * PAGE),
                "{error}"
            );
            refused += 1;
        }
        // The next page is free, and the driver received no call that it would have refused.
        pin(&all[2 * PAGE..], &mut || ()).unwrap();
    })
    .unwrap();
    assert_eq!((refused, m.sim.driver().calls().get(Call::HostRegister)), (4, 2));
    assert!(m.is_clean());
    // Memory inside a region is already pinned.
    let request = aquifer_host::region::RegionRequest::bytes(MIB);
    let region = aquifer_host::region::Region::new(&m.host, &m.budget, &request).unwrap();
    let error = pin(region.bytes(), &mut || ()).unwrap_err();
    assert!(matches!(error.cause, Cause::AlreadyPinned(_)));
    drop(region);
    // Memory registered by another library is reported in the same way.
    let driver = m.sim.driver();
    // SAFETY: 1. the map outlives the registration.
    unsafe { driver.host_register(GPU, map.at, PAGE, flags).unwrap() };
    assert!(matches!(pin(all, &mut || ()).unwrap_err().cause, Cause::AlreadyPinned(_)));
    // SAFETY: 1. registered just now. 2. nothing is queued.
    unsafe { driver.host_unregister(GPU, map.at).unwrap() };
    assert!(m.is_clean());
}

#[test]
fn every_pinnable_kind_of_memory_is_pinned() {
    let m = machine();
    let anonymous = Map::anonymous(MIB, WRITE, 0).unwrap();
    assert_eq!(m.pin(anonymous).unwrap().ground(), Ground::Anonymous);
    let shared = Map::new(MIB, WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, None).unwrap();
    assert_eq!(m.pin(shared).unwrap().ground(), Ground::Memory);
    let memory = File::from(Kernel::new().memory_file(MIB, MapPages::Ordinary).unwrap());
    let mapped = Map::new(MIB, WRITE, libc::MAP_SHARED, Some(&memory)).unwrap();
    assert_eq!(m.pin(mapped).unwrap().ground(), Ground::Memory);
    match Map::anonymous(2 * MIB, WRITE, libc::MAP_HUGETLB) {
        // The mapping gives no guarantee: there may be no page behind it.
        Some(huge) if m.host.topology.free_huge_pages(None, 2 << 20).unwrap().value > Some(0) => {
            assert_eq!(m.pin(huge).unwrap().ground(), Ground::HugeTlb);
        }
        _ => println!("skipped: no huge pages in the pool"),
    }
    assert!(m.is_clean());
}

#[test]
fn a_file_mapped_shared_to_be_read_is_pinned_for_reading_only() {
    let m = machine();
    let Some(file) = file(MIB + 123) else {
        println!("skipped: the build folder lies in memory");
        return;
    };
    // SAFETY: 1. the file is used only here.
    let map = unsafe { FileMap::new(&m.host.kernel, &file) }.unwrap();
    let pinned = m.pin(map).unwrap();
    assert_eq!((pinned.ground(), pinned.items().len()), (Ground::File, MIB + 123));
    assert!(
        m.faults.made(SystemCall::PopulateRead) > 0 && m.faults.made(SystemCall::Populate) == 0
    );
    let (_streams, stream) = stream(&m.sim);
    let mut target = OnDevice::new(m.sim.driver(), MIB as u64 + 123);
    stream.scope(|c| c.upload(pinned.items(), &mut target)).unwrap().unwrap();
    let expected: Vec<u8> = (0..MIB + 123).map(|i| (i % 251) as u8).collect();
    assert_eq!(m.sim.read_back(target.range).unwrap(), expected);
    assert_eq!(m.sim.violations(), []);
    // The driver knows that it is read-only: a copy into it is refused and reported.
    let at = NonNull::from(pinned.items()).cast();
    assert!(
        // SAFETY: 1. both sides are there; the copy is refused.
        unsafe { m.sim.driver().copy_to_host(stream.raw(), at, target.range.address, 64) }.is_err()
    );
    assert_eq!(m.sim.take_violations()[0].kind, ViolationKind::WriteToReadOnly);
    drop(pinned);
    // A driver without this feature is reported as such, and nothing remains.
    m.sim.fail(Call::HostRegister, 1, 801);
    // SAFETY: as above.
    let map = unsafe { FileMap::new(&m.host.kernel, &file) }.unwrap();
    let refused = InPlace::new(&m.host, &m.budget, map, HostFlags::default()).unwrap_err();
    assert!(matches!(refused.error.cause, Cause::Driver(e) if e.code == 801));
    assert_eq!(refused.memory.bytes()[..3], [0, 1, 2]);
    assert!(m.is_clean());
}

#[test]
fn memory_unsuited_to_the_driver_is_refused_before_the_driver_call() {
    let m = machine();
    let unfit = |memory: Map, expected: Unfit| {
        let error = m.pin(memory).map(drop).unwrap_err();
        assert_eq!((error.step, &error.cause), (Step::Request, &Cause::NotInPlace(expected)));
        assert!(error.to_string().contains("use a stager"), "{error}");
    };
    if let Some(file) = file(MIB) {
        let map = |access, flags| Map::new(MIB, access, flags, Some(&file)).unwrap();
        unfit(map(READ, libc::MAP_PRIVATE), Unfit::PrivateFile);
        unfit(map(WRITE, libc::MAP_PRIVATE), Unfit::WritableFile);
        unfit(map(WRITE, libc::MAP_SHARED), Unfit::WritableFile);
        // A file in the middle of anonymous memory.
        let mixed = Map::anonymous(MIB, WRITE, 0).unwrap();
        // SAFETY: 1. inside our own mapping.
        let over = unsafe { mixed.at.add(MIB / 2).as_ptr() }.cast();
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: 1. the same.
        assert_eq!(unsafe { libc::mmap(over, PAGE, READ, flags, file.as_raw_fd(), 0) }, over);
        unfit(mixed, Unfit::Mixed);
    } else {
        println!("skipped: the build folder lies in memory");
    }
    unfit(Map::anonymous(MIB, READ, 0).unwrap(), Unfit::Protected);
    let holed = Map::anonymous(MIB, WRITE, 0).unwrap();
    // SAFETY: 1. inside a mapping of this test that is no longer read.
    unsafe { libc::munmap(holed.at.add(MIB / 2).as_ptr().cast(), PAGE) };
    unfit(holed, Unfit::Mixed);
    assert_eq!(m.sim.driver().calls().get(Call::HostRegister), 0);
    assert_eq!(m.pin(Vec::<u8>::new()).map(drop).unwrap_err().step, Step::Request);
    m.faults.fail(SystemCall::Mappings, 1, libc::ENOENT);
    assert!(
        matches!(m.pin(vec![1u8; 64]).map(drop).unwrap_err().cause, Cause::System(_)),
        "unknown is no guess"
    );
    assert!(m.is_clean());
}

#[test]
fn more_than_the_kernel_pins_at_once_is_refused_and_nothing_is_touched() {
    let m = machine();
    m.faults.seem_version(6, 12);
    let large = Map::anonymous(2 << 30, WRITE, 0).unwrap();
    let error = m.pin(large).map(drop).unwrap_err();
    assert!(
        matches!(error.cause, Cause::NotInPlace(Unfit::TooLarge { limit }) if limit < 2 << 30),
        "{error}"
    );
    assert_eq!(m.faults.made(SystemCall::Populate), 0);
    assert!(m.pin(vec![1u8; MIB]).is_ok());
    m.faults.clear();
    assert_eq!(
        Kernel::new().pin_limit().is_some(),
        matches!(Kernel::new().version(), Some((6, 11..=13)))
    );
}

/// Memory that records when it is dropped.
struct Watched(Map, Arc<AtomicBool>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

// SAFETY: 1. and 2. those of the mapping, which has no other owner.
unsafe impl Pinnable for Watched {
    type Item = u8;
    fn items(&self) -> &[u8] {
        self.0.slice()
    }
}

#[test]
fn memory_stays_with_a_registration_that_the_driver_will_not_end() {
    let m = machine();
    let gone = Arc::new(AtomicBool::new(false));
    for close in [false, true] {
        gone.store(false, Ordering::Relaxed);
        let pinned = m.pin(Watched(Map::filled(MIB, 1), gone.clone())).unwrap();
        m.sim.fail_every(Call::HostUnregister, 1, 999);
        if close {
            assert_eq!(pinned.close().map(drop).unwrap_err().step, Step::Register);
        } else {
            drop(pinned);
        }
        retry_stranded();
        assert!(!gone.load(Ordering::Relaxed) && m.budget.used() >= MIB as u64);
        m.sim.clear_failures();
        retry_stranded();
        assert!(gone.load(Ordering::Relaxed) && m.is_clean());
    }
}

#[test]
fn a_forgotten_registration_is_leaked_and_stays_pinned() {
    let m = machine();
    let gone = Arc::new(AtomicBool::new(false));
    let _forgotten = ManuallyDrop::new(m.pin(Watched(Map::filled(MIB, 1), gone.clone())).unwrap());
    end_retired();
    retry_stranded();
    assert!(!gone.load(Ordering::Relaxed) && m.budget.used() >= MIB as u64);
    assert_eq!(m.sim.outstanding().registrations, 1);
}

#[test]
fn workers_populate_missing_pages_and_keep_present_ones() {
    let m = machine();
    let map = Map::anonymous(80 * MIB, WRITE, 0).unwrap();
    // SAFETY: 1. mapped writable, and used only here.
    unsafe { map.at.write(42) };
    let pinned = m.pin(map).unwrap();
    assert_eq!(m.faults.made(SystemCall::Populate), 3, "a piece each");
    assert_eq!(support::present(pinned.registered().unwrap()), 80 * MIB / PAGE);
    assert_eq!((pinned.items()[0], pinned.items()[1]), (42, 0));
    drop(pinned);
    // A kernel without this feature leaves the population to the driver.
    m.faults.fail_from(SystemCall::Populate, 1, libc::EINVAL);
    let pinned = m.pin(vec![1u8; MIB]).unwrap();
    assert_eq!(pinned.shortfalls()[0].step, Step::Populate);
}

#[test]
fn without_a_driver_nothing_can_be_pinned_and_the_memory_comes_back() {
    let _alone = alone();
    let refused = InPlace::new(
        &support::host(),
        &Budget::unlimited("pinned"),
        vec![5u8; 10],
        HostFlags::default(),
    );
    let refused = refused.unwrap_err();
    assert_eq!((refused.error.cause, refused.memory), (Cause::NoDriver, vec![5; 10]));
}

#[test]
fn a_memory_file_is_zeroed_sealed_and_readable_by_every_holder() {
    let file = Kernel::new().memory_file(MIB, MapPages::Ordinary).unwrap();
    let mut file = File::from(file);
    assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, vec![0; MIB]);
}
