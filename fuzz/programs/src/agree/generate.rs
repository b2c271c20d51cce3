//! Performs a program without races that bytes encode.

use super::{
    EVENTS, GRANULE, HOSTS, HostPart, Outcome, Part, Place, RANGE,
    machine::{Machine, Side},
};
use crate::program::Bytes;
use aquifer_driver::{DeviceId, Driver, Pattern, Result};
use std::sync::Arc;

/// Steps per program. Each is an operation with the ordering that it needs.
const STEPS: usize = 60;
/// Maximum number of live blocks.
const BLOCKS: usize = 8;
/// Maximum number of live handles.
const HANDLES: usize = 3;
/// The largest block, in bytes.
const LARGEST: u64 = 96 << 10;

/// Choices read from bytes. After the last byte every choice is the first option.
struct Choices<'a>(Bytes<'a>);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        self.0.u8()
    }

    /// Returns a number below `bound`, which must not be 0 or exceed 32 bits.
    fn below(&mut self, bound: u64) -> u64 {
        u64::from(self.0.u32()) % bound
    }

    fn index(&mut self, bound: usize) -> usize {
        self.below(bound as u64) as usize
    }

    /// Returns one element of `of`, or `None` if it is empty.
    fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        (!of.is_empty()).then(|| of[self.index(of.len())])
    }

    /// Returns an offset and a length of at least 1, within `size`.
    fn range(&mut self, size: u64) -> (u64, u64) {
        let offset = self.below(size);
        (offset, 1 + self.below(size - offset))
    }
}

/// A vector clock: for each agent (the streams, then the host) the latest count of it that is
/// ordered before.
type Clock = Vec<u32>;

fn join(into: &mut Clock, from: &Clock) {
    for (mine, theirs) in into.iter_mut().zip(from) {
        *mine = (*mine).max(*theirs);
    }
}

/// The last accesses to a piece of memory: the agent, and its count at that time.
#[derive(Clone, Default)]
struct Touched {
    write: Option<(usize, u32)>,
    reads: Vec<(usize, u32)>,
}

/// A live block.
#[derive(Clone, Copy)]
struct Block {
    bytes: u64,
    pooled: bool,
}

/// Physical memory and its mappings.
#[derive(Clone)]
struct Handle {
    granules: u64,
    at: Vec<u64>,
    released: bool,
}

/// Memory that is tracked as one unit: a block, a handle (through any mapping), or a host buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    Block(usize),
    Handle(usize),
    Host(usize),
}

struct Generator<'a> {
    choices: Choices<'a>,
    streams: usize,
    machine: Machine,
    clocks: Vec<Clock>,
    /// The clock at each event's last record.
    events: Vec<Clock>,
    blocks: [Option<Block>; BLOCKS],
    handles: [Option<Handle>; HANDLES],
    touched: Vec<(Memory, Touched)>,
}

/// Performs the program that `bytes` encode, without its waits between streams if it is careless.
pub(super) fn perform(
    bytes: &[u8],
    careless: bool,
    driver: &Arc<dyn Driver>,
    device: DeviceId,
) -> Result<Outcome> {
    let mut choices = Choices(Bytes::new(bytes));
    let streams = 2 + choices.index(2);
    let zero = vec![0; streams + 1];
    let mut generator = Generator {
        choices,
        streams,
        machine: Machine::new(driver, device, streams, careless)?,
        clocks: vec![zero.clone(); streams + 1],
        events: vec![zero; EVENTS],
        blocks: [None; BLOCKS],
        handles: [const { None }; HANDLES],
        touched: Vec::new(),
    };
    for (host, bytes) in HOSTS.into_iter().enumerate() {
        generator.write(HostPart { host, offset: 0, bytes });
    }
    generator.allocate();
    generator.create();
    for _ in 0..STEPS {
        generator.step();
    }
    generator.machine.finish()
}

impl Generator<'_> {
    fn step(&mut self) {
        match self.choices.below(82) {
            0..8 => self.allocate(),
            8..13 => self.free(),
            13..17 => self.create(),
            17..22 => self.alias(),
            22..27 => self.unmap(),
            27..29 => self.release(),
            29..41 => self.fill(),
            41..52 => self.upload(),
            52..60 => self.download(),
            60..72 => self.copy(),
            72..78 => {
                let to = self.host_part();
                self.write(to);
            }
            _ => self.idle_order(),
        }
    }

    // --- order ---

    fn host_agent(&self) -> usize {
        self.streams
    }

    fn touched(&mut self, memory: Memory) -> &mut Touched {
        let at = self.touched.iter().position(|(of, _)| *of == memory).unwrap_or_else(|| {
            self.touched.push((memory, Touched::default()));
            self.touched.len() - 1
        });
        &mut self.touched[at].1
    }

    fn forget(&mut self, memory: Memory) {
        self.touched.retain(|(of, _)| *of != memory);
    }

    /// Orders work queued on a stream after everything that is ordered before the host.
    fn enqueue(&mut self, stream: usize) {
        let host = self.clocks[self.host_agent()].clone();
        join(&mut self.clocks[stream], &host);
    }

    fn record(&mut self, event: usize, stream: usize) {
        self.enqueue(stream);
        self.machine.record(event, stream);
        self.events[event] = self.clocks[stream].clone();
    }

    fn wait(&mut self, stream: usize, event: usize) {
        self.enqueue(stream);
        self.machine.wait(stream, event);
        let seen = self.events[event].clone();
        join(&mut self.clocks[stream], &seen);
    }

    /// Makes the host wait for a stream, in one of four ways.
    fn host_waits(&mut self, stream: usize) {
        let event = self.choices.index(EVENTS);
        match self.choices.below(4) {
            0 => self.machine.synchronize(stream),
            1 => self.machine.poll(stream),
            2 => {
                self.record(event, stream);
                self.machine.synchronize_event(event);
            }
            _ => {
                self.record(event, stream);
                self.machine.poll_event(event);
            }
        }
        let (seen, host) = (self.clocks[stream].clone(), self.host_agent());
        join(&mut self.clocks[host], &seen);
    }

    /// Orders an access of `agent` after all conflicting accesses, and records it.
    fn order(&mut self, agent: usize, memory: Memory, writes: bool) {
        let host = self.host_agent();
        if agent != host {
            self.enqueue(agent);
        }
        let earlier = self.touched(memory);
        let mut before: Vec<_> = earlier.write.into_iter().collect();
        if writes {
            before.extend(&earlier.reads);
        }
        for (other, count) in before {
            if other == agent || self.clocks[agent][other] >= count {
                continue;
            }
            if agent == host {
                self.host_waits(other);
            } else {
                let event = self.choices.index(EVENTS);
                self.record(event, other);
                self.wait(agent, event);
            }
        }
        self.clocks[agent][agent] += 1;
        let now = (agent, self.clocks[agent][agent]);
        let touched = self.touched(memory);
        if writes {
            *touched = Touched { write: Some(now), reads: Vec::new() };
        } else {
            touched.reads.push(now);
        }
    }

    /// Adds ordering that is not needed and must do no harm.
    fn idle_order(&mut self) {
        let (stream, event) = (self.choices.index(self.streams), self.choices.index(EVENTS));
        match self.choices.below(3) {
            0 => self.record(event, stream),
            1 => self.wait(stream, event),
            _ => self.host_waits(stream),
        }
    }

    // --- state ---

    fn stream(&mut self) -> usize {
        self.choices.index(self.streams)
    }

    fn free_ranges(&self, granules: u64) -> Vec<u64> {
        let taken = |granule: u64| {
            let covers = |handle: &Handle| {
                handle.at.iter().any(|&at| (at..at + handle.granules).contains(&granule))
            };
            self.handles.iter().flatten().any(covers)
        };
        (0..=RANGE - granules)
            .filter(|&at| (at..at + granules).all(|granule| !taken(granule)))
            .collect()
    }

    /// Returns every location with memory: the memory, the location and its size.
    fn places(&self) -> Vec<(Memory, Place, u64)> {
        let blocks = self.blocks.iter().enumerate().filter_map(|(slot, block)| {
            block.map(|block| (Memory::Block(slot), Place::Block(slot), block.bytes))
        });
        let mappings = self.handles.iter().enumerate().flat_map(|(index, handle)| {
            handle.iter().flat_map(move |handle| {
                let bytes = handle.granules * GRANULE;
                handle.at.iter().map(move |&at| (Memory::Handle(index), Place::Mapping(at), bytes))
            })
        });
        blocks.chain(mappings).collect()
    }

    fn place(&mut self) -> Option<(Memory, Place, u64)> {
        let places = self.places();
        self.choices.pick(&places)
    }

    fn host_part(&mut self) -> HostPart {
        let host = self.choices.index(HOSTS.len());
        let (offset, bytes) = self.choices.range(HOSTS[host] as u64);
        HostPart { host, offset: offset as usize, bytes: bytes as usize }
    }

    /// Returns the handles that can still be mapped: index and size.
    fn open_handles(&self) -> Vec<(usize, u64)> {
        let open = |(index, handle): (usize, &Option<Handle>)| {
            handle.as_ref().filter(|handle| !handle.released).map(|handle| (index, handle.granules))
        };
        self.handles.iter().enumerate().filter_map(open).collect()
    }

    // --- steps ---

    fn allocate(&mut self) {
        let Some(slot) = self.blocks.iter().position(Option::is_none) else { return };
        let (bytes, pooled, stream) =
            (1 + self.choices.below(LARGEST), self.choices.below(2) == 0, self.stream());
        self.machine.allocate(slot, pooled.then_some(stream), bytes);
        let agent = if pooled { stream } else { self.host_agent() };
        self.blocks[slot] = Some(Block { bytes, pooled });
        // The first use of it is ordered after the allocation.
        self.order(agent, Memory::Block(slot), true);
        self.fill_whole(Memory::Block(slot), Place::Block(slot), bytes);
    }

    /// Fills new memory, whose contents are undefined, so that they are determined from here on.
    fn fill_whole(&mut self, memory: Memory, place: Place, bytes: u64) {
        let (stream, byte) = (self.stream(), self.choices.byte());
        self.order(stream, memory, true);
        self.machine.fill(stream, Part { place, offset: 0, bytes }, byte);
    }

    fn free(&mut self) {
        let live: Vec<_> = (0..BLOCKS).filter(|&slot| self.blocks[slot].is_some()).collect();
        let Some(slot) = self.choices.pick(&live) else { return };
        let Some(block) = self.blocks[slot].take() else { return };
        let stream = block.pooled.then(|| self.stream());
        self.order(stream.unwrap_or(self.host_agent()), Memory::Block(slot), true);
        self.machine.free(slot, stream);
        self.forget(Memory::Block(slot));
    }

    fn create(&mut self) {
        let Some(handle) = self.handles.iter().position(Option::is_none) else { return };
        let granules = 1 + u64::from(self.choices.below(4) == 0);
        let free = self.free_ranges(granules);
        let Some(at) = self.choices.pick(&free) else { return };
        self.machine.create(handle, granules);
        self.machine.map(handle, at, granules);
        self.handles[handle] = Some(Handle { granules, at: vec![at], released: false });
        let host = self.host_agent();
        self.order(host, Memory::Handle(handle), true);
        self.fill_whole(Memory::Handle(handle), Place::Mapping(at), granules * GRANULE);
    }

    fn alias(&mut self) {
        let open = self.open_handles();
        let Some((index, granules)) = self.choices.pick(&open) else { return };
        let free = self.free_ranges(granules);
        let Some(at) = self.choices.pick(&free) else { return };
        if let Some(handle) = &mut self.handles[index] {
            handle.at.push(at);
        }
        self.machine.map(index, at, granules);
    }

    fn unmap(&mut self) {
        let mapped: Vec<_> = (0..HANDLES)
            .filter(|&i| self.handles[i].as_ref().is_some_and(|h| !h.at.is_empty()))
            .collect();
        let Some(index) = self.choices.pick(&mapped) else { return };
        let last = self.handles[index].as_ref().is_some_and(|handle| handle.at.len() == 1);
        if last && self.choices.below(2) == 0 {
            // Most mappings are kept, so that there is memory to work on.
            return;
        }
        let host = self.host_agent();
        self.order(host, Memory::Handle(index), true);
        let Some(handle) = &mut self.handles[index] else { return };
        let at = handle.at.swap_remove(self.choices.index(handle.at.len()));
        self.machine.unmap(at);
        self.bury(index);
    }

    fn release(&mut self) {
        let open = self.open_handles();
        let Some((index, _)) = self.choices.pick(&open) else { return };
        self.machine.release(index);
        if let Some(handle) = &mut self.handles[index] {
            handle.released = true;
        }
        self.bury(index);
    }

    /// Removes a handle that is released and has no mapping.
    fn bury(&mut self, index: usize) {
        if self.handles[index]
            .as_ref()
            .is_some_and(|handle| handle.released && handle.at.is_empty())
        {
            self.handles[index] = None;
            self.forget(Memory::Handle(index));
        }
    }

    fn fill(&mut self) {
        let Some((memory, place, size)) = self.place() else { return };
        let (stream, byte, (offset, bytes)) =
            (self.stream(), self.choices.byte(), self.choices.range(size));
        self.order(stream, memory, true);
        let to = Part { place, offset, bytes };
        if self.choices.below(3) == 0 {
            self.fill_with(stream, to, byte);
        } else {
            self.machine.fill(stream, to, byte);
        }
    }

    /// Fills the aligned middle of a part with elements of 2 or 4 bytes.
    fn fill_with(&mut self, stream: usize, to: Part, byte: u8) {
        let pattern = match self.choices.below(2) {
            0 => Pattern::Half(u16::from_ne_bytes([byte, !byte])),
            _ => Pattern::Word(u32::from_ne_bytes([byte, !byte, 1, 2])),
        };
        let element = pattern.bytes();
        let offset = to.offset.next_multiple_of(element);
        let count = (to.offset + to.bytes).saturating_sub(offset) / element;
        let part = Part { offset, bytes: count * element, ..to };
        if count == 0 {
            self.machine.fill(stream, to, byte);
        } else {
            self.machine.fill_with(stream, part, pattern);
        }
    }

    fn upload(&mut self) {
        let Some((memory, place, size)) = self.place() else { return };
        let (stream, mut from) = (self.stream(), self.host_part());
        from.bytes = from.bytes.min(size as usize);
        let offset = self.choices.below(size - from.bytes as u64 + 1);
        self.order(stream, Memory::Host(from.host), false);
        self.order(stream, memory, true);
        let to = Part { place, offset, bytes: from.bytes as u64 };
        self.machine.copy(stream, Side::Host(from), Side::Device(to));
    }

    fn download(&mut self) {
        let Some((memory, place, size)) = self.place() else { return };
        let (stream, mut to) = (self.stream(), self.host_part());
        to.bytes = to.bytes.min(size as usize);
        let offset = self.choices.below(size - to.bytes as u64 + 1);
        self.order(stream, memory, false);
        self.order(stream, Memory::Host(to.host), true);
        let from = Part { place, offset, bytes: to.bytes as u64 };
        self.machine.copy(stream, Side::Device(from), Side::Host(to));
    }

    fn copy(&mut self) {
        let (Some((memory, place, size)), Some((other, to_place, to_size))) =
            (self.place(), self.place())
        else {
            return;
        };
        let stream = self.stream();
        let (from, to) = if memory == other {
            // From one half to the other, possibly through another mapping.
            let half = size / 2;
            if half == 0 {
                return;
            }
            let (offset, bytes) = self.choices.range(half);
            (Part { place, offset, bytes }, Part { place: to_place, offset: half + offset, bytes })
        } else {
            let (_, bytes) = self.choices.range(size.min(to_size));
            let (from, to) =
                (self.choices.below(size - bytes + 1), self.choices.below(to_size - bytes + 1));
            (Part { place, offset: from, bytes }, Part { place: to_place, offset: to, bytes })
        };
        self.order(stream, memory, false);
        self.order(stream, other, true);
        self.machine.copy(stream, Side::Device(from), Side::Device(to));
    }

    fn write(&mut self, to: HostPart) {
        let (host, seed) = (self.host_agent(), u64::from(self.choices.0.u32()));
        self.order(host, Memory::Host(to.host), true);
        self.machine.hosts.write(to, seed);
    }
}
