//! Room for what has addresses of its own, and the room that it makes for others.

use crate::{
    Block, Request,
    chain::note,
    home::Home,
    physical::handle::{Funds, NoHandle},
    pool::{Inner, deadline},
};
use aquifer_core::{MemoryError, Reservation, Result, Tag, error::Tried};
use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

impl Inner {
    /// Memory for a block of the caches that found none, where things have left that may have made room by now.
    #[cold]
    pub(crate) fn allocate_after_leaving(
        self: &Arc<Self>,
        home: &'static Home,
        request: &Request,
        reserved: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        self.apart.reap_quietly();
        let until = deadline(self.config.wait);
        loop {
            let refused = match self.allocate_slowly(home, request, reserved) {
                Err(MemoryError::OutOfMemory(refused)) => refused,
                other => return other,
            };
            let late = until.is_some_and(|until| Instant::now() >= until);
            if late || !self.apart.wait_for_oldest(until)? || self.apart.reap()? == 0 {
                return Err(MemoryError::OutOfMemory(refused));
            }
        }
    }

    /// Calls `take` for `wanted` bytes until it has them, making room in between: what has left and what caches hold goes
    /// back to the driver, then handlers are asked, then queued work is waited for. The last two block.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`] when all of that made no room; the driver's.
    pub(crate) fn with_room<T>(
        &self,
        wanted: u64,
        tag: Tag,
        mut take: impl FnMut(Funds<'_>) -> Result<T, NoHandle>,
    ) -> Result<T> {
        let mut refused = None;
        let mut attempt =
            |refused: &mut Option<NoHandle>| match take(Funds { budget: self.budget(), reserved: None }) {
                Ok(taken) => Ok(Some(taken)),
                Err(no) if no.is_out_of_memory() => {
                    *refused = Some(no);
                    Ok(None)
                }
                Err(no) => Err(no.into_error(self.info.device)),
            };
        let mut tried: Vec<Tried> = Vec::new();
        let mut note = |step, gave| note(&mut tried, step, gave);
        let make_room = || self.trim(self.held().saturating_sub(wanted));
        let mut room = || -> Result<Option<T>> {
            if let Some(taken) = attempt(&mut refused)? {
                return Ok(Some(taken));
            }
            let gave = make_room()?;
            note("give back what is free", gave);
            if gave > 0
                && let Some(taken) = attempt(&mut refused)?
            {
                return Ok(Some(taken));
            }
            for handler in &self.config.reclaim {
                loop {
                    let offered = handler.reclaim(wanted);
                    note("pressure handlers", offered);
                    if offered == 0 {
                        break;
                    }
                    make_room()?;
                    if let Some(taken) = attempt(&mut refused)? {
                        return Ok(Some(taken));
                    }
                }
            }
            let until = deadline(self.config.wait);
            while until.is_none_or(|until| Instant::now() < until) && self.wait_for_anything(until)? {
                note("wait for queued work", make_room()?);
                if let Some(taken) = attempt(&mut refused)? {
                    return Ok(Some(taken));
                }
            }
            Ok(None)
        };
        let taken = room();
        if !matches!(taken, Ok(Some(_))) {
            self.apart.failed(wanted, tag);
        }
        match taken? {
            Some(taken) => Ok(taken),
            None => {
                let error = self.out_of_memory(wanted, refused, tried);
                Err(MemoryError::OutOfMemory(Box::new(error)))
            }
        }
    }

    /// Waits for work that keeps something from being free. Says whether there was any.
    fn wait_for_anything(&self, until: Option<Instant>) -> Result<bool> {
        if self.apart.wait_for_oldest(until)? {
            return Ok(true);
        }
        let homes = self.homes();
        for &home in &homes {
            if home.wait_for_pending(until)? {
                return Ok(true);
            }
        }
        for &home in &homes {
            let (timeline, last_free) = home.with(|s| (s.timeline().cloned(), s.last_free));
            if let Some(timeline) = timeline
                && !timeline.is_done(last_free)
            {
                return timeline.wait(last_free, until);
            }
        }
        Ok(false)
    }
}
