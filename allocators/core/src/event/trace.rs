//! A trace of the life of every block, in a format that can be replayed.
//!
//! # The format
//! Text lines that end with a line feed. Fields are separated by commas. The first line names the
//! fields:
//!
//! ```text
//! t_us,op,id,bytes,stream,kind,device,tag,address,thread,refused_by
//! 0,l,0,8589934592,0,cached,0,,,1,
//! 0,a,1,4096,2,cached,0,,0x7f0000000000,1,
//! 7,a,2,1048576,3,cached,1,kv%2Ccache,0x7f8000000000,2,
//! 7,f,1,4096,2,cached,0,,0x7f0000000000,1,
//! 12,c,1,4096,2,cached,0,,0x7f0000000000,1,
//! 25,a,3,65536,0,pinned,host:1,,0x7e0000000000,1,
//! 26,o,0,612368384,0,cached,0,,,1,
//! 26,g,0,2097152,0,cached,0,,,1,
//! 30,f,2,1048576,3,cached,1,kv%2Ccache,0x7f8000000000,2,
//! 31,x,0,1073741824,0,cached,0,,,1,all tenants/tenant a
//! ```
//!
//! - `t_us`: the time in whole microseconds since the recorder's start. It never decreases except
//!   between racing threads. A replay uses the order of lines.
//! - `op`: the operation:
//!   - `a`: the block was allocated.
//!   - `f`: its owner freed it. Its bytes may still be in use on other streams.
//!   - `c`: its last use is done, and its bytes can be reused.
//!   - `g`, `s`: the pool allocated memory from the driver or the kernel, or released some.
//!   - `m`: the pool moved physical memory of free ranges to other addresses.
//!   - `x`: an allocation failed.
//!   - `v`: a debugging pool found an error.
//!   - `l`: the limit of a pool's memory from here on, of a device or pinned: the lowest one of its
//!     budget and those above it. Written when the pool is opened and has a limit, and by its next
//!     slow path after a change. Older files have no such lines.
//!   - `o`: what the device has in use from here on beyond the memory of one device pool: the
//!     driver's count of used bytes less the pool's physical memory. Written before a `g` or an
//!     `x` of the pool if it has changed. The driver counts what other programs, contexts and
//!     libraries hold, and the other pools of this program. Older files have no such lines.
//!   - `p`: the pool dropped its plan, which no longer matches. The bytes are those of its range.
//!     Older files have no such lines.
//! - `id`: the number of the block, from 1 on and unique. 0 in lines that are about no block: `g`,
//!   `s`, `m`, `x`, `v`, `l`, `o` and `p`.
//! - `bytes`: the requested bytes, the same in each line of a block. Never 0, except in `v` and
//!   `o`, and in `l` if there is no limit any more.
//! - `stream`: the stream's number in its pool. In `a` it is the stream of the allocation, in `f`
//!   that of the free. 0 if there is none. Numbers of different devices are unrelated.
//! - `kind`: the name of a [`BlockKind`].
//! - `device`: the device's ordinal, `host:N` for pinned memory of NUMA node N, or `host` if the
//!   node is not known.
//! - `tag`: the name of its [`Tag`]. `%`, `,` and control characters are written as `%` and two
//!   hexadecimal digits for each byte. At most 1,024 bytes. Empty for none.
//! - `address`: the first address of the block or range in hexadecimal, with `0x`. Empty where an
//!   event has none, as most of `g`, `s` and `m`.
//! - `thread`: the number of the thread that caused the event, from 1 on.
//! - `refused_by`: the budget that refused, in `x` only, written as `tag` is: see
//!   [`Event::refused`]. Empty if no budget refused.
//!
//! Each block has one `a`, then at most one `f`, then at most one `c`. A block that is live at the
//! end of the file has no `f`. A `c` directly after its `f` means that no use outlived the free.
//! Without a `c`, the last use is not known to be done. All numbers are decimal, without a sign.
//! Readers should use the names in the first line, since older files have only the first five,
//! eight or ten fields.
//!
//! Each committed step of reserved memory is a block. Parking frees and completes a tag's blocks.
//! Resuming allocates them again. If a line cannot be written, the trace ends before it, and this
//! is reported on the standard error stream.

use super::{Action, BlockKind, Event, EventSink, MemoryLocation, line_file::LineFile};
use crate::{DeviceId, Tag};
use std::{
    collections::HashMap,
    fmt::{self, Write as _},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

const HEADER: &str = "t_us,op,id,bytes,stream,kind,device,tag,address,thread,refused_by";
/// The maximum length of a tag's name, in bytes.
const MAX_TAG_BYTES: usize = 1024;

/// A sink that writes a trace file, line by line, so that the trace is complete up to the last
/// event even if the program is killed. Each line costs a system call.
///
/// ```
/// use aquifer::{DeviceId, Tag, event::{Action, MemoryLocation, Recorder, TraceFile}};
/// use std::sync::Arc;
/// # if cfg!(miri) { return Ok(()); } // which opens no files
/// let path = std::env::temp_dir().join(format!("trace-{}.csv", std::process::id()));
/// let recorder = Recorder::new(Arc::new(TraceFile::create(&path)?));
/// let place = MemoryLocation::Device(DeviceId(0));
/// recorder.record(recorder.ticket(), recorder.event(Action::Allocate, place, 2, 0x7f00, 512, Tag::NONE));
/// let text = std::fs::read_to_string(&path)?;
/// assert!(text.starts_with("t_us,op,id,bytes,stream,"));
/// assert!(text.contains(",a,1,512,2,cached,0,,0x7f00,"));
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct TraceFile(Mutex<TraceState>);

#[derive(Debug)]
struct TraceState {
    lines: LineFile,
    /// Blocks that are not complete, by location and address. A freed block that is not complete
    /// still owns its bytes, so its address is unique.
    blocks: HashMap<(MemoryLocation, u64), TracedBlock>,
    next: u64,
    /// The fields after `stream` of the current line.
    rest: String,
}

#[derive(Clone, Copy, Debug)]
struct TracedBlock {
    id: u64,
    bytes: u64,
    kind: BlockKind,
    tag: Tag,
    freed: bool,
}

impl TraceFile {
    /// Creates or replaces the file at `path`, in which `%p` is replaced by the process id.
    ///
    /// A file that another process or this one is writing is left alone. The new file then has the
    /// process id in its name: `trace.csv` becomes `trace.4711.csv`. The file of a process that has
    /// ended is replaced.
    ///
    /// # Errors
    /// The operating system's error if the file cannot be created or its first line cannot be
    /// written.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self(Mutex::new(TraceState::new(LineFile::create(path, HEADER)?))))
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.state().lines.path().to_owned()
    }

    /// Records events that have waited elsewhere, in their order, with one system call. Each is
    /// complete in the file, or none of them is.
    pub fn record_all(&self, events: impl IntoIterator<Item = Event>) {
        let mut state = self.state();
        state.lines.hold_back();
        let events = events.into_iter().filter(|event| event.place != MemoryLocation::Global);
        events.for_each(|event| state.record(&event));
        state.lines.write_held();
    }

    fn state(&self) -> MutexGuard<'_, TraceState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TraceState {
    fn new(lines: LineFile) -> Self {
        Self { lines, blocks: HashMap::new(), next: 1, rest: String::new() }
    }

    /// Writes a line about the block of `event`.
    fn write(&mut self, event: &Event, op: char, block: TracedBlock) {
        let TracedBlock { id, bytes, kind, tag, .. } = block;
        let place = event.place;
        self.rest.clear();
        // Writing to a string cannot fail.
        let _ = write!(self.rest, "{},{},{},", kind.name(), DeviceField(place), TagField(tag));
        if event.address != 0 {
            let _ = write!(self.rest, "{:#x}", event.address);
        }
        let _ = write!(self.rest, ",{},{}", event.thread, TagField(event.refused_by));
        let (at_us, stream, rest) = (event.at_ns / 1000, event.stream, &self.rest);
        self.lines.write(format_args!("{at_us},{op},{id},{bytes},{stream},{rest}"));
    }

    /// Writes a line that is about no traced block.
    fn write_mark(&mut self, event: &Event, op: char) {
        let Event { bytes, kind, tag, .. } = *event;
        if bytes > 0 || matches!(op, 'v' | 'l' | 'o') {
            self.write(event, op, TracedBlock { id: 0, bytes, kind, tag, freed: false });
        }
    }

    /// Writes the end of a block whose address has been reused.
    fn write_end(&mut self, event: &Event, block: TracedBlock) {
        if !block.freed {
            self.write(event, 'f', block);
        }
        self.write(event, 'c', block);
    }

    fn record(&mut self, event: &Event) {
        let key = (event.place, event.address);
        let Event { bytes, kind, tag, .. } = *event;
        match event.action {
            // Imported memory has no bytes here: it counts where it was allocated.
            Action::Allocate if bytes > 0 => {
                let block = TracedBlock { id: self.next, bytes, kind, tag, freed: false };
                self.next += 1;
                if let Some(before) = self.blocks.insert(key, block) {
                    self.write_end(event, before);
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
            Action::Grow => self.write_mark(event, 'g'),
            Action::Reap => self.write_mark(event, 's'),
            Action::Move => self.write_mark(event, 'm'),
            Action::Fail => self.write_mark(event, 'x'),
            Action::Finding => self.write_mark(event, 'v'),
            Action::Limit => {
                let bytes = if bytes == u64::MAX { 0 } else { bytes };
                self.write_mark(&Event { bytes, ..*event }, 'l');
            }
            Action::Outside => self.write_mark(event, 'o'),
            Action::DropPlan => self.write_mark(event, 'p'),
            Action::Allocate | Action::Adopt => {}
        }
    }
}

impl EventSink for TraceFile {
    fn record(&self, event: &Event) {
        if event.place != MemoryLocation::Global {
            self.state().record(event);
        }
    }

    fn dropped(&self) -> u64 {
        self.state().lines.dropped()
    }
}

/// The value of the field `device`.
struct DeviceField(MemoryLocation);

impl fmt::Display for DeviceField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            MemoryLocation::Device(DeviceId(device)) => write!(f, "{device}"),
            MemoryLocation::Host(Some(node)) => write!(f, "host:{node}"),
            MemoryLocation::Host(None) | MemoryLocation::Global => f.write_str("host"),
        }
    }
}

/// The value of the fields `tag` and `refused_by`.
struct TagField(Tag);

impl fmt::Display for TagField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == Tag::NONE {
            return Ok(());
        }
        let within = |&(at, character): &(usize, char)| at + character.len_utf8() <= MAX_TAG_BYTES;
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
