//! The state of the simulated machine.

use super::{
    agents::{Agent, Components, Host, acting},
    capture::Captures,
    clock::Clock,
    codes,
    config::{Schedule, SimConfig},
    faults::Faults,
    graph::Graphs,
    ledger::{Act, Mark},
    ownership::{Kept, Ownership},
    pinned::PinnedMemory,
    pool::Pools,
    queue::{self, Event, Kind, Stream},
    registered::Registered,
    space::Space,
    store::Store,
    table::Table,
    values::Values,
    violation::{Finding, Reports},
};
use crate::{DeviceId, DeviceInfo, RawStream, devices::count_loss};
use std::{
    collections::{HashMap, VecDeque},
    panic::Location,
    thread::ThreadId,
};

/// An error code of the driver.
pub(crate) type Refused = u32;

/// A device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) info: DeviceInfo,
    /// Allocated bytes of its memory.
    pub(crate) taken: u64,
    /// The code that every call returns once the device is lost.
    pub(crate) lost: Option<u32>,
    /// Whether a call has returned a sticky error.
    pub(crate) seen_lost: bool,
    /// The index of its legacy stream, once used.
    pub(crate) legacy: Option<usize>,
}

/// The machine. One lock guards it, and no call waits while it holds the lock.
#[derive(Debug)]
pub(crate) struct State {
    /// The number of this machine, unique in the process.
    machine: u64,
    pub(crate) config: SimConfig,
    pub(crate) devices: Vec<Device>,
    pub(crate) space: Space,
    pub(crate) pinned: PinnedMemory,
    pub(crate) pools: Pools,
    pub(crate) values: Values,

    pub(crate) streams: Vec<Stream>,
    vacant_streams: Vec<usize>,
    next_stream_id: u64,
    /// The indices of the default streams, by device and thread.
    thread_streams: HashMap<(DeviceId, ThreadId), usize>,
    pub(crate) events: Table<Event>,
    /// The number of items in all queues.
    pub(crate) queued: usize,
    /// Whether an item that calls the program is running. Meanwhile no other item may run and
    /// nothing may be unmapped.
    pub(crate) running: bool,
    pub(crate) random: u64,
    /// Calls since work was last allowed to run, by [`SimConfig::pace`].
    pub(crate) since_pace: u32,
    /// The number of threads that wait for an item to run.
    pub(crate) waiting: usize,

    pub(crate) oracle: bool,
    pub(crate) components: Components,
    pub(crate) hosts: Vec<Host>,
    pub(crate) owners: Ownership,
    pub(crate) kept: Kept,
    pub(crate) registered: Registered,
    pub(crate) reports: Reports,
    pub(crate) checked: u64,
    /// The length of the longest path.
    pub(crate) longest_path: u64,
    /// Scratch buffer for the checks.
    pub(crate) found: Vec<Finding>,

    pub(crate) captures: Captures,
    pub(crate) graphs: Graphs,
    pub(crate) faults: Faults,
}

impl Device {
    /// Records that a call returns a sticky error.
    pub(crate) fn is_told_lost(&mut self) {
        if !std::mem::replace(&mut self.seen_lost, true) {
            count_loss();
        }
    }
}

impl State {
    pub(crate) fn new(machine: u64, config: SimConfig, store: Store) -> Self {
        let devices = config.infos().into_iter().map(|info| Device {
            info,
            taken: 0,
            lost: None,
            seen_lost: false,
            legacy: None,
        });
        let mut components = Components::default();
        let hosts = (0..config.host_agents.max(1)).map(|agent| {
            let (slot, clock) = components.lease(Agent::Host { agent }, &Clock::default());
            Host { slot, clock, version: 1, path: 0 }
        });
        let hosts = hosts.collect();
        let random = match config.schedule {
            Schedule::Seeded(seed) => seed,
            Schedule::Eager | Schedule::Stepped => 0,
        };
        Self {
            machine,
            devices: devices.collect(),
            space: Space::new(store),
            pinned: PinnedMemory::default(),
            pools: Pools::default(),
            values: Values::default(),
            streams: Vec::new(),
            vacant_streams: Vec::new(),
            next_stream_id: 1,
            thread_streams: HashMap::new(),
            events: Table::default(),
            queued: 0,
            running: false,
            random,
            since_pace: 0,
            waiting: 0,
            oracle: true,
            components,
            hosts,
            owners: Ownership::default(),
            kept: Kept::default(),
            registered: Registered::default(),
            reports: Reports::default(),
            checked: 0,
            longest_path: 0,
            found: Vec::new(),
            captures: Captures::default(),
            graphs: Graphs::default(),
            faults: Faults::default(),
            config,
        }
    }

    /// Returns a device that exists and is not lost.
    pub(crate) fn device(&mut self, device: DeviceId) -> Result<&mut Device, Refused> {
        let device = self.devices.get_mut(device.0 as usize).ok_or(codes::INVALID_DEVICE)?;
        match device.lost {
            Some(code) => {
                device.is_told_lost();
                Err(code)
            }
            None => Ok(device),
        }
    }

    /// Returns the granularity of a device with virtual memory management.
    pub(crate) fn virtual_memory(&mut self, device: DeviceId) -> Result<u64, Refused> {
        let info = &self.device(device)?.info;
        if info.virtual_memory { Ok(info.granularity.max(1)) } else { Err(codes::NOT_SUPPORTED) }
    }

    /// Allocates bytes of a device's memory.
    pub(crate) fn take(&mut self, device: DeviceId, bytes: u64) -> Result<(), Refused> {
        let device = self.device(device)?;
        match device.taken.checked_add(bytes) {
            Some(taken) if taken <= device.info.memory => {
                device.taken = taken;
                Ok(())
            }
            _ => Err(codes::OUT_OF_MEMORY),
        }
    }

    /// Frees bytes of a device's memory.
    pub(crate) fn give(&mut self, device: DeviceId, bytes: u64) {
        if let Some(device) = self.devices.get_mut(device.0 as usize) {
            device.taken = device.taken.saturating_sub(bytes);
        }
    }

    /// Returns the bits of all devices with access to the memory of `device`, including itself.
    pub(crate) fn reach(&self, device: DeviceId) -> u64 {
        if self.config.peers { u64::MAX } else { bit(device) }
    }

    /// Creates a stream and returns its index.
    pub(crate) fn make_stream(&mut self, device: DeviceId, kind: Kind) -> usize {
        self.make_stream_of(device, kind, None)
    }

    /// As [`State::make_stream`], for an agent that is not a plain stream.
    pub(crate) fn make_stream_of(
        &mut self,
        device: DeviceId,
        kind: Kind,
        agent: Option<Agent>,
    ) -> usize {
        let id = self.next_stream_id;
        self.next_stream_id += 1;
        let creator = &self.hosts[self.agent()].clock;
        let agent = agent.unwrap_or(Agent::Stream { device, id });
        let (slot, clock) = self.components.lease(agent, creator);
        let mut stream = Stream {
            device,
            id,
            kind,
            alive: true,
            slot,
            clock,
            seen: (u32::MAX, 0),
            enqueued: 0,
            executed: 0,
            queue: VecDeque::new(),
            capture: None,
            path: 0,
        };
        match self.vacant_streams.pop() {
            Some(place) => {
                let before = &self.streams[place];
                (stream.enqueued, stream.executed) = (before.enqueued, before.executed);
                self.streams[place] = stream;
                place
            }
            None => {
                self.streams.push(stream);
                self.streams.len() - 1
            }
        }
    }

    /// Returns the index of the stream of a handle. Default streams are created when first used.
    pub(crate) fn stream(&mut self, stream: RawStream) -> Result<usize, Refused> {
        let device = stream.device();
        match stream.handle() {
            0 | 1 => Ok(self.legacy(device)?),
            2 => {
                self.device(device)?;
                let key = (device, std::thread::current().id());
                if let Some(&place) = self.thread_streams.get(&key) {
                    return Ok(place);
                }
                let place = self.make_stream(device, Kind::Blocking);
                self.thread_streams.insert(key, place);
                Ok(place)
            }
            _ => {
                let place = queue::place(self.machine, stream).ok_or(codes::INVALID_HANDLE)?;
                match self.streams.get(place) {
                    Some(s) if s.alive && s.device == device && s.kind != Kind::Branch => Ok(place),
                    _ => Err(codes::INVALID_HANDLE),
                }
            }
        }
    }

    /// Returns the index of a device's legacy stream.
    pub(crate) fn legacy(&mut self, device: DeviceId) -> Result<usize, Refused> {
        if let Some(place) = self.device(device)?.legacy {
            return Ok(place);
        }
        let place = self.make_stream(device, Kind::Legacy);
        self.device(device)?.legacy = Some(place);
        Ok(place)
    }

    /// Returns whether the program created a stream: it is not a default stream.
    pub(crate) fn is_made(&self, place: usize) -> bool {
        !matches!(self.streams[place].kind, Kind::Legacy | Kind::Branch)
            && !self.thread_streams.values().any(|&other| other == place)
    }

    /// Frees the index of a destroyed stream once all its work is done.
    pub(crate) fn retire(&mut self, place: usize) {
        let stream = &mut self.streams[place];
        if !stream.alive && stream.executed == stream.enqueued {
            self.components.vacate(stream.slot, stream.device, std::mem::take(&mut stream.clock));
            self.vacant_streams.push(place);
        }
    }

    /// Returns the host agent that this thread acts as.
    pub(crate) fn agent(&self) -> usize {
        (acting() as usize).min(self.hosts.len() - 1)
    }

    /// Counts a host action and returns its mark.
    pub(crate) fn host_mark(
        &mut self,
        act: Act,
        work: &'static str,
        site: &'static Location<'static>,
    ) -> Mark {
        let agent = self.agent();
        let host = &mut self.hosts[agent];
        Mark { count: host.tick(), slot: host.slot, act, work, site, launch: None }
    }

    /// Returns a mark of the host without counting, for an action that needs no own position in the
    /// order.
    pub(crate) fn host_name(
        &self,
        act: Act,
        work: &'static str,
        site: &'static Location<'static>,
    ) -> Mark {
        let host = &self.hosts[self.agent()];
        Mark { count: host.clock.get(host.slot), slot: host.slot, act, work, site, launch: None }
    }
}

/// Returns a device's bit in a set of devices.
pub(crate) fn bit(device: DeviceId) -> u64 {
    1_u64.checked_shl(device.0).unwrap_or(0)
}
