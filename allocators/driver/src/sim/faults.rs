//! Injected failures and blocked calls.

use crate::Call;
use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Failures to inject.
#[derive(Default, Debug)]
pub(crate) struct Faults {
    rules: Vec<FaultRule>,
}

#[derive(Debug)]
struct FaultRule {
    call: Call,
    /// Calls of this kind until the next failure, including that one.
    remaining: u64,
    /// Calls from one failure to the next. 0 fails once.
    every: u64,
    code: u32,
}

impl Faults {
    pub(crate) fn add(&mut self, call: Call, nth: u64, every: u64, code: u32) {
        self.rules.push(FaultRule { call, remaining: nth.max(1), every, code });
    }

    pub(crate) fn clear(&mut self) {
        self.rules.clear();
    }

    /// Counts one call, and returns the code that it must fail with.
    pub(crate) fn count_call(&mut self, call: Call) -> Option<u32> {
        let mut code = None;
        self.rules.retain_mut(|rule| {
            if rule.call != call {
                return true;
            }
            rule.remaining -= 1;
            if rule.remaining == 0 {
                code = code.or(Some(rule.code));
                rule.remaining = rule.every;
            }
            rule.remaining > 0
        });
        code
    }
}

/// Calls that are blocked.
#[derive(Default, Debug)]
pub(crate) struct Stalls {
    active: AtomicUsize,
    /// The key of the next entry. Keys are never reused, so that a thread that wakes up cannot
    /// take a later entry for its own.
    key: AtomicU64,
    list: Mutex<Vec<Stall>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Stall {
    key: u64,
    call: Call,
    waiting: usize,
}

impl Stalls {
    fn lock(&self) -> MutexGuard<'_, Vec<Stall>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the call is blocked. No other lock may be held.
    pub(crate) fn wait_while_stalled(&self, call: Call) {
        if self.active.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut stalls = self.lock();
        while let Some(mine) = stalls.iter_mut().find(|stall| stall.call == call) {
            mine.waiting += 1;
            let key = mine.key;
            self.changed.notify_all();
            stalls = self.changed.wait(stalls).unwrap_or_else(PoisonError::into_inner);
            if let Some(mine) = stalls.iter_mut().find(|stall| stall.key == key) {
                mine.waiting -= 1;
            }
        }
    }

    pub(crate) fn stall(self: Arc<Self>, call: Call) -> StallGuard {
        let key = self.key.fetch_add(1, Ordering::Relaxed);
        self.lock().push(Stall { key, call, waiting: 0 });
        self.active.fetch_add(1, Ordering::Release);
        StallGuard { stalls: self, key }
    }
}

/// A guard that blocks a call: threads that make it stay in it. Tests use it to show that other
/// threads do not need the resources that a blocked thread holds.
///
/// ```
/// use aquifer::{DeviceId, driver::Call, sim::Sim};
/// use std::{thread, time::Duration};
/// let sim = Sim::h200(1).symbolic();
/// let (driver, slow) = (sim.driver(), sim.stall(Call::MemAlloc));
/// let waiter = thread::spawn(move || driver.mem_alloc(DeviceId(0), 4096));
/// assert!(slow.wait_for(1, Duration::from_secs(10)));
/// assert!(sim.driver().memory_info(DeviceId(0)).is_ok()); // not blocked by the other thread
/// drop(slow);
/// assert!(waiter.join().is_ok_and(|address| address.is_ok()));
/// ```
#[derive(Debug)]
#[must_use = "the call is held up until this is dropped"]
pub struct StallGuard {
    stalls: Arc<Stalls>,
    key: u64,
}

impl StallGuard {
    /// Returns how many threads are in the call now.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.stalls
            .lock()
            .iter()
            .find(|stall| stall.key == self.key)
            .map_or(0, |stall| stall.waiting)
    }

    /// Blocks until `threads` threads are in the call, or until `timeout`. Returns whether they
    /// are.
    #[must_use]
    pub fn wait_for(&self, threads: usize, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut stalls = self.stalls.lock();
        loop {
            if stalls.iter().any(|stall| stall.key == self.key && stall.waiting >= threads) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            stalls = self
                .stalls
                .changed
                .wait_timeout(stalls, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Drop for StallGuard {
    fn drop(&mut self) {
        self.stalls.lock().retain(|stall| stall.key != self.key);
        self.stalls.active.fetch_sub(1, Ordering::Release);
        self.stalls.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_fails_only_its_nth_call() {
        let mut faults = Faults::default();
        faults.add(Call::Map, 3, 0, 2);
        let codes: Vec<_> = (0..5)
            .map(|_| (faults.count_call(Call::Unmap), faults.count_call(Call::Map)))
            .collect();
        assert_eq!(
            codes,
            [(None, None), (None, None), (None, Some(2)), (None, None), (None, None)]
        );
    }

    #[test]
    fn recurring_rule_fails_every_nth_call() {
        let mut faults = Faults::default();
        faults.add(Call::Map, 2, 2, 1);
        let codes: Vec<_> = (0..6).map(|_| faults.count_call(Call::Map).is_some()).collect();
        assert_eq!(codes, [false, true, false, true, false, true]);
        faults.clear();
        assert_eq!((faults.count_call(Call::Map), faults.count_call(Call::Map)), (None, None));
    }

    /// A released thread may wake up when the call is blocked again, and would decrement the wrong
    /// count.
    #[test]
    fn second_stall_of_a_call_has_a_new_key() {
        let stalls = Arc::new(Stalls::default());
        let first = stalls.clone().stall(Call::Map);
        let key = first.key;
        drop(first);
        assert_ne!(stalls.stall(Call::Map).key, key);
    }
}
