//! Helpers that the tests of this crate share.
#![allow(dead_code, reason = "each test binary uses some of it")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a support function that fails is a failed test"
)]
#![allow(unsafe_code, reason = "adopts streams, ends handles, and implements an operand")]

use aquifer_core::Result;
use aquifer_driver::{
    Access, Call, DeviceId, DeviceRange, DriverError, KeepAlive, Operand, OperandMut, RawStream,
    Typed,
    sim::{Sim, SimKernel},
};
use aquifer_stream::{Stream, StreamLifetime, StreamPool, UseList};
use std::{sync::mpsc, thread, time::Duration};

pub(crate) const GPU: DeviceId = DeviceId(0);
/// Longer than any operation takes on any machine, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A pool of streams on a simulated device.
pub(crate) struct Rig {
    pub(crate) sim: Sim,
    pub(crate) pool: StreamPool,
}

impl Rig {
    /// Ends a capture and returns the number of nodes of its graph.
    pub(crate) fn end_capture(&self, stream: RawStream) -> Result<u64, DriverError> {
        let graph = self.sim.driver().capture_end(stream)?;
        let nodes = self.sim.graph_nodes(graph).unwrap();
        // SAFETY: 1. The handle is known only here.
        unsafe { self.sim.driver().graph_destroy(graph) }?;
        Ok(nodes)
    }

    /// Creates a pool on a machine that runs work as it is queued.
    pub(crate) fn new(cap: u32) -> Self {
        Self::on(Sim::h200(1).symbolic(), cap)
    }

    /// Creates a pool on a machine that runs work only when the host waits for it or the test
    /// requests it.
    pub(crate) fn stepped(cap: u32) -> Self {
        Self::on(Sim::h200(1).symbolic().stepped(), cap)
    }

    pub(crate) fn on(sim: Sim, cap: u32) -> Self {
        let pool = StreamPool::new(sim.driver(), GPU, cap);
        Self { sim, pool }
    }

    pub(crate) fn lease(&self) -> Stream {
        self.pool.lease().unwrap()
    }

    /// Returns a stream made by another library.
    pub(crate) fn foreign(&self) -> RawStream {
        self.sim.driver().stream_create(GPU, 0).unwrap()
    }

    /// Destroys a stream as that library would.
    pub(crate) fn destroy(&self, stream: RawStream) {
        // SAFETY: 1. the test's own stream, used from here on only by tests of exactly that.
        unsafe { self.sim.driver().stream_destroy(stream) }.unwrap();
    }

    pub(crate) fn adopt(&self, stream: RawStream, life: StreamLifetime) -> Result<Stream> {
        // SAFETY: 1. a stream of the pool's driver, or a handle that must be refused. 2. the test
        // follows `life`.
        unsafe { self.pool.adopt(stream, life) }
    }

    /// Queues work that touches nothing.
    pub(crate) fn launch(&self, stream: &Stream) {
        self.sim.launch(stream.raw(), SimKernel::new("work")).unwrap();
    }

    /// Tries to queue work on a lost device.
    pub(crate) fn launch_refused(&self, stream: &Stream) {
        self.sim.launch(stream.raw(), SimKernel::new("work")).unwrap_err();
    }

    /// Returns how often a call has been made.
    pub(crate) fn made(&self, call: Call) -> u64 {
        self.sim.driver().calls().get(call)
    }

    #[track_caller]
    pub(crate) fn assert_all_given_back(self) {
        let Self { sim, pool } = self;
        drop(pool);
        assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
        assert!(sim.violations().is_empty(), "{}", sim.violations()[0]);
    }
}

/// Runs `work` on a separate thread, and fails the test instead of hanging with it.
#[track_caller]
pub(crate) fn within<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(work()));
    told.recv_timeout(PATIENCE).expect("this should have come back by now, with an answer")
}

/// Device memory outside any pool, whose uses are recorded.
pub(crate) struct Plain {
    range: DeviceRange,
    streams: StreamPool,
    home: Stream,
    uses: UseList,
}

impl Plain {
    pub(crate) fn new(rig: &Rig, home: &Stream, bytes: u64) -> Self {
        let address = rig.sim.driver().mem_alloc(GPU, bytes).unwrap();
        let range = DeviceRange { device: GPU, address, bytes };
        Self { range, streams: rig.pool.clone(), home: home.clone(), uses: UseList::new() }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let driver = self.home.driver();
        driver.device_synchronize(GPU).unwrap();
        // SAFETY: 1. allocated by `new`. 2. nothing uses it: the device is idle.
        unsafe { driver.mem_free(GPU, self.range.address) }.unwrap();
    }
}

// SAFETY: 1. its own allocation until the drop, which waits for the device. 2. the list orders
// uses, and the memory has no other user.
unsafe impl Operand for Plain {
    fn range(&self) -> DeviceRange {
        self.range
    }

    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        let on = self.streams.timeline(stream, alive)?;
        self.uses.lend(self.range.address, self.home.timeline(), &on, access)
    }
}

// SAFETY: 1. the allocation has no other owner.
unsafe impl OperandMut for Plain {}

impl Typed for Plain {
    type Item = u8;
    fn len(&self) -> usize {
        self.range.bytes as usize
    }
}
