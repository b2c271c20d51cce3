//! The choice of devices for the shards of a request, and how all of them are held or none.
//!
//! - Devices are chosen first, by their known figures, and then held one after another in the order
//!   of their indices.
//! - A refusal releases what was held, last first. The next choice excludes what was refused.
//! - So of two groups that compete for a device, the second holds nothing with a higher index that
//!   the first could need. One of them succeeds.
//!
//! A single request is a group of one shard. The devices are those of a runtime or of a
//! [`DeviceSource`](super::DeviceSource).

use super::{Candidate, Group, NoFit, PlaceError, Policy, RejectReason, RejectedDevice};
use std::collections::BTreeMap;

/// A group that a policy places.
#[derive(Clone, Copy)]
pub(super) struct Choice<'p> {
    pub(super) policy: &'p Policy,
    pub(super) group: &'p Group,
    /// The number of requests placed before.
    pub(super) turn: u64,
}

/// A device of a choice with its number of shards, or one that could be, with the number that it
/// has room for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    device: Candidate<'a>,
    shards: usize,
}

/// Bytes for one shard that are held before the choice.
#[derive(Debug)]
pub(super) struct Grant<H> {
    pub(super) index: usize,
    /// If it is known.
    pub(super) generation: Option<u32>,
    pub(super) bytes: u64,
    pub(super) held: H,
}

/// By the index of a device: the number of shards that it held when it refused one, and why.
pub(super) type Refusals = BTreeMap<usize, (usize, RejectReason)>;

impl Choice<'_> {
    /// Chooses among all `devices`, by what they have refused. `own` is the index of a device, and
    /// bytes that the group has there.
    ///
    /// # Errors
    /// [`PlaceError::PolicyPanicked`].
    pub(super) fn choose<'a>(
        &self,
        mut devices: Vec<Candidate<'a>>,
        own: Option<(usize, u64)>,
        refusals: &Refusals,
    ) -> Result<Option<Vec<Part<'a>>>, PlaceError> {
        let (group, count) = (self.group, devices.len());
        if let Some((index, bytes)) = own {
            let here = devices.iter_mut().filter(|device| device.index == index);
            here.for_each(|device| device.free = device.free.saturating_add(bytes));
        }
        let room = |device: &Candidate<'_>| {
            let refused = refusals.get(&device.index).map_or(usize::MAX, |(shards, _)| *shards);
            group.shards_that_fit(device, device.free).min(refused)
        };
        devices.retain(|device| group.each.admits(device) && room(device) > 0);
        let ranked = self.policy.ranked(&group.each, devices, self.turn, count)?.into_iter();
        let options = ranked.map(|device| Part { shards: room(&device), device });
        Ok(choose_from(options.collect(), group))
    }

    /// Holds every shard, or none. Returns what is held in the order of the choice, or `None` if no
    /// choice is left. Uses what is `granted` if its device is chosen. `hold` takes the bytes of a
    /// shard on a device, or says why that cannot be.
    ///
    /// # Errors
    /// As of [`Choice::choose`].
    pub(super) fn hold_all<'a, H>(
        &self,
        devices: impl Fn() -> Vec<Candidate<'a>>,
        granted: &mut Option<Grant<H>>,
        refusals: &mut Refusals,
        mut hold: impl FnMut(&Candidate<'a>) -> Result<H, RejectReason>,
    ) -> Result<Option<Vec<(Candidate<'a>, H)>>, PlaceError> {
        'choice: loop {
            let own = granted.as_ref().map(|granted| (granted.index, granted.bytes));
            let Some(parts) = self.choose(devices(), own, refusals)? else { return Ok(None) };
            let mut by_index: Vec<_> = parts.iter().enumerate().collect();
            by_index.sort_by_key(|(_, part)| part.device.index);
            let mut all = Vec::new();
            for (at, &Part { device, shards }) in by_index {
                let index = device.index;
                for before in 0..shards {
                    let own = granted.take_if(|own| {
                        let same = own.generation.is_none_or(|own| own == device.generation);
                        own.index == index && same
                    });
                    match own.map_or_else(|| hold(&device), |granted| Ok(granted.held)) {
                        Ok(held) => all.push((at, device, held)),
                        Err(refused) => {
                            while all.pop().is_some() {}
                            refusals.insert(index, (before, refused));
                            continue 'choice;
                        }
                    }
                }
            }
            // Restore the policy's order.
            all.sort_by_key(|(at, ..)| *at);
            return Ok(Some(all.into_iter().map(|(_, device, held)| (device, held)).collect()));
        }
    }
}

impl Group {
    /// Returns how many shards fit on a device of which `bytes` are free.
    fn shards_that_fit(&self, device: &Candidate<'_>, bytes: u64) -> usize {
        if bytes < self.each.needs() || device.total < self.each.size() {
            return 0;
        }
        let room = usize::try_from(bytes / self.each.size()).unwrap_or(usize::MAX);
        if self.packed { room } else { room.min(1) }
    }

    /// Returns whether nothing is requested.
    pub(super) fn is_empty(&self) -> bool {
        self.shards == 0 || self.each.size() == 0
    }

    /// Returns whether there would be room on these devices if nothing were in use.
    pub(super) fn is_satisfiable<'a>(
        &self,
        devices: impl IntoIterator<Item = Candidate<'a>>,
    ) -> bool {
        let suitable = devices.into_iter().filter(|device| self.each.suits(device));
        let part = |device: Candidate<'a>| Part {
            shards: self.shards_that_fit(&device, device.total),
            device,
        };
        choose_from(suitable.map(part).collect(), self).is_some()
    }

    /// Returns why none of `devices` was taken. Those out of service come with the reason.
    pub(super) fn no_fit<'a>(
        &self,
        devices: impl IntoIterator<Item = (Candidate<'a>, Option<RejectReason>)>,
        refusals: &Refusals,
    ) -> NoFit {
        let default_reason =
            if self.shards > 1 { RejectReason::Alone } else { RejectReason::NotNamed };
        let devices = devices.into_iter().map(|(candidate, out_of_service)| {
            let Candidate { index, device, generation, free, age, .. } = candidate;
            let refused = || refusals.get(&index).map(|(_, refused)| refused.clone());
            let why = out_of_service.or_else(|| self.each.objection(&candidate)).or_else(refused);
            let why = why.unwrap_or_else(|| default_reason.clone());
            RejectedDevice { device, generation, free, age, why }
        });
        NoFit { requested: self.each.size(), shards: self.shards, devices: devices.collect() }
    }
}

/// Returns the first devices, in the given order, that together have room for all shards. If the
/// group is on peers, each is a peer of every other. If it is packed, devices with the most room
/// come first, so that the choice has as few devices as possible.
fn choose_from<'a>(mut options: Vec<Part<'a>>, group: &Group) -> Option<Vec<Part<'a>>> {
    options.retain(|option| option.shards > 0);
    if group.packed {
        options.sort_by_key(|option| std::cmp::Reverse(option.shards));
    }
    let mut chosen = Vec::new();
    let is_found = if group.on_peers {
        search_peers(&options, group.shards, &mut chosen)
    } else {
        let mut missing = group.shards;
        chosen.extend(options.iter().map_while(|option| option.take(&mut missing)));
        missing == 0
    };
    is_found.then_some(chosen)
}

impl Part<'_> {
    /// Returns the part of the missing shards that it has room for, if any are missing.
    fn take(&self, missing: &mut usize) -> Option<Self> {
        let shards = self.shards.min(*missing);
        *missing -= shards;
        (shards > 0).then_some(Self { shards, ..*self })
    }

    fn is_peer(&self, other: &Self) -> bool {
        let (one, two) = (&self.device, &other.device);
        one.reaches(two.device) && two.reaches(one.device)
    }
}

/// Returns the one shard of a group of one.
pub(super) fn only<H>(mut held: Vec<H>) -> Result<H, PlaceError> {
    held.pop().ok_or(PlaceError::ZeroSize)
}

/// Adds to the chosen devices, of which all `options` are peers, until no shard is missing. If
/// devices form islands, it ends without backtracking. In general it is the search for a clique.
fn search_peers<'a>(options: &[Part<'a>], missing: usize, chosen: &mut Vec<Part<'a>>) -> bool {
    let mut left = options.iter().map(|option| option.shards).fold(0, usize::saturating_add);
    for (at, option) in options.iter().enumerate() {
        if left < missing {
            return false;
        }
        left = left.saturating_sub(option.shards);
        let mut still_missing = missing;
        let Some(part) = option.take(&mut still_missing) else { return true };
        chosen.push(part);
        let peers = || options[at + 1..].iter().filter(|other| option.is_peer(other)).copied();
        if still_missing == 0 || search_peers(&peers().collect::<Vec<_>>(), still_missing, chosen) {
            return true;
        }
        chosen.pop();
    }
    missing == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PlacementRequest;
    use aquifer_core::DeviceId;
    use proptest::prelude::*;

    /// Picks from devices with this much room. `peers` lists the pairs that are peers, in both
    /// directions.
    fn pick(
        room: &[usize],
        peers: &[(usize, usize)],
        group: &Group,
    ) -> Option<Vec<(usize, usize)>> {
        let id = |at: usize| DeviceId(at as u32);
        let of = |at: usize| -> Vec<DeviceId> {
            let both = peers.iter().flat_map(|&(a, b)| [(a, b), (b, a)]);
            both.filter(|(a, _)| *a == at).map(|(_, b)| id(b)).collect()
        };
        let peers: Vec<_> = (0..room.len()).map(of).collect();
        let option = |(at, &shards): (usize, &usize)| Part {
            device: Candidate { peers: &peers[at], ..Candidate::new(at, id(at), 0, 0) },
            shards,
        };
        choose_from(room.iter().enumerate().map(option).collect(), group)
            .map(|parts| parts.iter().map(|part| (part.device.index, part.shards)).collect())
    }

    fn group(shards: usize) -> Group {
        Group::of(shards, PlacementRequest::bytes(1))
    }

    #[test]
    fn a_group_takes_the_first_devices_with_room() {
        assert_eq!(pick(&[1, 0, 1, 1], &[], &group(2)), Some(vec![(0, 1), (2, 1)]));
        assert_eq!(pick(&[1, 0, 1], &[], &group(3)), None);
    }

    #[test]
    fn a_packed_group_takes_as_few_devices_as_possible() {
        assert_eq!(pick(&[1, 3, 2], &[], &group(4).packed()), Some(vec![(1, 3), (2, 1)]));
        assert_eq!(pick(&[1, 3, 2], &[], &group(7).packed()), None);
    }

    #[test]
    fn a_group_on_peers_skips_a_device_with_too_few_peers() {
        let islands = [(1, 2), (3, 4), (4, 5), (3, 5), (0, 3)];
        assert_eq!(pick(&[1; 6], &islands, &group(2).on_peers()), Some(vec![(0, 1), (3, 1)]));
        assert_eq!(
            pick(&[1; 6], &islands, &group(3).on_peers()),
            Some(vec![(3, 1), (4, 1), (5, 1)])
        );
        assert_eq!(pick(&[1; 6], &islands, &group(4).on_peers()), None);
        assert_eq!(
            pick(&[1, 2, 2], &[(1, 2)], &group(4).on_peers().packed()),
            Some(vec![(1, 2), (2, 2)])
        );
    }

    proptest! {
        /// A choice is found exactly if one exists, checked against all subsets.
        #[test]
        fn a_choice_is_found_exactly_if_one_exists(
            room in prop::collection::vec(0usize..4, 1..7),
            edges in prop::collection::vec(any::<bool>(), 49),
            shards in 1usize..8,
            packed in any::<bool>(),
        ) {
            let room: Vec<_> = room.iter().map(|&r| if packed { r } else { r.min(1) }).collect();
            let count = room.len();
            let peers: Vec<_> = (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b)))
                .filter(|(a, b)| edges[a * 7 + b]).collect();
            let mut requested = group(shards).on_peers();
            requested.packed = packed;
            let exists = (0u32..1 << count).any(|set| {
                let within: Vec<_> = (0..count).filter(|at| set >> at & 1 == 1).collect();
                let clique = within.iter().all(|a| within.iter().all(|b| a >= b || peers.contains(&(*a, *b))));
                clique && within.iter().map(|&at| room[at]).sum::<usize>() >= shards
            });
            let found = pick(&room, &peers, &requested);
            prop_assert_eq!(found.is_some(), exists);
            if let Some(found) = found {
                prop_assert_eq!(found.iter().map(|(_, shards)| shards).sum::<usize>(), shards);
                prop_assert!(found.iter().all(|&(at, shards)| shards <= room[at]));
            }
        }
    }
}
