//! Driver objects whose release was refused.
//!
//! A driver may refuse to destroy a stream, an event or a graph. The object still exists then and takes the driver's memory,
//! so it is kept in a list of the process and released again later: whenever another object is released here, or one is about
//! to be made, or by [`retry`]. [`count`] says how many there are. Objects of a lost device, or of a driver that is gone, have
//! ended with it and are not kept.
#![expect(unsafe_code, reason = "ends handles")]

use crate::{Driver, RawEvent, RawGraph, RawGraphExec, RawStream, Relaxed, Result};
use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

/// An object that a driver made and can destroy.
///
/// Its example is that of [`release`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Object {
    /// A stream (`cuStreamDestroy`).
    Stream(RawStream),
    /// An event (`cuEventDestroy`).
    Event(RawEvent),
    /// A template of a graph (`cuGraphDestroy`).
    Graph(RawGraph),
    /// A graph that can be launched (`cuGraphExecDestroy`).
    GraphExec(RawGraphExec),
}

impl Object {
    /// # Safety
    /// 1. No copy of the handle is used afterwards, unless the call is refused.
    unsafe fn destroy(self, driver: &dyn Driver) -> Result<()> {
        // SAFETY: 1. the caller's.
        unsafe {
            match self {
                Self::Stream(stream) => driver.stream_destroy(stream),
                Self::Event(event) => driver.event_destroy(event),
                Self::Graph(graph) => driver.graph_destroy(graph),
                Self::GraphExec(exec) => driver.graph_exec_destroy(exec),
            }
        }
    }
}

/// An object that was refused, and the driver that made it. A driver that is dropped takes its contexts, and what is in
/// them, along.
type Kept = (Weak<dyn Driver>, Object);

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// How many there are, so that the usual case takes no lock. Relaxed: a count that is read late costs one retry.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn kept() -> MutexGuard<'static, Vec<Kept>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Destroys an object, or keeps it to be destroyed later if the driver refuses. Never blocks, never panics.
///
/// ```
/// use aquifer_driver::{Call, DeviceId, Driver, sim::Sim, unreleased::{self, Object}};
/// let sim = Sim::h200(1);
/// let driver = sim.driver();
/// let stream = driver.stream_create(DeviceId(0), 0)?;
/// sim.fail(Call::StreamDestroy, 1, 999);
/// // SAFETY: 1. the handle is not used again.
/// unsafe { unreleased::release(&driver, Object::Stream(stream)) };
/// assert_eq!((unreleased::count(), sim.outstanding().streams), (1, 1));
/// unreleased::retry();
/// assert_eq!((unreleased::count(), sim.outstanding().streams), (0, 0));
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
///
/// # Safety
/// 1. The object is one of this driver's, and no copy of its handle is used afterwards.
pub unsafe fn release(driver: &Arc<dyn Driver>, object: Object) {
    retry();
    // SAFETY: 1. the caller's.
    unsafe { attempt(driver, object) };
}

/// # Safety
/// 1. As [`release`].
unsafe fn attempt(driver: &Arc<dyn Driver>, object: Object) {
    // Destroying a graph would break a capture that is open.
    let is_graph = matches!(object, Object::Graph(_) | Object::GraphExec(_));
    let _relaxed = is_graph.then(|| Relaxed::enter(&**driver));
    // SAFETY: 1. the caller's; what is refused is known to this list alone.
    if let Err(refused) = unsafe { object.destroy(&**driver) }
        && !refused.is_device_lost()
        && !refused.is_driver_gone()
    {
        let mut kept = kept();
        kept.push((Arc::downgrade(driver), object));
        COUNT.store(kept.len(), Ordering::Relaxed);
    }
}

/// Tries again to destroy what was refused. Never blocks, never panics.
pub fn retry() {
    if count() == 0 {
        return;
    }
    // Out of the list while the driver is called, which is not to be done under a lock.
    let again = {
        let mut kept = kept();
        COUNT.store(0, Ordering::Relaxed);
        mem::take(&mut *kept)
    };
    for (driver, object) in again {
        if let Some(driver) = driver.upgrade() {
            // SAFETY: 1. `release` was promised so, and the list held the handle alone.
            unsafe { attempt(&driver, object) };
        }
    }
}

/// How many objects drivers have refused to destroy, of all drivers of the process. Makes no call.
#[must_use]
pub fn count() -> usize {
    COUNT.load(Ordering::Relaxed)
}
