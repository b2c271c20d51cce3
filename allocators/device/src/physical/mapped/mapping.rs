//! Mapping of planned handles.
#![expect(unsafe_code, reason = "maps and unmaps")]

use super::{Mapped, plan::MappingPlan};
use crate::physical::slots::runs;
use aquifer_core::Result;

impl Mapped {
    /// Maps the planned handles and grants access to the device and its peers. If that fails, no
    /// new mapping remains and the plan is complete, except for mappings that the driver refused
    /// to remove, which are in `stuck`.
    pub(super) fn map_all(&self, plan: &mut MappingPlan<'_>) -> Result<()> {
        let mut mapped = 0;
        let outcome = self.map_planned(plan, &mut mapped);
        if outcome.is_err() {
            for planned in &plan.planned[..mapped] {
                let (address, bytes) = (self.address(planned.first), planned.count * self.slot);
                // SAFETY: 1. mapped above, and not handed out.
                if unsafe { self.driver.unmap(self.device, address, bytes) }.is_err() {
                    plan.stuck.push(planned.mapping());
                }
            }
            let stuck = &plan.stuck;
            plan.planned
                .retain(|planned| stuck.iter().all(|mapping| mapping.first != planned.first));
            return outcome;
        }
        let mut slots = self.slots();
        for planned in plan.planned.drain(..) {
            slots.map(planned.mapping());
        }
        Ok(())
    }

    fn map_planned(&self, plan: &MappingPlan<'_>, mapped: &mut usize) -> Result<()> {
        for planned in &plan.planned {
            let mapping = planned.mapping();
            let (address, bytes) = (self.address(planned.first), planned.count * self.slot);
            // SAFETY: 1. this attempt has claimed the slots: nothing is mapped there, and no other
            // code uses them.
            let done = unsafe { self.driver.map(address, bytes, mapping.handle.raw()) };
            done.map_err(|e| self.driver_error(e))?;
            *mapped += 1;
        }
        for (first, count) in
            runs(plan.planned.iter().map(|planned| (planned.first, planned.count)))
        {
            self.driver
                .set_access(self.address(first), count * self.slot, &self.accessors)
                .map_err(|e| self.driver_error(e))?;
        }
        Ok(())
    }
}
