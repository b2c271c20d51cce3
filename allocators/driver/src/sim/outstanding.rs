//! Driver objects that have not been released.

use super::{machine_state::MachineState, pinned::PinKind};
use std::fmt;

/// Counts of all driver objects that a program holds. Objects of a lost device do not count: they
/// are gone with the device's context.
///
/// ```
/// use aquifer::{DeviceId, sim::Sim};
/// let sim = Sim::h200(1).symbolic();
/// let address = sim.driver().mem_alloc(DeviceId(0), 4096)?;
/// assert_eq!(sim.outstanding().to_string(), "1 allocations");
/// // SAFETY: 1. It was allocated above. 2. Nothing uses it.
/// unsafe { sim.driver().mem_free(DeviceId(0), address)? };
/// assert!(sim.outstanding().is_empty());
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Outstanding {
    /// Streams, except default streams.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Graphs.
    pub graphs: u64,
    /// Executable graphs.
    pub graph_execs: u64,
    /// Physical handles that have not been released.
    pub handles: u64,
    /// Mappings.
    pub mappings: u64,
    /// Reserved address ranges.
    pub reservations: u64,
    /// Stream-ordered pools.
    pub pools: u64,
    /// Blocks of stream-ordered pools.
    pub pool_blocks: u64,
    /// Allocations.
    pub allocations: u64,
    /// Allocations of host memory.
    pub host_allocations: u64,
    /// Registrations of host memory.
    pub registrations: u64,
}

impl Outstanding {
    fn counts(&self) -> [(&'static str, u64); 12] {
        [
            ("streams", self.streams),
            ("events", self.events),
            ("graphs", self.graphs),
            ("executable graphs", self.graph_execs),
            ("handles", self.handles),
            ("mappings", self.mappings),
            ("reservations", self.reservations),
            ("pools", self.pools),
            ("pool blocks", self.pool_blocks),
            ("allocations", self.allocations),
            ("host allocations", self.host_allocations),
            ("registrations", self.registrations),
        ]
    }

    /// Returns whether everything has been released.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counts().iter().all(|&(_, count)| count == 0)
    }

    pub(crate) fn count(state: &MachineState) -> Self {
        let mut all = Self::default();
        let is_present = |device: crate::DeviceId| {
            state.devices.get(device.0 as usize).is_some_and(|device| device.lost.is_none())
        };
        let streams = (0..state.streams.len()).filter(|&index| {
            state.streams[index].alive
                && is_present(state.streams[index].device)
                && state.is_created_by_program(index)
        });
        all.streams = streams.count() as u64;
        all.events = state.events.iter().filter(|event| is_present(event.device)).count() as u64;
        all.graphs =
            state.graphs.graphs.iter().filter(|graph| is_present(graph.device)).count() as u64;
        all.graph_execs =
            state.graphs.execs.iter().filter(|exec| is_present(exec.device)).count() as u64;
        for device in state
            .devices
            .iter()
            .filter(|device| device.lost.is_none())
            .map(|device| device.info.device)
        {
            let counts = state.space.count_objects(device);
            all.handles += counts.handles;
            all.mappings += counts.mappings;
            all.reservations += counts.reservations;
            all.allocations += counts.allocations;
            let (pools, blocks) = state.count_pools(device);
            all.pools += pools;
            all.pool_blocks += blocks;
            all.host_allocations += state.pinned.count(device, PinKind::Allocated);
            all.registrations += state.pinned.count(device, PinKind::Registered);
        }
        all
    }
}

impl fmt::Display for Outstanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("nothing outstanding");
        }
        for (i, (name, count)) in self.counts().iter().filter(|&&(_, count)| count > 0).enumerate()
        {
            write!(f, "{}{count} {name}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
