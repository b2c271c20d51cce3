//! Which line of the user's program a driver call is made for.
//!
//! The simulated GPU names both parties of a race by their source lines. A driver call is made deep
//! inside a pool, through a trait object, where `#[track_caller]` ends; so public functions of the
//! upper crates [`enter`] their caller's line, and it holds for what they call on this thread.

use std::{cell::Cell, panic::Location};

thread_local! {
    static SITE: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// Restores what stood before, when dropped.
///
/// Its example is that of [`enter`].
#[derive(Debug)]
#[must_use = "the site holds until this is dropped"]
pub struct Entered {
    before: Option<&'static Location<'static>>,
}

/// Makes the caller's line the site of driver calls on this thread, unless an outer function has
/// entered one already: the outermost is the user's.
#[track_caller]
pub fn enter() -> Entered {
    let before = SITE.get();
    if before.is_none() {
        SITE.set(Some(Location::caller()));
    }
    Entered { before }
}

/// Makes a line the site of driver calls on this thread: one that was [entered](fn@entered) on the
/// thread which this one works for.
///
/// Its example is that of [`enter`].
pub fn enter_as(site: Option<&'static Location<'static>>) -> Entered {
    Entered { before: SITE.replace(site) }
}

impl Entered {
    /// Panics for violations of the simulated GPU where they are to
    /// ([`OnViolation::Panic`](crate::sim::OnViolation::Panic)) and no outer function has entered a
    /// site: called by public functions that queue work or wait for it, at their end, under no
    /// lock.
    #[track_caller]
    pub fn checkpoint(&self, driver: &dyn crate::Driver) {
        if self.before.is_none()
            && let Some(observer) = driver.observer()
        {
            observer.checkpoint();
        }
    }
}

/// Makes `site` the site of driver calls on this thread, unless an outer function has entered one:
/// for drops, which have no caller's line, and name the one that made what they end.
///
/// Its example is that of [`enter`].
pub fn enter_or(site: &'static Location<'static>) -> Entered {
    Entered { before: SITE.replace(Some(SITE.get().unwrap_or(site))) }
}

impl Drop for Entered {
    fn drop(&mut self) {
        SITE.set(self.before);
    }
}

/// The line entered, if one has been.
///
/// Its example is that of [`enter`].
#[must_use]
pub fn entered() -> Option<&'static Location<'static>> {
    SITE.get()
}

/// The line entered, or the caller's own.
#[track_caller]
#[must_use]
pub fn current() -> &'static Location<'static> {
    // Not by a closure, whose own caller would be named.
    match SITE.get() {
        Some(site) => site,
        None => Location::caller(),
    }
}
