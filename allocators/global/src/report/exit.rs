//! A report when the process exits, on request.
//!
//! `AQUIFER_GLOBAL_REPORT=stderr` or `=./PATH` requests it for any program whose allocator counts.
//! [`report_at_exit`] requests it from within the program.
//!
//! The first thread that allocates registers a function with `atexit`. The environment is read only
//! in that function. Inside an allocation, reading it could deadlock, since the caller may hold the
//! lock of the environment.
#![expect(unsafe_code, reason = "registers a function with the C library")]

use super::report;
use crate::{not_installed::print, route::unrouted};
use std::{
    env, error,
    ffi::{OsStr, OsString},
    fmt, fs, io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    process,
    str::FromStr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

/// The environment variable that requests a report.
const VARIABLE: &str = "AQUIFER_GLOBAL_REPORT";

/// The destination of a report.
///
/// ```
/// use aquifer::global::ReportTo;
/// assert_eq!("stderr".parse(), Ok(ReportTo::Stderr));
/// assert_eq!("/tmp/memory".parse(), Ok(ReportTo::File("/tmp/memory".into())));
/// assert!("stdrr".parse::<ReportTo>().is_err(), "a file of this folder is ./stdrr");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ReportTo {
    /// The standard error stream.
    Stderr,
    /// A file, which is replaced. `%p` in its name stands for the process id, so that a program and
    /// its child processes write to different files.
    File(PathBuf),
}

/// The error for a text that is not a valid destination.
///
/// See [`report_at_exit`] for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BadReportTo {
    /// The text.
    pub text: OsString,
}

impl fmt::Display for BadReportTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.text.display();
        write!(
            f,
            "'{text}' is neither 'stderr' nor a path; a file in the current folder is named ./FILE"
        )
    }
}

impl error::Error for BadReportTo {}

impl TryFrom<&OsStr> for ReportTo {
    type Error = BadReportTo;

    /// Parses `stderr` or a path. A path must contain a `/`, so that a typing error is not taken
    /// for a file name.
    fn try_from(text: &OsStr) -> Result<Self, BadReportTo> {
        let bytes = text.as_encoded_bytes();
        match bytes {
            b"stderr" => Ok(Self::Stderr),
            _ if bytes.contains(&b'/') && !bytes.ends_with(b"/") => Ok(Self::File(text.into())),
            _ => Err(BadReportTo { text: text.to_owned() }),
        }
    }
}

impl FromStr for ReportTo {
    type Err = BadReportTo;

    fn from_str(text: &str) -> Result<Self, BadReportTo> {
        OsStr::new(text).try_into()
    }
}

/// The destination that the program has requested.
static DESTINATION: Mutex<Option<ReportTo>> = Mutex::new(None);
/// The process that registered the function. A forked child writes no report.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Requests a [`Report`](super::Report) when the process exits.
///
/// It is written at `exit` or the end of `main`, but not after a signal or `abort`.
/// `AQUIFER_GLOBAL_REPORT` in the environment does the same and takes precedence. An invalid value
/// is reported on standard error at exit.
///
/// ```no_run
/// use aquifer::global;
/// global::report_at_exit("stderr".parse()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn report_at_exit(to: ReportTo) {
    *DESTINATION.lock().unwrap_or_else(PoisonError::into_inner) = Some(to);
    request();
}

unsafe extern "C" {
    safe fn atexit(call: extern "C" fn()) -> i32;
}

/// Registers [`at_exit`] with the C library, once. This is also safe inside an allocation, since it
/// does not use the wrapped allocator. If the registration fails there is no report.
#[inline]
pub(crate) fn request() {
    if !cfg!(miri) && PROCESS.load(Ordering::Relaxed) == 0 {
        register();
    }
}

#[cold]
fn register() {
    if PROCESS.compare_exchange(0, process::id(), Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        let _ = atexit(at_exit);
    }
}

extern "C" fn at_exit() {
    if process::id() != PROCESS.load(Ordering::Relaxed) {
        return;
    }
    // Nothing may unwind into the C library. On a panic the report is lost.
    let _ = catch_unwind(AssertUnwindSafe(|| unrouted(write_report)));
}

fn write_report() {
    let requested = env::var_os(VARIABLE);
    let to = match requested.as_deref().map(ReportTo::try_from) {
        Some(Ok(to)) => Some(to),
        Some(Err(bad)) => {
            print(&format!("{VARIABLE}: {bad}"));
            None
        }
        None => None,
    };
    let to = to.or_else(|| DESTINATION.lock().unwrap_or_else(PoisonError::into_inner).take());
    match to {
        None => {}
        Some(ReportTo::Stderr) => print(&report().to_string()),
        Some(ReportTo::File(path)) => {
            if let Err((path, e)) = write_file(path) {
                print(&format!("the report cannot be written to {}: {e}", path.display()));
            }
        }
    }
}

fn write_file(path: PathBuf) -> Result<(), (PathBuf, io::Error)> {
    let path = match path.to_str() {
        Some(text) => PathBuf::from(text.replace("%p", &process::id().to_string())),
        None => path,
    };
    fs::write(&path, format!("{}\n", report())).map_err(|e| (path, e))
}
