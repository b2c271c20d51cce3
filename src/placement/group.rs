//! Several leases at once, all or none.
//!
//! - Devices are chosen first, by their known figures, and then reserved one after another in the
//!   order of their indices.
//! - A refusal releases what was reserved, last first. The next choice excludes what was refused.
//! - So of two groups that compete for a device, the second holds nothing with a higher index that
//!   the first could need. One of them succeeds.
//!
//! `grouping` describes how groups wait.

mod grouping;

use super::{
    Candidate, Group, Lease, PlaceError, Placer, RejectReason, Rejections, waiting::Grant,
};
use aquifer_core::{MemoryError, Reservation};

/// A device of a choice, and its number of shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ChosenDevice {
    index: usize,
    generation: u32,
    shards: usize,
}

/// A device that could be part of a choice, and the number of shards it has room for.
#[derive(Clone, Copy, Debug)]
struct DeviceOption<'a> {
    device: Candidate<'a>,
    room: usize,
}

/// Returns the first devices, in the given order, that together have room for all shards. If the
/// group is on peers, each is a peer of every other. If it is packed, devices with the most room
/// come first, so that the choice has as few devices as possible.
fn choose(options: &mut Vec<DeviceOption<'_>>, group: &Group) -> Option<Vec<ChosenDevice>> {
    if group.packed {
        options.sort_by_key(|option| std::cmp::Reverse(option.room));
    }
    let mut chosen = Vec::with_capacity(group.shards);
    search(options, 0, group, group.shards, &mut chosen).then_some(chosen)
}

/// Continues the search from `from`. If any two devices are peers, or devices form islands, it ends
/// without backtracking. In general it is the search for a clique.
fn search(
    options: &[DeviceOption<'_>],
    from: usize,
    group: &Group,
    missing: usize,
    chosen: &mut Vec<ChosenDevice>,
) -> bool {
    if missing == 0 {
        return true;
    }
    let option_of =
        |part: &ChosenDevice| options.iter().find(|option| option.device.index == part.index);
    let is_compatible = |option: &DeviceOption<'_>| {
        let peers = |other: &DeviceOption<'_>| {
            option.device.reaches(other.device.device) && other.device.reaches(option.device.device)
        };
        !group.on_peers || chosen.iter().filter_map(option_of).all(peers)
    };
    let rest: Vec<usize> =
        (from..options.len()).filter(|&at| is_compatible(&options[at])).collect();
    let mut left: usize = rest.iter().map(|&at| options[at].room).fold(0, usize::saturating_add);
    for at in rest {
        if left < missing {
            return false;
        }
        let DeviceOption { device, room } = options[at];
        left -= room.min(left);
        let shards = room.min(missing);
        if shards == 0 {
            continue;
        }
        chosen.push(ChosenDevice { index: device.index, generation: device.generation, shards });
        if search(options, at + 1, group, missing - shards, chosen) {
            return true;
        }
        chosen.pop();
    }
    false
}

impl Placer {
    /// Places every shard of a group as [`Placer::place`] does, or none. Leases are in the order in
    /// which the policy takes the devices. Does not block.
    ///
    /// # Errors
    /// [`PlaceError`] with every device and the reason why it was not taken. Nothing is reserved.
    pub fn place_group(&self, group: &Group) -> Result<Vec<Lease>, PlaceError> {
        self.try_group(group, self.turn(), &mut None)
    }

    /// Returns whether there would be room if nothing were in use.
    fn is_satisfiable(&self, group: &Group) -> bool {
        let suits = |candidate: &Candidate<'_>| group.each.suits(candidate);
        let mut options: Vec<_> = self
            .device_set
            .members()
            .enumerate()
            .filter(|(_, member)| member.health() != super::Health::Lost)
            .map(|(index, member)| member.candidate(index, 0, None))
            .filter(suits)
            .map(|device| DeviceOption {
                device,
                room: shards_that_fit(group, &device, device.total),
            })
            .collect();
        choose(&mut options, group).is_some()
    }

    fn try_group(
        &self,
        group: &Group,
        turn: u64,
        granted: &mut Option<Grant>,
    ) -> Result<Vec<Lease>, PlaceError> {
        if group.shards == 0 || group.each.size() == 0 {
            return Err(PlaceError::ZeroSize);
        }
        let (mut now, priority) = (self.device_set.poll(), group.each.requested_priority());
        let mut rejections = Rejections::default();
        // For each device, the number of shards that it could hold when it refused one.
        let mut max_shards = vec![usize::MAX; self.device_set.len()];
        let mut refreshed = false;
        loop {
            // The group may use the bytes that a wait was granted.
            let own =
                granted.as_ref().map(|granted| (granted.index, granted.reservation.remaining()));
            let serving = self
                .device_set
                .serving(0)
                .map(|(index, member)| member.candidate(index, now, priority));
            let admitted = serving.filter(|c| group.each.admits(&with_grant(*c, own)));
            let ranked = self.ranked(&group.each, admitted, turn)?;
            let options = ranked.iter().map(|&device| {
                let device = with_grant(device, own);
                DeviceOption {
                    room: shards_that_fit(group, &device, device.free)
                        .min(max_shards[device.index]),
                    device,
                }
            });
            let mut options: Vec<_> = options.filter(|option| option.room > 0).collect();
            let Some(parts) = choose(&mut options, group) else {
                if refreshed {
                    return Err(self.no_fit(&group.each, group.shards, &rejections));
                }
                // The known figures give no choice. Refresh them once, and make others release what
                // they can.
                refreshed = true;
                let all = group.each.size().saturating_mul(group.shards as u64);
                self.device_set.reclaim_from_others(&group.each, all);
                max_shards.fill(usize::MAX);
                rejections = Rejections::default();
                now = self.refresh();
                continue;
            };
            match self.reserve_all(group, &parts, granted) {
                Ok(leases) => return Ok(leases),
                Err((index, granted_shards, error)) => {
                    max_shards[index] = granted_shards;
                    rejections.add(index, error);
                }
            }
        }
    }

    /// Reserves every part, in the order of indices, or none.
    fn reserve_all(
        &self,
        group: &Group,
        parts: &[ChosenDevice],
        granted: &mut Option<Grant>,
    ) -> Result<Vec<Lease>, (usize, usize, MemoryError)> {
        let mut by_index: Vec<usize> = (0..parts.len()).collect();
        by_index.sort_by_key(|&at| parts[at].index);
        let mut reservations: Vec<(usize, Reservation)> = Vec::with_capacity(group.shards);
        for at in by_index {
            let ChosenDevice { index, generation, shards } = parts[at];
            let member = self.device_set.at(index, generation);
            for granted_shards in 0..shards {
                let own = granted.take_if(|g| (g.index, g.generation) == (index, generation));
                let reserved = match own {
                    Some(granted) => Ok(granted.reservation),
                    None => member.reserve(group.each.size(), group.each.requested_priority()),
                };
                match reserved {
                    Ok(reserved) => reservations.push((at, reserved)),
                    Err(error) => {
                        while reservations.pop().is_some() {}
                        return Err((index, granted_shards, error));
                    }
                }
            }
        }
        // Restore the policy's order.
        reservations.sort_by_key(|(at, _)| *at);
        let lease = |(at, reserved): (usize, _)| {
            Lease::new(self.device_set.clone(), parts[at].index, parts[at].generation, reserved)
        };
        Ok(reservations.into_iter().map(lease).collect())
    }
}

/// Returns a device with the bytes already granted there added to its free bytes.
fn with_grant(device: Candidate<'_>, own: Option<(usize, u64)>) -> Candidate<'_> {
    let more = own.filter(|(index, _)| *index == device.index).map_or(0, |(_, bytes)| bytes);
    Candidate { free: device.free.saturating_add(more), ..device }
}

/// Returns how many shards fit on a device of which `bytes` are free.
fn shards_that_fit(group: &Group, device: &Candidate<'_>, bytes: u64) -> usize {
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
        let mut options: Vec<_> = room.iter().enumerate().map(option).collect();
        choose(&mut options, group)
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
