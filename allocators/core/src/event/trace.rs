//! Writes the life of every device block as a trace that can be replayed.
//!
//! One line an event under the header `t_us,op,id,bytes,stream`: `a` allocated, `f` freed by its owner, `c` its last
//! use is done. `id` names the block, `bytes` is what was asked for, `t_us` counts microseconds from the start.

use super::{Action, Event, Place, Sink};
use std::{
    collections::HashMap,
    fs::File,
    io::{self, LineWriter, Write},
    path::Path,
    sync::{Mutex, PoisonError},
};

/// A sink that writes a trace file, a line at a time, so that the trace of a program that is killed is whole as far as it
/// goes. A line costs a system call.
#[derive(Debug)]
pub struct TraceFile {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: LineWriter<File>,
    /// Ids of blocks that are not complete, by place and address. A freed block whose bytes are held back cannot share
    /// its address with another, so the address tells blocks apart until they are complete.
    ids: HashMap<(Place, u64), (u64, u64)>,
    next: u64,
    /// Lines that could not be written.
    dropped: u64,
}

impl TraceFile {
    /// Creates or truncates the file at `path`.
    ///
    /// # Errors
    /// The operating system's, if the file cannot be created or its first line not written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut file = LineWriter::new(File::create(path)?);
        writeln!(file, "t_us,op,id,bytes,stream")?;
        file.flush()?;
        Ok(Self { state: Mutex::new(State { file, ids: HashMap::new(), next: 1, dropped: 0 }) })
    }
}

impl Sink for TraceFile {
    fn record(&self, event: &Event) {
        if !matches!(event.place, Place::Device(_)) {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
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
        let line = writeln!(state.file, "{},{op},{id},{bytes},{}", event.at_ns / 1000, event.stream);
        if line.is_err() {
            state.dropped += 1;
        }
    }

    fn dropped(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).dropped
    }

    fn flush(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.file.flush().is_err() {
            state.dropped += 1;
        }
    }
}
