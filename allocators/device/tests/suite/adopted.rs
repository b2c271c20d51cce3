//! Tests of memory adopted from another library: it is ordered with that library's work when it is
//! taken over and when it is returned.
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]
#![allow(clippy::mem_forget, clippy::forget_non_drop, reason = "that is what is tested")]
#![allow(unsafe_code, reason = "plays another library")]

use crate::support::{PATIENCE, Rig};
use aquifer_core::{DriverError, MemoryError, Result};
use aquifer_device::{Adopted, Declined};
use aquifer_driver::{
    Access, Call, DeviceId, DeviceRange, External, Foreign, KeepAlive, Operand, RawStream, Typed,
    sim::Sim,
};
use aquifer_stream::Stream;
use std::{
    mem::forget,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

const GPU: DeviceId = DeviceId(0);
const BYTES: u64 = 4096;

/// A library with its own stream, which frees memory in the order of that stream.
struct Library {
    sim: Sim,
    stream: RawStream,
    freed: Arc<AtomicU32>,
}

/// The library's handle of a piece of memory.
struct Tensor {
    sim: Sim,
    stream: RawStream,
    range: DeviceRange,
    freed: Arc<AtomicU32>,
    /// Whether the memory is freed immediately, as by an unmap, rather than in stream order.
    at_once: bool,
}

impl Library {
    fn new(sim: &Sim) -> Self {
        let stream = sim.driver().stream_create(GPU, 0).unwrap();
        Self { sim: sim.clone(), stream, freed: Arc::default() }
    }

    fn tensor(&self, at_once: bool) -> Tensor {
        let address = self.sim.driver().mem_alloc(GPU, BYTES).unwrap();
        let range = DeviceRange { device: GPU, address, bytes: BYTES };
        let (sim, freed) = (self.sim.clone(), self.freed.clone());
        Tensor { sim, stream: self.stream, range, freed, at_once }
    }

    /// Runs a kernel of the library.
    fn works_on(&self, range: DeviceRange) {
        self.sim.access(self.stream, range, Access::ReadWrite, None).unwrap();
    }

    /// Hands the tensor over as an unknown library would.
    fn external(&self, tensor: Tensor) -> External<u32, Tensor> {
        let (range, at_once) = (tensor.range, tensor.at_once);
        let alive: KeepAlive = Arc::new(());
        // SAFETY: 1. the tensor owns its range. 2. the library uses one stream. 3. it is freed in
        // that stream's order, or `at_once` is declared below. 4. the stream lives as long as the
        // machine.
        let external = unsafe { External::new(range, self.stream, Some(alive), tensor) };
        if at_once { external.ending_at_once() } else { external }
    }

    fn freed(&self) -> u32 {
        self.freed.load(Ordering::Relaxed)
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.freed.fetch_add(1, Ordering::Relaxed);
        if self.at_once {
            // SAFETY: 1. allocated for this tensor. 2. the code that drops it promises this, and
            // the oracle checks it.
            unsafe { self.sim.driver().mem_free(GPU, self.range.address) }.unwrap();
        } else {
            // A stream-ordered pool would give this memory to the next kernel of the stream.
            self.sim.access(self.stream, self.range, Access::Write, None).unwrap();
        }
    }
}

fn rigs() -> impl Iterator<Item = Rig> {
    (0..24).map(|seed| Rig::on(Sim::h200(1).seeded(seed), 64, |_| ()))
}

/// Adopts a tensor that its library has just written, and uses it on two other streams.
fn used(
    rig: &Rig,
    library: &Library,
    at_once: bool,
) -> (Adopted<External<u32, Tensor>>, [Stream; 2]) {
    let (s, u) = (rig.stream(), rig.stream());
    let tensor = library.tensor(at_once);
    library.works_on(tensor.range);
    let mut x = Adopted::new(rig.pool.streams(), library.external(tensor)).unwrap();
    s.fill(&mut x, 7).unwrap();
    let mut back = rig.pool.buffer::<u32>(&u, 1024).unwrap();
    u.copy(&x, &mut back).unwrap();
    u.fill(&mut x.slice_mut(0..10).unwrap(), 8).unwrap();
    (x, [s, u])
}

#[test]
fn foreign_memory_is_ordered_with_its_library_on_adoption_and_return() {
    for rig in rigs() {
        let library = Library::new(&rig.sim);
        let (x, [s, _u]) = used(&rig, &library, false);
        assert_eq!((x.len(), x.range().bytes), (1024, BYTES));
        let mut back = vec![0; 1024];
        s.scope(|c| c.download(&x, &mut back)).unwrap().unwrap();
        assert!(back[..10].iter().all(|&n| n == 8) && back[10..].iter().all(|&n| n == 7));
        let tensor = x.into_inner().unwrap().into_guard();
        library.works_on(tensor.range);
        assert_eq!(library.freed(), 0);
        drop(tensor);
        rig.assert_silent();
    }
}

#[test]
fn foreign_memory_freed_immediately_waits_for_every_use() {
    for rig in rigs() {
        let library = Library::new(&rig.sim);
        let (x, _streams) = used(&rig, &library, true);
        drop(x);
        let (y, _streams) = used(&rig, &library, true);
        drop(y.into_inner().unwrap().into_guard());
        assert_eq!(library.freed(), 2);
        rig.assert_silent();
    }
}

#[test]
fn forgotten_foreign_memory_is_leaked_and_never_races() {
    for rig in rigs() {
        let library = Library::new(&rig.sim);
        let (x, _streams) = used(&rig, &library, false);
        forget(x);
        let (x, _streams) = used(&rig, &library, false);
        drop(x);
        assert_eq!(library.freed(), 1);
        rig.assert_silent();
    }
}

#[test]
fn an_open_use_keeps_foreign_memory_until_it_ends() {
    let rig = Rig::stepped(64);
    let library = Library::new(&rig.sim);
    let (x, [_, u]) = used(&rig, &library, false);
    let held = x.buffer().block().prepare(&u, Access::Write).unwrap();
    let declined = x.into_inner().unwrap_err();
    assert!(matches!(declined.error, MemoryError::Busy { .. }), "{declined}");
    drop(declined.value);
    let (y, _streams) = used(&rig, &library, false);
    assert_eq!(library.freed(), 0, "kept");
    held.finish().unwrap();
    drop(y);
    looked_at_again(&rig, &library);
    rig.assert_silent();
}

#[test]
fn a_wait_refused_by_the_driver_keeps_foreign_memory() {
    let rig = Rig::stepped(64);
    let library = Library::new(&rig.sim);
    let (x, _streams) = used(&rig, &library, false);
    // Fail every wait and not only the next one: a drop on any thread of the process polls the kept
    // memory.
    rig.sim.fail_every(Call::StreamWaitEvent, 1, 999);
    let x = x.into_inner().unwrap_err().value;
    drop(x);
    assert_eq!(library.freed(), 0);
    rig.sim.clear_failures();
    drop(used(&rig, &library, false));
    looked_at_again(&rig, &library);
    rig.assert_silent();
}

/// Asserts that the kept memory is freed, and also memory dropped beside it. Either this thread
/// frees it or another thread that holds the list.
#[track_caller]
fn looked_at_again(rig: &Rig, library: &Library) {
    let (other, begun) = (Library::new(&rig.sim), Instant::now());
    while library.freed() < 2 {
        assert!(begun.elapsed() < PATIENCE, "{} of 2 are freed", library.freed());
        drop(used(rig, &other, false));
        // The other thread may need the processor.
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(library.freed(), 2);
}

#[test]
fn foreign_memory_on_a_lost_device_is_dropped_immediately() {
    let rig = Rig::stepped(64);
    let library = Library::new(&rig.sim);
    let tensor = Arc::new(());
    let range =
        DeviceRange { device: GPU, address: rig.sim.driver().mem_alloc(GPU, 4).unwrap(), bytes: 4 };
    // SAFETY: 1. to 4. the address is known only here and is never freed.
    let external = unsafe {
        External::<u32, _>::new(range, library.stream, Some(Arc::new(())), tensor.clone())
    };
    let mut x = Adopted::new(rig.pool.streams(), external).unwrap();
    rig.stream().fill(&mut x, 1).unwrap();
    rig.sim.lose_device(GPU);
    drop(x);
    assert_eq!(Arc::strong_count(&tensor), 1);
}

/// A library whose calls can fail.
struct Failing {
    range: DeviceRange,
    stream: RawStream,
    enters: Result<()>,
    leaves: Result<()>,
}

// SAFETY: 1. to 3. no work is ever queued with it.
unsafe impl Foreign for Failing {
    type Item = u32;
    fn range(&self) -> DeviceRange {
        self.range
    }
    fn stream(&self) -> (RawStream, Option<KeepAlive>) {
        (self.stream, None)
    }
    fn enter(&mut self) -> Result<()> {
        self.enters.clone()
    }
    fn leave(&mut self) -> Result<()> {
        self.leaves.clone()
    }
}

#[test]
fn foreign_memory_that_cannot_be_adopted_is_returned_with_the_reason() {
    let rig = Rig::on(Sim::h200(2).stepped(), 64, |_| ());
    let s = rig.stream();
    let range = DeviceRange { device: GPU, address: 1 << 40, bytes: 64 };
    let failing = |range, stream| Failing { range, stream, enters: Ok(()), leaves: Ok(()) };
    let declined = |failing: Failing| -> MemoryError {
        let range = failing.range;
        let Declined { value, error } =
            Adopted::new(rig.pool.streams(), failing).map(drop).unwrap_err();
        assert_eq!(value.range, range);
        error
    };
    let elsewhere = DeviceRange { device: DeviceId(1), ..range };
    let wrong = MemoryError::WrongDevice { expected: GPU, actual: DeviceId(1) };
    assert_eq!(declined(failing(elsewhere, s.raw())), wrong);
    assert_eq!(
        declined(failing(DeviceRange { bytes: 3, ..range }, s.raw())),
        MemoryError::ZeroSize
    );
    // A default stream needs no object that keeps it alive.
    for default in [RawStream::legacy(GPU), RawStream::per_thread(GPU)] {
        // SAFETY: 1. to 4. nothing touches the range.
        let external =
            unsafe { External::<u32, _>::new(range, default, None, failing(range, default)) };
        let adopted = Adopted::new(rig.pool.streams(), external).map_err(|d| d.error).unwrap();
        assert_eq!(adopted.into_inner().unwrap().into_guard().range, range);
    }
    let unknown = rig.sim.driver().stream_create(GPU, 0).unwrap();
    assert_eq!(declined(failing(range, unknown)), MemoryError::UnknownId);

    let error = MemoryError::Driver(DriverError { call: "theirs", code: 1, name: "theirs" });
    let mut bad = failing(range, s.raw());
    bad.enters = Err(error.clone());
    assert_eq!(declined(bad), error);
    let mut bad = failing(range, s.raw());
    bad.leaves = Err(error.clone());
    let x = Adopted::new(rig.pool.streams(), bad).unwrap();
    let back = x.into_inner().map(drop).unwrap_err();
    assert_eq!(back.to_string(), error.to_string());
    assert_eq!(back.value.range(), range, "it is ours still");
}

#[test]
fn foreign_memory_of_a_threads_default_stream_returns_on_that_thread_only() {
    let rig = Rig::new(64);
    let stream = RawStream::per_thread(GPU);
    let library = Library { sim: rig.sim.clone(), stream, freed: Arc::default() };
    let (lend, lent) = mpsc::channel();
    let (give_back, back) = mpsc::channel::<Adopted<External<u32, Tensor>>>();
    thread::scope(|scope| {
        let (rig, library) = (&rig, &library);
        let owner = scope.spawn(move || {
            let (x, _streams) = used(rig, library, false);
            lend.send(x).unwrap();
            let tensor = back.recv().unwrap().into_inner().unwrap().into_guard();
            library.works_on(tensor.range);
        });
        let declined = lent.recv().unwrap().into_inner().unwrap_err();
        assert!(matches!(declined.error, MemoryError::OtherThread { stream: 2 }));
        give_back.send(declined.value).unwrap();
        owner.join().unwrap();
    });
    rig.assert_silent();
}
