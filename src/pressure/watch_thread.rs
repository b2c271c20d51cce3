//! The watch thread.

use aquifer_core::SystemError;
use aquifer_host::kernel::{Kernel, is_forked_child};
use std::{
    mem::ManuallyDrop,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, SyncSender},
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
    /// Ends the current pause, or else the next.
    bell: SyncSender<()>,
    /// A forked child does not have it.
    thread: Option<JoinHandle<()>>,
}

impl WatchThread {
    /// Starts the thread. The kernel keeps 15 bytes of a name.
    ///
    /// # Errors
    /// `EAGAIN` if the process may start no more threads.
    pub(super) fn start(
        kernel: &Kernel,
        name: &str,
        mut read: impl FnMut(&StopFlag) -> Next + Send + 'static,
    ) -> Result<Self, SystemError> {
        let (bell, rung) = mpsc::sync_channel(1);
        let stop = StopFlag { flag: Arc::default() };
        let flag = stop.clone();
        let thread = kernel.spawn(name, move || {
            while !flag.is_set()
                && let Next::After(pause) = read(&flag)
            {
                // The watch is dropped only after it has been told to stop.
                let _woken = rung.recv_timeout(pause);
            }
        })?;
        Ok(Self { stop, bell, thread: Some(thread) })
    }

    /// Runs the next reading now.
    pub(super) fn run_now(&self) {
        // If the bell is full, it has been rung already.
        let _rung = self.bell.try_send(());
    }
}

impl Drop for WatchThread {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if is_forked_child() {
            // A lock of the handle may be held for ever.
            let _kept = ManuallyDrop::new(thread);
            return;
        }
        self.stop.flag.store(true, Ordering::Relaxed);
        self.run_now();
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
    use std::{sync::mpsc, time::Instant};

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn the_watch_reads_at_start_and_on_request_and_ends_when_dropped_during_a_long_wait() {
        let (sender, receiver) = mpsc::channel();
        let watch = WatchThread::start(&Kernel::new(), "aq-test", move |_| {
            let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
            sender.send(name).unwrap();
            Next::After(LONG)
        })
        .unwrap();
        assert_eq!(receiver.recv().unwrap(), "aq-test\n");
        watch.run_now();
        receiver.recv().unwrap();
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
        drop(WatchThread::start(&Kernel::new(), "aq-test", |_| Next::Stop).unwrap());
        let (handover, watch_receiver) = mpsc::channel::<WatchThread>();
        let (sender, receiver) = mpsc::channel();
        let watch = WatchThread::start(&Kernel::new(), "aq-test", move |stop| {
            drop(watch_receiver.recv().unwrap());
            sender.send(stop.is_set()).unwrap();
            Next::After(LONG)
        });
        handover.send(watch.unwrap()).unwrap();
        assert_eq!(receiver.recv(), Ok(true));
        assert!(receiver.recv().is_err(), "it ended after that reading");
    }
}
