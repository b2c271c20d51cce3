//! Stream capture, as far as it decides which calls fail and which captures they break.
//!
//! Work queued on a capturing stream becomes part of a graph and does not run; the graph itself is not simulated.

use super::{codes, queue::Kind, state::State};
use crate::{CaptureMode, CaptureStatus, RawStream};
use std::{
    collections::HashMap,
    thread::{self, ThreadId},
};

/// Open captures, and how strict each thread is.
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
    origin: usize,
    valid: bool,
    work: u64,
}

/// An error code of the driver.
type Refused = u32;

impl Captures {
    /// Sets this thread's mode, and answers with the one before.
    pub(crate) fn exchange(&mut self, mode: CaptureMode) -> CaptureMode {
        self.modes.insert(thread::current().id(), mode).unwrap_or(CaptureMode::Global)
    }

    /// A call that could disturb a capture is made by this thread.
    pub(crate) fn disturb(&mut self) -> Result<(), Refused> {
        if self.open.is_empty() {
            return Ok(());
        }
        let me = thread::current().id();
        let mode = self.modes.get(&me).copied().unwrap_or(CaptureMode::Global);
        let mut refused = false;
        for capture in self.open.values_mut() {
            let mine = capture.thread == me && capture.mode != CaptureMode::Relaxed;
            let anybodys = mode == CaptureMode::Global && capture.mode == CaptureMode::Global;
            if mode != CaptureMode::Relaxed && (mine || anybodys) {
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

    /// Counts work that becomes part of a capture.
    fn add(&mut self, capture: u64) -> Result<(), Refused> {
        match self.open.get_mut(&capture) {
            Some(capture) if capture.valid => {
                capture.work += 1;
                Ok(())
            }
            _ => Err(codes::CAPTURE_INVALIDATED),
        }
    }
}

impl State {
    /// Opens a capture on a stream.
    pub(crate) fn begin_capture(&mut self, stream: RawStream, mode: CaptureMode) -> Result<(), Refused> {
        let place = self.stream(stream)?;
        if self.streams[place].kind == Kind::Legacy {
            return Err(codes::CAPTURE_UNSUPPORTED);
        }
        if self.streams[place].capture.is_some() {
            return Err(codes::INVALID_VALUE);
        }
        self.captures.next += 1;
        let id = self.captures.next;
        let thread = thread::current().id();
        self.captures.open.insert(id, Capture { mode, thread, origin: place, valid: true, work: 0 });
        self.streams[place].capture = Some(id);
        Ok(())
    }

    /// Ends it, and answers with how much work it holds.
    pub(crate) fn end_capture(&mut self, stream: RawStream) -> Result<u64, Refused> {
        let place = self.stream(stream)?;
        let id = self.streams[place].capture.ok_or(codes::CAPTURE_UNMATCHED)?;
        let capture = self.captures.open.get(&id).ok_or(codes::CAPTURE_UNMATCHED)?;
        if capture.origin != place {
            return Err(codes::CAPTURE_UNMATCHED);
        }
        if capture.thread != thread::current().id() && capture.mode != CaptureMode::Relaxed {
            return Err(codes::CAPTURE_WRONG_THREAD);
        }
        let (valid, work) = (capture.valid, capture.work);
        self.captures.open.remove(&id);
        self.streams.iter_mut().filter(|s| s.capture == Some(id)).for_each(|s| s.capture = None);
        if valid { Ok(work) } else { Err(codes::CAPTURE_INVALIDATED) }
    }

    /// Which capture a stream takes part in.
    pub(crate) fn capture_status(&mut self, stream: RawStream) -> Result<CaptureStatus, Refused> {
        let place = self.stream(stream)?;
        if self.implied(place).into_iter().any(|other| self.streams[other].capture.is_some())
            && self.streams[place].kind == Kind::Legacy
        {
            return Err(codes::CAPTURE_IMPLICIT);
        }
        let Some(id) = self.streams[place].capture else { return Ok(CaptureStatus::None) };
        let valid = self.captures.open.get(&id).is_some_and(|capture| capture.valid);
        Ok(if valid { CaptureStatus::Active { id } } else { CaptureStatus::Invalidated })
    }

    /// Whether work for a stream goes into a capture instead of its queue.
    pub(crate) fn captured(&mut self, stream: usize) -> Result<bool, Refused> {
        match self.streams[stream].capture {
            Some(id) => self.captures.add(id).map(|()| true),
            None => {
                // Work that implies an order with a capturing stream cannot be given one.
                let implied = self.implied(stream).into_iter().find_map(|other| self.streams[other].capture);
                match implied {
                    Some(id) => {
                        self.captures.invalidate(id);
                        Err(codes::CAPTURE_IMPLICIT)
                    }
                    None => Ok(false),
                }
            }
        }
    }

    /// A query of, or a wait for, a stream that captures.
    pub(crate) fn refuse_capturing(&mut self, stream: usize) -> Result<(), Refused> {
        match self.streams[stream].capture {
            Some(id) => {
                self.captures.invalidate(id);
                Err(codes::CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    /// A stream waits for an event that was recorded in a capture, or captures itself. Whether that was all.
    pub(crate) fn captured_wait(&mut self, stream: usize, event: Option<u64>) -> Result<bool, Refused> {
        match (self.streams[stream].capture, event) {
            (None, None) => Ok(false),
            (Some(mine), Some(theirs)) if mine == theirs => self.captures.add(mine).map(|()| true),
            (None, Some(theirs)) => {
                self.captures.add(theirs)?;
                self.streams[stream].capture = Some(theirs);
                Ok(true)
            }
            (Some(mine), Some(theirs)) => {
                self.captures.invalidate(mine);
                self.captures.invalidate(theirs);
                Err(codes::CAPTURE_MERGE)
            }
            (Some(mine), None) => {
                self.captures.invalidate(mine);
                Err(codes::CAPTURE_ISOLATION)
            }
        }
    }
}
