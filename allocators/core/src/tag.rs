//! Tags: the owners of allocations.
//!
//! A tag is a small number for a name, interned for the whole process. [`tagged`] sets the tag of
//! the allocations of a scope on this thread. A request can override it.

use std::{cell::Cell, collections::BTreeMap, fmt, sync::Mutex};

/// A name under which allocations are counted, as a two-byte number.
///
/// ```
/// use aquifer::{Tag, tagged};
/// let kv = Tag::named("kv-cache");
/// assert_eq!(kv, Tag::named("kv-cache"));
/// assert_eq!(tagged(kv, Tag::current).name(), "kv-cache");
/// assert_eq!(Tag::current(), Tag::NONE);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(u16);

/// A tag is written as its name.
#[cfg(feature = "serde")]
impl serde::Serialize for Tag {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

struct TagNames {
    by_name: BTreeMap<&'static str, u16>,
    by_tag: Vec<&'static str>,
}

static NAMES: Mutex<TagNames> =
    Mutex::new(TagNames { by_name: BTreeMap::new(), by_tag: Vec::new() });

thread_local! {
    // `const` and without a destructor, so that an allocator may read it at any time in a thread's
    // life.
    static CURRENT: Cell<u16> = const { Cell::new(0) };
    static OBSERVER: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Sets the function that is called after each change of this thread's current tag. Replaces the
/// previous one. It must not unwind.
///
/// For the global allocator, which then needs no lookup at each allocation. Not for other use, so
/// it has no example.
pub fn follow(observer: fn()) {
    OBSERVER.set(Some(observer));
}

/// Sets the thread's current tag and returns the previous one.
fn set_current(tag: u16) -> u16 {
    let before = CURRENT.replace(tag);
    if let Some(observer) = OBSERVER.get() {
        observer();
    }
    before
}

impl Tag {
    /// The tag of untagged memory.
    pub const NONE: Tag = Tag(0);
    /// The shared tag of all names after the 65,534th.
    pub const OTHER: Tag = Tag(1);
    /// The maximum number of tags: tables indexed by [`Tag::index`] need no more rows.
    pub const MAX: usize = 1 << 16;
    const FIRST: usize = 2;

    /// Returns the tag of this name, which is created at its first use and never removed.
    ///
    /// Takes a process-wide lock, and allocates the first time. Callers should store the tag
    /// instead of looking it up for each request.
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

    /// Returns the name of this tag.
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

    /// Returns the tag of the innermost [`tagged`] scope of this thread.
    #[inline]
    #[must_use]
    pub fn current() -> Tag {
        Tag(CURRENT.get())
    }

    /// Returns the tag with this [`index`](Tag::index), or `None` for [`Tag::MAX`] and above.
    #[must_use]
    pub fn from_index(index: usize) -> Option<Tag> {
        u16::try_from(index).ok().map(Tag)
    }

    /// Returns the index of this tag for tables.
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

/// Runs `work` with `tag` as this thread's current tag. The previous tag is restored at the end,
/// also on unwind.
pub fn tagged<R>(tag: Tag, work: impl FnOnce() -> R) -> R {
    struct Restore(u16);
    impl Drop for Restore {
        fn drop(&mut self) {
            set_current(self.0);
        }
    }
    let _restore = Restore(set_current(tag.0));
    work()
}
