//! Agents (the host and streams), and the clock component of each.

use super::clock::Clock;
use crate::DeviceId;
use std::fmt;

/// An agent, whose actions have one total order.
///
/// See the example of [`Sim`](super::Sim).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Agent {
    /// The host: all of its threads.
    Host,
    /// A stream.
    Stream {
        /// Its device.
        device: DeviceId,
        /// A number that no other stream ever has: [`stream_id`](crate::Streams::stream_id).
        id: u64,
    },
    /// A branch of an executable graph: work captured on a stream other than the one that began the
    /// capture.
    Graph {
        /// The graph's device.
        device: DeviceId,
        /// A number that no other executable graph ever has.
        id: u64,
    },
}

impl fmt::Display for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("the host"),
            Self::Stream { device, id } => write!(f, "stream {id} of {device}"),
            Self::Graph { device, id } => {
                write!(f, "a branch of executable graph {id} of {device}")
            }
        }
    }
}

/// The components of the clocks, and their owners.
///
/// A component outlives its stream, since other clocks and records refer to it. It is reused for a
/// new stream only if the creator knows that all of the old stream's work is done. Then every clock
/// that covers the new stream's work also covers the old stream's.
#[derive(Default, Debug)]
pub(crate) struct ClockComponents {
    /// For each component, its owners and the count from which each owned it.
    owners: Vec<Vec<(u64, Agent)>>,
    free: Vec<FreeComponent>,
}

/// A component whose stream is destroyed.
#[derive(Debug)]
struct FreeComponent {
    component: u32,
    device: DeviceId,
    clock: Clock,
}

impl ClockComponents {
    /// Returns a component for `agent`, and its initial clock. `creator` is the clock of the host.
    pub(crate) fn lease(&mut self, agent: Agent, creator: &Clock) -> (u32, Clock) {
        let known =
            |free: &FreeComponent| creator.covers(free.component, free.clock.get(free.component));
        if let Some(position) = self.free.iter().position(known) {
            let FreeComponent { component, clock: last, .. } = self.free.swap_remove(position);
            let count = last.get(component);
            self.owners[component as usize].push((count + 1, agent));
            // The old clock is not inherited: it may have waited for more since its last action.
            let mut clock = Clock::default();
            clock.raise(component, count);
            return (component, clock);
        }
        let component = self.owners.len() as u32;
        self.owners.push(vec![(0, agent)]);
        (component, Clock::default())
    }

    /// Frees the component of a destroyed stream whose work is all done.
    pub(crate) fn release(&mut self, component: u32, device: DeviceId, clock: Clock) {
        self.free.push(FreeComponent { component, device, clock });
    }

    /// Returns the clocks of a device's destroyed streams, which a device synchronisation covers
    /// too.
    pub(crate) fn released_clocks(&self, device: DeviceId) -> impl Iterator<Item = &Clock> {
        self.free.iter().filter(move |free| free.device == device).map(|free| &free.clock)
    }

    /// Returns the agent of an action.
    pub(crate) fn owner(&self, component: u32, count: u64) -> Agent {
        let owners = self.owners.get(component as usize).map_or(&[][..], Vec::as_slice);
        let later = owners.partition_point(|&(from, _)| from <= count);
        owners.get(later.saturating_sub(1)).map_or(Agent::Host, |&(_, agent)| agent)
    }
}

/// The host, which is one agent.
#[derive(Debug)]
pub(crate) struct HostAgent {
    pub(crate) component: u32,
    pub(crate) clock: Clock,
    /// Changes with the clock, so that streams can skip a clock that they have already joined.
    pub(crate) version: u64,
}

impl HostAgent {
    /// Joins the host's clock with `clock`.
    pub(crate) fn join_clock(&mut self, clock: &Clock) {
        if self.clock.join(clock) {
            self.version += 1;
        }
    }

    /// Counts one action of the host.
    pub(crate) fn tick(&mut self) -> u64 {
        self.version += 1;
        self.clock.tick(self.component)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn component_is_reused_only_if_the_creator_knows_that_its_work_is_done() {
        let stream = |id| Agent::Stream { device: DeviceId(0), id };
        let mut components = ClockComponents::default();
        let (component, mut clock) = components.lease(stream(1), &Clock::default());
        let last = clock.tick(component);
        components.release(component, DeviceId(0), clock.clone());
        let (other, _) = components.lease(stream(2), &Clock::default());
        assert_ne!(other, component);
        let (again, mut passed) = components.lease(stream(3), &clock);
        assert_eq!(again, component);
        let first = passed.tick(again);
        assert_eq!(components.owner(component, last), stream(1));
        assert_eq!(components.owner(component, first), stream(3));
    }
}
