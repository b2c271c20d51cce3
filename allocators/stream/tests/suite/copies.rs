//! Tests of copies between operands made directly by a program, and of the uses that are recorded
//! for them.
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]
#![allow(unsafe_code, reason = "implements an operand")]

use aquifer_driver::{Call, sim::Sim};
use std::{
    env,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use crate::support::{GPU, Plain, Rig};
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{
    Access, DeviceId, DeviceRange, KeepAlive, Operand, OperandMut, RawStream, Typed,
};
use aquifer_stream::{StreamPool, UseList};

/// A view of device memory that may overlap others, which no operand should.
struct Window(DeviceRange);

// SAFETY: 1. deliberately broken, for calls that are refused. 2. one stream only.
unsafe impl Operand for Window {
    fn range(&self) -> DeviceRange {
        self.0
    }
    fn order(&self, _: RawStream, _: Option<KeepAlive>, _: Access) -> Result<()> {
        Ok(())
    }
}

// SAFETY: 1. deliberately broken.
unsafe impl OperandMut for Window {}

impl Typed for Window {
    type Item = u8;
    fn len(&self) -> usize {
        self.0.bytes as usize
    }
}

#[test]
fn a_copy_within_itself_is_refused_and_one_beside_it_is_not() {
    let rig = Rig::new(1);
    let s = rig.lease();
    let address = rig.sim.driver().mem_alloc(GPU, 100).unwrap();
    let window =
        |from: u64, bytes: u64| Window(DeviceRange { device: GPU, address: address + from, bytes });
    let overlap = |from, to, bytes| {
        Err(MemoryError::Overlap { from: address + from, to: address + to, bytes })
    };
    assert_eq!(s.copy(window(0, 50), &mut window(49, 50)), overlap(0, 49, 50));
    assert_eq!(s.copy(window(49, 50), &mut window(0, 50)), overlap(49, 0, 50));
    assert_eq!(s.copy(window(10, 50), &mut window(10, 50)), overlap(10, 10, 50));
    assert_eq!(s.copy_to_peer(window(0, 50), &mut window(49, 50), &s), overlap(0, 49, 50));
    s.copy(window(0, 50), &mut window(50, 50)).unwrap();
    s.copy(window(50, 50), &mut window(0, 50)).unwrap();
    s.synchronize().unwrap();
    // SAFETY: 1. allocated above. 2. the stream is idle.
    unsafe { rig.sim.driver().mem_free(GPU, address) }.unwrap();
    drop(s);
    rig.assert_all_given_back();
}

#[test]
fn a_borrow_beside_others_waits_for_them_and_ends_none() {
    let rig = Rig::stepped(3);
    let (home, u, v) = (rig.lease(), rig.lease(), rig.lease());
    let mut uses = UseList::new();
    let lend = |uses: &UseList, on: &aquifer_stream::Stream| {
        uses.lend_beside(1, home.timeline(), on.timeline(), Access::Write).unwrap();
    };
    lend(&uses, &u);
    rig.launch(&u);
    lend(&uses, &v);
    // Work that `u` queues now is still a use, because its borrow has not ended.
    let before = u.timeline().open();
    u.timeline().fence(before).unwrap();
    rig.launch(&u);
    let left = uses.take();
    assert_eq!(left.iter().count(), 2);
    let of_u = left.iter().find(|noted| noted.on().raw() == u.raw()).unwrap();
    assert!(of_u.epoch().unwrap() > before, "stamped when all borrows were over");
    // The control: a single borrow ends them.
    lend(&uses, &u);
    uses.lend(1, home.timeline(), v.timeline(), Access::Write).unwrap();
    let after = u.timeline().open();
    rig.launch(&u);
    let left = uses.take();
    let of_u = left.iter().find(|noted| noted.on().raw() == u.raw()).unwrap();
    assert!(of_u.epoch().unwrap() < after);
    rig.sim.run_all();
}

#[test]
fn borrows_of_one_kind_by_one_stream_are_noted_once_however_many_they_are() {
    let rig = Rig::stepped(2);
    let (home, u) = (rig.lease(), rig.lease());
    let mut uses = UseList::new();
    for _ in 0..1000 {
        uses.lend(1, home.timeline(), u.timeline(), Access::Read).unwrap();
        rig.launch(&u);
    }
    let left = uses.take();
    let left: Vec<_> = left.iter().collect();
    assert_eq!(left.len(), 1);
    assert!(!left[0].is_done());
    assert_eq!(left[0].epoch(), Some(u.timeline().open()), "and by the last of them");
    rig.sim.run_all();
}

/// Calls that report completion of work.
const SAY_DONE: [Call; 4] =
    [Call::EventSynchronize, Call::EventQuery, Call::StreamSynchronize, Call::DeviceSynchronize];
/// Not a code of a lost device.
const REFUSED: u32 = 999;
const CHILD: &str = "AQUIFER_SCOPE_CHILD";

fn refuse_every_wait(rig: &Rig) {
    SAY_DONE.into_iter().for_each(|call| rig.sim.fail_every(call, 1, REFUSED));
}

#[test]
fn a_scope_returns_only_when_its_copies_are_done_however_long_waits_are_refused() {
    let rig = Rig::on(Sim::h200(1).stepped(), 2);
    let s = rig.lease();
    let mut x = Plain::new(&rig, &s, 1 << 10);
    let up = vec![7u8; 1 << 10];
    refuse_every_wait(&rig);
    let begun = Instant::now();
    let refused_for = Duration::from_millis(1500);
    thread::scope(|threads| {
        threads.spawn(|| {
            thread::sleep(refused_for);
            rig.sim.clear_failures();
        });
        s.scope(|c| c.upload(&up, &mut x)).unwrap().unwrap();
    });
    assert!(begun.elapsed() >= refused_for);
    assert_eq!(rig.sim.pending(s.raw()), 0, "what it borrowed may be freed now");
    drop((x, s));
    rig.assert_all_given_back();
}

#[test]
fn a_copy_between_devices_returns_only_in_order_or_done_however_long_waits_are_refused() {
    let rig = Rig::on(Sim::h200(2).stepped(), 1);
    let far = DeviceId(1);
    let driver = rig.sim.driver();
    let peers = StreamPool::new(driver.clone(), far, 1);
    let (s, peer) = (rig.lease(), peers.lease().unwrap());
    let window = |device| {
        let address = driver.mem_alloc(device, 64).unwrap();
        Window(DeviceRange { device, address, bytes: 64 })
    };
    let (from, mut to) = (window(GPU), window(far));
    rig.launch(&peer);
    // The first makes the copy wait for `peer`, the second `peer` for the copy.
    rig.sim.fail_every(Call::StreamWaitEvent, 2, REFUSED);
    refuse_every_wait(&rig);
    let begun = Instant::now();
    let refused_for = Duration::from_millis(1500);
    let told = thread::scope(|threads| {
        threads.spawn(|| {
            thread::sleep(refused_for);
            rig.sim.clear_failures();
        });
        s.copy_to_peer(&from, &mut to, &peer)
    });
    assert!(matches!(told, Err(MemoryError::Driver(_))), "{told:?}");
    assert!(begun.elapsed() >= refused_for);
    assert_eq!(rig.made(Call::StreamWaitEvent), 2);
    assert_eq!(rig.sim.pending(s.raw()), 0, "work on the other stream is not ordered after it");
    for Window(range) in [from, to] {
        driver.device_synchronize(range.device).unwrap();
        // SAFETY: 1. allocated above. 2. the device is idle.
        unsafe { driver.mem_free(range.device, range.address) }.unwrap();
    }
    drop((s, peer, peers));
    rig.assert_all_given_back();
}

#[test]
fn a_scope_on_a_lost_device_returns_at_once() {
    let rig = Rig::on(Sim::h200(1).stepped(), 2);
    let s = rig.lease();
    let x = rig.sim.driver().mem_alloc(GPU, 64).unwrap();
    let up = [7u8; 64];
    let told = s.scope(|c| {
        c.upload(&up, &mut Window(DeviceRange { device: GPU, address: x, bytes: 64 })).unwrap();
        rig.sim.lose_device(GPU);
    });
    assert_eq!(told, Err(MemoryError::DeviceLost { device: GPU }));
    // Also with a driver that has shut down, as at the end of a process.
    let rig = Rig::on(Sim::h200(1).stepped(), 2);
    let s = rig.lease();
    SAY_DONE.into_iter().for_each(|call| rig.sim.fail_every(call, 1, 4));
    let begun = Instant::now();
    assert!(s.scope(|_| ()).is_err());
    assert!(begun.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_process_whose_copies_cannot_be_waited_for_ends_with_a_message() {
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "copies::the_process_that_cannot_wait", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stderr).into_owned();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&child.status), Some(6), "{child:?}");
    assert!(
        said.contains("aquifer: device 0 has refused every wait for stream 0")
            && said.contains("(999)"),
        "{said}"
    );
    assert!(!String::from_utf8_lossy(&child.stdout).contains("returned"));
}

/// The part of the test above that runs in another process. Run directly, it does nothing.
#[test]
fn the_process_that_cannot_wait() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    let rig = Rig::on(Sim::h200(1).stepped(), 2);
    let s = rig.lease();
    let mut x = Plain::new(&rig, &s, 1 << 10);
    let up = vec![7u8; 1 << 10];
    refuse_every_wait(&rig);
    let _told = s.scope(|c| c.upload(&up, &mut x));
    println!("returned");
}
