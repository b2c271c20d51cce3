//! Machines and small programs that the simulator's tests share.
#![allow(unsafe_code, unreachable_pub, reason = "plays the caller of unsafe calls")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fixture that fails fails its test"
)]

use aquifer_driver::{
    Access, CaptureMode, DeviceId, DeviceRange, Driver, DriverError, ExportTypes, PhysicalHandle,
    RawEvent, RawGraphExec, RawStream,
    sim::{Sim, Violation, ViolationKind},
};
use std::{ptr::NonNull, sync::Arc, time::Duration};

pub const GPU: DeviceId = DeviceId(0);
pub const GRANULE: u64 = 2 << 20;
/// Longer than any operation takes on any machine, unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Runs an expression under this source line, and returns its value and the line.
macro_rules! at {
    ($work:expr) => {{
        let _site = aquifer_driver::site::enter();
        ($work, line!())
    }};
}

/// A machine and its driver.
pub struct Machine {
    pub sim: Sim,
    pub driver: Arc<dyn Driver>,
}

impl Machine {
    pub fn new(sim: Sim) -> Self {
        let driver = sim.driver();
        Self { sim, driver }
    }

    pub fn stream(&self) -> RawStream {
        self.driver.stream_create(GPU, 0).unwrap()
    }

    pub fn alloc(&self, bytes: u64) -> DeviceRange {
        DeviceRange { device: GPU, address: self.driver.mem_alloc(GPU, bytes).unwrap(), bytes }
    }

    /// Returns an event recorded after all work queued on a stream.
    pub fn fence(&self, stream: RawStream) -> RawEvent {
        let event = self.driver.event_create(stream.device()).unwrap();
        self.driver.event_record(event, stream).unwrap();
        event
    }

    /// Ends a capture and returns the number of nodes of its graph.
    pub fn end_capture(&self, stream: RawStream) -> Result<u64, DriverError> {
        let graph = self.driver.capture_end(stream)?;
        let nodes = self.sim.graph_nodes(graph).unwrap();
        // SAFETY: 1. The handle was this function's own.
        unsafe { self.driver.graph_destroy(graph) }?;
        Ok(nodes)
    }

    /// Captures what `work` queues on a stream, and returns an executable.
    pub fn exec(&self, stream: RawStream, work: impl FnOnce()) -> RawGraphExec {
        self.driver.capture_begin(stream, CaptureMode::ThreadLocal).unwrap();
        work();
        let graph = self.driver.capture_end(stream).unwrap();
        let exec = self.driver.graph_instantiate(graph).unwrap();
        // SAFETY: 1. The handle was this function's own.
        unsafe { self.driver.graph_destroy(graph) }.unwrap();
        exec
    }

    pub fn launch(&self, exec: RawGraphExec, stream: RawStream) {
        // SAFETY: 1. and 2. The simulator checks what this asks for.
        unsafe { self.driver.graph_launch(exec, stream) }.unwrap();
    }

    /// Makes one stream wait for all work queued on another.
    pub fn order(&self, first: RawStream, then: RawStream) {
        self.driver.stream_wait_event(then, self.fence(first)).unwrap();
    }

    pub fn reserve(&self, bytes: u64) -> u64 {
        self.driver.address_reserve(GPU, bytes, 0).unwrap()
    }

    pub fn handle(&self, bytes: u64) -> PhysicalHandle {
        self.driver.handle_create(GPU, bytes, ExportTypes::NONE).unwrap()
    }

    /// Returns one granule, mapped in a range of its own with access.
    pub fn granule(&self) -> (DeviceRange, PhysicalHandle) {
        let handle = self.handle(GRANULE);
        let address = self.reserve(GRANULE);
        self.map(address, handle);
        (DeviceRange { device: GPU, address, bytes: GRANULE }, handle)
    }

    pub fn map(&self, address: u64, handle: PhysicalHandle) {
        // SAFETY: 1. The simulator checks what this asks for.
        unsafe { self.driver.map(address, GRANULE, handle) }.unwrap();
        self.driver.set_access(address, GRANULE, &[GPU]).unwrap();
    }

    pub fn unmap(&self, address: u64) {
        // SAFETY: 1. The simulator checks what this asks for.
        unsafe { self.driver.unmap(GPU, address, GRANULE) }.unwrap();
    }

    /// Allocates pinned memory of the driver.
    pub fn pinned(&self, bytes: usize) -> NonNull<u8> {
        self.driver.host_alloc(GPU, bytes, false).unwrap()
    }

    pub fn write(&self, stream: RawStream, range: DeviceRange) {
        self.sim.access(stream, range, Access::Write, None).unwrap();
    }

    pub fn read(&self, stream: RawStream, range: DeviceRange) {
        self.sim.access(stream, range, Access::Read, None).unwrap();
    }

    #[track_caller]
    pub fn silent(&self) {
        let found = self.sim.violations();
        assert!(found.is_empty(), "{:?}: {}", self.sim.config(), found[0]);
    }

    /// Takes the violations, which must be one fault of this kind between these two lines of
    /// `file`.
    #[track_caller]
    pub fn only(&self, kind: ViolationKind, file: &str, earlier: u32, later: u32) -> Violation {
        let mut found = self.sim.take_violations();
        assert_eq!(found.len(), 1, "{:?}: {found:#?}", self.sim.config());
        let fault = found.remove(0);
        check(&fault, kind, file, Some(earlier), later);
        fault
    }

    /// Takes the violations, the first of which must be of this kind between these two lines.
    #[track_caller]
    pub fn first(
        &self,
        kind: ViolationKind,
        file: &str,
        earlier: Option<u32>,
        later: u32,
    ) -> Violation {
        let found = self.sim.take_violations();
        let fault = found.first().expect("nothing was found").clone();
        check(&fault, kind, file, earlier, later);
        fault
    }
}

#[track_caller]
fn check(fault: &Violation, kind: ViolationKind, file: &str, earlier: Option<u32>, later: u32) {
    assert_eq!(fault.kind, kind, "{fault}");
    let lines = (fault.earlier.map(|party| party.site.line()), fault.later.site.line());
    assert_eq!(lines, (earlier, later), "{fault}");
    assert!(fault.later.site.file().ends_with(file), "{fault}");
    let text = fault.to_string();
    assert!(text.contains(&format!("{file}:{later}")), "{text}");
    if let Some(earlier) = earlier {
        assert!(text.contains(&format!("{file}:{earlier}")), "{text}");
    }
}

/// Runs a test in both modes with every schedule: the oracle's findings depend on neither.
pub fn everywhere(test: impl Fn(&Machine)) {
    let bytes = || Sim::h200(1).capacity(256 << 20);
    let symbolic = || Sim::h200(1).symbolic();
    for sim in [
        symbolic(),
        bytes(),
        symbolic().stepped(),
        bytes().stepped(),
        symbolic().seeded(7),
        bytes().seeded(8),
    ] {
        test(&Machine::new(sim));
    }
}
