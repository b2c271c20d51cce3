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

/// Routes that there can be: one for each kind of memory and node of a machine, with room.
const MOST: usize = 32;

static ROUTES: [OnceLock<&'static dyn Route>; MOST] = [const { OnceLock::new() }; MOST];
/// Routes before this one may be set.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Where the windows of all routes lie. It only widens, and before the first block of a route can
/// exist: a thread that frees one has been told of it by the thread that got it, so relaxed loads
/// see it.
struct Window {
    lowest: AtomicUsize,
    highest: AtomicUsize,
}

// Padded: every free reads it, so nothing that is written often may share its line.
static WINDOW: CachePadded<Window> =
    CachePadded::new(Window { lowest: AtomicUsize::new(usize::MAX), highest: AtomicUsize::new(0) });

/// A registered route.
///
/// Its example is that of [`register`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RouteId(usize);

/// There are as many routes as there can be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RoutesFull {
    /// How many.
    pub most: usize,
}

impl fmt::Display for RoutesFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "all {} routes are registered; route to one of them", self.most)
    }
}

impl error::Error for RoutesFull {}

/// Makes a route known, for the life of the process. Registering one again answers with the same
/// id.
///
/// Takes time linear in the routes there are; does not block but for another registration.
///
/// # Errors
/// [`RoutesFull`] if there are 32.
pub fn register(route: &'static dyn Route) -> Result<RouteId, RoutesFull> {
    let window = route.window();
    for (index, place) in ROUTES.iter().enumerate() {
        if place.get().is_none() {
            // Wide enough before anybody can be sent there.
            WINDOW.lowest.fetch_min(window.start, Ordering::Relaxed);
            WINDOW.highest.fetch_max(window.end, Ordering::Relaxed);
        }
        let kept = place.get_or_init(|| route);
        COUNT.fetch_max(index + 1, Ordering::Release);
        if is(*kept, route) {
            return Ok(RouteId(index));
        }
    }
    Err(RoutesFull { most: MOST })
}

/// Whether both are the same route. With the method tables: routes without fields may share an
/// address.
fn is(a: &dyn Route, b: &dyn Route) -> bool {
    ptr::eq(a, b)
}

impl RouteId {
    /// The route. Every id was made by `register`, so there is one.
    pub(super) fn get(self) -> Option<&'static dyn Route> {
        ROUTES.get(self.0)?.get().copied()
    }
}

/// Whether a block could be a route's.
#[inline]
pub(super) fn may_own(block: *mut u8) -> bool {
    let address = block.addr();
    address >= WINDOW.lowest.load(Ordering::Relaxed)
        && address < WINDOW.highest.load(Ordering::Relaxed)
}

/// The route that a block is of.
pub(super) fn owner(block: NonNull<u8>) -> Option<&'static dyn Route> {
    let count = COUNT.load(Ordering::Acquire);
    ROUTES.iter().take(count).filter_map(OnceLock::get).copied().find(|route| route.owns(block))
}
