//! Graphs over the memory of a pool: ours, and those that others make.
#![expect(unsafe_code, reason = "launches and ends graphs")]

use super::{Announced, GraphPool, memory::Memory};
use crate::home::check_home;
use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_driver::{
    CaptureMode, Driver, RawGraph, RawGraphExec, RawStream, Relaxed, leftovers, site,
};
use aquifer_stream::Stream;
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// The driver's code for a capture that some call has broken.
const CAPTURE_INVALIDATED: u32 = 901;

/// A graph that was captured over the memory of a [`GraphPool`], and can be launched on any stream
/// of the device, as often as one likes.
///
/// It keeps all of the pool's memory. Dropping it waits for nothing (`cuGraphExecDestroy`):
/// launches that are queued still run, and the memory goes back to the driver when the last of them
/// is done, and all else that keeps it is gone.
pub struct Graph {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    exec: RawGraphExec,
    memory: Arc<Memory>,
}

/// A capture of ours that is open: it is ended, and what it made destroyed, if nobody ends it.
struct Open<'a> {
    driver: &'a Arc<dyn Driver>,
    stream: RawStream,
    ended: bool,
}

impl Open<'_> {
    /// Ends the capture. It stays open if the driver refused and the stream still captures.
    fn end(&mut self) -> Result<RawGraph> {
        let ended = self.driver.capture_end(self.stream);
        // A capture that was broken, or not joined, is over all the same; one whose end was refused
        // is not.
        self.ended =
            ended.is_ok() || matches!(self.driver.stream_is_capturing(self.stream), Ok(false));
        ended.map_err(|refused| match refused.code {
            CAPTURE_INVALIDATED => MemoryError::CaptureInvalidated { stream: self.stream.handle() },
            _ => MemoryError::driver(self.stream.device(), refused),
        })
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if !self.ended
            && let Ok(graph) = self.end()
        {
            destroy(self.driver, graph);
        }
    }
}

/// Destroys a graph that is known to the caller alone, now or in a later sweep.
fn destroy(driver: &Arc<dyn Driver>, graph: RawGraph) {
    let of = driver.clone();
    leftovers::release(driver, move || {
        let _relaxed = Relaxed::enter(&*of);
        // SAFETY: 1. made by the caller and known to it alone, and no release of it has succeeded
        // yet.
        unsafe { of.graph_destroy(graph) }
    });
}

impl GraphPool {
    /// Captures what `work` queues on `stream`, and on streams that join it there, and makes a
    /// graph of it (`cuStreamBeginCapture`, `cuStreamEndCapture`, `cuGraphInstantiate`). Blocks
    /// that are allocated meanwhile for those streams are of this pool's memory, and the graph
    /// finds them at their addresses, whether they live or have been freed by then. None of the
    /// work runs.
    ///
    /// Calls that could break a capture are refused to this thread meanwhile, but for those of this
    /// library; other threads are free to make them ([`CaptureMode::ThreadLocal`]). Blocks for as
    /// long as instantiating takes, milliseconds for thousands of nodes.
    ///
    /// # Safety
    /// 1. What the captured work touches beside blocks of this pool's memory stays valid, where it
    ///    is, and the caller's, until the graph has been dropped and its launches are done. (Blocks
    ///    of this memory do so by themselves.)
    /// 2. The caller orders launches with whatever else uses those things.
    ///
    /// # Errors
    /// Those of `work`; [`MemoryError::WrongDevice`], [`MemoryError::AlreadyAnnounced`];
    /// [`MemoryError::CaptureInvalidated`] if some call has broken the capture; the driver's. There
    /// is no graph then, and the stream captures no longer, unless the driver has refused twice to
    /// end the capture.
    #[track_caller]
    pub unsafe fn capture<T>(
        &self,
        stream: &Stream,
        work: impl FnOnce(&Stream) -> Result<T>,
    ) -> Result<(Graph, T)> {
        let _site = site::enter();
        let announced = self.announce(stream)?;
        let (driver, device) = (stream.driver(), stream.device());
        let lost = |refused| MemoryError::driver(device, refused);
        let mut open = {
            let _calling = stream.timeline().calling()?;
            driver.capture_begin(stream.raw(), CaptureMode::ThreadLocal).map_err(lost)?;
            Open { driver, stream: stream.raw(), ended: false }
        };
        let made = work(stream)?;
        let graph = open.end()?;
        let memory = announced.end_noted();
        // Others may capture: neither is a call that they could bear.
        let _relaxed = Relaxed::enter(&**driver);
        let exec = driver.graph_instantiate(graph);
        destroy(driver, graph);
        let exec = exec.map_err(lost)?;
        Ok((Graph { driver: driver.clone(), device, exec, memory }, made))
    }
}

impl Graph {
    /// Queues all of the graph on `stream` (`cuGraphLaunch`): behind whatever has been queued that
    /// touches the pool's memory on any stream, launches of other graphs that share it included.
    /// Later uses of its blocks come after it. The host waits for no work.
    ///
    /// Whoever has allocated blocks within the capture and kept them reads and writes them between
    /// launches as he does others': a copy on another stream waits for the launch, and the next
    /// launch for the copy.
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`]; [`MemoryError::Capturing`] if `stream` captures;
    /// [`MemoryError::Busy`] if a prepared use of a block of the pool is not finished; the
    /// driver's. Nothing is queued then but waits.
    #[track_caller]
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let _site = site::enter();
        check_home(&*self.driver, self.device, stream.timeline())?;
        self.memory.launch(stream.timeline(), || {
            let _calling = stream.timeline().calling()?;
            // SAFETY: 1. the pool's memory is mapped until the last launch that is noted is done,
            // and this one is about to be; the rest was promised to `capture`. 2. the stream has
            // been made to wait for whatever touches the blocks, whoever comes next waits for it,
            // and what is free belongs to graphs of this memory alone, whose launches follow each
            // other; the rest was promised to `capture`.
            let queued = unsafe { self.driver.graph_launch(self.exec, stream.raw()) };
            queued.map_err(|refused| MemoryError::driver(self.device, refused))
        })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let (driver, exec) = (self.driver.clone(), self.exec);
        leftovers::release(&self.driver, move || {
            // It would break captures that other threads have open.
            let _relaxed = Relaxed::enter(&*driver);
            // SAFETY: 1. the handle was this value's alone, and no release of it has succeeded yet.
            unsafe { driver.graph_exec_destroy(exec) }
        });
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("device", &self.device)
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

/// A graph of another library's that was captured over the memory of a [`GraphPool`]: keeps that
/// memory, and is told when the graph is launched.
///
/// It is dropped when the graph is not launched any more; what has been noted by then is waited for
/// before the memory goes.
#[derive(Clone)]
pub struct Captured {
    memory: Arc<Memory>,
}

impl Announced {
    /// Ends the announcement, for whoever says when the graph that was captured meanwhile is
    /// launched, or gives it to [`Captured::keep_until_released`]. An announcement that is dropped
    /// instead leaves a graph whose launches nobody sees: when the last who holds the memory is
    /// gone the whole device is waited for before it goes.
    ///
    /// Waits for nothing. To be called after the capture's end: what is allocated on a stream that
    /// captures still is not the graph's.
    pub fn end(self) -> Captured {
        Captured { memory: self.end_noted() }
    }
}

impl Captured {
    /// Notes that the graph has just been launched on `stream`: the memory stays until that launch
    /// is done, and later uses of its blocks come after it. The launch must have been ordered with
    /// earlier uses of the memory by other streams, other graphs that share it included.
    ///
    /// # Errors
    /// The driver's, where the stream has to be fenced at once; the launch is noted all the same.
    #[track_caller]
    pub fn launched(&self, stream: &Stream) -> Result<()> {
        let _site = site::enter();
        self.memory.launched(stream.timeline())
    }

    /// Has the driver keep the memory for as long as the graph, its executables made from here on
    /// and their launches last (`cuGraphRetainUserObject`): nobody has to note launches then. The
    /// memory goes at the next trim, slow path or end of a pool of this process that finds them
    /// gone.
    ///
    /// # Errors
    /// The driver's; the memory is kept no longer by this.
    pub fn keep_until_released(self, graph: RawGraph) -> Result<()> {
        let released = Arc::new(AtomicBool::new(false));
        let word = released.clone();
        let driver = self.memory.driver().clone();
        // Before the driver can say that they are gone.
        kept().push(Held { released: released.clone(), memory: self.memory });
        let call = Box::new(move || word.store(true, Ordering::Release));
        let _relaxed = Relaxed::enter(&*driver);
        driver.graph_on_release(graph, call).map_err(|refused| {
            released.store(true, Ordering::Release);
            sweep();
            MemoryError::driver(graph.device(), refused)
        })
    }
}

impl fmt::Debug for Captured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Captured").field("memory", &self.memory).finish()
    }
}

/// Memory that the driver keeps for a graph.
struct Held {
    /// What the driver has left word of.
    released: Arc<AtomicBool>,
    memory: Arc<Memory>,
}

/// Of all pools: graphs outlive those.
static KEPT: Mutex<Vec<Held>> = Mutex::new(Vec::new());

fn kept() -> MutexGuard<'static, Vec<Held>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets go of memory whose graphs the driver has said are gone, and ends caches whose end the
/// driver has refused.
pub(crate) fn sweep() {
    crate::home::sweep();
    let gone: Vec<_> =
        kept().extract_if(.., |held| held.released.load(Ordering::Acquire)).collect();
    gone.into_iter().for_each(|held| drop(held.memory));
}
