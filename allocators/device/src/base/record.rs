//! What is known about blocks: their records, and the list of those that bypass the checks.

use aquifer_core::{Bytes, Tag};
use aquifer_driver::site;
use aquifer_stream::Timeline;
use std::{
    backtrace::Backtrace,
    collections::BTreeMap,
    env, fmt,
    panic::Location,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// The debugging record of a block.
///
/// See [`LeakReport`](crate::LeakReport) for an example.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BlockRecord {
    /// The block's first address.
    pub address: u64,
    /// Number of bytes requested.
    pub bytes: u64,
    /// The tag of the request.
    pub tag: Tag,
    /// The number of blocks that the pool had allocated with this one, itself included.
    pub number: u64,
    /// The driver's number of the owner stream (`cuStreamGetId`), which the simulated GPU uses
    /// too.
    pub stream: u64,
    /// The number of that stream in its pool, which recorders and snapshots use.
    pub(crate) of_pool: u32,
    /// When it was allocated.
    pub born: Instant,
    /// The line that allocated it.
    pub allocated_at: &'static Location<'static>,
    /// The line that freed it, if it was freed by [`DevicePool::free`](crate::DevicePool::free) or
    /// inside a function of this library. A plain drop does not pass its line.
    pub freed_at: Option<&'static Location<'static>>,
    /// The call stack of the allocation, with
    /// [`Debugging::backtraces`](crate::Debugging::backtraces).
    pub allocated_by: Option<Arc<Backtrace>>,
    /// The call stack of the free, likewise.
    pub freed_by: Option<Arc<Backtrace>>,
}

impl fmt::Display for BlockRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, bytes, tag, number, stream, .. } = self;
        write!(
            f,
            "block {number} at {address:#x}, {} for \"{tag}\" on stream {stream}",
            Bytes(*bytes)
        )
    }
}

impl BlockRecord {
    /// Writes where the block was allocated and freed.
    pub(crate) fn write_details(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n  block       {self}\n  allocated   {}", self.allocated_at)?;
        if let Some(stack) = &self.allocated_by {
            write!(f, "\n  allocated by")?;
            write_stack(f, &stack.to_string())?;
        }
        if let Some(freed_at) = self.freed_at {
            write!(f, "\n  freed       {freed_at}")?;
        }
        if let Some(stack) = &self.freed_by {
            write!(f, "\n  freed by")?;
            write_stack(f, &stack.to_string())?;
        }
        Ok(())
    }
}

/// The crates whose frames lead from the program into the capture of a stack.
const LIBRARY_CRATES: [&str; 9] = [
    "std",
    "core",
    "alloc",
    "aquifer",
    "aquifer_adapters",
    "aquifer_core",
    "aquifer_device",
    "aquifer_host",
    "aquifer_stream",
];

/// The standard library's frame below `main`, a test, and the function of a thread.
const BELOW_MAIN: &str = "__rust_begin_short_backtrace";

/// Writes the frames of the program: not those of this library and of the standard library above
/// them, nor what is below `main`. Writes all of them if there are no others, as in a program in C
/// without symbols.
fn write_stack(f: &mut fmt::Formatter<'_>, stack: &str) -> fmt::Result {
    // A frame is a line "  12: name", or "      name" if it is inlined, and a line "at file:line".
    let mut frames: Vec<(&str, Option<&str>)> = Vec::new();
    for line in stack.lines().map(str::trim_start) {
        match (line.strip_prefix("at "), frames.last_mut()) {
            (Some(place), Some((_, at))) => *at = Some(place),
            _ => {
                let (number, name) = line.split_once(": ").unwrap_or_default();
                let numbered = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
                frames.push((if numbered { name } else { line }, None));
            }
        }
    }
    // Debug information with lines alone names a function without its crate, but says its file. A
    // path that begins with a point is one below the current folder.
    let here = env::current_dir().unwrap_or_default();
    let here = here.to_string_lossy();
    let sources = file!().strip_suffix("/src/base/record.rs").unwrap_or_default();
    let sources = &sources[..sources.rfind("device").unwrap_or(0)];
    let is_library = |(name, at): &(&str, Option<&str>)| {
        let path = name.trim_start_matches(['<', '&']);
        let end = path.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(path.len());
        let named = path[end..].starts_with("::") && LIBRARY_CRATES.contains(&&path[..end]);
        named
            || at.is_some_and(|at| {
                let file = at.strip_prefix('.').map(|below| format!("{here}{below}"));
                let file = file.as_deref().unwrap_or(at);
                file.starts_with("/rustc/")
                    || file.contains("/rustlib/src/rust/")
                    || (file.contains("/src/") && !sources.is_empty() && file.contains(sources))
            })
    };
    let first = frames.iter().position(|frame| !is_library(frame)).unwrap_or(0);
    let below = frames.iter().position(|(name, _)| name.contains(BELOW_MAIN));
    let mut shown = &frames[first..below.unwrap_or(frames.len()).max(first)];
    while let [rest @ .., last] = shown
        && is_library(last)
        && below.is_some()
    {
        shown = rest;
    }
    let shown = if shown.is_empty() { &frames[..] } else { shown };
    for (name, at) in shown {
        write!(f, "\n    {name}")?;
        if let Some(at) = at {
            write!(f, "\n      at {at}")?;
        }
    }
    Ok(())
}

/// Returns the number by which findings name a stream: the driver's own, which violations of the
/// simulated GPU use too. A stream without one, since it captures, is named by its number in its
/// pool.
pub(crate) fn stream_of(stream: &Timeline) -> u64 {
    stream.id().unwrap_or_else(|| u64::from(stream.number()))
}

/// Addresses of which a part is committed.
pub(crate) trait CommittedBytes: Send + Sync {
    /// Returns the committed bytes.
    fn committed_bytes(&self) -> u64;
}

/// The live blocks of a pool that bypass its checks: stable and reserved memory, memory of graphs
/// and parkable memory. Numbers all blocks of the pool.
#[derive(Default)]
pub(crate) struct LiveBlockList {
    numbers: AtomicU64,
    backtraces: bool,
    live: Mutex<BTreeMap<u64, UncheckedBlock>>,
}

/// A block that bypasses the checks.
struct UncheckedBlock {
    record: BlockRecord,
    /// For reserved memory, what is committed.
    committed: Option<Weak<dyn CommittedBytes>>,
}

/// Removes its block from the listing when it is dropped.
pub(crate) struct LiveBlockEntry {
    listing: Arc<LiveBlockList>,
    number: u64,
}

impl Drop for LiveBlockEntry {
    fn drop(&mut self) {
        let listed = self.listing.live().remove(&self.number);
        debug_assert!(listed.is_some(), "a block was removed twice");
    }
}

impl LiveBlockList {
    pub(crate) fn new(backtraces: bool) -> Self {
        Self { backtraces, ..Self::default() }
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<u64, UncheckedBlock>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the next block.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Lists a block of `bytes`, or of the committed bytes, until the returned value is dropped.
    #[track_caller]
    pub(crate) fn list(
        self: &Arc<Self>,
        (address, bytes): (u64, u64),
        tag: Tag,
        owner_stream: &Timeline,
        committed: Option<Arc<dyn CommittedBytes>>,
    ) -> LiveBlockEntry {
        let number = self.number();
        let record = BlockRecord {
            address,
            bytes,
            tag,
            number,
            stream: stream_of(owner_stream),
            of_pool: owner_stream.number(),
            born: Instant::now(),
            allocated_at: site::current(),
            freed_at: None,
            allocated_by: self.backtraces.then(|| Arc::new(Backtrace::force_capture())),
            freed_by: None,
        };
        let committed = committed.as_ref().map(Arc::downgrade);
        let before = self.live().insert(number, UncheckedBlock { record, committed });
        debug_assert!(before.is_none(), "two blocks have one number");
        LiveBlockEntry { listing: self.clone(), number }
    }

    /// Returns the live blocks. Reserved memory counts with its committed bytes, and is left out if
    /// it has none.
    pub(crate) fn records(&self) -> Vec<BlockRecord> {
        let live = self.live();
        let records = live.values().filter_map(|block| {
            let committed = block.committed.as_ref().map(Weak::upgrade);
            let bytes = match committed {
                None => block.record.bytes,
                Some(memory) => memory?.committed_bytes(),
            };
            (bytes > 0).then(|| BlockRecord { bytes, ..block.record.clone() })
        });
        records.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Written<'a>(&'a str);

    impl fmt::Display for Written<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write_stack(f, self.0)
        }
    }

    #[test]
    fn a_stack_is_shown_from_the_programs_own_frame_down_to_main() {
        let stack = "   0: std::backtrace_rs::backtrace::trace
             at /rustc/1/library/std/src/backtrace.rs:1:2
       1: <aquifer_device::checked::CheckedPool as core::fmt::Debug>::allocate
      aquifer_device::pool::DevicePool::alloc
             at ./src/pool.rs:3:4
       2: core::ops::function::FnOnce::call_once
       3: <server::Cache as server::Store>::put
             at /server/src/cache.rs:5:6
       4: std::panicking::catch_unwind
       5: server::main
             at /server/src/main.rs:7:8
       6: core::ops::function::FnOnce::call_once
       7: std::sys::backtrace::__rust_begin_short_backtrace
       8: main
       9: __libc_start_main
      10: _start
    ";
        let expected = "
    <server::Cache as server::Store>::put
      at /server/src/cache.rs:5:6
    std::panicking::catch_unwind
    server::main
      at /server/src/main.rs:7:8";
        assert_eq!(Written(stack).to_string(), expected);
        let lines_only = "   0: alloc
             at ./allocators/device/src/pool.rs:1:2
       1: step
             at /server/src/step.rs:3:4
       2: call_once<server::main, ()>
             at /rustc/1/library/core/src/ops/function.rs:250:5
       3: __rust_begin_short_backtrace<fn(), ()>
    ";
        let expected = "\n    step\n      at /server/src/step.rs:3:4";
        assert_eq!(Written(lines_only).to_string(), expected);
        let foreign = "   0: std::backtrace\n   1: aquifer_device::pool";
        assert_eq!(Written(foreign).to_string().lines().count(), 3);
        let of_c = "   0: aquifer_device::pool::alloc\n   1: step\n   2: main\n";
        assert_eq!(Written(of_c).to_string(), "\n    step\n    main");
    }
}
