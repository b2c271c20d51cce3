//! The routes of the process.

use super::Route;
use crossbeam_utils::CachePadded;
use std::{
    error, fmt,
    ptr::{self, NonNull},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Maximum number of routes: enough for one per kind of memory and node of a machine.
const MAX_ROUTES: usize = 32;

static ROUTES: [OnceLock<&'static dyn Route>; MAX_ROUTES] = [const { OnceLock::new() }; MAX_ROUTES];
/// Routes before this index may be set.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The bounds of the windows of all routes. It only widens, and does so before the first block of a
/// route can exist. A thread that frees a block has received it from the thread that allocated it,
/// with synchronisation, so relaxed loads see the bounds.
struct Window {
    lowest: AtomicUsize,
    highest: AtomicUsize,
}

// Padded: every free reads it, so frequently written data must not share its cache line.
static WINDOW: CachePadded<Window> =
    CachePadded::new(Window { lowest: AtomicUsize::new(usize::MAX), highest: AtomicUsize::new(0) });

/// A registered route.
///
/// See [`register`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RouteId(usize);

/// The error that the maximum number of routes is registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RoutesFull {
    /// That number.
    pub most: usize,
}

impl fmt::Display for RoutesFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "all {} routes are registered; route to one of them", self.most)
    }
}

impl error::Error for RoutesFull {}

/// Registers a route for the life of the process. Registering a route again returns the same id.
///
/// Takes time linear in the number of routes. Blocks only while another registration is in
/// progress.
///
/// # Errors
/// [`RoutesFull`] if 32 routes are registered.
pub fn register(route: &'static dyn Route) -> Result<RouteId, RoutesFull> {
    let window = route.window();
    for (index, slot) in ROUTES.iter().enumerate() {
        if slot.get().is_none() {
            // The bounds must include the window before any allocation can be routed there.
            WINDOW.lowest.fetch_min(window.start, Ordering::Relaxed);
            WINDOW.highest.fetch_max(window.end, Ordering::Relaxed);
        }
        let registered = slot.get_or_init(|| route);
        COUNT.fetch_max(index + 1, Ordering::Release);
        if is_same(*registered, route) {
            return Ok(RouteId(index));
        }
    }
    Err(RoutesFull { most: MAX_ROUTES })
}

/// Returns whether both are the same route. Compares the vtables too, since routes without fields
/// may share an address.
fn is_same(a: &dyn Route, b: &dyn Route) -> bool {
    ptr::eq(a, b)
}

impl RouteId {
    /// Returns the route. There always is one, since `register` creates every id.
    pub(super) fn get(self) -> Option<&'static dyn Route> {
        ROUTES.get(self.0)?.get().copied()
    }
}

/// Returns whether a block may belong to a route.
#[inline]
pub(super) fn may_own(block: *mut u8) -> bool {
    let address = block.addr();
    address >= WINDOW.lowest.load(Ordering::Relaxed)
        && address < WINDOW.highest.load(Ordering::Relaxed)
}

/// Returns the route that owns a block.
pub(super) fn owner(block: NonNull<u8>) -> Option<&'static dyn Route> {
    let count = COUNT.load(Ordering::Acquire);
    ROUTES.iter().take(count).filter_map(OnceLock::get).copied().find(|route| route.owns(block))
}
