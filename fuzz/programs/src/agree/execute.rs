//! Runs a program on a driver.
#![expect(unsafe_code, reason = "makes driver calls whose conditions the generator has met")]

use super::{
    EVENTS, GRANULE, HOSTS, Made, Operation, Outcome, Part, Place, Program, RANGE,
    host::{Hosts, digest},
};
use aquifer_driver::{
    DeviceId, Driver, HostFlags, PhysicalHandle, Pitched, PoolHandle, RawEvent, RawGraphExec,
    RawStream, Result,
};
use std::{collections::BTreeMap, ptr::NonNull, sync::Arc};

/// Polls before the host blocks instead.
const POLLS: u32 = 1 << 20;
/// The maximum size of the driver's pool.
const POOL: u64 = 256 << 20;

/// The state of a running program.
pub(super) struct Run {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) device: DeviceId,
    pub(super) streams: Vec<RawStream>,
    pub(super) events: Vec<RawEvent>,
    pub(super) pool: PoolHandle,
    pub(super) range: u64,
    pub(super) hosts: Hosts,
    /// Address, size, and whether it is from the pool.
    pub(super) blocks: BTreeMap<usize, (u64, u64, bool)>,
    pub(super) handles: BTreeMap<usize, PhysicalHandle>,
    /// Sizes in granules, by start.
    mappings: BTreeMap<u64, u64>,
    graphs: BTreeMap<usize, RawGraphExec>,
    operation: usize,
    outcome: Outcome,
}

impl Program {
    /// Runs the program in the given device's context and waits for its end. Frees everything that
    /// it allocated.
    ///
    /// # Errors
    /// An error of the set-up: streams, events, a pool, an address range and host buffers. Errors
    /// of the operations are part of the outcome.
    pub fn run(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Outcome> {
        let mut run = Run {
            driver: driver.clone(),
            device,
            hosts: Hosts::new(driver, device)?,
            streams: (0..self.streams)
                .map(|_| driver.stream_create(device, 0))
                .collect::<Result<_>>()?,
            events: (0..EVENTS).map(|_| driver.event_create(device)).collect::<Result<_>>()?,
            pool: driver.pool_create(device, POOL)?,
            range: driver.address_reserve(device, RANGE * GRANULE, GRANULE)?,
            blocks: BTreeMap::new(),
            handles: BTreeMap::new(),
            mappings: BTreeMap::new(),
            graphs: BTreeMap::new(),
            operation: 0,
            outcome: Outcome { bytes: Vec::new(), codes: Vec::new(), made: Vec::new() },
        };
        for (index, operation) in self.operations.iter().enumerate() {
            run.operation = index;
            run.execute(*operation);
        }
        run.operation = self.operations.len();
        run.finish()
    }
}

impl Run {
    /// Records the code of a call and returns its value.
    pub(super) fn note<T>(&mut self, call: &'static str, result: Result<T>) -> Option<T> {
        self.outcome.made.push(Made { operation: self.operation, call });
        self.outcome.codes.push(result.as_ref().map_or_else(|e| e.code, |_| 0));
        result.ok()
    }

    /// Records a call that cannot be made because its object was not created.
    pub(super) fn skip(&mut self, call: &'static str) {
        self.outcome.made.push(Made { operation: self.operation, call });
        self.outcome.codes.push(Outcome::SKIPPED);
    }

    fn address(&self, part: Part) -> Option<u64> {
        let start = match part.place {
            Place::Block(slot) => self.blocks.get(&slot)?.0,
            Place::Mapping(at) => {
                self.mappings.contains_key(&at).then(|| self.range + at * GRANULE)?
            }
        };
        Some(start + part.offset)
    }

    fn execute(&mut self, operation: Operation) {
        match operation {
            Operation::Allocate { slot, bytes } => {
                let result = self.driver.mem_alloc(self.device, bytes);
                if let Some(address) = self.note("mem_alloc", result) {
                    self.blocks.insert(slot, (address, bytes, false));
                }
            }
            Operation::PoolAllocate { slot, stream, bytes } => {
                let result = self.driver.pool_alloc(self.pool, self.streams[stream], bytes);
                if let Some(address) = self.note("pool_alloc", result) {
                    self.blocks.insert(slot, (address, bytes, true));
                }
            }
            Operation::Free { slot } => self.free(slot, None),
            Operation::PoolFree { slot, stream } => self.free(slot, Some(stream)),
            Operation::Create { handle, granules } => {
                let result = self.driver.handle_create(self.device, granules * GRANULE);
                if let Some(raw) = self.note("handle_create", result) {
                    self.handles.insert(handle, raw);
                }
            }
            Operation::Release { handle } => self.release(handle),
            Operation::Map { handle, at, granules } => self.map(handle, at, granules),
            Operation::Unmap { at, .. } => self.unmap(at),
            Operation::Fill { stream, to, byte } => {
                let Some(address) = self.address(to) else { return self.skip("fill") };
                // SAFETY: 1. the part is mapped until the host has waited for the stream. 2. the
                // program has no races.
                let result =
                    unsafe { self.driver.fill(self.streams[stream], address, byte, to.bytes) };
                self.note("fill", result);
            }
            Operation::Upload { stream, from, to } => {
                let Some(address) = self.address(to) else { return self.skip("copy_to_device") };
                let host = self.hosts.address(from);
                // SAFETY: 1. both sides live until the host has waited for the stream. 2. the
                // program has no races.
                let result = unsafe {
                    self.driver.copy_to_device(self.streams[stream], address, host, from.bytes)
                };
                self.note("copy_to_device", result);
            }
            Operation::Download { stream, from, to } => {
                let Some(address) = self.address(from) else { return self.skip("copy_to_host") };
                let host = self.hosts.address(to);
                // SAFETY: 1. and 2. as above.
                let result = unsafe {
                    self.driver.copy_to_host(self.streams[stream], host, address, to.bytes)
                };
                self.note("copy_to_host", result);
            }
            Operation::Copy { stream, from, to } => {
                let (Some(source), Some(address)) = (self.address(from), self.address(to)) else {
                    return self.skip("copy_on_device");
                };
                // SAFETY: 1. both are mapped until the host has waited for the stream. 2. the
                // program has no races.
                let result = unsafe {
                    self.driver.copy_on_device(self.streams[stream], address, source, to.bytes)
                };
                self.note("copy_on_device", result);
            }
            Operation::FillWith { stream, to, pattern } => {
                let Some(address) = self.address(to) else { return self.skip("fill_with") };
                let count = to.bytes / pattern.bytes();
                // SAFETY: 1. and 2. as above.
                let result =
                    unsafe { self.driver.fill_with(self.streams[stream], address, pattern, count) };
                self.note("fill_with", result);
            }
            Operation::FillRows { stream, to, pattern, pitch, rows } => {
                let Some(start) = self.address(to) else { return self.skip("fill_2d") };
                let to = Pitched { start, pitch };
                // SAFETY: 1. and 2. as above: the rows lie in the part.
                let result =
                    unsafe { self.driver.fill_2d(self.streams[stream], to, pattern, rows) };
                self.note("fill_2d", result);
            }
            Operation::UploadRows { stream, from, from_pitch, to, to_pitch, rows } => {
                let Some(start) = self.address(to) else { return self.skip("copy_2d_to_device") };
                let to = Pitched { start, pitch: to_pitch };
                let from = Pitched { start: self.hosts.address(from), pitch: from_pitch };
                // SAFETY: 1. and 2. as above: the rows lie in their parts.
                let result =
                    unsafe { self.driver.copy_2d_to_device(self.streams[stream], to, from, rows) };
                self.note("copy_2d_to_device", result);
            }
            Operation::DownloadRows { stream, from, from_pitch, to, to_pitch, rows } => {
                let Some(start) = self.address(from) else { return self.skip("copy_2d_to_host") };
                let from = Pitched { start, pitch: from_pitch };
                let to = Pitched { start: self.hosts.address(to), pitch: to_pitch };
                // SAFETY: 1. and 2. as above: the rows lie in their parts.
                let result =
                    unsafe { self.driver.copy_2d_to_host(self.streams[stream], to, from, rows) };
                self.note("copy_2d_to_host", result);
            }
            Operation::CopyRows { stream, from, from_pitch, to, to_pitch, rows } => {
                let (Some(source), Some(start)) = (self.address(from), self.address(to)) else {
                    return self.skip("copy_2d_on_device");
                };
                let from = Pitched { start: source, pitch: from_pitch };
                let to = Pitched { start, pitch: to_pitch };
                // SAFETY: 1. and 2. as above: the rows lie in their parts, which do not overlap.
                let result =
                    unsafe { self.driver.copy_2d_on_device(self.streams[stream], to, from, rows) };
                self.note("copy_2d_on_device", result);
            }
            Operation::Write { to, seed } => self.hosts.write(to, seed),
            Operation::Record { event, stream } => {
                let result = self.driver.event_record(self.events[event], self.streams[stream]);
                self.note("event_record", result);
            }
            Operation::Wait { stream, event } => {
                let result =
                    self.driver.stream_wait_event(self.streams[stream], self.events[event]);
                self.note("stream_wait_event", result);
            }
            Operation::Synchronize { stream } => {
                let result = self.driver.stream_synchronize(self.streams[stream]);
                self.note("stream_synchronize", result);
            }
            Operation::SynchronizeEvent { event } => {
                let result = self.driver.event_synchronize(self.events[event]);
                self.note("event_synchronize", result);
            }
            Operation::Poll { stream } => {
                let (driver, stream) = (&self.driver, self.streams[stream]);
                let result =
                    poll(|| driver.stream_query(stream), || driver.stream_synchronize(stream));
                self.note("stream_query", result);
            }
            Operation::PollEvent { event } => {
                let (driver, event) = (&self.driver, self.events[event]);
                let result = poll(|| driver.event_query(event), || driver.event_synchronize(event));
                self.note("event_query", result);
            }
            Operation::CaptureBegin { stream, mode } => {
                let result = self.driver.capture_begin(self.streams[stream], mode);
                self.note("capture_begin", result);
            }
            Operation::CaptureEnd { stream, graph } => self.capture_end(stream, graph),
            Operation::Launch { graph, stream } => {
                let Some(&exec) = self.graphs.get(&graph) else { return self.skip("graph_launch") };
                // SAFETY: 1. what its nodes use lives until the host has waited for the stream. 2.
                // the program has no races.
                let result = unsafe { self.driver.graph_launch(exec, self.streams[stream]) };
                self.note("graph_launch", result);
            }
            Operation::GraphEnd { graph } => {
                let Some(exec) = self.graphs.remove(&graph) else {
                    return self.skip("graph_exec_destroy");
                };
                // SAFETY: 1. the only copy was just removed.
                let result = unsafe { self.driver.graph_exec_destroy(exec) };
                self.note("graph_exec_destroy", result);
            }
            Operation::Mistake(fault) => self.mistake(fault),
        }
    }

    fn capture_end(&mut self, stream: usize, graph: usize) {
        let result = self.driver.capture_end(self.streams[stream]);
        let Some(captured) = self.note("capture_end", result) else {
            self.skip("graph_instantiate");
            return self.skip("graph_destroy");
        };
        let result = self.driver.graph_instantiate(captured);
        if let Some(exec) = self.note("graph_instantiate", result) {
            self.graphs.insert(graph, exec);
        }
        // SAFETY: 1. no copy of the handle is kept.
        let result = unsafe { self.driver.graph_destroy(captured) };
        self.note("graph_destroy", result);
    }

    fn map(&mut self, handle: usize, at: u64, granules: u64) {
        let Some(&raw) = self.handles.get(&handle) else { return self.skip("map") };
        let (address, bytes) = (self.range + at * GRANULE, granules * GRANULE);
        // SAFETY: 1. nothing is mapped there, and the host has waited for all earlier uses of the
        // addresses.
        let result = unsafe { self.driver.map(address, bytes, raw) };
        if self.note("map", result).is_none() {
            return self.skip("set_access");
        }
        let result = self.driver.set_access(address, bytes, &[self.device]);
        self.note("set_access", result);
        self.mappings.insert(at, granules);
    }

    fn unmap(&mut self, at: u64) {
        let Some(granules) = self.mappings.remove(&at) else { return self.skip("unmap") };
        // SAFETY: 1. the host has waited for all work that uses these addresses.
        let result = unsafe {
            self.driver.unmap(self.device, self.range + at * GRANULE, granules * GRANULE)
        };
        self.note("unmap", result);
    }

    fn free(&mut self, slot: usize, stream: Option<usize>) {
        let call = if stream.is_some() { "pool_free" } else { "mem_free" };
        let Some((address, ..)) = self.blocks.remove(&slot) else { return self.skip(call) };
        // SAFETY: 1. the block is freed to the allocator that it came from. 2. every use is ordered
        // before the free, for the stream or for the host.
        let result = unsafe {
            match stream {
                Some(stream) => self.driver.pool_free(self.streams[stream], address),
                None => self.driver.mem_free(self.device, address),
            }
        };
        self.note(call, result);
    }

    fn release(&mut self, handle: usize) {
        let Some(raw) = self.handles.remove(&handle) else { return self.skip("handle_release") };
        // SAFETY: 1. the only copy was just removed.
        let result = unsafe { self.driver.handle_release(raw) };
        self.note("handle_release", result);
    }

    /// Waits for all work, reads all contents, and frees everything.
    fn finish(mut self) -> Result<Outcome> {
        for stream in self.streams.clone() {
            let result = self.driver.stream_synchronize(stream);
            self.note("stream_synchronize", result);
        }
        self.read_all()?;

        let blocks: Vec<_> =
            self.blocks.iter().map(|(&slot, &(.., pooled))| (slot, pooled.then_some(0))).collect();
        for (slot, stream) in blocks {
            self.free(slot, stream);
        }
        for at in self.mappings.keys().copied().collect::<Vec<_>>() {
            self.unmap(at);
        }
        for handle in self.handles.keys().copied().collect::<Vec<_>>() {
            self.release(handle);
        }
        let result = self.driver.stream_synchronize(self.streams[0]);
        self.note("stream_synchronize", result);
        // SAFETY: throughout: 1. the program owns each of them, none is used any more, and no copy
        // of the handle is kept.
        unsafe {
            let result = self.driver.address_free(self.device, self.range, RANGE * GRANULE);
            self.note("address_free", result);
            let result = self.driver.pool_destroy(self.pool);
            self.note("pool_destroy", result);
            for event in std::mem::take(&mut self.events) {
                let result = self.driver.event_destroy(event);
                self.note("event_destroy", result);
            }
            for stream in std::mem::take(&mut self.streams) {
                let result = self.driver.stream_destroy(stream);
                self.note("stream_destroy", result);
            }
        }
        let mut ended = Vec::new();
        self.hosts.end(|call, result| ended.push((call, result)));
        for (call, result) in ended {
            self.note(call, result);
        }
        Ok(self.outcome)
    }

    /// Computes the digests of every block, every mapping and every host buffer.
    fn read_all(&mut self) -> Result<()> {
        let blocks = self.blocks.values().map(|&(address, bytes, _)| (address, bytes));
        let mappings = self
            .mappings
            .iter()
            .map(|(&at, &granules)| (self.range + at * GRANULE, granules * GRANULE));
        let parts: Vec<_> = blocks.chain(mappings).collect();
        let largest = parts.iter().map(|&(_, bytes)| bytes).max().unwrap_or(1) as usize;
        let scratch = self.driver.host_alloc(self.device, largest, HostFlags::default())?;
        let digests =
            parts.into_iter().map(|(address, bytes)| self.read(scratch, address, bytes as usize));
        let digests: Result<Vec<_>> = digests.collect();
        // SAFETY: 1. it came from the driver. 2. every copy into it is complete.
        unsafe { self.driver.host_free(self.device, scratch) }?;
        let hosts = (0..HOSTS.len()).map(|host| self.hosts.digest(host));
        self.outcome.bytes = digests?.into_iter().chain(hosts).flat_map(u64::to_le_bytes).collect();
        Ok(())
    }

    fn read(&self, scratch: NonNull<u8>, address: u64, bytes: usize) -> Result<u64> {
        let stream = self.streams[0];
        // SAFETY: 1. `scratch` has room, the range is mapped, and the stream is waited for below.
        // 2. every stream has been waited for before.
        unsafe { self.driver.copy_to_host(stream, scratch, address, bytes) }?;
        self.driver.stream_synchronize(stream)?;
        // SAFETY: 1. the copy has written this many bytes, and is complete.
        Ok(digest(unsafe { std::slice::from_raw_parts(scratch.as_ptr(), bytes) }))
    }
}

/// Polls until the result is `true`, and blocks after too many polls.
fn poll(mut ask: impl FnMut() -> Result<bool>, wait: impl FnOnce() -> Result<()>) -> Result<()> {
    for _ in 0..POLLS {
        if ask()? {
            return Ok(());
        }
        std::thread::yield_now();
    }
    wait()
}
