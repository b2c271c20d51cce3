//! The choice of devices for the shards of a group, and how all of them are held or none.
//!
//! - Devices are chosen first, by their known figures, and then held one after another in the order
//!   of their indices.
//! - A refusal releases what was held, last first. The next choice excludes what was refused.
//! - So of two groups that compete for a device, the second holds nothing with a higher index that
//!   the first could need. One of them succeeds.

use super::{Candidate, Group, NoFit, PlaceError, RejectReason, RejectedDevice};
use aquifer_core::DeviceId;

/// A device of a choice, and its number of shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ChosenDevice {
    pub(super) index: usize,
    pub(super) device: DeviceId,
    pub(super) generation: u32,
    pub(super) shards: usize,
}

/// A device that could be part of a choice, and the number of shards it has room for.
#[derive(Clone, Copy, Debug)]
struct DeviceOption<'a> {
    device: Candidate<'a>,
    room: usize,
}

/// A device that has refused a shard.
#[derive(Debug)]
pub(super) struct Refusal<E> {
    pub(super) index: usize,
    /// The number of shards that it held before.
    pub(super) shards: usize,
    pub(super) error: E,
}

/// Chooses among `devices`, which satisfy the request of each shard. `room` is the number of shards
/// that a device has room for. `rank` returns the first devices in the order of the policy, at most
/// as many as it is told.
///
/// # Errors
/// As of `rank`.
pub(super) fn choose<'a>(
    group: &Group,
    devices: impl Iterator<Item = Candidate<'a>>,
    room: impl Fn(&Candidate<'_>) -> usize,
    rank: impl FnOnce(Vec<Candidate<'a>>, usize) -> Result<Vec<Candidate<'a>>, PlaceError>,
) -> Result<Option<Vec<ChosenDevice>>, PlaceError> {
    let devices = devices.filter(|device| room(device) > 0).collect();
    let most = if group.packed || group.on_peers { usize::MAX } else { group.shards };
    let ranked = rank(devices, most)?.into_iter();
    let options = ranked.map(|device| DeviceOption { room: room(&device), device });
    Ok(choose_from(options.collect(), group))
}

/// Returns whether there would be room on these devices if nothing were in use.
pub(super) fn is_satisfiable<'a>(
    group: &Group,
    devices: impl Iterator<Item = Candidate<'a>>,
) -> bool {
    let suitable = devices.filter(|device| group.each.suits(device));
    let options = suitable
        .map(|device| DeviceOption { device, room: shards_that_fit(group, &device, device.total) });
    choose_from(options.collect(), group).is_some()
}

/// Returns the first devices, in the given order, that together have room for all shards. If the
/// group is on peers, each is a peer of every other. If it is packed, devices with the most room
/// come first, so that the choice has as few devices as possible.
fn choose_from(mut options: Vec<DeviceOption<'_>>, group: &Group) -> Option<Vec<ChosenDevice>> {
    options.retain(|option| option.room > 0);
    if group.packed {
        options.sort_by_key(|option| std::cmp::Reverse(option.room));
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

impl DeviceOption<'_> {
    /// Returns the part of the missing shards that it has room for, if any are missing.
    fn take(&self, missing: &mut usize) -> Option<ChosenDevice> {
        let shards = self.room.min(*missing);
        *missing -= shards;
        let Candidate { index, device, generation, .. } = self.device;
        (shards > 0).then_some(ChosenDevice { index, device, generation, shards })
    }

    fn is_peer(&self, other: &DeviceOption<'_>) -> bool {
        let (one, two) = (&self.device, &other.device);
        one.reaches(two.device) && two.reaches(one.device)
    }
}

/// Adds to the chosen devices, of which all `options` are peers, until no shard is missing. If
/// devices form islands, it ends without backtracking. In general it is the search for a clique.
fn search_peers(
    options: &[DeviceOption<'_>],
    missing: usize,
    chosen: &mut Vec<ChosenDevice>,
) -> bool {
    let mut left = options.iter().map(|option| option.room).fold(0, usize::saturating_add);
    for (at, option) in options.iter().enumerate() {
        if left < missing {
            return false;
        }
        left = left.saturating_sub(option.room);
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

/// Holds every shard, in the order of the devices' indices, or none. Returns what is held in the
/// order of the choice.
///
/// # Errors
/// The first refusal. What was held before is released, last first.
pub(super) fn hold_all<H, E>(
    parts: &[ChosenDevice],
    mut hold: impl FnMut(&ChosenDevice) -> Result<H, E>,
) -> Result<Vec<(ChosenDevice, H)>, Refusal<E>> {
    let mut by_index: Vec<usize> = (0..parts.len()).collect();
    by_index.sort_by_key(|&at| parts[at].index);
    let mut all: Vec<(usize, H)> = Vec::new();
    for at in by_index {
        let part = &parts[at];
        for shards in 0..part.shards {
            match hold(part) {
                Ok(held) => all.push((at, held)),
                Err(error) => {
                    while all.pop().is_some() {}
                    return Err(Refusal { index: part.index, shards, error });
                }
            }
        }
    }
    // Restore the policy's order.
    all.sort_by_key(|(at, _)| *at);
    Ok(all.into_iter().map(|(at, held)| (parts[at], held)).collect())
}

/// Returns the index of the device where a group that was refused waits: the one that lacks bytes
/// and has the most `left`, or `current` if that has as many. Returns `None` if no device lacks
/// bytes: then a device has to come back or a pool has to find room.
pub(super) fn device_to_wait_at(
    refused: &NoFit,
    current: Option<usize>,
    left: impl Fn(usize, &RejectedDevice) -> u64,
) -> Option<usize> {
    let lacking = refused.devices.iter().enumerate().filter(|(_, rejected)| {
        matches!(rejected.why, RejectReason::Free { .. } | RejectReason::Budget(_))
    });
    lacking
        .max_by_key(|&(index, rejected)| (left(index, rejected), current == Some(index)))
        .map(|(index, _)| index)
}

/// Returns a device with the bytes already granted there added to its free bytes.
pub(super) fn with_grant(device: Candidate<'_>, own: Option<(usize, u64)>) -> Candidate<'_> {
    let more = own.filter(|(index, _)| *index == device.index).map_or(0, |(_, bytes)| bytes);
    Candidate { free: device.free.saturating_add(more), ..device }
}

/// Returns how many shards fit on a device of which `bytes` are free.
pub(super) fn shards_that_fit(group: &Group, device: &Candidate<'_>, bytes: u64) -> usize {
    if bytes < group.each.needs() || device.total < group.each.size() {
        return 0;
    }
    let room = usize::try_from(bytes / group.each.size()).unwrap_or(usize::MAX);
    if group.packed { room } else { room.min(1) }
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
        let option = |(at, &room): (usize, &usize)| DeviceOption {
            device: Candidate { peers: &peers[at], ..Candidate::new(at, id(at), 0, 0) },
            room,
        };
        choose_from(room.iter().enumerate().map(option).collect(), group)
            .map(|parts| parts.iter().map(|part| (part.index, part.shards)).collect())
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
