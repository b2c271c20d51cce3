//! Events of the simulated machine.
#![expect(unsafe_code, reason = "creates handles, and implements the call that destroys one")]

use crate::{
    Call, DeviceId, Events, RawEvent, RawStream, Result,
    sim::{
        codes::{self, ErrorCode},
        machine::{Machine, caller_site, error_of},
        machine_state::MachineState,
        queue::Event,
    },
};

impl MachineState {
    /// Returns the event of a handle.
    pub(crate) fn event(&mut self, event: RawEvent) -> Result<&mut Event, ErrorCode> {
        match self.events.get_mut(event.handle()) {
            Some(entry) if entry.device == event.device() => Ok(entry),
            _ => Err(codes::INVALID_HANDLE),
        }
    }
}

// SAFETY: 1. The slots of events are reused only under another handle. 2. Results depend on how far
// the stream's queue has run. 3. Errors are detected before anything changes.
unsafe impl Events for Machine {
    fn event_create(&self, device: DeviceId) -> Result<RawEvent> {
        let mut state = self.enter(Call::EventCreate, Some(device))?;
        let handle = state.events.insert(Event { device, point: None, captured: None });
        // SAFETY: 1. The handle belongs to the event that was just created.
        Ok(unsafe { RawEvent::from_raw(device, handle) })
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()> {
        let call = Call::EventDestroy;
        let mut state = self.enter(call, Some(event.device()))?;
        state.event(event).map_err(error_of(call))?;
        state.events.remove(event.handle());
        Ok(())
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let site = caller_site();
        let call = Call::EventRecord;
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        if state.event(event).map_err(error_of(call))?.device != stream.device() {
            return Err(error_of(call)(codes::INVALID_HANDLE));
        }
        state.is_captured(index).map_err(error_of(call))?;
        let captured = state.captured_point(index);
        let point = captured.is_none().then(|| {
            // The event also comes after what the host knows now, and after the work implied by the
            // legacy rule.
            state.wait_for_implied_streams(index, "event", site);
            state.join_host_clock(index);
            state.point(index)
        });
        let event = state.event(event).map_err(error_of(call))?;
        (event.point, event.captured) = (point, captured);
        Ok(())
    }

    fn event_query(&self, event: RawEvent) -> Result<bool> {
        let call = Call::EventQuery;
        let mut state = self.enter(call, Some(event.device()))?;
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        state.refuse_captured_event(event).map_err(error_of(call))?;
        // Taken out and put back, to avoid copying a clock at every poll.
        let Some(point) = state.event(event).map_err(error_of(call))?.point.take() else {
            return Ok(true);
        };
        let done = state.reached(point.stream, point.count);
        if done {
            state.order_host_after(&point.clock);
        }
        state.event(event).map_err(error_of(call))?.point = Some(point);
        Ok(done)
    }

    fn event_synchronize(&self, event: RawEvent) -> Result<()> {
        let call = Call::EventSynchronize;
        let mut state = self.enter(call, Some(event.device()))?;
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        state.refuse_captured_event(event).map_err(error_of(call))?;
        let Some(point) = state.event(event).map_err(error_of(call))?.point.clone() else {
            return Ok(());
        };
        self.synchronize_host(state, event.device(), &point).map_err(error_of(call))
    }
}
