//! Call stacks: walked when they are sampled, resolved to names when they are printed.
#![cfg_attr(
    feature = "stacks",
    expect(unsafe_code, reason = "walks the stack without the lock that names need")
)]

use super::{paused, record};
use crate::route::unrouted;
use aquifer_core::scratch::{Bump, list};
use std::{cmp::Reverse, collections::BTreeMap, fmt};

/// A call stack whose allocations hold memory.
///
/// See [`stacks`] for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Stack {
    /// Estimated bytes that it holds, since each sampled block also represents blocks that were
    /// not sampled.
    pub live: u64,
    /// Bytes of the sampled blocks themselves.
    pub sampled: u64,
    /// Number of sampled blocks.
    pub blocks: u64,
    /// Instruction addresses, the innermost frame first, at most 40.
    pub frames: Vec<usize>,
}

/// Stores the return addresses of this thread's callers, the innermost first, and returns their
/// number.
#[cfg(feature = "stacks")]
#[inline(never)]
pub(super) fn walk(frames: &mut [usize]) -> usize {
    let mut depth = 0;
    let push = |frame: &backtrace::Frame| match frames.get_mut(depth) {
        Some(slot) => {
            *slot = frame.ip().addr();
            depth += 1;
            true
        }
        None => false,
    };
    // SAFETY: only the debugging library of Windows must not be used on several threads at once.
    // Elsewhere this uses the unwinder, which is thread-safe, does not allocate, and does not take
    // the lock that resolving names needs.
    unsafe { backtrace::trace_unsynchronized(push) };
    depth
}

/// Never called: samples cannot be requested without the feature.
#[cfg(not(feature = "stacks"))]
pub(super) fn walk(_: &mut [usize]) -> usize {
    0
}

/// Returns the `n` call stacks that hold the most bytes, in descending order.
///
/// The result is empty unless `sample_every` has been called, which needs the feature `stacks`.
/// Blocks that are sampled or freed during the call may be missing.
#[must_use]
pub fn stacks(n: usize) -> Vec<Stack> {
    // The memory of this function itself must not be counted.
    paused(|| unrouted(|| largest(n)))
}

/// The sums over the samples of one call stack.
#[derive(Clone, Copy, Default)]
struct Sums {
    live: u64,
    sampled: u64,
    blocks: u64,
}

fn largest(n: usize) -> Vec<Stack> {
    // A program has many more call stacks than are returned, and may call this because it is at its
    // cap, so temporary data lies in a bump allocator.
    let bump = Bump::new();
    let mut all = BTreeMap::<&[usize], Sums>::new();
    for sample in record::samples() {
        let frames = sample.frames.get(..sample.depth).unwrap_or_default();
        let add = |sums: &mut Sums| {
            sums.live += sample.weight;
            sums.sampled += sample.bytes;
            sums.blocks += 1;
        };
        // Most samples have a known call stack, and allocate nothing.
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

/// Prefixes of the innermost functions of every stack: the walk, this crate, and the language's
/// allocation functions.
#[cfg(feature = "stacks")]
const HIDDEN_PREFIXES: [&str; 9] = [
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

/// Prints the functions and, if known, the lines. Resolving them reads the program's file and takes
/// milliseconds to seconds. A frame without a name is printed as its address.
impl fmt::Display for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        paused(|| unrouted(|| fmt_names(self, f)))
    }
}

fn fmt_names(stack: &Stack, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let blocks = if stack.blocks == 1 { "block" } else { "blocks" };
    write!(f, "about {} in {} sampled {blocks}", aquifer_core::Bytes(stack.live), stack.blocks)?;
    for (name, location) in frames_of(stack) {
        write!(f, "\n    {name}{location}")?;
    }
    Ok(())
}

/// Returns the names and locations of the frames, without those of the allocator itself.
#[cfg(feature = "stacks")]
fn frames_of(stack: &Stack) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    for &frame in &stack.frames {
        let mut found = false;
        // A return address lies after the call, and possibly in the next function.
        backtrace::resolve((frame.saturating_sub(1)) as *mut _, |symbol| {
            let Some(name) = symbol.name() else { return };
            found = true;
            let location = symbol.filename().map(|file| match symbol.lineno() {
                Some(line) => format!(" ({}:{line})", file.display()),
                None => format!(" ({})", file.display()),
            });
            // Without the hash of the mangled name.
            lines.push((format!("{name:#}"), location.unwrap_or_default()));
        });
        if !found {
            lines.push((format!("{frame:#x}"), String::new()));
        }
    }
    let hidden = |name: &str| HIDDEN_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    lines.into_iter().skip_while(|(name, _)| hidden(name)).collect()
}

#[cfg(not(feature = "stacks"))]
fn frames_of(_: &Stack) -> Vec<(String, String)> {
    Vec::new()
}
