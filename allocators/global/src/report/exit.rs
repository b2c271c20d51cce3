//! A report when the process exits, on request.
//!
//! `AQUIFER_GLOBAL_REPORT=stderr` or `=./PATH` asks any program whose allocator counts, and
//! [`report_at_exit`] asks from within. The first thread that allocates has the C library call us
//! at exit; only then is the environment read, since a look at it inside an allocation could wait
//! for whoever is changing it, who may be the caller.
#![expect(unsafe_code, reason = "registers a function with the C library")]

use super::{NOT_INSTALLED, report};
use crate::{
    route::{is_installed, unrouted},
    sample::paused,
};
use std::{
    env, error,
    ffi::{OsStr, OsString},
    fmt, fs,
    io::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    process,
    str::FromStr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

/// Who asks for a report.
const VARIABLE: &str = "AQUIFER_GLOBAL_REPORT";

/// Where a report goes.
///
/// ```
/// use aquifer_global::ReportTo;
/// assert_eq!("stderr".parse(), Ok(ReportTo::Stderr));
/// assert_eq!("/tmp/memory".parse(), Ok(ReportTo::File("/tmp/memory".into())));
/// assert!("stdrr".parse::<ReportTo>().is_err(), "a file of this folder is ./stdrr");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ReportTo {
    /// The standard error stream.
    Stderr,
    /// A file, which is replaced. `%p` in its name is the number of the process, so that a program
    /// and those it starts do not replace each other's.
    File(PathBuf),
}

/// A text that names no place for a report.
///
/// Its example is that of [`report_at_exit`].
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

    /// `stderr`, or a path: something with a `/` in it, so that a slip is not taken for a file's
    /// name.
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

/// Where the program itself wants it.
static WANTED: Mutex<Option<ReportTo>> = Mutex::new(None);
/// The process that was asked; a child that it forks tells nothing.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Has the process write a [`Report`](super::Report) when it exits: by `exit` or the end of `main`,
/// not by a signal or `abort`. `AQUIFER_GLOBAL_REPORT` in the environment does the same, and has
/// the last word where both are there. What it cannot follow is said on the standard error stream
/// at exit.
///
/// ```no_run
/// use aquifer_global as global;
/// global::report_at_exit("stderr".parse()?);
/// # Ok::<(), global::report::BadReportTo>(())
/// ```
pub fn report_at_exit(to: ReportTo) {
    *WANTED.lock().unwrap_or_else(PoisonError::into_inner) = Some(to);
    request();
}

unsafe extern "C" {
    safe fn atexit(call: extern "C" fn()) -> i32;
}

/// Has the C library call [`at_exit`], once. Inside an allocation too: it takes no memory of ours.
/// If it has no room there is no report.
#[cold]
pub(crate) fn request() {
    if cfg!(miri) || PROCESS.load(Ordering::Relaxed) != 0 {
        return;
    }
    if PROCESS.compare_exchange(0, process::id(), Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        let _ = atexit(at_exit);
    }
}

extern "C" fn at_exit() {
    if process::id() != PROCESS.load(Ordering::Relaxed) {
        return;
    }
    // Nothing may unwind into the C library; what is lost is a report.
    let _ = catch_unwind(AssertUnwindSafe(|| paused(|| unrouted(tell))));
}

fn tell() {
    let asked = env::var_os(VARIABLE);
    let to = match asked.as_deref().map(ReportTo::try_from) {
        Some(Ok(to)) => Some(to),
        Some(Err(bad)) => {
            say(&format!("{VARIABLE}: {bad}"));
            None
        }
        None => None,
    };
    let to = to.or_else(|| WANTED.lock().unwrap_or_else(PoisonError::into_inner).take());
    match to {
        None => {}
        Some(ReportTo::Stderr) => say(&report().to_string()),
        Some(ReportTo::File(path)) => {
            if let Err((path, e)) = write(path) {
                say(&format!("the report cannot be written to {}: {e}", path.display()));
            }
        }
    }
}

/// Says once that a cap holds for little, where it does.
pub(crate) fn warn_unless_installed() {
    static LOOKED: AtomicBool = AtomicBool::new(false);
    if !cfg!(miri) && !LOOKED.swap(true, Ordering::Relaxed) && !is_installed() {
        say(&format!("{NOT_INSTALLED}: a cap refuses nothing that other code allocates"));
    }
}

fn write(path: PathBuf) -> Result<(), (PathBuf, io::Error)> {
    let path = match path.to_str() {
        Some(text) => PathBuf::from(text.replace("%p", &process::id().to_string())),
        None => path,
    };
    fs::write(&path, format!("{}\n", report())).map_err(|e| (path, e))
}

fn say(text: &str) {
    // If not even that can be written there is nobody to tell.
    let _ = writeln!(io::stderr().lock(), "aquifer: {text}");
}
