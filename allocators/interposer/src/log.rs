//! The trace, written by a thread of this library: a call of the program only adds an event to a
//! list.
//!
//! Of a process that is killed the last 10 ms are missing. One that exits waits for the last
//! events.

use crate::guest::{self, lock};
use aquifer_core::{
    Tag,
    event::{Action, BlockKind, Event, MemoryLocation, NullSink, Recorder, TraceFile},
};
use std::{
    iter, mem,
    path::{Path, PathBuf},
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

/// How many events may wait, each of 80 bytes. A thread that adds one more writes them.
const MOST_WAITING: usize = 1 << 20;

/// What an event is about.
#[derive(Clone, Copy)]
pub(crate) struct Subject {
    pub(crate) place: MemoryLocation,
    pub(crate) kind: BlockKind,
    pub(crate) stream: u32,
    pub(crate) bytes: u64,
    pub(crate) tag: Tag,
}

impl Subject {
    /// Returns a figure of a whole memory.
    pub(crate) fn figure(place: MemoryLocation, bytes: u64) -> Self {
        Self { place, kind: BlockKind::Cached, stream: 0, bytes, tag: Tag::NONE }
    }
}

pub(crate) struct Log {
    /// Makes events. It passes none on.
    events: Recorder,
    path: PathBuf,
    /// Whether an event was added. The first is written at once: processes that the program starts
    /// see by the file that they are not the first.
    has_begun: AtomicBool,
    waiting: Mutex<Vec<Event>>,
    writer: Mutex<Writer>,
}

struct Writer {
    file: LogFile,
    /// Takes the place of the list that is written, so that no list grows anew.
    spare: Vec<Event>,
}

/// The file appears with the first event, so that a process that takes no memory leaves none.
enum LogFile {
    Unopened,
    Open(TraceFile),
    Failed,
}

impl Log {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self {
            events: Recorder::new(Arc::new(NullSink)),
            path,
            has_begun: AtomicBool::new(false),
            waiting: Mutex::default(),
            writer: Mutex::new(Writer { file: LogFile::Unopened, spare: Vec::new() }),
        }
    }

    /// Adds what happened to a block, or to a whole memory.
    pub(crate) fn add(&self, action: Action, address: u64, what: Subject) {
        let Subject { place, kind, stream, bytes, tag } = what;
        let event = self.events.event(action, place, stream, address, bytes, tag).of_kind(kind);
        self.push(event);
    }

    /// Adds a failure, with the budget that refused, if one did.
    pub(crate) fn add_failure(&self, what: Subject, budget: Option<&str>) {
        let Subject { place, kind, stream, bytes, tag } = what;
        let event = self.events.event(Action::Fail, place, stream, 0, bytes, tag).of_kind(kind);
        self.push(match budget {
            Some(budget) => event.refused(budget, budget),
            None => event,
        });
    }

    fn push(&self, event: Event) {
        let waiting = {
            let mut waiting = lock(&self.waiting);
            waiting.push(event);
            waiting.len()
        };
        if waiting >= MOST_WAITING || !self.has_begun.swap(true, Ordering::Relaxed) {
            self.write();
        }
    }

    /// Writes what waits. Blocks while another thread writes.
    pub(crate) fn write(&self) {
        let mut writer = lock(&self.writer);
        let Writer { file, spare } = &mut *writer;
        mem::swap(spare, &mut *lock(&self.waiting));
        if spare.is_empty() {
            return;
        }
        if matches!(file, LogFile::Unopened) {
            let path = free_path(&self.path);
            *file = match TraceFile::create(&path) {
                Ok(open) => LogFile::Open(open),
                Err(error) => {
                    guest::report(&format!("no trace is written: {}: {error}", path.display()));
                    LogFile::Failed
                }
            };
        }
        // Nothing that is queued uses a freed block any more, or only its own stream.
        let both = spare.drain(..).flat_map(|event| {
            let is_free = event.action == Action::Free;
            let end = Event { action: Action::Complete, ..event };
            [Some(event), is_free.then_some(end)].into_iter().flatten()
        });
        if let LogFile::Open(open) = file {
            open.record_all(both);
        }
    }
}

/// Returns the path of this process's trace: of several processes of a program the first has the
/// one that was asked for, and others have their process id in the name.
fn free_path(path: &Path) -> PathBuf {
    let id = process::id();
    let own = |number: u32| {
        // A process that has executed another program has its id still.
        let own = if number < 2 { id.to_string() } else { format!("{id}.{number}") };
        match (path.file_stem(), path.extension()) {
            (Some(stem), Some(extension)) => {
                let (stem, extension) = (stem.to_string_lossy(), extension.to_string_lossy());
                path.with_file_name(format!("{stem}.{own}.{extension}"))
            }
            _ => path.with_extension(own),
        }
    };
    let mut names = iter::once(path.to_owned()).chain((1..).map(own));
    names.find(|name| !name.exists()).unwrap_or_else(|| path.to_owned())
}
