//! The figures of this process, read back for its own reports.

use crate::{
    error::StatusError,
    publication,
    reader::{ProcessStatus, file},
};

impl ProcessStatus {
    /// Returns the figures of this process: all of its pools, as other processes see them. Returns
    /// `None` if it publishes nothing: before its first pool, and where publication is off.
    ///
    /// Reads the process's own file with a few system calls, and stops no thread. No allocator
    /// depends on the result.
    ///
    /// ```
    /// use aquifer_status::ProcessStatus;
    /// if let Some(own) = ProcessStatus::current()? {
    ///     println!("{} bytes in {} pools", own.total().live, own.pools.len());
    /// }
    /// # Ok::<(), aquifer_status::StatusError>(())
    /// ```
    ///
    /// # Errors
    /// [`StatusError::System`] if the file cannot be read; [`StatusError::BadFile`] if another
    /// process has damaged it.
    pub fn current() -> Result<Option<Self>, StatusError> {
        let Some(path) = publication::own_path() else { return Ok(None) };
        match file::read(path) {
            Ok(status) => Ok(Some(status)),
            // Another thread has ended publication meanwhile.
            Err(_) if publication::own_path().is_none() => Ok(None),
            Err(error) => Err(error),
        }
    }
}
