//! Writes the life of every device block as a trace that can be replayed.
//!
//! # The format
//! Text in lines that end with a line feed, of five fields apart by commas, under this header:
//!
//! ```text
//! t_us,op,id,bytes,stream
//! 0,a,1,4096,2
//! 7,a,2,1048576,3
//! 7,f,1,4096,2
//! 12,c,1,4096,2
//! 30,f,2,1048576,3
//! ```
//!
//! | field | is |
//! |---|---|
//! | `t_us` | when: whole microseconds from the recorder's start. Never smaller than the line before but for threads that race; a replay goes by the order of lines |
//! | `op` | `a`: the block was given out; `f`: its owner freed it, and its bytes may still be in use on other streams; `c`: its last use is done, and anybody may have its bytes |
//! | `id` | the block: from 1 on, and never again for another |
//! | `bytes` | what was asked for, the same in each of a block's lines; not 0 |
//! | `stream` | the number that its pool gave to the stream: in `a` the one that it was allocated for, in `f` the one that it was freed on |
//!
//! Each block has one `a`, at most one `f` behind it, and at most one `c` behind that. What is still held when the file ends
//! has no `f`. A `c` right behind its `f` says that nothing outlived the free; without one, the last use is not known to be
//! done by the end. All numbers are decimal, without a sign. Only blocks of device memory are written.

use super::{Action, Event, Place, Sink, lines::Lines};
use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A sink that writes a trace file, a line at a time, so that the trace of a program that is killed is whole as far as it
/// goes. A line costs a system call.
///
/// ```
/// use aquifer_core::event::{Action, Place, Recorder, TraceFile};
/// use aquifer_core::{DeviceId, Tag};
/// use std::sync::Arc;
/// # if cfg!(miri) { return Ok(()); } // which opens no files
/// let path = std::env::temp_dir().join(format!("trace-{}.csv", std::process::id()));
/// let recorder = Recorder::new(Arc::new(TraceFile::create(&path)?));
/// let place = Place::Device(DeviceId(0));
/// recorder.record(recorder.ticket(), recorder.event(Action::Allocate, place, 2, 0x7f00, 512, Tag::NONE));
/// let text = std::fs::read_to_string(&path)?;
/// assert!(text.starts_with("t_us,op,id,bytes,stream\n") && text.ends_with(",a,1,512,2\n"));
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct TraceFile {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    lines: Lines,
    /// Ids of blocks that are not complete, by place and address. A freed block whose bytes are held back cannot share
    /// its address with another, so the address tells blocks apart until they are complete.
    ids: HashMap<(Place, u64), (u64, u64)>,
    next: u64,
}

impl TraceFile {
    /// Creates or truncates the file at `path`.
    ///
    /// # Errors
    /// The operating system's, if the file cannot be created or its first line not written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let lines = Lines::create(path, "t_us,op,id,bytes,stream")?;
        Ok(Self { state: Mutex::new(State { lines, ids: HashMap::new(), next: 1 }) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sink for TraceFile {
    fn record(&self, event: &Event) {
        if !matches!(event.place, Place::Device(_)) {
            return;
        }
        let mut state = self.state();
        let key = (event.place, event.address);
        let (op, id, bytes) = match event.action {
            Action::Allocate => {
                let id = state.next;
                state.next += 1;
                state.ids.insert(key, (id, event.bytes));
                ('a', id, event.bytes)
            }
            Action::Free => match state.ids.get(&key) {
                Some(&(id, bytes)) => ('f', id, bytes),
                None => return,
            },
            Action::Complete => match state.ids.remove(&key) {
                Some((id, bytes)) => ('c', id, bytes),
                None => return,
            },
            _ => return,
        };
        let at_us = event.at_ns / 1000;
        state.lines.write(format_args!("{at_us},{op},{id},{bytes},{}", event.stream));
    }

    fn dropped(&self) -> u64 {
        self.state().lines.dropped()
    }

    fn flush(&self) {
        self.state().lines.flush();
    }
}
