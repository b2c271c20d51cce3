//! Who an allocation belongs to.
//!
//! A tag is a number for a name, interned once for the process. [`tagged`] sets the tag of what a
//! scope allocates on this thread; a request may name another.

use std::{cell::Cell, collections::BTreeMap, fmt, sync::Mutex};

/// A name to count allocations under, two bytes wide.
///
/// ```
/// use aquifer_core::{Tag, tagged};
/// let kv = Tag::named("kv-cache");
/// assert_eq!(kv, Tag::named("kv-cache"));
/// assert_eq!(tagged(kv, Tag::current).name(), "kv-cache");
/// assert_eq!(Tag::current(), Tag::NONE);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(u16);

struct Names {
    by_name: BTreeMap<&'static str, u16>,
    by_tag: Vec<&'static str>,
}

static NAMES: Mutex<Names> = Mutex::new(Names { by_name: BTreeMap::new(), by_tag: Vec::new() });

thread_local! {
    // Const and without a destructor, so that an allocator may read it at any time of a thread's life.
    static CURRENT: Cell<u16> = const { Cell::new(0) };
    static FOLLOWER: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Has `told` called whenever this thread's current tag has changed, instead of who was told
/// before. It must not unwind.
///
/// For the global allocator, which then need not ask at each allocation. It has no example: nobody
/// else is to call it.
pub fn follow(told: fn()) {
    FOLLOWER.set(Some(told));
}

/// Makes this the thread's current tag, and answers with the one before.
fn change_to(tag: u16) -> u16 {
    let before = CURRENT.replace(tag);
    if let Some(told) = FOLLOWER.get() {
        told();
    }
    before
}

impl Tag {
    /// The tag of what nobody tagged.
    pub const NONE: Tag = Tag(0);
    /// Where names go after the 65,534th.
    pub const OTHER: Tag = Tag(1);
    /// Tags that exist at most: tables indexed by [`Tag::index`] need no more rows.
    pub const MAX: usize = 1 << 16;
    const FIRST: usize = 2;

    /// The tag of this name, made at its first use and kept for the life of the process.
    ///
    /// Takes a process-wide lock and, the first time, allocates: keep the tag, do not look it up
    /// for each request.
    #[must_use]
    pub fn named(name: &str) -> Tag {
        let mut names = NAMES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(&tag) = names.by_name.get(name) {
            return Tag(tag);
        }
        let Ok(tag) = u16::try_from(names.by_tag.len() + Self::FIRST) else { return Self::OTHER };
        let name: &'static str = Box::leak(name.into());
        names.by_tag.push(name);
        names.by_name.insert(name, tag);
        Tag(tag)
    }

    /// The name this tag was made from.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NONE => "untagged",
            Self::OTHER => "other",
            Tag(tag) => {
                let names = NAMES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                names.by_tag.get(usize::from(tag) - Self::FIRST).copied().unwrap_or("untagged")
            }
        }
    }

    /// The tag of the innermost [`tagged`] scope of this thread.
    #[inline]
    #[must_use]
    pub fn current() -> Tag {
        Tag(CURRENT.get())
    }

    /// The tag whose [`index`](Tag::index) this is; `None` from [`Tag::MAX`] on.
    #[must_use]
    pub fn from_index(index: usize) -> Option<Tag> {
        u16::try_from(index).ok().map(Tag)
    }

    /// The row of this tag in a table.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tag({} {:?})", self.0, self.name())
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Runs `work` with `tag` as this thread's current tag; the tag before comes back at the end, also
/// on unwind.
pub fn tagged<R>(tag: Tag, work: impl FnOnce() -> R) -> R {
    struct Restore(u16);
    impl Drop for Restore {
        fn drop(&mut self) {
            change_to(self.0);
        }
    }
    let _restore = Restore(change_to(tag.0));
    work()
}
