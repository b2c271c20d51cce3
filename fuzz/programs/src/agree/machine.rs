//! The driver calls of a program, and what they answered.
#![expect(unsafe_code, reason = "makes driver calls whose conditions the generator has met")]

use super::{
    EVENTS, GRANULE, HOSTS, HostPart, Outcome, Part, Place, RANGE,
    host::{Hosts, digest},
};
use aquifer_driver::{
    DeviceId, Driver, ExportTypes, Pattern, PhysicalHandle, PoolHandle, RawEvent, RawStream, Result,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    ptr::NonNull,
    sync::Arc,
};

/// Polls before the host blocks instead.
const POLLS: u32 = 1 << 20;

/// One end of a copy.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Device(Part),
    Host(HostPart),
}

/// What a running program has of a driver. Streams, events, slots and handles are indices.
pub(super) struct Machine {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    streams: Vec<RawStream>,
    events: Vec<RawEvent>,
    pool: PoolHandle,
    range: u64,
    pub(super) hosts: Hosts,
    /// Address, size, and whether it is from the pool.
    blocks: BTreeMap<usize, (u64, u64, bool)>,
    handles: BTreeMap<usize, PhysicalHandle>,
    /// Sizes in granules, by start.
    mappings: BTreeMap<u64, u64>,
    /// Whether no stream waits for another.
    careless: bool,
    /// The calls made so far.
    calls: BTreeSet<&'static str>,
}

impl Machine {
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        streams: usize,
        careless: bool,
    ) -> Result<Self> {
        Ok(Self {
            driver: driver.clone(),
            device,
            hosts: Hosts::new(driver, device)?,
            streams: (0..streams)
                .map(|_| driver.stream_create(device, 0))
                .collect::<Result<_>>()?,
            events: (0..EVENTS).map(|_| driver.event_create(device)).collect::<Result<_>>()?,
            pool: driver.pool_create(device)?,
            range: driver.address_reserve(device, RANGE * GRANULE, GRANULE)?,
            blocks: BTreeMap::new(),
            handles: BTreeMap::new(),
            mappings: BTreeMap::new(),
            careless,
            calls: BTreeSet::new(),
        })
    }

    /// Notes a call and returns its value. Programs are valid, so a driver refuses none of theirs.
    fn made<T>(&mut self, call: &'static str, result: Result<T>) -> T {
        self.calls.insert(call);
        match result {
            Ok(value) => value,
            Err(refused) => panic!("{call}: {refused}"),
        }
    }

    fn address(&self, part: Part) -> u64 {
        let start = match part.place {
            Place::Block(slot) => self.blocks[&slot].0,
            Place::Mapping(at) => self.range + at * GRANULE,
        };
        start + part.offset
    }

    /// Allocates a block, from the driver's pool if a stream is named.
    pub(super) fn allocate(&mut self, slot: usize, stream: Option<usize>, bytes: u64) {
        let address = match stream {
            Some(stream) => {
                let result = self.driver.pool_alloc(self.pool, self.streams[stream], bytes);
                self.made("pool_alloc", result)
            }
            None => {
                let result = self.driver.mem_alloc(self.device, bytes);
                self.made("mem_alloc", result)
            }
        };
        self.blocks.insert(slot, (address, bytes, stream.is_some()));
    }

    /// Frees a block, in the order of a stream if it is from the pool.
    pub(super) fn free(&mut self, slot: usize, stream: Option<usize>) {
        let Some((address, ..)) = self.blocks.remove(&slot) else { return };
        // SAFETY: 1. the block is freed to the allocator that it came from. 2. every use is ordered
        // before the free, for the stream or for the host.
        let result = unsafe {
            match stream {
                Some(stream) => self.driver.pool_free(self.streams[stream], address),
                None => self.driver.mem_free(self.device, address),
            }
        };
        self.made(if stream.is_some() { "pool_free" } else { "mem_free" }, result);
    }

    /// Creates physical memory.
    pub(super) fn create(&mut self, handle: usize, granules: u64) {
        let result = self.driver.handle_create(self.device, granules * GRANULE, ExportTypes::NONE);
        let raw = self.made("handle_create", result);
        self.handles.insert(handle, raw);
    }

    /// Releases physical memory. It stays alive while it is mapped.
    pub(super) fn release(&mut self, handle: usize) {
        let Some(raw) = self.handles.remove(&handle) else { return };
        // SAFETY: 1. the only copy was just removed.
        let result = unsafe { self.driver.handle_release(raw) };
        self.made("handle_release", result);
    }

    /// Maps a whole handle and gives the device access.
    pub(super) fn map(&mut self, handle: usize, at: u64, granules: u64) {
        let (address, bytes) = (self.range + at * GRANULE, granules * GRANULE);
        // SAFETY: 1. nothing is mapped there, and the host has waited for all earlier uses of the
        // addresses.
        let result = unsafe { self.driver.map(address, bytes, self.handles[&handle]) };
        self.made("map", result);
        let result = self.driver.set_access(address, bytes, &[self.device]);
        self.made("set_access", result);
        self.mappings.insert(at, granules);
    }

    pub(super) fn unmap(&mut self, at: u64) {
        let Some(granules) = self.mappings.remove(&at) else { return };
        // SAFETY: 1. the host has waited for all work that uses these addresses.
        let result = unsafe {
            self.driver.unmap(self.device, self.range + at * GRANULE, granules * GRANULE)
        };
        self.made("unmap", result);
    }

    pub(super) fn fill(&mut self, stream: usize, to: Part, byte: u8) {
        let address = self.address(to);
        // SAFETY: 1. the part is mapped until the host has waited for the stream. 2. the program
        // has no races.
        let result = unsafe { self.driver.fill(self.streams[stream], address, byte, to.bytes) };
        self.made("fill", result);
    }

    /// Fills device memory with elements. The part is aligned to their size.
    pub(super) fn fill_with(&mut self, stream: usize, to: Part, pattern: Pattern) {
        let (address, count) = (self.address(to), to.bytes / pattern.bytes());
        // SAFETY: 1. and 2. as above.
        let result =
            unsafe { self.driver.fill_with(self.streams[stream], address, pattern, count) };
        self.made("fill_with", result);
    }

    /// Copies all of a part. The two sides never overlap.
    pub(super) fn copy(&mut self, stream: usize, from: Side, to: Side) {
        let (driver, stream) = (&self.driver, self.streams[stream]);
        // SAFETY: throughout: 1. both sides live until the host has waited for the stream. 2. the
        // program has no races.
        let (call, result) = unsafe {
            match (from, to) {
                (Side::Host(from), Side::Device(to)) => {
                    let (to, start) = (self.address(to), self.hosts.address(from));
                    ("copy_to_device", driver.copy_to_device(stream, to, start, from.bytes))
                }
                (Side::Device(from), Side::Host(to)) => {
                    let (start, from) = (self.hosts.address(to), self.address(from));
                    ("copy_to_host", driver.copy_to_host(stream, start, from, to.bytes))
                }
                (Side::Device(from), Side::Device(to)) => {
                    let (start, from) = (self.address(to), self.address(from));
                    ("copy_on_device", driver.copy_on_device(stream, start, from, to.bytes))
                }
                (Side::Host(_), Side::Host(_)) => return,
            }
        };
        self.made(call, result);
    }

    pub(super) fn record(&mut self, event: usize, stream: usize) {
        let result = self.driver.event_record(self.events[event], self.streams[stream]);
        self.made("event_record", result);
    }

    pub(super) fn wait(&mut self, stream: usize, event: usize) {
        if !self.careless {
            let result = self.driver.stream_wait_event(self.streams[stream], self.events[event]);
            self.made("stream_wait_event", result);
        }
    }

    pub(super) fn synchronize(&mut self, stream: usize) {
        let result = self.driver.stream_synchronize(self.streams[stream]);
        self.made("stream_synchronize", result);
    }

    pub(super) fn synchronize_event(&mut self, event: usize) {
        let result = self.driver.event_synchronize(self.events[event]);
        self.made("event_synchronize", result);
    }

    pub(super) fn poll(&mut self, stream: usize) {
        let (driver, stream) = (&self.driver, self.streams[stream]);
        let result = poll(|| driver.stream_query(stream), || driver.stream_synchronize(stream));
        self.made("stream_query", result);
    }

    pub(super) fn poll_event(&mut self, event: usize) {
        let (driver, event) = (&self.driver, self.events[event]);
        let result = poll(|| driver.event_query(event), || driver.event_synchronize(event));
        self.made("event_query", result);
    }

    /// Waits for all work, reads all contents, and frees everything.
    pub(super) fn finish(mut self) -> Result<Outcome> {
        (0..self.streams.len()).for_each(|stream| self.synchronize(stream));
        let contents = self.read_all()?;
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
        self.synchronize(0);
        // SAFETY: throughout: 1. the program owns each of them, none is used any more, and no copy
        // of the handle is kept.
        unsafe {
            let result = self.driver.address_free(self.device, self.range, RANGE * GRANULE);
            self.made("address_free", result);
            let result = self.driver.pool_destroy(self.pool);
            self.made("pool_destroy", result);
            for event in std::mem::take(&mut self.events) {
                let result = self.driver.event_destroy(event);
                self.made("event_destroy", result);
            }
            for stream in std::mem::take(&mut self.streams) {
                let result = self.driver.stream_destroy(stream);
                self.made("stream_destroy", result);
            }
        }
        let mut ended = Vec::new();
        self.hosts.end(|call, result| ended.push((call, result)));
        for (call, result) in ended {
            self.made(call, result);
        }
        Ok(Outcome { contents, calls: self.calls })
    }

    /// Computes the digests of every block, every mapping and every host buffer.
    fn read_all(&self) -> Result<Vec<u64>> {
        let blocks = self.blocks.values().map(|&(address, bytes, _)| (address, bytes));
        let mappings = self
            .mappings
            .iter()
            .map(|(&at, &granules)| (self.range + at * GRANULE, granules * GRANULE));
        let parts: Vec<_> = blocks.chain(mappings).collect();
        let largest = parts.iter().map(|&(_, bytes)| bytes).max().unwrap_or(1) as usize;
        let scratch = self.driver.host_alloc(self.device, largest, false)?;
        let digests =
            parts.into_iter().map(|(address, bytes)| self.read(scratch, address, bytes as usize));
        let digests: Result<Vec<_>> = digests.collect();
        // SAFETY: 1. it came from the driver. 2. every copy into it is complete.
        unsafe { self.driver.host_free(self.device, scratch) }?;
        let hosts = (0..HOSTS.len()).map(|host| self.hosts.digest(host));
        Ok(digests?.into_iter().chain(hosts).collect())
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
