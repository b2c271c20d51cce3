//! The driver's own calls, which show what a cache can save.
//!
//! A GiB is allocated as handles of one size, mapped side by side. Handles are created, mapped and
//! released one by one. Access is set, and mappings are removed, in one call for all. Each row per
//! handle has a row per GiB.
#![expect(unsafe_code, reason = "maps and unmaps, as a pool does")]

use super::{DeviceBench, size};
use crate::console::place::Session;
use crate::{
    lap::{Contender, Failed, Lap, contest, repeat},
    row::Unit,
};
use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_driver::{Driver, DriverError, ExportTypes, PhysicalHandle, RawEvent, RawStream};
use aquifer_stream::StreamPool;
use std::time::Instant;

/// Sizes of handles, in bytes.
const HANDLES: [u64; 4] = [2 << 20, 8 << 20, 32 << 20, 128 << 20];
/// Total bytes for each handle size.
const WHOLE: u64 = 1 << 30;
/// The steps, in the order of timing.
const STEPS: [&str; 5] = ["create", "map", "set access", "unmap", "release"];
const EVENTS: [&str; 4] = [
    "driver event create and destroy",
    "driver event record",
    "driver event query",
    "driver stream wait event",
];

fn step_name(step: &str, bytes: u64) -> String {
    format!("driver {step}, a handle of {}", size(bytes))
}

fn whole_name(step: &str, bytes: u64) -> String {
    format!("driver {step}, 1 GiB of {}", size(bytes))
}

fn move_name(bytes: u64) -> String {
    format!("driver move, a handle of {}", size(bytes))
}

pub(super) fn names(bench: &DeviceBench<'_>) -> Vec<String> {
    if !bench.driver {
        return Vec::new();
    }
    let of_size = |bytes| {
        let steps =
            STEPS.into_iter().flat_map(move |s| [step_name(s, bytes), whole_name(s, bytes)]);
        steps.chain([move_name(bytes)])
    };
    let events = EVENTS.map(str::to_owned);
    HANDLES.into_iter().flat_map(of_size).chain(events).collect()
}

pub(super) fn measure(bench: &mut DeviceBench<'_>) -> Result<()> {
    let session = bench.session();
    let lost = |e| MemoryError::driver(session.device, e);
    if bench.place.info().virtual_memory {
        for bytes in HANDLES {
            handles(bench, &session, bytes).map_err(lost)?;
        }
    } else {
        let rows = names(bench);
        for row in rows.iter().filter(|row| !EVENTS.contains(&row.as_str())) {
            bench.sheet.leave_out(row, "the device has no virtual memory management".to_owned());
        }
    }
    events(bench, &session)
}

/// A reserved range with its mappings and handles. All of it is released on drop.
struct Range<'a> {
    session: &'a Session,
    address: u64,
    bytes: u64,
    /// Bytes mapped, counted from the start.
    mapped: u64,
    handles: Vec<PhysicalHandle>,
}

impl<'a> Range<'a> {
    fn reserve(session: &'a Session, bytes: u64) -> Result<Self, DriverError> {
        let address = session.driver.address_reserve(session.device, bytes, 0)?;
        Ok(Self { session, address, bytes, mapped: 0, handles: Vec::new() })
    }

    /// Creates and maps one handle. No device has access yet.
    fn mapped(session: &'a Session, bytes: u64) -> Result<Self, DriverError> {
        let mut range = Self::reserve(session, bytes)?;
        range.create(bytes, bytes)?;
        range.map(bytes)?;
        Ok(range)
    }

    fn driver(&self) -> &dyn Driver {
        &*self.session.driver
    }

    /// Creates handles of `each` bytes, `bytes` in total.
    fn create(&mut self, bytes: u64, each: u64) -> Result<(), DriverError> {
        for _ in 0..bytes / each {
            self.handles.push(self.driver().handle_create(
                self.session.device,
                each,
                ExportTypes::NONE,
            )?);
        }
        Ok(())
    }

    /// Maps all handles of `each` bytes side by side.
    fn map(&mut self, each: u64) -> Result<(), DriverError> {
        for place in 0..self.handles.len() {
            // SAFETY: 1. the range is reserved for this value, nothing is mapped beyond `mapped`,
            // and no work is queued.
            unsafe { self.driver().map(self.address + self.mapped, each, self.handles[place])? };
            self.mapped += each;
        }
        Ok(())
    }

    fn set_access(&self, devices: &[DeviceId]) -> Result<(), DriverError> {
        self.driver().set_access(self.address, self.mapped, devices)
    }

    fn unmap(&mut self) -> Result<(), DriverError> {
        if self.mapped > 0 {
            // SAFETY: 1. no work was ever queued on the range.
            unsafe { self.driver().unmap(self.session.device, self.address, self.mapped)? };
            self.mapped = 0;
        }
        Ok(())
    }

    fn release(&mut self) -> Result<(), DriverError> {
        while let Some(handle) = self.handles.pop() {
            // SAFETY: 1. its only copy was in the list.
            unsafe { self.driver().handle_release(handle)? };
        }
        Ok(())
    }
}

impl Drop for Range<'_> {
    fn drop(&mut self) {
        // What the driver does not free is freed when the process ends.
        if self.unmap().is_ok() {
            // SAFETY: 1. the range was reserved for this value, nothing is mapped in it, and its
            // address is not stored elsewhere.
            let _ = unsafe {
                self.driver().address_free(self.session.device, self.address, self.bytes)
            };
        }
        let _ = self.release();
    }
}

/// Measures a GiB of handles of `bytes` each through all steps, and the move of one handle.
fn handles(bench: &mut DeviceBench<'_>, session: &Session, bytes: u64) -> Result<(), DriverError> {
    let moves = bench.sheet.wants(&move_name(bytes));
    let wanted = |step: &str| {
        bench.sheet.wants(&step_name(step, bytes)) || bench.sheet.wants(&whole_name(step, bytes))
    };
    if STEPS.iter().any(|step| wanted(step))
        && bench.has_room(&step_name(STEPS[0], bytes), WHOLE, false)
    {
        let here = [session.device];
        let figures = repeat(bench.pace, || {
            let mut range = Range::reserve(session, WHOLE)?;
            Ok::<_, DriverError>([
                timed(|| range.create(WHOLE, bytes))?,
                timed(|| range.map(bytes))?,
                timed(|| range.set_access(&here))?,
                timed(|| range.unmap())?,
                timed(|| range.release())?,
            ])
        })?;
        for (step, ns) in STEPS.into_iter().zip(figures) {
            bench.sheet.add(
                &step_name(step, bytes),
                Unit::UsPerHandle,
                ns / (WHOLE / bytes) as f64,
                None,
            );
            bench.sheet.add(&whole_name(step, bytes), Unit::UsPerGib, ns, None);
        }
    }
    if moves {
        let mut range = Range::mapped(session, bytes)?;
        range.set_access(&[session.device])?;
        let [ns] = repeat(bench.pace, || {
            timed(|| {
                range.unmap()?;
                range.map(bytes)?;
                range.set_access(&[session.device])
            })
            .map(|ns| [ns])
        })?;
        bench.sheet.add(&move_name(bytes), Unit::UsPerHandle, ns, None);
    }
    Ok(())
}

fn timed(work: impl FnOnce() -> Result<(), DriverError>) -> Result<f64, DriverError> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed().as_nanos() as f64)
}

/// An event that is destroyed on drop.
struct Event<'a>(&'a dyn Driver, RawEvent);

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: 1. the handle was created for this value, and its copies are no longer used. An
        // event that the driver does not destroy is freed when the process ends.
        let _ = unsafe { self.0.event_destroy(self.1) };
    }
}

/// Measures calls on a completed event and an idle stream.
fn events(bench: &mut DeviceBench<'_>, session: &Session) -> Result<()> {
    if !EVENTS.iter().any(|name| bench.sheet.wants(name)) {
        return Ok(());
    }
    let lost = |e| MemoryError::driver(session.device, e);
    let driver = &*session.driver;
    let streams = StreamPool::new(session.driver.clone(), session.device, 2);
    let (stream, other) = (streams.lease()?, streams.lease()?);
    let (stream, other): (RawStream, RawStream) = (stream.raw(), other.raw());
    let event = Event(driver, driver.event_create(session.device).map_err(lost)?);
    let raw = event.1;
    let outcomes = contest(
        bench.pace,
        vec![
            calling(driver, stream, || {
                driver.event_create(session.device).map(|made| drop(Event(driver, made)))
            }),
            calling(driver, stream, || driver.event_record(raw, stream)),
            calling(driver, stream, || driver.event_query(raw).map(drop)),
            calling(driver, other, || driver.stream_wait_event(other, raw)),
        ],
    );
    for (name, outcome) in EVENTS.into_iter().zip(outcomes) {
        bench.sheet.note(name, outcome.failed);
        bench.sheet.add(name, Unit::NsPerCall, outcome.each, None);
    }
    Ok(())
}

/// Returns a contender that repeats one call. `stream` is idle again before the next lap.
fn calling<'a>(
    driver: &'a dyn Driver,
    stream: RawStream,
    call: impl Fn() -> Result<(), DriverError> + 'a,
) -> Contender<'a> {
    Box::new(move |count| {
        let mut failed = Failed::default();
        let begun = Instant::now();
        for _ in 0..count {
            if let Err(refused) = call() {
                failed.note(&refused);
            }
        }
        let took = begun.elapsed();
        if let Err(refused) = driver.stream_synchronize(stream) {
            failed.note(&refused);
        }
        let each = took.as_nanos() as f64 / count.max(1) as f64;
        Lap { took, over_all: each, each, failed }
    })
}
