//! Lines on standard error: the warnings that the program uses another allocator.

use crate::route::is_installed;
use std::{
    io::{self, Write},
    sync::atomic::{AtomicBool, Ordering},
};

/// The message for programs in which figures stay at zero.
pub(crate) const NOT_INSTALLED: &str = "aquifer's Global is not this program's #[global_allocator]";

/// A warning that a setting has little effect, because [`Global`](crate::Global) is not installed.
pub(crate) struct Warning {
    effect: &'static str,
    checked: AtomicBool,
}

impl Warning {
    /// Creates a warning that names the missing effect.
    pub(crate) const fn new(effect: &'static str) -> Self {
        Self { effect, checked: AtomicBool::new(false) }
    }

    /// Prints the warning at the first call, if [`Global`](crate::Global) is not installed.
    pub(crate) fn check_once(&self) {
        if !cfg!(miri) && !self.checked.swap(true, Ordering::Relaxed) && !is_installed() {
            print(&format!("{NOT_INSTALLED}: {}", self.effect));
        }
    }
}

/// Prints a line on standard error.
pub(crate) fn print(text: &str) {
    // A write error cannot be reported anywhere.
    let _ = writeln!(io::stderr().lock(), "aquifer: {text}");
}

#[cfg(test)]
mod tests {
    use super::NOT_INSTALLED;
    use crate::{report, set_cap};
    use std::{env, process::Command};

    /// Names the part of the test that a child process runs.
    const PART: &str = "AQUIFER_NOT_INSTALLED";

    /// Returns what a part prints on standard error. Each part runs in a process of its own, since
    /// a warning is printed once in a process.
    fn printed(part: &str) -> Vec<String> {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "not_installed::tests::the_part_of_a_child", "--nocapture"])
            .env(PART, part)
            .output()
            .unwrap();
        assert!(child.status.success(), "{child:?}");
        String::from_utf8(child.stderr).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn without_this_global_allocator_a_report_and_every_setting_say_so_once() {
        let warning = |effect: &str| vec![format!("aquifer: {NOT_INSTALLED}: {effect}")];
        assert_eq!(
            printed("report"),
            [format!("{NOT_INSTALLED}: most allocations are not counted")]
        );
        assert_eq!(printed("cap"), warning("a cap refuses nothing that other code allocates"));
        assert_eq!(printed("none"), [""; 0], "what switches a setting off has its effect");
    }

    /// The part of the test above that runs in another process. Run directly, it does nothing.
    #[test]
    fn the_part_of_a_child() {
        let Ok(part) = env::var(PART) else { return };
        match part.as_str() {
            "report" => {
                let report = report().to_string();
                eprintln!("{}", report.lines().next().unwrap_or_default());
            }
            "cap" => (0..2).for_each(|_| assert_eq!(set_cap(1 << 40), 0)),
            _ => assert_eq!(set_cap(u64::MAX), 0),
        }
    }
}
