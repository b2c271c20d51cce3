//! The source line of the user's program that driver calls on this thread are attributed to.
//!
//! The simulated GPU reports both sides of a race with their source lines. A driver call is made
//! deep inside a pool, through a trait object, which ends `#[track_caller]`. So public functions of
//! the upper crates [`enter`] the line of their caller. It applies to all calls they make on this
//! thread.

use std::{cell::Cell, panic::Location};

/// A line of the program.
pub(crate) type Site = &'static Location<'static>;

thread_local! {
    static SITE: Cell<Option<Site>> = const { Cell::new(None) };
}

/// A guard that restores the previous site when dropped. Returned by [`enter`].
#[derive(Debug)]
#[must_use = "the site holds until this is dropped"]
pub struct Entered {
    previous: Option<Site>,
}

/// Sets the caller's line as the site of driver calls on this thread, unless an outer function has
/// already entered one. The outermost line is the user's.
#[track_caller]
pub fn enter() -> Entered {
    let previous = SITE.get();
    if previous.is_none() {
        SITE.set(Some(Location::caller()));
    }
    Entered { previous }
}

/// Sets a line as the site of driver calls on this thread. The line was [entered](fn@entered) on
/// the thread that this one works for. Compare [`enter`].
pub fn enter_as(site: Option<&'static Location<'static>>) -> Entered {
    Entered { previous: SITE.replace(site) }
}

/// Sets `site` as the site of driver calls on this thread, unless an outer function has entered
/// one. For drops, which have no caller's line: they use the line that created the dropped value.
/// Compare [`enter`].
pub fn enter_or(site: &'static Location<'static>) -> Entered {
    Entered { previous: SITE.replace(Some(SITE.get().unwrap_or(site))) }
}

impl Drop for Entered {
    fn drop(&mut self) {
        SITE.set(self.previous);
    }
}

/// Returns the line set by [`enter`], if there is one.
#[must_use]
pub fn entered() -> Option<&'static Location<'static>> {
    SITE.get()
}

/// Returns the entered line, or else the caller's own.
#[track_caller]
#[must_use]
pub fn current() -> &'static Location<'static> {
    // Not by a closure, since `Location::caller` would return the closure's caller.
    match SITE.get() {
        Some(site) => site,
        None => Location::caller(),
    }
}
