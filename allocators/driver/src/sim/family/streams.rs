//! Streams of the simulated machine.
#![expect(unsafe_code, reason = "creates handles, and implements the call that destroys one")]

use crate::{
    Call, CaptureMode, DeviceId, RawEvent, RawStream, Result, Streams,
    sim::{
        codes,
        machine::{Machine, caller_site, error_of},
        queue::{self, StreamKind},
    },
};

// SAFETY: 1. and 4. The slots of streams may be reused, and ids are never reused. 2. Queues run in
// order and stop at an event that has not been reached. 3. Results depend on how far the queue has
// run. 5. Errors are detected before anything changes.
unsafe impl Streams for Machine {
    fn stream_create(&self, device: DeviceId, _priority: i32) -> Result<RawStream> {
        let mut state = self.enter(Call::StreamCreate, Some(device))?;
        let index = state.create_stream(device, StreamKind::NonBlocking);
        // SAFETY: 1. The handle belongs to the stream that was just created.
        Ok(unsafe { RawStream::from_raw(device, queue::stream_handle(self.machine_id, index)) })
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()> {
        let call = Call::StreamDestroy;
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        if !state.is_created_by_program(index) {
            return Err(error_of(call)(codes::INVALID_HANDLE));
        }
        // A capture that it takes part in is invalidated.
        state.leave_capture(index);
        state.streams[index].alive = false;
        state.recycle_stream(index);
        Ok(())
    }

    fn stream_id(&self, stream: RawStream) -> Result<u64> {
        let mut state = self.enter(Call::StreamId, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(Call::StreamId))?;
        state.refuse_capturing_stream(index).map_err(error_of(Call::StreamId))?;
        Ok(state.streams[index].id)
    }

    fn stream_query(&self, stream: RawStream) -> Result<bool> {
        let call = Call::StreamQuery;
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        state.refuse_capturing_stream(index).map_err(error_of(call))?;
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        let point = state.point(index);
        let done = state.reached(point.stream, point.count);
        if done {
            state.order_host_after(&point.clock);
        }
        Ok(done)
    }

    fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        let call = Call::StreamSynchronize;
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        state.refuse_capturing_stream(index).map_err(error_of(call))?;
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        let point = state.point(index);
        self.synchronize_host(state, stream.device(), &point).map_err(error_of(call))
    }

    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let site = caller_site();
        let call = Call::StreamWaitEvent;
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        let (point, captured) = {
            let event = state.event(event).map_err(error_of(call))?;
            (event.point.clone(), event.captured.clone())
        };
        let captured = state.wait_captured_event(index, captured).map_err(error_of(call))?;
        if let Some(point) = point.filter(|_| !captured) {
            state.wait_for_point(index, &point, "wait for an event", site);
        }
        Ok(())
    }

    fn stream_is_capturing(&self, stream: RawStream) -> Result<bool> {
        let call = Call::StreamIsCapturing;
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        let captures = |other: usize| state.streams[other].capture.is_some();
        let legacy = state.streams[index].kind == StreamKind::Legacy;
        Ok(captures(index) || legacy && state.implied_streams(index).into_iter().any(captures))
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let mut state = self.enter(Call::ExchangeCaptureMode, None)?;
        Ok(state.captures.exchange_mode(mode))
    }
}
