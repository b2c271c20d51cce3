//! Who acts: streams and host agents, and which component of the clocks counts for whom.

use super::clock::Clock;
use crate::DeviceId;
use std::{cell::Cell, fmt};

/// Somebody whose actions follow one another in one order.
///
/// Unless a test asks for [several host agents](super::Sim::host_agents) the host is one; its
/// example is that of [`Sim::host_edge`](super::Sim::host_edge).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Agent {
    /// The host, or one of several host agents: see [`Sim::host_agents`](super::Sim::host_agents).
    Host {
        /// Which; 0 where there is one.
        agent: u32,
    },
    /// A stream.
    Stream {
        /// Its device.
        device: DeviceId,
        /// The number that no other stream ever has: [`stream_id`](crate::Streams::stream_id).
        id: u64,
    },
    /// A branch of an executable graph: what was captured on another stream than the one that began
    /// the capture.
    Graph {
        /// The graph's device.
        device: DeviceId,
        /// The number that no other executable graph ever has.
        id: u64,
    },
}

impl fmt::Display for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { agent: 0 } => f.write_str("the host"),
            Self::Host { agent } => write!(f, "host agent {agent}"),
            Self::Stream { device, id } => write!(f, "stream {id} of {device}"),
            Self::Graph { device, id } => {
                write!(f, "a branch of executable graph {id} of {device}")
            }
        }
    }
}

/// The components of the clocks, and whose each has been.
///
/// A component outlives its stream, since other clocks and records name it. It passes to a new
/// stream only where the creator knows all of the old one's work to be done: then nobody can know
/// the new stream's work without knowing that.
#[derive(Default, Debug)]
pub(crate) struct Components {
    /// For each component, who has owned it from which count on.
    owners: Vec<Vec<(u64, Agent)>>,
    vacant: Vec<Vacant>,
}

/// A component whose stream is gone.
#[derive(Debug)]
struct Vacant {
    slot: u32,
    device: DeviceId,
    clock: Clock,
}

impl Components {
    /// A component for `agent`, and the clock it starts with. `creator` is the clock of the host
    /// agent that makes it.
    pub(crate) fn lease(&mut self, agent: Agent, creator: &Clock) -> (u32, Clock) {
        let known = |vacant: &Vacant| creator.knows(vacant.slot, vacant.clock.get(vacant.slot));
        if let Some(position) = self.vacant.iter().position(known) {
            let Vacant { slot, clock: last, .. } = self.vacant.swap_remove(position);
            let count = last.get(slot);
            self.owners[slot as usize].push((count + 1, agent));
            // Not all that the old one knew: it may have waited for more since its last action.
            let mut clock = Clock::default();
            clock.raise(slot, count);
            return (slot, clock);
        }
        let slot = self.owners.len() as u32;
        self.owners.push(vec![(0, agent)]);
        (slot, Clock::default())
    }

    /// The stream of a component is gone, and all its work is done.
    pub(crate) fn vacate(&mut self, slot: u32, device: DeviceId, clock: Clock) {
        self.vacant.push(Vacant { slot, device, clock });
    }

    /// What streams of a device that are gone have done: part of what a device synchronisation
    /// teaches.
    pub(crate) fn gone(&self, device: DeviceId) -> impl Iterator<Item = &Clock> {
        self.vacant.iter().filter(move |vacant| vacant.device == device).map(|vacant| &vacant.clock)
    }

    /// Whose action it was.
    pub(crate) fn owner(&self, slot: u32, count: u64) -> Agent {
        let owners = self.owners.get(slot as usize).map_or(&[][..], Vec::as_slice);
        let later = owners.partition_point(|&(from, _)| from <= count);
        owners.get(later.saturating_sub(1)).map_or(Agent::Host { agent: 0 }, |&(_, agent)| agent)
    }
}

/// What one host agent knows.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) slot: u32,
    pub(crate) clock: Clock,
    /// Changes whenever the clock does, so that streams need not join a clock that they have
    /// joined.
    pub(crate) version: u64,
    /// The longest path whose end it has waited for.
    pub(crate) path: u64,
}

impl Host {
    /// Learns what `clock` knows.
    pub(crate) fn learn(&mut self, clock: &Clock) {
        if self.clock.join(clock) {
            self.version += 1;
        }
    }

    /// Counts one action of the host's own.
    pub(crate) fn tick(&mut self) -> u64 {
        self.version += 1;
        self.clock.tick(self.slot)
    }
}

thread_local! {
    static ACTING: Cell<u32> = const { Cell::new(0) };
}

/// The host agent that this thread acts as.
pub(crate) fn acting() -> u32 {
    ACTING.get()
}

/// While it lives, this thread acts as one of several host agents. See
/// [`Sim::act_as`](super::Sim::act_as).
///
/// ```
/// use aquifer_driver::{DeviceId, HostFlags, sim::{Sim, ViolationKind}};
/// let sim = Sim::h200(1).host_agents(2);
/// let pinned = sim.driver().host_alloc(DeviceId(0), 64, HostFlags::default())?.as_ptr() as u64;
/// sim.host_write(pinned, 64);
/// {
///     let _second = sim.act_as(1);
///     sim.host_read(pinned, 64); // and nobody has told it that the bytes are there
/// }
/// assert_eq!(sim.violations()[0].kind, ViolationKind::WriteRead);
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
#[derive(Debug)]
#[must_use = "the thread acts as the agent until this is dropped"]
pub struct ActingAs {
    before: u32,
    /// Restores a thread-local, so it stays on its thread.
    thread: std::marker::PhantomData<*const ()>,
}

impl ActingAs {
    pub(crate) fn enter(agent: u32) -> Self {
        Self { before: ACTING.replace(agent), thread: std::marker::PhantomData }
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        ACTING.set(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_component_passes_on_only_to_a_creator_who_knows_its_work() {
        let stream = |id| Agent::Stream { device: DeviceId(0), id };
        let mut components = Components::default();
        let (slot, mut clock) = components.lease(stream(1), &Clock::default());
        let last = clock.tick(slot);
        components.vacate(slot, DeviceId(0), clock.clone());
        let (other, _) = components.lease(stream(2), &Clock::default());
        assert_ne!(other, slot);
        let (again, mut passed) = components.lease(stream(3), &clock);
        assert_eq!(again, slot);
        let first = passed.tick(again);
        assert_eq!(components.owner(slot, last), stream(1));
        assert_eq!(components.owner(slot, first), stream(3));
    }
}
