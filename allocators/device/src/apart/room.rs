//! Room for what has addresses of its own.

use crate::{
    chain::Progress,
    physical::handle::{Funds, NoHandle},
    pool::Inner,
};
use aquifer_core::{MemoryError, Result, Tag};

impl Inner {
    /// Calls `take` for `wanted` bytes until it has them, making room in between: what has left and what caches hold goes
    /// back to the driver, then others are asked, then queued work is waited for. The last two block.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`] when all of that made no room; the driver's.
    pub(crate) fn with_room<T>(
        &self,
        wanted: u64,
        tag: Tag,
        mut take: impl FnMut(Funds<'_>) -> Result<T, NoHandle>,
    ) -> Result<T> {
        let mut attempt =
            |progress: &mut Progress<'_>| match take(Funds { budget: self.budget(), reserved: None }) {
                Ok(taken) => Ok(Some(taken)),
                Err(no) if no.is_out_of_memory() => {
                    progress.refused = Some(no);
                    Ok(None)
                }
                Err(no) => Err(no.into_error(self.info.device)),
            };
        let mut progress = Progress::default();
        let taken = self.insist(wanted, None, &mut progress, |progress| {
            if let Some(taken) = attempt(progress)? {
                return Ok(Some(taken));
            }
            let gave = self.press(self.held().saturating_sub(wanted))?;
            progress.note("give back what is free", gave);
            if gave > 0 { attempt(progress) } else { Ok(None) }
        });
        if !matches!(taken, Ok(Some(_))) {
            self.apart.failed(wanted, tag);
        }
        match taken? {
            Some(taken) => Ok(taken),
            None => Err(MemoryError::OutOfMemory(Box::new(self.explain(wanted, None, progress)))),
        }
    }
}
