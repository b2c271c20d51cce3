//! The watch thread.

use aquifer_core::SystemError;
use aquifer_host::kernel::{Bell, Kernel, Process, StallAlarm, Woken};
use std::{
    mem::ManuallyDrop,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// When to run the next reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// After this time, or when it is called.
    In(Duration),
    /// Never: the watch is over.
    Over,
}

/// The part of the watch that a reading may query.
#[derive(Clone)]
pub(super) struct Calls {
    stop: Arc<AtomicBool>,
}

impl Calls {
    /// Returns whether the watch is to end. A reading with several steps ends before its next step.
    pub(super) fn stopped(&self) -> bool {
        // Relaxed: the flag guards no memory.
        self.stop.load(Ordering::Relaxed)
    }
}

/// A thread that runs a function repeatedly. Dropping the watch ends and joins the thread.
pub(super) struct Watch {
    calls: Calls,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
    /// The process of the thread. A forked child does not have it.
    process: Process,
}

impl Watch {
    /// Starts the thread. The kernel keeps 15 bytes of a name.
    ///
    /// # Errors
    /// `EMFILE` if the process may open no more files, `EAGAIN` if it may start no more threads.
    pub(super) fn start(
        kernel: &Kernel,
        name: &str,
        mut alarm: Option<StallAlarm>,
        mut look: impl FnMut(&Calls, Woken) -> Next + Send + 'static,
    ) -> Result<Self, SystemError> {
        let bell = Arc::new(kernel.bell()?);
        let calls = Calls { stop: Arc::default() };
        let (inside, heard, system) = (calls.clone(), bell.clone(), kernel.clone());
        let thread = kernel.spawn(name.to_owned(), move || {
            let mut woken = Woken::default();
            while !inside.stopped() {
                let Next::In(pause) = look(&inside, woken) else { return };
                woken = system.wait(&heard, alarm.as_ref(), pause).unwrap_or_else(|_| {
                    // The kernel has no memory for a wait. A sleep needs none, and it is short so
                    // that a stop is not delayed.
                    thread::sleep(pause.min(Duration::from_millis(10)));
                    Woken::default()
                });
                if woken.over {
                    alarm = None;
                }
            }
        })?;
        Ok(Self { calls, bell, thread: Some(thread), process: Process::current() })
    }

    /// Runs the next reading now.
    pub(super) fn call(&self) {
        self.bell.ring();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if !self.process.is_current() {
            // The bell is shared with the parent, and the behaviour of a handle to a thread that
            // does not exist in this process is not specified.
            let _kept = ManuallyDrop::new(thread);
            return;
        }
        self.calls.stop.store(true, Ordering::Relaxed);
        self.bell.ring();
        // The last reference may be dropped by the function itself, on this thread.
        if let Some(thread) = thread.filter(|there| there.thread().id() != thread::current().id()) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_host::kernel::{Faults, SystemCall};
    use std::{sync::mpsc, time::Instant};

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn it_looks_at_once_and_when_called_and_ends_when_dropped_however_long_it_would_wait() {
        let (tell, told) = mpsc::channel();
        let watch = Watch::start(&Kernel::new(), "aq-test", None, move |_, woken| {
            tell.send((woken.rung, thread::current().name().map(str::to_owned))).unwrap();
            Next::In(LONG)
        })
        .unwrap();
        assert_eq!(told.recv().unwrap(), (false, Some("aq-test".to_owned())));
        watch.call();
        assert!(told.recv().unwrap().0);
        let begun = Instant::now();
        drop(watch);
        assert!(begun.elapsed() < Duration::from_secs(20));
        assert!(told.recv().is_err(), "what the look held is gone when the drop returns");
    }

    #[test]
    fn one_that_ends_itself_or_is_dropped_from_inside_waits_for_nobody() {
        drop(Watch::start(&Kernel::new(), "aq-test", None, |_, _| Next::Over).unwrap());
        let (give, given) = mpsc::channel::<Watch>();
        let (tell, told) = mpsc::channel();
        let watch = Watch::start(&Kernel::new(), "aq-test", None, move |calls, _| {
            drop(given.recv().unwrap());
            tell.send(calls.stopped()).unwrap();
            Next::In(LONG)
        });
        give.send(watch.unwrap()).unwrap();
        assert_eq!(told.recv(), Ok(true));
        assert!(told.recv().is_err(), "it ended after that look");
    }

    #[test]
    fn what_the_system_refuses_is_an_error_and_a_wait_that_fails_is_a_sleep() {
        let faults = Arc::new(Faults::new());
        let kernel = Kernel::with_faults(faults.clone());
        for call in [SystemCall::Bell, SystemCall::Spawn] {
            faults.fail(call, 1, 11);
            assert_eq!(
                Watch::start(&kernel, "aq-test", None, |_, _| Next::Over).err().unwrap().errno,
                11
            );
        }
        faults.fail_from(SystemCall::Wait, 1, 12);
        let (tell, told) = mpsc::channel();
        let watch = Watch::start(&kernel, "aq-test", None, move |_, _| {
            let _ = tell.send(());
            Next::In(LONG)
        });
        (0..3).for_each(|_| told.recv().unwrap());
        drop(watch.unwrap());
    }
}
