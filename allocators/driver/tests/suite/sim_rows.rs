//! Tests of copies and fills by rows, and of fills with elements of several bytes: their results,
//! refusals, and the oracle's view of each row.
#![allow(unsafe_code, reason = "plays the caller of unsafe calls")]
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::sim_fixtures::{Machine, everywhere};
use aquifer_driver::{Call, DeviceRange, Pattern, Pitched, Rows, sim::ViolationKind};
use std::ptr::NonNull;

const FILE: &str = "sim_rows.rs";
/// Three rows of 5 bytes.
const ROWS: Rows = Rows { width: 5, height: 3 };

fn at(start: u64, pitch: u64) -> Pitched<u64> {
    Pitched { start, pitch }
}

fn host(bytes: &mut [u8], pitch: u64) -> Pitched<NonNull<u8>> {
    Pitched { start: NonNull::from(bytes).cast(), pitch }
}

/// Returns the contents at an address on a machine that stores bytes.
fn read(m: &Machine, x: DeviceRange) -> Option<Vec<u8>> {
    m.driver.device_synchronize(x.device).unwrap();
    m.sim.read_back(x)
}

/// Returns `to` with the rows of `from` copied into it.
fn expected(
    mut to: Vec<u8>,
    to_pitch: usize,
    from: &[u8],
    from_pitch: usize,
    rows: Rows,
) -> Vec<u8> {
    for row in 0..rows.height as usize {
        let width = rows.width as usize;
        to[row * to_pitch..][..width].copy_from_slice(&from[row * from_pitch..][..width]);
    }
    to
}

#[test]
fn rows_go_up_down_and_across_and_what_lies_between_them_stays() {
    everywhere(|m| {
        let a = m.stream();
        let (x, y) = (m.alloc(64), m.alloc(64));
        let mut up: Vec<u8> = (1..=64).collect();
        let mut down = vec![0xee; 64];
        // SAFETY: 1. three rows of at most 16 bytes lie in each 64. 2. all is on one stream, and
        // the host waits.
        unsafe {
            m.driver.fill(a, x.address, 0xaa, 64).unwrap();
            m.driver.fill(a, y.address, 0xbb, 64).unwrap();
            m.driver.copy_2d_to_device(a, at(x.address + 1, 16), host(&mut up, 7), ROWS).unwrap();
            m.driver.copy_2d_on_device(a, at(y.address, 5), at(x.address + 1, 16), ROWS).unwrap();
            m.driver.copy_2d_to_host(a, host(&mut down, 9), at(y.address, 5), ROWS).unwrap();
        }
        m.driver.stream_synchronize(a).unwrap();
        if let Some(found) = read(m, x) {
            let there = expected(vec![0xaa; 63], 16, &up, 7, ROWS);
            assert_eq!(found[1..], there);
            let packed = expected(vec![0xbb; 64], 5, &there, 16, ROWS);
            assert_eq!(read(m, y), Some(packed.clone()));
            assert_eq!(down, expected(vec![0xee; 64], 9, &packed, 5, ROWS));
        }
        assert_eq!(m.driver.calls().get(Call::Copy2d), 3);
        m.silent();
    });
}

#[test]
fn rows_of_pinned_memory_are_read_when_their_turn_comes() {
    let m = Machine::new(aquifer_driver::sim::Sim::h200(1).stepped());
    let (a, x, pinned) = (m.stream(), m.alloc(32), m.pinned(64));
    let mut pageable = [1_u8; 32];
    // SAFETY: 1. all of it lives until the host has waited. 2. the late write is deliberate, on one
    // thread.
    unsafe {
        let from = Pitched { start: pinned, pitch: 8 };
        m.driver.copy_2d_to_device(a, at(x.address, 5), from, ROWS).unwrap();
        m.driver.copy_2d_to_device(a, at(x.address + 15, 5), host(&mut pageable, 5), ROWS).unwrap();
        pinned.as_ptr().write_bytes(3, 64);
    }
    pageable.fill(9);
    let found = read(&m, x).unwrap();
    assert_eq!((&found[..15], &found[15..30]), (&[3; 15][..], &[1; 15][..]));
}

#[test]
fn fills_write_whole_elements_and_rows_of_them() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(64));
        // SAFETY: 1. all of it lies in the 64 bytes. 2. one stream.
        unsafe {
            m.driver.fill_with(a, x.address, Pattern::Byte(1), 64).unwrap();
            m.driver.fill_with(a, x.address + 2, Pattern::Half(0x0203), 3).unwrap();
            m.driver.fill_with(a, x.address + 8, Pattern::Word(0x0405_0607), 2).unwrap();
            let two = Rows { width: 2, height: 2 };
            m.driver.fill_2d(a, at(x.address + 16, 8), Pattern::Byte(8), two).unwrap();
            m.driver.fill_2d(a, at(x.address + 32, 8), Pattern::Half(0x090a), two).unwrap();
            m.driver
                .fill_2d(a, at(x.address + 48, 8), Pattern::Word(11), Rows { width: 1, height: 2 })
                .unwrap();
        }
        if let Some(found) = read(m, x) {
            assert_eq!(found[..8], [1, 1, 3, 2, 3, 2, 3, 2]);
            assert_eq!(found[8..16], [7, 6, 5, 4, 7, 6, 5, 4]);
            assert_eq!(found[16..32], [8, 8, 1, 1, 1, 1, 1, 1, 8, 8, 1, 1, 1, 1, 1, 1]);
            assert_eq!(found[32..48], [10, 9, 10, 9, 1, 1, 1, 1, 10, 9, 10, 9, 1, 1, 1, 1]);
            assert_eq!(found[48..], [11, 0, 0, 0, 1, 1, 1, 1, 11, 0, 0, 0, 1, 1, 1, 1]);
        }
        for call in
            [Call::Fill, Call::Fill16, Call::Fill32, Call::Fill2d, Call::Fill2d16, Call::Fill2d32]
        {
            assert_eq!(m.driver.calls().get(call), 1, "{}", call.name());
        }
        m.silent();
    });
}

#[test]
fn pitches_and_addresses_that_cannot_be_are_refused_and_nothing_is_queued() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(64));
        let mut bytes = [0_u8; 64];
        let before = m.sim.accesses_checked();
        let (start, d) = (x.address, &m.driver);
        // SAFETY: invalid calls are refused, and empty ones access nothing.
        unsafe {
            let refused = [
                d.copy_2d_to_device(a, at(start, 4), host(&mut bytes, 5), ROWS),
                d.copy_2d_to_device(a, at(start, 5), host(&mut bytes, 4), ROWS),
                d.copy_2d_to_host(a, host(&mut bytes, 4), at(start, 5), ROWS),
                d.copy_2d_on_device(a, at(start, 5), at(start + 32, 4), ROWS),
                d.copy_2d_on_device(a, at(start, 1 << 31), at(start + 32, 5), ROWS),
                d.fill_2d(a, at(start, 4), Pattern::Byte(1), ROWS),
                d.fill_2d(a, at(start, 8), Pattern::Word(1), ROWS),
                d.fill_2d(a, at(start + 1, 16), Pattern::Half(1), ROWS),
                d.fill_2d(a, at(start, 15), Pattern::Half(1), ROWS),
                d.fill_with(a, start + 1, Pattern::Half(1), 1),
                d.fill_with(a, start + 2, Pattern::Word(1), 1),
            ];
            for (i, refused) in refused.into_iter().enumerate() {
                assert_eq!(refused.unwrap_err().code, 1, "{i}");
            }
            for nothing in [Rows { width: 0, height: 3 }, Rows { width: 5, height: 0 }] {
                d.copy_2d_on_device(a, at(start, 5), at(start, 5), nothing).unwrap();
                d.fill_2d(a, at(start, 5), Pattern::Byte(1), nothing).unwrap();
            }
        }
        assert_eq!(m.sim.accesses_checked(), before);
        m.silent();
    });
}

#[test]
fn two_streams_may_have_the_two_halves_of_every_row() {
    everywhere(|m| {
        let (a, b, x, y) = (m.stream(), m.stream(), m.alloc(64), m.alloc(64));
        // SAFETY: 1. rows of 4 at a pitch of 8 lie in the 64 bytes. 2. the streams access different
        // bytes.
        unsafe {
            let rows = Rows { width: 4, height: 8 };
            m.driver.fill_2d(a, at(x.address, 8), Pattern::Byte(1), rows).unwrap();
            m.driver.copy_2d_on_device(b, at(x.address + 4, 8), at(y.address, 4), rows).unwrap();
        }
        m.silent();
    });
}

#[test]
fn a_row_that_another_stream_has_is_a_race() {
    everywhere(|m| {
        let (a, b, x, y) = (m.stream(), m.stream(), m.alloc(64), m.alloc(64));
        let rows = Rows { width: 4, height: 8 };
        let fifth = x.address + 4 * 8 + 3;
        let to = at(x.address, 8);
        // SAFETY: 1. all of it lies in the 64 bytes. 2. deliberately broken.
        let ((), wrote) = at!(unsafe { m.driver.fill_2d(a, to, Pattern::Byte(1), rows) }.unwrap());
        // SAFETY: as above.
        let ((), read) = at!(unsafe { m.driver.copy_on_device(b, y.address, fifth, 2) }.unwrap());
        m.only(ViolationKind::WriteRead, FILE, wrote, read);
    });
}

#[test]
fn rows_of_the_host_are_held_against_its_own_accesses_and_registrations() {
    everywhere(|m| {
        let (a, x, pinned) = (m.stream(), m.alloc(64), m.pinned(64));
        let from = Pitched { start: pinned, pitch: 8 };
        let rows = Rows { width: 4, height: 8 };
        let to = at(x.address, 8);
        // SAFETY: 1. and 2. both sides live; the declared host accesses are only checked.
        let ((), copied) = at!(unsafe { m.driver.copy_2d_to_device(a, to, from, rows) }.unwrap());
        let start = pinned.as_ptr() as u64;
        m.sim.host_write(start + 4, 4);
        m.silent();
        let ((), wrote) = at!(m.sim.host_write(start + 16, 1));
        m.only(ViolationKind::ReadWrite, FILE, copied, wrote);
        m.driver.stream_synchronize(a).unwrap();

        // The last row ends one byte beyond the registration.
        let past = Pitched { start: pinned, pitch: 20 };
        let rows = Rows { width: 5, height: 4 };
        // SAFETY: refused.
        let refused = unsafe { m.driver.copy_2d_to_device(a, at(x.address, 5), past, rows) };
        assert_eq!(refused.unwrap_err().code, 1);
        assert_eq!(m.sim.take_violations()[0].kind, ViolationKind::AcrossRegistrations);
    });
}

#[test]
fn rows_of_unowned_memory_are_reported_and_not_accessed() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(1 << 20));
        let beyond = Rows { width: 16, height: (64 << 20) / 4096 };
        // SAFETY: 1. deliberately broken: the rows reach far beyond the block. 2. one stream.
        unsafe { m.driver.fill_2d(a, at(x.address, 4096), Pattern::Byte(1), beyond) }.unwrap();
        m.driver.stream_synchronize(a).unwrap();
        assert_eq!(m.sim.take_violations()[0].kind, ViolationKind::Unmapped);
    });
}
