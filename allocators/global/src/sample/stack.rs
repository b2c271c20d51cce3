//! Call stacks: walked as they are sampled, named as they are printed.
#![cfg_attr(
    feature = "stacks",
    expect(unsafe_code, reason = "walks the stack without the lock that names need")
)]

use super::{paused, record};
use crate::route::unrouted;
use aquifer_core::scratch::{Bump, list};
use std::{cmp::Reverse, collections::BTreeMap, fmt};

/// A place in the program that holds memory.
///
/// Its example is that of [`stacks`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Stack {
    /// Bytes that it holds, by estimate: each sampled block stands for all that were not.
    pub live: u64,
    /// Bytes of the sampled blocks themselves.
    pub sampled: u64,
    /// Sampled blocks (a count).
    pub blocks: u64,
    /// Addresses of instructions, the innermost first: at most the innermost 40.
    pub frames: Vec<usize>,
}

/// Notes the return addresses of this thread's callers, the innermost first; answers with how many.
#[cfg(feature = "stacks")]
#[inline(never)]
pub(super) fn walk(frames: &mut [usize]) -> usize {
    let mut depth = 0;
    let note = |frame: &backtrace::Frame| match frames.get_mut(depth) {
        Some(place) => {
            *place = frame.ip().addr();
            depth += 1;
            true
        }
        None => false,
    };
    // SAFETY: what must not happen on several threads at once is the use of Windows' debugging
    // library; elsewhere it asks the unwinder, which is made for threads, and neither allocates nor
    // takes the lock that names need.
    unsafe { backtrace::trace_unsynchronized(note) };
    depth
}

/// Nobody asks: there is no way to have samples taken.
#[cfg(not(feature = "stacks"))]
pub(super) fn walk(_: &mut [usize]) -> usize {
    0
}

/// The `n` call stacks that hold most bytes, the largest first; empty unless `sample_every` has
/// been called, which is there with the feature `stacks`. What is sampled or freed meanwhile may be
/// missing.
#[must_use]
pub fn stacks(n: usize) -> Vec<Stack> {
    // What this needs for itself is none of it.
    paused(|| unrouted(|| largest(n)))
}

/// What the samples of one place come to.
#[derive(Clone, Copy, Default)]
struct Sums {
    live: u64,
    sampled: u64,
    blocks: u64,
}

fn largest(n: usize) -> Vec<Stack> {
    // A program has many more places than are answered with, and may be asked because it is at its
    // cap.
    let bump = Bump::new();
    let mut all = BTreeMap::<&[usize], Sums>::new();
    for sample in record::samples() {
        let frames = sample.frames.get(..sample.depth).unwrap_or_default();
        let add = |sums: &mut Sums| {
            sums.live += sample.stands_for;
            sums.sampled += sample.bytes;
            sums.blocks += 1;
        };
        // Most samples are of places that are there already: they allocate nothing.
        match all.get_mut(frames) {
            Some(sums) => add(sums),
            None => add(all.entry(bump.alloc_slice_copy(frames)).or_default()),
        }
    }
    let mut all = list(&bump, all);
    all.sort_by_key(|(_, sums)| Reverse(sums.live));
    let stack = |(frames, Sums { live, sampled, blocks }): (&[usize], Sums)| Stack {
        live,
        sampled,
        blocks,
        frames: frames.to_vec(),
    };
    all.into_iter().take(n).map(stack).collect()
}

/// What stands on every stack before the caller: the walk, this crate, and the language's own way
/// to it.
#[cfg(feature = "stacks")]
const OURS: [&str; 9] = [
    "backtrace::",
    "aquifer_global::",
    "<aquifer_global::",
    "<core::option::Option",
    "core::ops::function::",
    "std::thread::local::",
    "__rustc::",
    "__rust",
    "alloc::alloc::",
];

/// The functions and, where the program knows them, the lines. Looks them up, which reads the
/// program's file and takes milliseconds to seconds; a frame without a name is told by its address.
impl fmt::Display for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        paused(|| unrouted(|| named(self, f)))
    }
}

fn named(stack: &Stack, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let blocks = if stack.blocks == 1 { "block" } else { "blocks" };
    write!(f, "about {} in {} sampled {blocks}", aquifer_core::Bytes(stack.live), stack.blocks)?;
    for (name, place) in frames_of(stack) {
        write!(f, "\n    {name}{place}")?;
    }
    Ok(())
}

/// The frames' names and places, without those of the allocator's own.
#[cfg(feature = "stacks")]
fn frames_of(stack: &Stack) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    for &frame in &stack.frames {
        let mut found = false;
        // A return address is behind the call, perhaps in the next function.
        backtrace::resolve((frame.saturating_sub(1)) as *mut _, |symbol| {
            let Some(name) = symbol.name() else { return };
            found = true;
            let place = symbol.filename().map(|file| match symbol.lineno() {
                Some(line) => format!(" ({}:{line})", file.display()),
                None => format!(" ({})", file.display()),
            });
            // Without the hash that tells versions apart.
            lines.push((format!("{name:#}"), place.unwrap_or_default()));
        });
        if !found {
            lines.push((format!("{frame:#x}"), String::new()));
        }
    }
    let ours = |name: &str| OURS.iter().any(|prefix| name.starts_with(prefix));
    lines.into_iter().skip_while(|(name, _)| ours(name)).collect()
}

#[cfg(not(feature = "stacks"))]
fn frames_of(_: &Stack) -> Vec<(String, String)> {
    Vec::new()
}
