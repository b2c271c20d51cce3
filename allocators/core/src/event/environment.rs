//! The trace that `AQUIFER_TRACE` enables.

use super::{Recorder, TraceFile, sinks::TeeSink};
use crate::{MemoryError, Result};
use std::{
    env,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

const VARIABLE: &str = "AQUIFER_TRACE";

/// The trace of this process, shared by all pools.
static TRACE: Mutex<Option<Arc<Recorder>>> = Mutex::new(None);

impl Recorder {
    /// Returns the recorder for a pool that was given `own`. If `AQUIFER_TRACE` names a file, both
    /// `own` and the file receive every event. If the variable is not set or empty, returns `own`.
    /// All pools of the process share the file, which is created at the first call.
    ///
    /// ```
    /// use aquifer::event::Recorder;
    /// if std::env::var_os("AQUIFER_TRACE").is_none() {
    ///     assert!(Recorder::with_environment(None)?.is_none());
    /// }
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] if the file cannot be created.
    pub fn with_environment(own: Option<Arc<Self>>) -> Result<Option<Arc<Self>>> {
        let Some(path) = env::var_os(VARIABLE).filter(|path| !path.is_empty()) else {
            return Ok(own);
        };
        let trace = trace(Path::new(&path))?;
        Ok(Some(match own {
            Some(own) if !Arc::ptr_eq(&own, &trace) => Arc::new(own.tee(&trace)),
            _ => trace,
        }))
    }

    /// Returns a recorder with the clock of this one whose events reach the sinks of both.
    fn tee(&self, other: &Self) -> Self {
        let offset_ns = other.clock.elapsed().wrapping_sub(self.clock.elapsed());
        let (first, second) = (self.sink.clone(), other.sink.clone());
        Self::with_clock(Arc::new(TeeSink { first, second, offset_ns }), self.clock.clone())
    }
}

fn trace(path: &Path) -> Result<Arc<Recorder>> {
    let mut trace = TRACE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(recorder) = &*trace {
        return Ok(recorder.clone());
    }
    let file = TraceFile::create(path).map_err(|_| MemoryError::BadSetting {
        name: VARIABLE,
        value: path.display().to_string(),
        expected: "the path of a file that can be written",
    })?;
    let recorder = Arc::new(Recorder::new(Arc::new(file)));
    *trace = Some(recorder.clone());
    Ok(recorder)
}
