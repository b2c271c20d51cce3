//! The watch thread.

use aquifer_core::SystemError;
use aquifer_host::kernel::{Bell, Kernel, StallAlarm, Woken, is_forked_child};
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
    After(Duration),
    /// Never: the watch is over.
    Stop,
}

/// The part of the watch that a reading may query.
#[derive(Clone)]
pub(super) struct StopFlag {
    flag: Arc<AtomicBool>,
}

impl StopFlag {
    /// Returns whether the watch is to end. A reading with several steps ends before its next step.
    pub(super) fn is_set(&self) -> bool {
        // Relaxed: the flag guards no memory.
        self.flag.load(Ordering::Relaxed)
    }
}

/// A thread that runs a function repeatedly. Dropping the watch ends and joins the thread.
pub(super) struct WatchThread {
    stop: StopFlag,
    bell: Arc<Bell>,
    /// A forked child does not have it.
    thread: Option<JoinHandle<()>>,
}

impl WatchThread {
    /// Starts the thread. The kernel keeps 15 bytes of a name.
    ///
    /// # Errors
    /// `EMFILE` if the process may open no more files, `EAGAIN` if it may start no more threads.
    pub(super) fn start(
        kernel: &Kernel,
        name: &str,
        mut alarm: Option<StallAlarm>,
        mut read: impl FnMut(&StopFlag, Woken) -> Next + Send + 'static,
    ) -> Result<Self, SystemError> {
        let bell = Arc::new(kernel.bell()?);
        let stop = StopFlag { flag: Arc::default() };
        let (flag, waiting_bell, system) = (stop.clone(), bell.clone(), kernel.clone());
        let thread = kernel.spawn(name, move || {
            let mut woken = Woken::default();
            while !flag.is_set() {
                let Next::After(pause) = read(&flag, woken) else { return };
                woken = system.wait(&waiting_bell, alarm.as_ref(), pause).unwrap_or_else(|_| {
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
        Ok(Self { stop, bell, thread: Some(thread) })
    }

    /// Runs the next reading now.
    pub(super) fn run_now(&self) {
        self.bell.ring();
    }
}

impl Drop for WatchThread {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if is_forked_child() {
            // The bell is shared with the parent, and a lock of the handle may be held for ever.
            let _kept = ManuallyDrop::new(thread);
            return;
        }
        self.stop.flag.store(true, Ordering::Relaxed);
        self.bell.ring();
        // The last reference may be dropped by the function itself, on this thread.
        if let Some(thread) = thread.filter(|it| it.thread().id() != thread::current().id()) {
            // The panic hook has printed the message of a reading that panicked.
            let _ended = thread.join();
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
    fn the_watch_reads_at_start_and_on_request_and_ends_when_dropped_during_a_long_wait() {
        let (sender, receiver) = mpsc::channel();
        let watch = WatchThread::start(&Kernel::new(), "aq-test", None, move |_, woken| {
            let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
            sender.send((woken.rung, name)).unwrap();
            Next::After(LONG)
        })
        .unwrap();
        assert_eq!(receiver.recv().unwrap(), (false, "aq-test\n".to_owned()));
        watch.run_now();
        assert!(receiver.recv().unwrap().0);
        let begun = Instant::now();
        drop(watch);
        assert!(begun.elapsed() < Duration::from_secs(20));
        assert!(
            receiver.recv().is_err(),
            "the reading function is dropped before the drop returns"
        );
    }

    #[test]
    fn a_watch_that_stops_itself_or_is_dropped_on_its_own_thread_is_not_joined() {
        drop(WatchThread::start(&Kernel::new(), "aq-test", None, |_, _| Next::Stop).unwrap());
        let (handover, watch_receiver) = mpsc::channel::<WatchThread>();
        let (sender, receiver) = mpsc::channel();
        let watch = WatchThread::start(&Kernel::new(), "aq-test", None, move |stop, _| {
            drop(watch_receiver.recv().unwrap());
            sender.send(stop.is_set()).unwrap();
            Next::After(LONG)
        });
        handover.send(watch.unwrap()).unwrap();
        assert_eq!(receiver.recv(), Ok(true));
        assert!(receiver.recv().is_err(), "it ended after that reading");
    }

    #[test]
    fn a_refused_system_call_is_an_error_and_a_failed_wait_becomes_a_sleep() {
        let faults = Arc::new(Faults::new());
        let kernel = Kernel::with_faults(faults.clone());
        for call in [SystemCall::Bell, SystemCall::Spawn] {
            faults.fail(call, 1, 11);
            assert_eq!(
                WatchThread::start(&kernel, "aq-test", None, |_, _| Next::Stop)
                    .err()
                    .unwrap()
                    .errno,
                11
            );
        }
        faults.fail_from(SystemCall::Wait, 1, 12);
        let (sender, receiver) = mpsc::channel();
        let watch = WatchThread::start(&kernel, "aq-test", None, move |_, _| {
            let _ = sender.send(());
            Next::After(LONG)
        });
        (0..3).for_each(|_| receiver.recv().unwrap());
        drop(watch.unwrap());
    }
}
