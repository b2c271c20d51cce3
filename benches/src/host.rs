//! The machine and the date of the results.

use std::{
    fs, thread,
    time::{SystemTime, UNIX_EPOCH},
};

/// Returns the processor's model, or `None` if the kernel does not report it.
pub(crate) fn processor() -> Option<String> {
    fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| model(&text))
}

fn model(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Returns the release of the loaded NVIDIA kernel module, such as `580.159.03`, or `None` if there
/// is none.
pub(crate) fn driver_release() -> Option<String> {
    fs::read_to_string("/proc/driver/nvidia/version").ok().and_then(|text| release_of(&text))
}

fn release_of(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let is_release =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    line.split_whitespace().find(is_release).map(str::to_owned)
}

/// Returns how many threads may run at the same time, or 0 if that is unknown.
pub(crate) fn processors() -> u64 {
    thread::available_parallelism().map_or(0, |count| count.get() as u64)
}

/// Returns the bytes that programs can allocate without swapping (`MemAvailable`), or `None` if
/// that is unknown.
pub(crate) fn available() -> Option<u64> {
    fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_of(&text))
}

fn available_of(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Returns the current time as `2026-11-21T12:16:43Z`.
pub(crate) fn date() -> String {
    // A clock before 1970 is reported as 1970.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    written(now.as_secs())
}

/// Converts seconds since 1970 to a date. Uses years that begin in March, so that a leap day is the
/// last day of its year.
fn written(seconds: u64) -> String {
    const ERA: u64 = 146_097; // days in 400 years
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400); // since 1 March of year 0
    let (era, day) = (days / ERA, days % ERA);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153; // from March
    let (date, month) =
        (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute) = (second / 3_600, second / 60 % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{:02}Z", second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_available_is_read_as_the_kernel_writes_it() {
        let text = "MemTotal:       16 kB\nMemAvailable:    7964220 kB\n";
        assert_eq!(
            (available_of(text), available_of("MemFree: 1 kB")),
            (Some(7_964_220 << 10), None)
        );
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let table = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_795_263_403, "2026-11-21T12:16:43Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ];
        for (seconds, text) in table {
            assert_eq!(written(seconds), text);
        }
    }

    #[test]
    fn the_release_is_read_from_both_kernel_modules() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release";
        assert_eq!(release_of(closed).as_deref(), Some("535.104.05"));
        assert_eq!(
            release_of(&format!("{open}\nGCC version: 12.2.0")).as_deref(),
            Some("580.159.03")
        );
        assert_eq!(release_of("GCC version: 12.2.0"), None);
        assert_eq!(release_of(""), None);
    }

    #[test]
    fn the_model_is_read_where_the_kernel_tells_it() {
        let text = "processor\t: 0\nmodel name\t: AMD EPYC\nmodel name\t: other\n";
        assert_eq!(model(text).as_deref(), Some("AMD EPYC"));
        assert_eq!(model("CPU implementer\t: 0x41\n"), None);
        assert_eq!(model("model name\t:\n"), None);
    }
}
