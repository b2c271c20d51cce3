//! Which device a request goes to, and bytes that are held there until they are used.
//!
//! A pick that holds nothing is a guess: by the time the memory is asked for, others have taken it. [`Placer::place`]
//! picks and reserves in one step, and answers with a [`Lease`] that draws from what it holds. A device whose budget
//! refuses is not picked, so of two requests for the last bytes one wins and the other goes elsewhere or is told.

mod lease;
mod policy;

pub use lease::Lease;
pub use policy::{Candidate, Place, Policy};

use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_device::DevicePool;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Picks devices by one policy.
///
/// ```
/// use aquifer::{Place, Policy, Runtime, sim::Sim};
/// let rt = Runtime::on(Sim::h200(2).driver())?;
/// let placer = rt.placer(Policy::RoundRobin);
/// let first = placer.place(&Place::bytes(1 << 20))?;
/// let second = placer.place(&Place::bytes(1 << 20))?;
/// assert_ne!(first.device(), second.device());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct Placer {
    pools: Arc<[DevicePool]>,
    policy: Policy,
    /// Requests placed: where round robin stands.
    turn: Arc<AtomicUsize>,
}

impl Placer {
    pub(crate) fn new(pools: Arc<[DevicePool]>, policy: Policy) -> Self {
        Self { pools, policy, turn: Arc::default() }
    }

    /// Picks a device that satisfies `place` and reserves its bytes there. Does not block.
    ///
    /// The policy orders the devices that satisfy every hint; the first whose budget grants the bytes is taken, after
    /// its free caches have been asked to make room.
    ///
    /// # Errors
    /// [`MemoryError::ZeroSize`]; [`MemoryError::NoDevice`] if no device satisfies the hints;
    /// [`MemoryError::OutOfBudget`] of the first choice if all refuse.
    pub fn place(&self, place: &Place) -> Result<Lease> {
        if place.size() == 0 {
            return Err(MemoryError::ZeroSize);
        }
        let mut candidates: Vec<Candidate> = self.pools.iter().enumerate().map(candidate).collect();
        candidates.retain(|c| place.admits(c));
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        self.policy.order(&mut candidates, turn, self.pools.len());
        let mut refused = None;
        for candidate in &candidates {
            match Lease::reserve(&self.pools[candidate.index], place.size()) {
                Ok(lease) => return Ok(lease),
                Err(error) => {
                    refused.get_or_insert(error);
                }
            }
        }
        let (asked, count) = (0, u32::try_from(self.pools.len()).unwrap_or(u32::MAX));
        Err(refused.unwrap_or(MemoryError::NoDevice { asked, count }))
    }

    /// The devices it picks from.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceId> {
        self.pools.iter().map(DevicePool::device).collect()
    }
}

/// What a policy may know of a pool, read now.
fn candidate((index, pool): (usize, &DevicePool)) -> Candidate {
    let stats = pool.stats();
    let info = pool.info();
    Candidate {
        index,
        device: info.device,
        // What is cached is charged and can be had all the same.
        free: pool.budget().remaining().saturating_add(stats.cached),
        total: pool.budget().limit().min(info.memory),
        compute_capability: info.compute_capability,
    }
}

impl fmt::Debug for Placer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Placer")
            .field("policy", &self.policy)
            .field("devices", &self.devices())
            .finish_non_exhaustive()
    }
}
