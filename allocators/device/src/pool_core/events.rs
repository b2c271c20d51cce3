//! The events that are recorded of a pool.

use super::PoolCore;
use aquifer_core::{
    Action, Budget, OutOfBudget, Recorder, Tag,
    event::{self, BlockKind, EventTicket},
};
use aquifer_driver::{MemoryInfo, Relaxed};
use aquifer_status::tightest_limit;

impl PoolCore {
    /// Takes a ticket in the order of events, if there is a recorder.
    #[inline]
    pub(crate) fn ticket(&self) -> Option<EventTicket> {
        self.config.recorder.as_deref().map(Recorder::ticket)
    }

    /// Records an event under its ticket, if there is one.
    #[inline]
    pub(crate) fn report(
        &self,
        ticket: Option<EventTicket>,
        action: Action,
        stream: u32,
        address: u64,
        bytes: u64,
        tag: Tag,
    ) {
        if let (Some(ticket), Some(recorder)) = (ticket, &self.config.recorder) {
            let place = event::MemoryLocation::Device(self.info.device);
            recorder.record(ticket, recorder.event(action, place, stream, address, bytes, tag));
        }
    }

    /// Records the limit of the pool's memory if it has changed since it was last recorded. Called
    /// with no lock held.
    pub(crate) fn report_limit(&self) {
        let Some(recorder) = &self.config.recorder else { return };
        let place = event::MemoryLocation::Device(self.info.device);
        recorder.record_change(&self.recorded_limit, Action::Limit, place, || {
            tightest_limit(&self.budget).unwrap_or(u64::MAX)
        });
    }

    /// Records what the device has in use beyond this pool's memory if it has changed since it was
    /// last recorded. Calls the driver (`cuMemGetInfo`), so it is called only where the pool has
    /// grown or refuses a request, with no lock held. Memory that another thread takes or releases
    /// at the same time may count on either side.
    pub(crate) fn report_outside(&self) {
        let Some(recorder) = &self.config.recorder else { return };
        if !recorder.accepts(Action::Outside) {
            return;
        }
        // A capture in the strictest mode on another thread must not break.
        let memory = {
            let _relaxed = Relaxed::enter(&*self.driver);
            self.driver.memory_info(self.info.device)
        };
        let Ok(MemoryInfo { free, total }) = memory else { return };
        let outside = total.saturating_sub(free).saturating_sub(self.held());
        let place = event::MemoryLocation::Device(self.info.device);
        recorder.record_change(&self.recorded_outside, Action::Outside, place, || outside);
    }

    /// Records the limit and the bytes that the pool holds, as far as they have changed since they
    /// were last recorded. Slow paths call it when they have taken or released memory. Called with
    /// no lock held.
    pub(crate) fn report_held(&self, kind: BlockKind) {
        let Some(recorder) = &self.config.recorder else { return };
        self.report_limit();
        let held = self.memory.held();
        if held.has_grown() {
            self.report_outside();
        }
        held.record_change(recorder, self.info.device, kind);
    }

    /// Records an event that concerns no block. Called with no lock held.
    pub(crate) fn report_pool(&self, action: Action, bytes: u64, tag: Tag) {
        self.report_held(BlockKind::Cached);
        self.report(self.ticket(), action, 0, 0, bytes, tag);
    }

    /// Records a failed request, with the charged budget and the refusal if a budget refused.
    /// Called with no lock held.
    pub(crate) fn report_failure(
        &self,
        bytes: u64,
        tag: Tag,
        refused: Option<(&Budget, &OutOfBudget)>,
    ) {
        self.report_held(BlockKind::Cached);
        self.report_outside();
        if let Some(recorder) = &self.config.recorder {
            let place = event::MemoryLocation::Device(self.info.device);
            let event = recorder.event(Action::Fail, place, 0, 0, bytes, tag);
            let event = match refused {
                Some((charged, refused)) => event.refused(refused.budget, charged.name()),
                None => event,
            };
            recorder.record(recorder.ticket(), event);
        }
    }
}
