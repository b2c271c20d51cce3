//! The state of the simulated machine.

use super::{
    access_history::{Action, ActionKind},
    address_space::AddressSpace,
    agents::{Agent, ClockComponents, HostAgent},
    capture::Captures,
    clock::Clock,
    codes::{self, ErrorCode},
    config::{Schedule, SimConfig},
    driver_pool::DriverPools,
    faults::Faults,
    graph::GraphTables,
    handle_table::HandleTable,
    owner_map::{OwnerMap, RetainedRanges},
    pinned::PinnedMemory,
    queue::{self, Event, Stream, StreamKind},
    registrations::Registrations,
    store::Store,
    violation::ViolationLog,
};
use crate::{DeviceId, DeviceInfo, RawStream, devices::count_lost_device, site::Site};
use aquifer_core::random::SplitMix64;
use std::{
    collections::{HashMap, VecDeque},
    thread::ThreadId,
};

/// A device.
#[derive(Debug)]
pub(crate) struct SimDevice {
    pub(crate) info: DeviceInfo,
    /// Allocated bytes of its memory.
    pub(crate) allocated: u64,
    /// The code that every call returns once the device is lost.
    pub(crate) lost: Option<u32>,
    /// Whether a call has returned a sticky error.
    pub(crate) loss_reported: bool,
    /// The index of its legacy stream, once used.
    pub(crate) legacy: Option<usize>,
}

/// The machine. One lock guards it, and no call waits while it holds the lock.
#[derive(Debug)]
pub(crate) struct MachineState {
    /// The number of this machine, unique in the process.
    machine_id: u64,
    pub(crate) config: SimConfig,
    pub(crate) devices: Vec<SimDevice>,
    pub(crate) space: AddressSpace,
    pub(crate) pinned: PinnedMemory,
    pub(crate) pools: DriverPools,

    pub(crate) streams: Vec<Stream>,
    free_streams: Vec<usize>,
    next_stream_id: u64,
    /// The indices of the default streams, by device and thread.
    thread_streams: HashMap<(DeviceId, ThreadId), usize>,
    pub(crate) events: HandleTable<Event>,
    /// The number of items in all queues.
    pub(crate) queued: usize,
    /// Whether an item that calls the program is running. Meanwhile no other item may run and
    /// nothing may be unmapped.
    pub(crate) running: bool,
    pub(crate) random: SplitMix64,
    /// Calls since work was last allowed to run, by [`SimConfig::pace`].
    pub(crate) calls_since_run: u32,
    /// The number of threads that wait for an item to run.
    pub(crate) waiting: usize,

    pub(crate) oracle: bool,
    pub(crate) components: ClockComponents,
    pub(crate) host: HostAgent,
    pub(crate) owners: OwnerMap,
    pub(crate) retained: RetainedRanges,
    pub(crate) registrations: Registrations,
    pub(crate) violations: ViolationLog,
    pub(crate) accesses_checked: u64,

    pub(crate) captures: Captures,
    pub(crate) graphs: GraphTables,
    pub(crate) faults: Faults,
}

impl SimDevice {
    /// Records that a call returns a sticky error.
    pub(crate) fn record_loss(&mut self) {
        if !std::mem::replace(&mut self.loss_reported, true) {
            count_lost_device();
        }
    }
}

impl MachineState {
    pub(crate) fn new(machine_id: u64, config: SimConfig, store: Store) -> Self {
        let devices = config.infos().into_iter().map(|info| SimDevice {
            info,
            allocated: 0,
            lost: None,
            loss_reported: false,
            legacy: None,
        });
        let mut components = ClockComponents::default();
        let (component, clock) = components.lease(Agent::Host, &Clock::default());
        let host = HostAgent { component, clock, version: 1 };
        let seed = match config.schedule {
            Schedule::Seeded(seed) => seed,
            Schedule::Eager | Schedule::Stepped => 0,
        };
        Self {
            machine_id,
            devices: devices.collect(),
            space: AddressSpace::new(store),
            pinned: PinnedMemory::default(),
            pools: DriverPools::default(),
            streams: Vec::new(),
            free_streams: Vec::new(),
            next_stream_id: 1,
            thread_streams: HashMap::new(),
            events: HandleTable::default(),
            queued: 0,
            running: false,
            random: SplitMix64::new(seed),
            calls_since_run: 0,
            waiting: 0,
            oracle: true,
            components,
            host,
            owners: OwnerMap::default(),
            retained: RetainedRanges::default(),
            registrations: Registrations::default(),
            violations: ViolationLog::default(),
            accesses_checked: 0,
            captures: Captures::default(),
            graphs: GraphTables::default(),
            faults: Faults::default(),
            config,
        }
    }

    /// Checks what holds between calls. Costs as much as the machine has objects.
    pub(crate) fn check(&self) {
        let queued: usize = self.streams.iter().map(|stream| stream.queue.len()).sum();
        debug_assert_eq!(queued, self.queued, "the queues and their number of items differ");
        for stream in &self.streams {
            debug_assert!(stream.executed <= stream.enqueued, "more items ran than were queued");
            let left = stream.enqueued - stream.executed;
            let running = u64::from(self.running);
            debug_assert!(
                (left.saturating_sub(running)..=left).contains(&(stream.queue.len() as u64)),
                "a queue of {} items has {left} that have not run",
                stream.queue.len()
            );
        }
        for device in &self.devices {
            debug_assert!(device.allocated <= device.info.memory, "a device holds too much");
        }
        self.space.check();
        self.pools.check();
    }

    /// Returns a device that exists and is not lost.
    pub(crate) fn device(&mut self, device: DeviceId) -> Result<&mut SimDevice, ErrorCode> {
        let device = self.devices.get_mut(device.0 as usize).ok_or(codes::INVALID_DEVICE)?;
        match device.lost {
            Some(code) => {
                device.record_loss();
                Err(code)
            }
            None => Ok(device),
        }
    }

    /// Returns the granularity of a device with virtual memory management.
    pub(crate) fn virtual_memory(&mut self, device: DeviceId) -> Result<u64, ErrorCode> {
        let info = &self.device(device)?.info;
        if info.virtual_memory { Ok(info.granularity.max(1)) } else { Err(codes::NOT_SUPPORTED) }
    }

    /// Allocates bytes of a device's memory.
    pub(crate) fn charge_memory(&mut self, device: DeviceId, bytes: u64) -> Result<(), ErrorCode> {
        let device = self.device(device)?;
        match device.allocated.checked_add(bytes) {
            Some(allocated) if allocated <= device.info.memory => {
                device.allocated = allocated;
                Ok(())
            }
            _ => Err(codes::OUT_OF_MEMORY),
        }
    }

    /// Frees bytes of a device's memory.
    pub(crate) fn refund_memory(&mut self, device: DeviceId, bytes: u64) {
        if let Some(device) = self.devices.get_mut(device.0 as usize) {
            device.allocated = device.allocated.saturating_sub(bytes);
        }
    }

    /// Returns the bits of all devices with access to the memory of `device`, including itself.
    pub(crate) fn devices_with_access(&self, device: DeviceId) -> u64 {
        if self.config.peers { u64::MAX } else { device_bit(device) }
    }

    /// Creates a stream and returns its index. A branch belongs to the executable graph `exec`.
    pub(crate) fn create_stream(&mut self, device: DeviceId, kind: StreamKind) -> usize {
        let id = self.next_stream_id;
        self.next_stream_id += 1;
        let agent = match kind {
            StreamKind::Branch { exec } => Agent::Graph { device, id: exec },
            _ => Agent::Stream { device, id },
        };
        let (component, clock) = self.components.lease(agent, &self.host.clock);
        let mut stream = Stream {
            device,
            id,
            kind,
            alive: true,
            component,
            clock,
            joined_host: 0,
            enqueued: 0,
            executed: 0,
            queue: VecDeque::new(),
            capture: None,
        };
        match self.free_streams.pop() {
            Some(index) => {
                let before = &self.streams[index];
                (stream.enqueued, stream.executed) = (before.enqueued, before.executed);
                self.streams[index] = stream;
                index
            }
            None => {
                self.streams.push(stream);
                self.streams.len() - 1
            }
        }
    }

    /// Returns the index of the stream of a handle. Default streams are created when first used.
    pub(crate) fn stream(&mut self, stream: RawStream) -> Result<usize, ErrorCode> {
        let device = stream.device();
        match stream.handle() {
            0 | 1 => Ok(self.legacy_stream(device)?),
            2 => {
                self.device(device)?;
                let key = (device, std::thread::current().id());
                if let Some(&index) = self.thread_streams.get(&key) {
                    return Ok(index);
                }
                let index = self.create_stream(device, StreamKind::Blocking);
                self.thread_streams.insert(key, index);
                Ok(index)
            }
            _ => {
                let index =
                    queue::stream_index(self.machine_id, stream).ok_or(codes::INVALID_HANDLE)?;
                match self.streams.get(index) {
                    Some(s) if s.alive && s.device == device && !s.kind.is_branch() => Ok(index),
                    _ => Err(codes::INVALID_HANDLE),
                }
            }
        }
    }

    /// Returns the index of a device's legacy stream.
    pub(crate) fn legacy_stream(&mut self, device: DeviceId) -> Result<usize, ErrorCode> {
        if let Some(index) = self.device(device)?.legacy {
            return Ok(index);
        }
        let index = self.create_stream(device, StreamKind::Legacy);
        self.device(device)?.legacy = Some(index);
        Ok(index)
    }

    /// Returns whether the program created a stream: it is not a default stream.
    pub(crate) fn is_created_by_program(&self, index: usize) -> bool {
        !matches!(self.streams[index].kind, StreamKind::Legacy | StreamKind::Branch { .. })
            && !self.thread_streams.values().any(|&other| other == index)
    }

    /// Frees the index of a destroyed stream once all its work is done.
    pub(crate) fn recycle_stream(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        if !stream.alive && stream.executed == stream.enqueued {
            self.components.release(
                stream.component,
                stream.device,
                std::mem::take(&mut stream.clock),
            );
            self.free_streams.push(index);
        }
    }

    /// Counts a host action, and returns it.
    pub(crate) fn new_host_action(
        &mut self,
        kind: ActionKind,
        work: &'static str,
        site: Site,
    ) -> Action {
        let count = self.host.tick();
        Action::new((self.host.component, count), kind, work, site)
    }

    /// Returns a host action without counting it, for an action that needs no own position in the
    /// order.
    pub(crate) fn current_host_action(
        &self,
        kind: ActionKind,
        work: &'static str,
        site: Site,
    ) -> Action {
        let HostAgent { component, clock, .. } = &self.host;
        Action::new((*component, clock.get(*component)), kind, work, site)
    }
}

/// Returns a device's bit in a set of devices.
pub(crate) fn device_bit(device: DeviceId) -> u64 {
    1_u64.checked_shl(device.0).unwrap_or(0)
}
