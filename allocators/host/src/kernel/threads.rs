//! Starting threads, also in a child of a fork.
//!
//! The standard library takes a lock of its own in each thread that starts or ends. A fork copies
//! that lock as it is, so a thread that the standard library starts in the child can wait forever.
//! The C library makes its locks consistent across forks, so threads are started by
//! `pthread_create` itself.
#![expect(unsafe_code, reason = "calls the C library")]

use super::{Kernel, Result, SystemCall};
use aquifer_core::SystemError;
use nix::libc::{self, c_void};
use std::{
    ffi::CString,
    mem::MaybeUninit,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::{
        Mutex, PoisonError,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

/// Bytes of a thread's stack: as much as the standard library gives.
const STACK_BYTES: usize = 2 << 20;

/// A started thread. It goes on if this is dropped.
///
/// See [`Kernel::spawn`] for an example.
#[derive(Debug)]
pub struct SpawnedThread {
    number: libc::pthread_t,
    /// Disconnected when the thread has dropped its work.
    over: Mutex<Receiver<()>>,
}

impl SpawnedThread {
    /// Waits until the thread has run and dropped its work.
    pub fn join(self) {
        let over = self.over.into_inner().unwrap_or_else(PoisonError::into_inner);
        let _disconnected = over.recv();
    }

    /// Returns whether this is the calling thread.
    #[must_use]
    pub fn is_current(&self) -> bool {
        // A thread that has ended may have left its number to the calling one. There is nothing to
        // wait for then either.
        //
        // SAFETY: 1. has no preconditions.
        self.number == unsafe { libc::pthread_self() }
    }
}

/// What a thread is started with.
struct ThreadStart {
    name: CString,
    work: Box<dyn FnOnce() + Send>,
    /// Dropped after the work.
    over: SyncSender<()>,
}

impl Kernel {
    /// Starts a thread (`pthread_create`). A panic of `work` ends it. If no thread is started,
    /// `work` is dropped.
    ///
    /// The kernel truncates `name` to 15 bytes. A name with a zero byte ends there. The standard
    /// library does not know the name.
    ///
    /// ```
    /// use aquifer_host::kernel::Kernel;
    /// let thread = Kernel::new().spawn("example", || println!("runs"))?;
    /// assert!(!thread.is_current());
    /// thread.join();
    /// # Ok::<(), aquifer_core::SystemError>(())
    /// ```
    ///
    /// # Errors
    /// `EAGAIN` if the limit of threads is reached.
    pub fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<SpawnedThread> {
        self.intercept(SystemCall::Spawn)?;
        let name: Vec<u8> = name.bytes().take_while(|&byte| byte != 0).take(15).collect();
        let name = CString::new(name).unwrap_or_default();
        let (sender, over) = sync_channel(0);
        let start =
            Box::into_raw(Box::new(ThreadStart { name, work: Box::new(work), over: sender }));
        let started = Attributes::new().and_then(|attributes| {
            let mut thread = MaybeUninit::uninit();
            // SAFETY: 1. the thread's number is written to a local. 2. the attributes are
            // initialised. 3. `run` takes the pointer of this box, once.
            check(unsafe {
                libc::pthread_create(
                    thread.as_mut_ptr(),
                    &raw const attributes.0,
                    run,
                    start.cast(),
                )
            })?;
            // SAFETY: 1. a call that succeeds has written it.
            Ok(unsafe { thread.assume_init() })
        });
        match started {
            Ok(number) => Ok(SpawnedThread { number, over: Mutex::new(over) }),
            Err(error) => {
                // SAFETY: 1. made by `Box::into_raw` above. 2. no thread was started that takes it.
                drop(unsafe { Box::from_raw(start) });
                Err(error)
            }
        }
    }
}

/// The body of a thread.
extern "C" fn run(start: *mut c_void) -> *mut c_void {
    // SAFETY: 1. the box of `spawn`, which gives it to this thread alone.
    let ThreadStart { name, work, over } = *unsafe { Box::from_raw(start.cast::<ThreadStart>()) };
    // SAFETY: 1. the calling thread exists. 2. the name ends with a zero byte. It is at most 15
    // bytes long, so the call does not fail.
    unsafe { libc::pthread_setname_np(libc::pthread_self(), name.as_ptr()) };
    // The panic hook has printed its message, and there is no thread to report it to.
    let _ = catch_unwind(AssertUnwindSafe(work));
    drop(over);
    ptr::null_mut()
}

/// Attributes of a detached thread.
struct Attributes(libc::pthread_attr_t);

impl Attributes {
    fn new() -> Result<Self> {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: 1. initialises the local.
        check(unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) })?;
        // SAFETY: 1. the call above has initialised it.
        let mut attributes = Self(unsafe { attributes.assume_init() });
        let detached = libc::PTHREAD_CREATE_DETACHED;
        // SAFETY: 1. the attributes are initialised. 2. the value is one of the two that exist.
        check(unsafe { libc::pthread_attr_setdetachstate(&raw mut attributes.0, detached) })?;
        // SAFETY: 1. the attributes are initialised. 2. the size is a multiple of the page size and
        // above the smallest.
        check(unsafe { libc::pthread_attr_setstacksize(&raw mut attributes.0, STACK_BYTES) })?;
        Ok(attributes)
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: 1. initialised by `new`, and not used after this.
        unsafe { libc::pthread_attr_destroy(&raw mut self.0) };
    }
}

/// Converts the result of a function that returns its error instead of setting `errno`.
fn check(errno: libc::c_int) -> Result<()> {
    if errno == 0 { Ok(()) } else { Err(SystemError { call: "pthread_create", errno }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{
            atomic::{AtomicBool, Ordering},
            mpsc,
        },
        thread,
    };

    #[test]
    fn a_thread_runs_under_its_name_and_may_panic() {
        let (said, heard) = mpsc::channel();
        let again = said.clone();
        let name = || std::fs::read_to_string("/proc/thread-self/comm").unwrap();
        let kernel = Kernel::new();
        kernel
            .spawn("sixteen-bytes-to", move || {
                said.send(name()).unwrap();
                panic!("as planned");
            })
            .unwrap();
        kernel.spawn("a\0b", move || again.send(name()).unwrap()).unwrap();
        let mut names: Vec<_> = heard.iter().collect();
        names.sort();
        assert_eq!(names, ["a\n", "sixteen-bytes-t\n"]);
    }

    #[test]
    fn work_that_no_thread_runs_is_dropped() {
        let faults = std::sync::Arc::new(super::super::Faults::new());
        faults.fail(SystemCall::Spawn, 1, libc::EAGAIN);
        let (said, heard) = mpsc::channel::<()>();
        let refused = Kernel::with_faults(faults).spawn("none", move || drop(said));
        assert_eq!(refused.err().map(|e| e.errno), Some(libc::EAGAIN));
        assert_eq!(heard.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }

    /// Threads start and end in the parent all the time, which is when the standard library holds
    /// its lock.
    #[test]
    fn a_child_of_a_fork_starts_threads_whatever_its_parents_threads_did() {
        let stop = AtomicBool::new(false);
        let (stop, over) = (&stop, || stop.store(true, Ordering::Relaxed));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let started: Vec<_> = (0..16).map(|_| thread::spawn(|| {})).collect();
                        started.into_iter().for_each(|thread| _ = thread.join());
                    }
                });
            }
            let mut wrong = None;
            for _ in 0..1_000 {
                // SAFETY: 1. the child uses memory, which the C library prepares for it, starts a
                // thread and leaves by `_exit`.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: 1. takes a number. A child that blocks is ended by the alarm.
                    unsafe { libc::alarm(20) };
                    let (said, heard) = sync_channel(1);
                    let started = Kernel::new().spawn("child", move || _ = said.send(()));
                    let ran = started.is_ok() && heard.recv().is_ok();
                    // SAFETY: 1. ends the child.
                    unsafe { libc::_exit(i32::from(!ran)) };
                }
                let mut status = -1;
                // SAFETY: 1. the child belongs to this process, and the status is a local.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                if status != 0 {
                    wrong = Some((status >> 8, status & 127));
                    break;
                }
            }
            over();
            assert_eq!(wrong, None, "exit code and signal of the child");
        });
    }
}
