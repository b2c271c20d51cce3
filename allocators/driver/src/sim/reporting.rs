//! Reporting of violations that the program does not take.
#![expect(unsafe_code, reason = "registers an exit handler, and exits with a status")]

use super::{machine::Machine, violation::Violation};
use nix::libc;
use std::{
    collections::HashMap,
    env, error, fmt,
    io::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    str::FromStr,
    sync::{
        Arc, Mutex, Once, OnceLock, PoisonError, Weak,
        atomic::{AtomicI32, AtomicU32, Ordering},
    },
};

/// The environment variable that selects the default.
const VARIABLE: &str = "AQUIFER_SIM_VIOLATIONS";

/// The default exit status under [`OnViolation::Exit`].
const DEFAULT_EXIT_STATUS: i32 = 86;

/// What happens with violations that the program does not take by
/// [`Sim::violations`](super::Sim::violations).
///
/// A machine ends with the last handle to it: a [`Sim`](super::Sim), its
/// [driver](super::Sim::driver), or a pool or block that uses the driver. A machine that is never
/// dropped ends with the process, if the process returns from `main` or calls `exit`.
///
/// | variant | `AQUIFER_SIM_VIOLATIONS` |
/// |---|---|
/// | [`Exit`](Self::Exit), the default with status 86 | `exit` for status 86, `exit=STATUS` for 1 to 255 |
/// | [`Report`](Self::Report) | `report` |
/// | [`Quiet`](Self::Quiet) | `quiet` |
///
/// So a test program in which the simulator finds a race fails, even if all its assertions hold.
///
/// ```
/// use aquifer::sim::OnViolation;
/// assert_eq!("exit=3".parse(), Ok(OnViolation::Exit(3)));
/// assert!("loud".parse::<OnViolation>().is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum OnViolation {
    /// Violations are written to standard error when the machine ends. The exit status stays as it
    /// is.
    Report,
    /// Violations are written to standard error when the machine ends. The process runs to its end,
    /// and then exits with this status instead of its own.
    Exit(i32),
    /// Nothing happens. They stay in [`Sim::violations`](super::Sim::violations).
    Quiet,
}

/// The error for a text that is no [`OnViolation`].
///
/// See [`OnViolation`] for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadOnViolation {
    /// The text.
    pub value: String,
}

impl BadOnViolation {
    /// The valid texts.
    pub const EXPECTED: &'static str = "report, exit, exit=STATUS with 1 to 255, or quiet";
}

impl fmt::Display for BadOnViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{VARIABLE} is {:?}; it can be {}", self.value, Self::EXPECTED)
    }
}

impl error::Error for BadOnViolation {}

impl FromStr for OnViolation {
    type Err = BadOnViolation;

    fn from_str(text: &str) -> Result<Self, BadOnViolation> {
        let status = |status: &str| status.parse().ok().filter(|status| (1..=255).contains(status));
        let known = match text.split_once('=').unwrap_or((text, "")) {
            ("report", "") => Some(Self::Report),
            ("quiet", "") => Some(Self::Quiet),
            ("exit", "") => Some(Self::Exit(DEFAULT_EXIT_STATUS)),
            ("exit", code) => status(code).map(Self::Exit),
            _ => None,
        };
        known
            .filter(|_| !text.ends_with('='))
            .ok_or_else(|| BadOnViolation { value: text.to_owned() })
    }
}

impl Default for OnViolation {
    fn default() -> Self {
        Self::Exit(DEFAULT_EXIT_STATUS)
    }
}

impl OnViolation {
    /// Returns the value of `AQUIFER_SIM_VIOLATIONS`, or `None` if it is unset or empty.
    ///
    /// # Errors
    /// [`BadOnViolation`] for an invalid value.
    pub fn from_env() -> Result<Option<Self>, BadOnViolation> {
        match env::var_os(VARIABLE).filter(|text| !text.is_empty()) {
            None => Ok(None),
            Some(text) => text.to_string_lossy().parse().map(Some),
        }
    }

    /// Returns the value that the environment had when the first machine was created. An invalid
    /// value is written to standard error once.
    pub(crate) fn process_default() -> Self {
        static PROCESS_DEFAULT: OnceLock<OnViolation> = OnceLock::new();
        *PROCESS_DEFAULT.get_or_init(|| match Self::from_env() {
            Ok(value) => value.unwrap_or_default(),
            Err(error) => {
                write_stderr(format_args!("aquifer: {error}\n"));
                Self::default()
            }
        })
    }
}

/// The report text of violations.
pub(crate) struct ReportText<'a> {
    pub(crate) violations: &'a [Violation],
    /// The name of the thread that created the machine, if it is to be named. A test program calls
    /// each thread after its test.
    pub(crate) creator: Option<&'a str>,
}

impl fmt::Display for ReportText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { violations, creator } = self;
        let plural = if violations.len() == 1 { "" } else { "s" };
        let creator = creator.map(|name| format!(" in {name}")).unwrap_or_default();
        write!(
            f,
            "aquifer: the simulated GPU found {} violation{plural}{creator}",
            violations.len()
        )?;
        for violation in *violations {
            // Every line is indented, so that the end of a violation is visible.
            for (n, line) in violation.to_string().lines().enumerate() {
                write!(f, "\n{}{line}", if n == 0 { "  " } else { "    " })?;
            }
        }
        Ok(())
    }
}

/// Writes violations to standard error, if there are any.
pub(crate) fn write(violations: &[Violation], creator: Option<&str>) {
    if !violations.is_empty() {
        write_stderr(format_args!("{}\n", ReportText { violations, creator }));
    }
}

fn write_stderr(text: fmt::Arguments<'_>) {
    // One write, so that the output of two machines is not interleaved. An error cannot be
    // reported.
    let _ = io::stderr().lock().write_all(text.to_string().as_bytes());
}

/// All live machines by their numbers.
static LIVE_MACHINES: Mutex<Option<HashMap<u64, Weak<Machine>>>> = Mutex::new(None);

/// The exit status of the process, or 0 for its own.
static EXIT_STATUS: AtomicI32 = AtomicI32::new(0);

/// The process that [`EXIT_STATUS`] is of. A child of a fork has a status of its own.
static EXIT_PROCESS: AtomicU32 = AtomicU32::new(0);

/// Makes a machine report when the process ends, if it is still alive then.
pub(crate) fn register(machine: &Arc<Machine>) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if !cfg!(miri) {
            // SAFETY: 1. The function neither unwinds nor takes arguments. If it is refused,
            // machines that are never dropped are not reported.
            let _refused = unsafe { libc::atexit(at_exit) };
        }
    });
    let mut machines = LIVE_MACHINES.lock().unwrap_or_else(PoisonError::into_inner);
    machines.get_or_insert_default().insert(machine.machine_id, Arc::downgrade(machine));
}

/// Removes a machine that has ended.
pub(crate) fn unregister(machine: u64) {
    if let Some(machines) = LIVE_MACHINES.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
        machines.remove(&machine);
    }
}

/// Makes the process exit with this status.
pub(crate) fn exit_with(status: i32) {
    EXIT_PROCESS.store(process::id(), Ordering::Relaxed);
    EXIT_STATUS.store(status, Ordering::Relaxed);
}

/// Reports all live machines when the process ends.
extern "C" fn at_exit() {
    let _never = catch_unwind(AssertUnwindSafe(|| {
        let mut machines: Vec<Arc<Machine>> = match LIVE_MACHINES.try_lock() {
            Ok(machines) => {
                machines.iter().flat_map(HashMap::values).filter_map(Weak::upgrade).collect()
            }
            Err(_) => Vec::new(),
        };
        machines.sort_by_key(|machine| machine.machine_id);
        machines.iter().for_each(|machine| machine.report_at_exit());
        // Other threads may still use the machines, so the last handle is kept.
        static RETAINED: OnceLock<Vec<Arc<Machine>>> = OnceLock::new();
        let _second = RETAINED.set(machines);
    }));
    let status = EXIT_STATUS.load(Ordering::Relaxed);
    if status != 0 && EXIT_PROCESS.load(Ordering::Relaxed) == process::id() {
        write_stderr(format_args!(
            "aquifer: exit status {status}, because the simulated GPU found violations that the \
             program did not read ({VARIABLE}=report keeps the program's own status)\n"
        ));
        // SAFETY: 1. It takes no pointer and does not return. Rust's own streams have been flushed
        // before the exit functions are called. The C library's streams are flushed here.
        unsafe {
            libc::fflush(std::ptr::null_mut());
            libc::_exit(status);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_valid_text_is_parsed_and_others_are_refused() {
        let parsed = |text: &str| text.parse::<OnViolation>().ok();
        assert_eq!(parsed("report"), Some(OnViolation::Report));
        assert_eq!(parsed("quiet"), Some(OnViolation::Quiet));
        assert_eq!(parsed("exit"), Some(OnViolation::Exit(DEFAULT_EXIT_STATUS)));
        assert_eq!(parsed("exit=255"), Some(OnViolation::Exit(255)));
        for wrong in
            ["", "Report", "exit=", "exit=0", "exit=256", "exit=-1", "report=1", "quiet=", "loud"]
        {
            assert_eq!(parsed(wrong), None, "{wrong:?}");
        }
    }
}
