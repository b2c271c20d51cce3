//! The time since a recorder was made.

/// Reads the processor's time-stamp counter, which is faster than the system clock, or the system
/// clock if the counter is not usable as a clock. The first clock of a process takes some
/// milliseconds for calibration.
#[cfg(not(miri))]
#[derive(Clone)]
pub(super) struct Clock {
    counter: quanta::Clock,
    start: u64,
}

#[cfg(not(miri))]
impl Clock {
    pub(super) fn start() -> Self {
        let counter = quanta::Clock::new();
        let start = counter.raw();
        Self { counter, start }
    }

    /// Returns the nanoseconds since the start.
    #[inline]
    pub(super) fn elapsed(&self) -> u64 {
        self.counter.delta_as_nanos(self.start, self.counter.raw())
    }
}

/// Miri supports only the system clock.
#[cfg(miri)]
#[derive(Clone)]
pub(super) struct Clock(std::time::Instant);

#[cfg(miri)]
impl Clock {
    pub(super) fn start() -> Self {
        Self(std::time::Instant::now())
    }

    pub(super) fn elapsed(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        thread,
        time::{Duration, Instant},
    };

    #[test]
    fn clock_runs_at_the_rate_of_the_system_clock() {
        let (outer, clock) = (Instant::now(), Clock::start());
        let inner = Instant::now();
        thread::sleep(Duration::from_millis(50));
        let (least, elapsed, most) = (inner.elapsed(), clock.elapsed(), outer.elapsed());
        // The calibration is short, so the counter's rate is slightly off.
        let (least, most) = (least.mul_f64(0.99), most.mul_f64(1.01));
        assert!(
            (least..=most).contains(&Duration::from_nanos(elapsed)),
            "{least:?} {elapsed} ns {most:?}"
        );
        assert!(clock.elapsed() >= elapsed);
    }
}
