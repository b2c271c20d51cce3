//! Several leases at once, all or none, as `choice` describes. How groups wait is in `grouping`.

mod grouping;

use super::{
    Candidate, Group, Health, Lease, PlaceError, Placer, Rejections,
    choice::{
        ChosenDevice, Refusal, choose, hold_all, is_satisfiable, shards_that_fit, with_grant,
    },
    waiting::Grant,
};
use aquifer_core::{MemoryError, Reservation};

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
        let members = self.device_set.members().enumerate();
        let present = members.filter(|(_, member)| member.health() != Health::Lost);
        is_satisfiable(group, present.map(|(index, member)| member.candidate(index, 0, None)))
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
            let room = |device: &Candidate<'_>| {
                let free = with_grant(*device, own).free;
                shards_that_fit(group, device, free).min(max_shards[device.index])
            };
            let rank = |devices, most| self.ranked(&group.each, devices, turn, most);
            let Some(parts) = choose(group, admitted, room, rank)? else {
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
                Err(Refusal { index, shards, error }) => {
                    max_shards[index] = shards;
                    rejections.add(index, error);
                }
            }
        }
    }

    fn reserve_all(
        &self,
        group: &Group,
        parts: &[ChosenDevice],
        granted: &mut Option<Grant>,
    ) -> Result<Vec<Lease>, Refusal<MemoryError>> {
        let reserve = |part: &ChosenDevice| {
            let ChosenDevice { index, generation, .. } = *part;
            match granted.take_if(|g| (g.index, g.generation) == (index, generation)) {
                Some(granted) => Ok(granted.reservation),
                None => {
                    let member = self.device_set.at(index, generation);
                    member.reserve(group.each.size(), group.each.requested_priority())
                }
            }
        };
        let lease = |(part, reserved): (ChosenDevice, Reservation)| {
            Lease::new(self.device_set.clone(), part.index, part.generation, reserved)
        };
        Ok(hold_all(parts, reserve)?.into_iter().map(lease).collect())
    }
}
