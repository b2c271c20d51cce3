//! Writes the life of every block as a trace that can be replayed.
//!
//! # The format
//! Text in lines that end with a line feed, of fields apart by commas. The first line names the
//! fields:
//!
//! ```text
//! t_us,op,id,bytes,stream,kind,device,tag
//! 0,a,1,4096,2,cached,0,
//! 7,a,2,1048576,3,cached,1,kv%2Ccache
//! 7,f,1,4096,2,cached,0,
//! 12,c,1,4096,2,cached,0,
//! 25,a,3,65536,0,pinned,host:1,
//! 30,f,2,1048576,3,cached,1,kv%2Ccache
//! ```
//!
//! | field | is |
//! |---|---|
//! | `t_us` | when: whole microseconds from the recorder's start. Never smaller than the line before but for threads that race; a replay goes by the order of lines |
//! | `op` | `a`: the block was allocated; `f`: its owner freed it, and its bytes may still be in use on other streams; `c`: its last use is done, and another block may have its bytes; `g`, `s`: the pool took memory from the driver or the kernel, or gave memory back; `x`: an allocation failed |
//! | `id` | the block: from 1 on, and never again for another; 0 in `g`, `s` and `x` |
//! | `bytes` | what was asked for, the same in each of a block's lines; not 0 |
//! | `stream` | the number that its pool gave to the stream: in `a` the one that it was allocated for, in `f` the one that it was freed on; 0 where there is none. Streams of different devices have nothing to do with each other |
//! | `kind` | the name of a [`BlockKind`] |
//! | `device` | the device's ordinal; `host:N` for pinned memory of NUMA node N, `host` where the node is not known |
//! | `tag` | the name of its [`Tag`], with `%`, `,`, and control characters as `%` and two hexadecimal digits for each byte; at most 1,024 bytes of it; empty for none |
//!
//! Each block has one `a`, at most one `f` behind it, and at most one `c` behind that. What is
//! still held when the file ends has no `f`. A `c` right behind its `f` says that nothing outlived
//! the free; without one, the last use is not known to be done by the end. All numbers are decimal,
//! without a sign. A reader goes by the names in the first line: files that were written before
//! have the first five fields alone.
//!
//! Reserved memory has a block for each committed step. Parking frees and completes a tag's blocks,
//! resuming allocates them again. The trace ends with the last line that could be written; that is
//! reported on the standard error stream.

use super::{Action, BlockKind, Event, Place, Sink, lines::Lines, process::PerProcess};
use crate::{DeviceId, Tag};
use std::{
    collections::HashMap,
    fmt::{self, Write as _},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

const HEADER: &str = "t_us,op,id,bytes,stream,kind,device,tag";
/// Bytes of a tag's name that are written.
const TAG: usize = 1024;

/// A sink that writes a trace file, a line at a time, so that the trace of a program that is killed
/// is whole as far as it goes. A line costs a system call.
///
/// A child of a fork writes a file of its own from its first event on. Blocks that it inherited are
/// in its parent's file alone.
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
/// assert!(text.starts_with("t_us,op,id,bytes,stream,") && text.ends_with(",a,1,512,2,cached,0,\n"));
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct TraceFile {
    template: PathBuf,
    state: PerProcess<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    lines: Lines,
    /// Blocks that are not complete, by place and address. A freed block whose bytes are held back
    /// cannot share its address with another, so the address tells blocks apart until they are
    /// complete.
    blocks: HashMap<(Place, u64), Block>,
    next: u64,
    /// The fields behind the stream's, of the line that is written.
    rest: String,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    id: u64,
    bytes: u64,
    kind: BlockKind,
    tag: Tag,
    freed: bool,
}

impl TraceFile {
    /// Creates or replaces the file at `path`, in which `%p` stands for the process id. A file that
    /// is being written already, by another process or by this one, is left alone: the new one has
    /// the process id in its name, so that `trace.csv` becomes `trace.4711.csv`. The file of a
    /// process that has ended is replaced.
    ///
    /// # Errors
    /// The operating system's, if the file cannot be created or its first line not written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let state = State::new(Lines::create(path, HEADER)?);
        Ok(Self { template: path.to_owned(), state: PerProcess::new(Mutex::new(state)) })
    }

    /// Returns the path of the file that this process writes.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.state().lines.path().to_owned()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let child = |_: &_| Mutex::new(State::new(Lines::in_child(&self.template, HEADER)));
        self.state.get(child).lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn new(lines: Lines) -> Self {
        Self { lines, blocks: HashMap::new(), next: 1, rest: String::new() }
    }

    /// Writes a line about a block that `event` has to do with.
    fn write(&mut self, event: &Event, op: char, block: Block) {
        let Block { id, bytes, kind, tag, .. } = block;
        let place = event.place;
        self.rest.clear();
        // Writing to a string does not fail.
        let _ = write!(self.rest, "{},{},{}", kind.name(), At(place), Escaped(tag));
        let (at_us, stream, rest) = (event.at_ns / 1000, event.stream, &self.rest);
        self.lines.write(format_args!("{at_us},{op},{id},{bytes},{stream},{rest}"));
    }

    /// Writes the end of a block that another has taken the address of.
    fn end(&mut self, event: &Event, block: Block) {
        if !block.freed {
            self.write(event, 'f', block);
        }
        self.write(event, 'c', block);
    }

    fn record(&mut self, event: &Event) {
        let key = (event.place, event.address);
        let Event { bytes, kind, tag, .. } = *event;
        match event.action {
            // Imported memory counts where it was made.
            Action::Allocate if bytes > 0 => {
                let block = Block { id: self.next, bytes, kind, tag, freed: false };
                self.next += 1;
                if let Some(before) = self.blocks.insert(key, block) {
                    self.end(event, before);
                }
                self.write(event, 'a', block);
            }
            Action::Free => {
                let Some(block) = self.blocks.get_mut(&key).filter(|block| !block.freed) else {
                    return;
                };
                block.freed = true;
                let block = *block;
                self.write(event, 'f', block);
            }
            Action::Complete => {
                if self.blocks.get(&key).is_some_and(|block| block.freed)
                    && let Some(block) = self.blocks.remove(&key)
                {
                    self.write(event, 'c', block);
                }
            }
            Action::Grow | Action::Reap | Action::Fail if bytes > 0 => {
                let op = match event.action {
                    Action::Grow => 'g',
                    Action::Reap => 's',
                    _ => 'x',
                };
                self.write(event, op, Block { id: 0, bytes, kind, tag, freed: false });
            }
            _ => {}
        }
    }
}

impl Sink for TraceFile {
    fn record(&self, event: &Event) {
        if event.place != Place::Global {
            self.state().record(event);
        }
    }

    fn dropped(&self) -> u64 {
        self.state().lines.dropped()
    }
}

/// A place, as the field `device` has it.
struct At(Place);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Place::Device(DeviceId(device)) => write!(f, "{device}"),
            Place::Host(Some(node)) => write!(f, "host:{node}"),
            Place::Host(None) | Place::Global => f.write_str("host"),
        }
    }
}

/// A tag, as the field `tag` has it.
struct Escaped(Tag);

impl fmt::Display for Escaped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == Tag::NONE {
            return Ok(());
        }
        let within = |&(at, character): &(usize, char)| at + character.len_utf8() <= TAG;
        for (_, character) in self.0.name().char_indices().take_while(within) {
            match character {
                ',' | '%' => write!(f, "%{:02X}", u32::from(character))?,
                control if control.is_control() => {
                    let mut bytes = [0; 4];
                    control
                        .encode_utf8(&mut bytes)
                        .bytes()
                        .try_for_each(|byte| write!(f, "%{byte:02X}"))?;
                }
                plain => f.write_char(plain)?,
            }
        }
        Ok(())
    }
}
