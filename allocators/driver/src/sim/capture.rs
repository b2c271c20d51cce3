//! Stream capture: which calls fail, which captures they invalidate, and how work is captured.
//!
//! Work that is queued on a capturing stream becomes a node of a graph. It comes after the stream's
//! *tail*: the previous node of the stream, and the tails of the events that the stream has waited
//! for since. Events and waits are not nodes. They carry tails from stream to stream.

use super::{
    codes::{self, ErrorCode},
    graph::{Graph, GraphNode},
    machine_state::MachineState,
    queue::{StreamKind, Task},
};
use crate::{CaptureMode, CaptureStatus, DeviceId, RawEvent, RawStream};
use std::{
    collections::HashMap,
    thread::{self, ThreadId},
};

/// Open captures, and the capture mode of each thread.
#[derive(Default, Debug)]
pub(crate) struct Captures {
    open: HashMap<u64, Capture>,
    next: u64,
    modes: HashMap<ThreadId, CaptureMode>,
}

#[derive(Debug)]
struct Capture {
    mode: CaptureMode,
    thread: ThreadId,
    valid: bool,
    /// The streams that take part, beginning with the one that began it. Their order is that of
    /// the graph's branches.
    members: Vec<CaptureMember>,
    nodes: Vec<GraphNode>,
    /// The keepers of memory for the graph.
    keepers: Vec<u64>,
}

/// A stream that takes part in a capture.
#[derive(Debug)]
struct CaptureMember {
    /// The stream's index.
    stream: usize,
    device: DeviceId,
    /// The nodes that precede the next one.
    tail: Vec<usize>,
}

/// The position of an event's record in a capture.
#[derive(Clone, Debug)]
pub(crate) struct CapturedPoint {
    capture: u64,
    tail: Vec<usize>,
}

impl Capture {
    fn member(&mut self, stream: usize) -> Option<&mut CaptureMember> {
        self.members.iter_mut().find(|member| member.stream == stream)
    }

    /// Returns whether the stream that began it waits for all work.
    fn is_joined(&self) -> bool {
        let mut reached = vec![false; self.nodes.len()];
        let mut next = self.members.first().map_or_else(Vec::new, |origin| origin.tail.clone());
        while let Some(node) = next.pop() {
            if !std::mem::replace(&mut reached[node], true) {
                next.extend_from_slice(&self.nodes[node].predecessors);
            }
        }
        reached.into_iter().all(|reached| reached)
    }
}

impl Captures {
    /// Sets this thread's mode and returns the previous one.
    pub(crate) fn exchange_mode(&mut self, mode: CaptureMode) -> CaptureMode {
        self.modes.insert(thread::current().id(), mode).unwrap_or(CaptureMode::Global)
    }

    /// Handles a call of this thread that is unsafe during a capture.
    pub(crate) fn reject_unsafe_call(&mut self) -> Result<(), ErrorCode> {
        if self.open.is_empty() {
            return Ok(());
        }
        let me = thread::current().id();
        let mode = self.modes.get(&me).copied().unwrap_or(CaptureMode::Global);
        let mut refused = false;
        for capture in self.open.values_mut() {
            let mine = capture.thread == me && capture.mode != CaptureMode::Relaxed;
            let global = mode == CaptureMode::Global && capture.mode == CaptureMode::Global;
            if mode != CaptureMode::Relaxed && (mine || global) {
                capture.valid = false;
                refused = true;
            }
        }
        if refused { Err(codes::CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.open.get_mut(&capture) {
            capture.valid = false;
        }
    }
}

impl MachineState {
    /// Begins a capture on a stream.
    pub(crate) fn begin_capture(
        &mut self,
        stream: RawStream,
        mode: CaptureMode,
    ) -> Result<(), ErrorCode> {
        let index = self.stream(stream)?;
        if self.streams[index].kind == StreamKind::Legacy {
            return Err(codes::CAPTURE_UNSUPPORTED);
        }
        if self.streams[index].capture.is_some() {
            return Err(codes::ILLEGAL_STATE);
        }
        self.captures.next += 1;
        let id = self.captures.next;
        let origin = CaptureMember { stream: index, device: stream.device(), tail: Vec::new() };
        let capture = Capture {
            mode,
            thread: thread::current().id(),
            valid: true,
            members: vec![origin],
            nodes: Vec::new(),
            keepers: Vec::new(),
        };
        self.captures.open.insert(id, capture);
        self.streams[index].capture = Some(id);
        Ok(())
    }

    /// Ends a capture and returns its graph.
    pub(crate) fn end_capture(&mut self, stream: RawStream) -> Result<Graph, ErrorCode> {
        let index = self.stream(stream)?;
        let id = self.streams[index].capture.ok_or(codes::ILLEGAL_STATE)?;
        let capture = self.captures.open.get(&id).ok_or(codes::ILLEGAL_STATE)?;
        if !self.began_capture(index) {
            self.captures.invalidate(id);
            return Err(codes::CAPTURE_UNMATCHED);
        }
        if capture.thread != thread::current().id() && capture.mode != CaptureMode::Relaxed {
            return Err(codes::CAPTURE_WRONG_THREAD);
        }
        let capture = self.close_capture(id).ok_or(codes::ILLEGAL_STATE)?;
        if !capture.valid {
            return Err(codes::CAPTURE_INVALIDATED);
        }
        if !capture.is_joined() {
            return Err(codes::CAPTURE_UNJOINED);
        }
        let branches = capture.members.iter().map(|member| member.device).collect();
        Ok(Graph::new(stream.device(), capture.nodes, branches, capture.keepers))
    }

    /// Returns whether the capture that a stream takes part in was begun there.
    fn began_capture(&self, index: usize) -> bool {
        let capture = self.streams[index].capture.and_then(|id| self.captures.open.get(&id));
        capture.is_some_and(|capture| {
            capture.members.first().is_some_and(|origin| origin.stream == index)
        })
    }

    /// Removes a capture and releases all of its streams.
    fn close_capture(&mut self, id: u64) -> Option<Capture> {
        self.streams.iter_mut().filter(|s| s.capture == Some(id)).for_each(|s| s.capture = None);
        self.captures.open.remove(&id)
    }

    /// Handles the destruction of a stream that takes part in a capture. The capture is
    /// invalidated. If the stream began it, it cannot be ended any more and is removed.
    pub(crate) fn leave_capture(&mut self, index: usize) {
        let Some(id) = self.streams[index].capture else { return };
        self.captures.invalidate(id);
        if self.began_capture(index) {
            self.close_capture(id);
        }
        self.streams[index].capture = None;
    }

    /// Returns the capture that a stream takes part in.
    pub(crate) fn capture_status(&mut self, stream: RawStream) -> Result<CaptureStatus, ErrorCode> {
        let index = self.stream(stream)?;
        if self
            .implied_streams(index)
            .into_iter()
            .any(|other| self.streams[other].capture.is_some())
            && self.streams[index].kind == StreamKind::Legacy
        {
            return Err(codes::CAPTURE_IMPLICIT);
        }
        let Some(id) = self.streams[index].capture else { return Ok(CaptureStatus::None) };
        let valid = self.captures.open.get(&id).is_some_and(|capture| capture.valid);
        Ok(if valid { CaptureStatus::Active { id } } else { CaptureStatus::Invalidated })
    }

    /// Returns whether work for a stream is captured instead of queued.
    pub(crate) fn is_captured(&mut self, stream: usize) -> Result<bool, ErrorCode> {
        if let Some(id) = self.streams[stream].capture {
            let valid = self.captures.open.get(&id).is_some_and(|capture| capture.valid);
            return if valid { Ok(true) } else { Err(codes::CAPTURE_INVALIDATED) };
        }
        // Work with an implicit order to a capturing stream cannot be ordered.
        let implied =
            self.implied_streams(stream).into_iter().find_map(|other| self.streams[other].capture);
        match implied {
            Some(id) => {
                self.captures.invalidate(id);
                Err(codes::CAPTURE_IMPLICIT)
            }
            None => Ok(false),
        }
    }

    /// Adds work to the graph of a stream that captures.
    pub(crate) fn capture(&mut self, stream: usize, task: Task) {
        let uses = self.split_by_block(task.work.uses());
        let id = self.streams[stream].capture;
        let Some(capture) = id.and_then(|id| self.captures.open.get_mut(&id)) else { return };
        for u in &uses {
            self.retained.add_keepers(u.range.address, u.range.bytes, &mut capture.keepers);
        }
        let node = capture.nodes.len();
        let Some(branch) = capture.members.iter().position(|member| member.stream == stream) else {
            return;
        };
        let predecessors = std::mem::replace(&mut capture.members[branch].tail, vec![node]);
        capture.nodes.push(GraphNode { task, uses, branch, predecessors });
    }

    /// Returns the position of an event that is recorded now, if its stream captures.
    pub(crate) fn captured_point(&mut self, stream: usize) -> Option<CapturedPoint> {
        let capture = self.streams[stream].capture?;
        let tail = self.captures.open.get_mut(&capture)?.member(stream)?.tail.clone();
        Some(CapturedPoint { capture, tail })
    }

    /// Refuses a query of, or a wait for, an event that was recorded in a capture. The code says
    /// that the capture is open, or, after its end, that the event is invalid.
    pub(crate) fn refuse_captured_event(&mut self, event: RawEvent) -> Result<(), ErrorCode> {
        let Some(capture) = self.event(event)?.captured.as_ref().map(|at| at.capture) else {
            return Ok(());
        };
        let open = self.captures.open.contains_key(&capture);
        Err(if open { codes::CAPTURED_EVENT } else { codes::INVALID_VALUE })
    }

    /// Refuses a query of, or a wait for, a stream that captures.
    pub(crate) fn refuse_capturing_stream(&mut self, stream: usize) -> Result<(), ErrorCode> {
        match self.streams[stream].capture {
            Some(id) => {
                self.captures.invalidate(id);
                Err(codes::CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    /// Handles a stream's wait for an event if the event was recorded in a capture or the stream
    /// captures. Returns whether the wait is complete.
    pub(crate) fn wait_captured_event(
        &mut self,
        stream: usize,
        event: Option<CapturedPoint>,
    ) -> Result<bool, ErrorCode> {
        match (self.streams[stream].capture, event) {
            (None, None) => Ok(false),
            (mine, Some(event)) if mine.is_none_or(|mine| mine == event.capture) => {
                // A capture that has ended or is invalidated cannot be joined.
                let refused =
                    if mine.is_some() { codes::CAPTURE_INVALIDATED } else { codes::INVALID_VALUE };
                let device = self.streams[stream].device;
                let open = self.captures.open.get_mut(&event.capture);
                let capture = open.filter(|capture| capture.valid).ok_or(refused)?;
                match capture.member(stream) {
                    Some(member) => {
                        let new: Vec<_> = event
                            .tail
                            .into_iter()
                            .filter(|node| !member.tail.contains(node))
                            .collect();
                        member.tail.extend(new);
                    }
                    None => {
                        capture.members.push(CaptureMember { stream, device, tail: event.tail });
                    }
                }
                self.streams[stream].capture = Some(event.capture);
                Ok(true)
            }
            (Some(mine), Some(event)) => {
                self.captures.invalidate(mine);
                self.captures.invalidate(event.capture);
                Err(codes::CAPTURE_MERGE)
            }
            (Some(mine), None) => {
                self.captures.invalidate(mine);
                Err(codes::CAPTURE_ISOLATION)
            }
            (None, Some(_)) => Err(codes::INVALID_VALUE),
        }
    }
}
