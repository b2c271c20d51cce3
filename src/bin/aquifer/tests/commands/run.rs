//! `aquifer run`: programs print and exit under it as without it, what they take is in the trace, and
//! no limit is exceeded.
//!
//! The driver and NVML are stand-ins. `run/` has their source, and that of the programs.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "steps that fail or are skipped")]

use crate::support::{Folder, json, program, text};
use nix::sys::signal::{Signal::SIGTERM, kill};
use std::{
    collections::HashMap,
    ffi::OsStr,
    fs,
    io::{self, BufRead, BufReader, Write},
    os::unix::{ffi::OsStrExt, fs::symlink, process::ExitStatusExt},
    path::Path,
    process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio},
    sync::{Arc, Mutex, Weak},
};

/// The programs that reach the driver: linked to it, with its folder in them, and by opening it.
const WAYS: [&str; 5] = [
    "linked",
    "rpath",
    "env DRIVER=libcuda.so.1 opened",
    "env DRIVER=libcuda.so opened",
    "env DRIVER=libcuda.so.1 DLSYM=1 opened",
];

/// The stand-ins and the programs, which tests that run at a time share.
struct Built(Folder);

impl Built {
    /// Compiles all. Fails if there is no compiler.
    fn new() -> io::Result<Self> {
        let built = Self(Folder::new());
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/commands/run");
        let driver = built.0.path("driver");
        ["driver", "old", "none"].iter().try_for_each(|name| fs::create_dir(built.0.path(name)))?;
        let library = "-shared -fPIC -Wl,-Bsymbolic -Wl,-soname,libcuda.so.1";
        for (file, source, flags) in [
            ("driver/libcuda.so.1", "driver.c", library),
            ("old/libcuda.so.1", "driver.c", &format!("{library} -DOLD")),
            ("driver/libnvidia-ml.so.1", "nvml.c", "-shared -fPIC"),
            ("linked", "program.c", "-Ldriver -l:libcuda.so.1"),
            ("rpath", "program.c", &format!("-Ldriver -l:libcuda.so.1 -Wl,-rpath,{driver}")),
            ("opened", "program.c", "-DOPENED"),
        ] {
            let always = "-O1 -Wall -Wextra -Werror -pthread -rdynamic -Wl,--disable-new-dtags -o";
            let mut command = Command::new("cc");
            command.current_dir(&built.0.0).args(always.split(' ')).arg(file);
            command.arg(sources.join(source)).args(flags.split(' '));
            assert!(command.status()?.success(), "{source} does not compile with {flags}");
        }
        symlink("libcuda.so.1", format!("{driver}/libcuda.so"))?;
        built.0.file("none/libcuda.so.1", "no library");
        Ok(built)
    }

    fn shared() -> Option<Arc<Self>> {
        static SHARED: Mutex<Weak<Built>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap();
        let skip = |error: &io::Error| println!("skipped: there is no C compiler: {error}");
        let new = || Self::new().inspect_err(skip).ok().map(Arc::new);
        let built = shared.upgrade().or_else(new)?;
        *shared = Arc::downgrade(&built);
        Some(built)
    }
}

/// Where the programs of one test run.
struct Place {
    built: Arc<Built>,
    folder: Folder,
    driver: &'static str,
}

impl Place {
    fn new() -> Option<Self> {
        Some(Self { built: Built::shared()?, folder: Folder::new(), driver: "driver" })
    }

    /// Returns the command of a program without `aquifer run`, in the test's folder. The names of
    /// the programs here stand for their paths.
    fn native(&self, words: &str) -> Command {
        let path = |word: &str| match word {
            "aquifer" => program().get_program().to_owned(),
            "linked" | "rpath" | "opened" => self.built.0.path(word).into(),
            _ => word.into(),
        };
        let mut words = words.split_whitespace().map(path);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).current_dir(&self.folder.0).stdin(Stdio::null());
        let folders = ["XDG_RUNTIME_DIR", "AQUIFER_STATUS", "AQUIFER_LEDGER"];
        command.envs(folders.map(|name| (name, &self.folder.0)));
        command.env("LD_LIBRARY_PATH", self.built.0.path(self.driver));
        command
    }

    fn run(&self, flags: &str, words: &str) -> Output {
        self.native(&format!("aquifer run {flags} -- {words}")).output().unwrap()
    }

    /// Returns what a program prints, which must end well and say nothing else.
    fn prints(&self, flags: &str, words: &str) -> String {
        let output = self.run(flags, words);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
        text(&output.stdout)
    }

    /// Starts a program, and waits until it does.
    fn start(&self, flags: &str, words: &str) -> Started {
        let mut started = Self::begin(self.native(&format!("aquifer run {flags} -- {words}")));
        while words.contains("wait") && started.line() != "waits" {}
        started
    }

    fn begin(mut command: Command) -> Started {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Started(child, lines)
    }

    /// Returns the fields of each line of a trace.
    fn rows(&self, name: &str) -> Vec<HashMap<String, String>> {
        let trace = fs::read_to_string(self.folder.path(name)).unwrap();
        let mut rows = trace.lines().map(|line| line.split(',').map(str::to_owned));
        let names: Vec<_> = rows.next().unwrap().collect();
        rows.map(|fields| names.iter().cloned().zip(fields).collect()).collect()
    }

    /// Returns what is about blocks in a trace, without their callers.
    fn events(&self, name: &str) -> Vec<String> {
        let event = |row: HashMap<String, String>| {
            let fields = ["op", "bytes", "stream", "kind", "device", "tag", "refused_by"];
            let fields = fields.map(|name| row[name].split(" < ").next().unwrap());
            (!row["tag"].is_empty()).then(|| fields.join(" ").trim_end().to_owned())
        };
        self.rows(name).into_iter().filter_map(event).collect()
    }
}

/// A program that runs. It is killed with this.
struct Started(Child, BufReader<ChildStdout>);

impl Started {
    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.1.read_line(&mut line).unwrap() > 0, "the program has ended");
        line.trim_end().to_owned()
    }

    fn ask(&mut self) -> String {
        self.0.stdin.as_ref().unwrap().write_all(b"\n").unwrap();
        self.line()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ended = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// Returns how a program has ended, and what it has printed.
fn all(output: &Output) -> (ExitStatus, String, String) {
    (output.status, text(&output.stdout), text(&output.stderr))
}

/// Checks the status, and that one line was said, with these words in it.
#[track_caller]
fn check_said(output: &Output, status: i32, words: &str) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.lines().count() == 1 && said.contains(words), "{said:?}");
}

#[test]
fn programs_print_and_exit_as_natively_and_are_recorded_however_they_reach_the_driver() {
    let Some(place) = Place::new() else { return };
    let expected = [
        ("a", "5242880 0 cached 0 cuMemAlloc"),
        ("a", "1000 0 cached 0 cuMemAlloc"),
        ("fc", "5242880 0 cached 0 cuMemAlloc"),
        ("afc", "41943040 33 cached 0 cuMemAllocAsync"),
        ("a", "3145728 0 pinned host cuMemHostAlloc"),
        ("a", "4194304 0 stable 0 cuMemCreate"),
        ("a", "6291456 0 pinned host cuMemCreate"),
        ("fc", "1000 0 cached 0 cuMemAlloc"),
        ("fc", "6291456 0 pinned host cuMemCreate"),
        ("a", "1000 0 cached 0 cuMemAlloc"),
        ("fc", "4194304 0 stable 0 cuMemCreate"),
        ("a", "3072000 0 cached 0 cuMemAllocPitch"),
        ("afc", "8388608 0 cached 0 cuMemAllocManaged"),
        ("afc", "4194304 0 stable 0 cuArrayCreate"),
        ("afc", "4096 0 pinned host cuMemHostRegister"),
        ("a", "3145728 0 cached 1 cuMemAlloc"),
    ]
    .map(|(ops, rest)| ops.chars().map(move |op| format!("{op} {rest}")));
    let expected: Vec<_> = expected.into_iter().flatten().collect();
    for way in WAYS {
        let words = format!("{way} all");
        let native = place.native(&words).output().unwrap();
        assert!(native.status.code() == Some(5) && native.stderr.is_empty());
        // This function is in the driver alone.
        assert!(text(&native.stdout).contains("\nadded later: 0\n"));
        assert_eq!(all(&place.run("", &words)), all(&native));
        for flags in ["--record t.csv", "--record t.csv --stacks"] {
            assert_eq!(all(&place.run(flags, &words)), all(&native));
            assert_eq!(place.events("t.csv"), expected, "{way} {flags}");
            for row in place.rows("t.csv").iter().filter(|row| !row["tag"].is_empty()) {
                assert_eq!(row["tag"].contains(" < main"), flags.contains("stacks"), "{row:?}");
            }
            let report = place.native("aquifer report --json t.csv").output().unwrap();
            assert_eq!(json(&report)["peaks"][0]["live"], 41_944_040, "{way} {flags}");
            let replay = place.native("aquifer replay --device sim t.csv").output().unwrap();
            assert!(replay.status.success(), "{}", text(&replay.stderr));
        }
    }
}

#[test]
fn the_driver_tells_the_limit_and_no_more_is_held_with_what_the_driver_holds_itself() {
    let Some(place) = Place::new() else { return };
    let expected = |free, total, got, small, left| {
        let first =
            format!("free {free} total {total}\ntotal {total}\ngot {got}\npeak {}", got + 100);
        let rest = "one more: 2\npinned: 0\nmore pinned: 0\n";
        format!("{first}\nsmall {small}\nthen free {left}\n{rest}")
    };
    let free = expected(1024, 1024, 1020, 4096, 0);
    // 100 MiB are the driver's, and 2048 small blocks share a page of 2 MiB.
    let (limited, full) = (expected(203, 303, 200, 2048, 1), expected(100, 200, 100, 0, 0));
    let name = "CUDA_DEVICE_MEMORY_LIMIT";
    let variables = format!("{name}=303M {name}_0=0 {name}_1=200m {name}_2=");
    for (words, on_first, on_second) in [
        ("aquifer run", &free, &free),
        ("aquifer run --limit 1=303MiB", &free, &limited),
        ("aquifer run --limit 303MiB --limit 1=200MiB", &limited, &full),
        (&format!("env {variables} aquifer run"), &limited, &full),
        (&format!("env {variables} aquifer run --limit 303MiB"), &limited, &limited),
    ] {
        for (way, device, expected) in [(0, 0, on_first), (0, 1, on_second), (3, 1, on_second)] {
            let words = format!("{words} -- {} limits {device}", WAYS[way]);
            assert_eq!(text(&place.native(&words).output().unwrap().stdout), *expected, "{words}");
        }
    }
    assert!(place.prints("--limit 50MiB", "linked limits").contains("got 0\npeak 100\nsmall 0\n"));
}

#[test]
fn a_refusal_is_in_the_trace_with_the_limit_that_refused() {
    let Some(place) = Place::new() else { return };
    let flags = "--limit 303MiB --pinned-limit 10MiB --record t.csv";
    assert!(place.prints(flags, "linked limits").ends_with("pinned: 0\nmore pinned: 2\n"));
    let refused = || place.events("t.csv").into_iter().filter(|event| event.starts_with('x'));
    let block = |bytes| format!("x {bytes} 0 cached 0 cuMemAlloc the limit of aquifer run");
    let pinned = "x 8388608 0 pinned host cuMemHostAlloc the pinned limit of aquifer run";
    let expected = [10_485_760, 1000, 10_485_760].map(block);
    assert!(refused().eq(expected.into_iter().chain([pinned.to_owned()])));
    let rows = place.rows("t.csv");
    let mark = |op| rows.iter().find(|row| row["op"] == op).unwrap()["bytes"].clone();
    assert_eq!((mark("l"), mark("o")), ("317718528".into(), "104857600".into()));
    // What the driver itself refuses was refused by no limit.
    place.prints("--record t.csv", "linked limits");
    assert_eq!(refused().next().unwrap(), "x 10485760 0 cached 0 cuMemAlloc");
}

#[test]
fn the_drivers_pool_is_trimmed_before_a_refusal_and_a_reset_of_the_context_frees_its_memory() {
    let Some(place) = Place::new() else { return };
    let steps = "alloc: 0\nthen free 180\nfree: 0\nother: 0\ntoo much: 2\nfree: 0\nagain: 0\n\
                 free: 0\nsmall: 0\npeak 500\n";
    assert_eq!(place.prints("--limit 600MiB", "linked pool"), steps);
    // A pool that has grown by more than was expected gives that back.
    let printed = text(&place.run("--limit 550MiB", "env GROWTH=1 linked pool").stdout);
    assert!(printed.starts_with("alloc: 2\nthen free 450\nfree: 1\nother: 0\n"), "{printed}");
    // Two blocks of 400 MiB, with a reset of the context between them.
    let printed = place.prints("--limit 600MiB --record t.csv", "linked reset");
    assert_eq!(printed, "alloc: 0\nreset: 0\nalloc: 0\n");
    assert!(place.events("t.csv").iter().map(|event| &event[..1]).eq(["a", "f", "c", "a"]));
}

#[test]
fn threads_together_hold_no_more_than_the_limit_and_every_allocation_has_its_free_in_the_trace() {
    let Some(place) = Place::new() else { return };
    for flags in ["", "--share", "--stacks --record t.csv"] {
        let printed = place.prints(&format!("--limit 600MiB {flags}"), "linked crowd");
        let peak: u64 = printed.trim().strip_prefix("peak ").unwrap().parse().unwrap();
        assert!((500..=600).contains(&peak), "{flags}: {peak}");
    }
    place.prints("--record t.csv --limit 200MiB", "linked threads");
    let mut ops: HashMap<_, Vec<_>> = HashMap::new();
    for row in place.rows("t.csv").into_iter().filter(|row| !row["tag"].is_empty()) {
        ops.entry(row["id"].clone()).or_default().push(row["op"].clone());
    }
    assert!(ops.len() == 32_000 && ops.values().all(|ops| *ops == ["a", "f", "c"]));
}

#[test]
fn a_forked_child_is_passed_on_and_what_is_executed_has_a_trace_of_its_own() {
    let Some(place) = Place::new() else { return };
    let check = |own: String| {
        assert_eq!(place.events("t.csv"), ["a 2097152 0 cached 0 cuMemAlloc"]);
        assert_eq!(place.events(&own), ["a 7340032 0 cached 0 cuMemAlloc"]);
        fs::remove_file(place.folder.path(&own)).unwrap();
    };
    let printed = place.prints("--record t.csv", "linked fork");
    let (rest, process) = printed.trim_end().split_once("\nprocess: ").unwrap();
    assert_eq!(rest, "alloc: 0\nchild: 3\nexecuted: 4");
    check(format!("t.{process}.csv"));
    let mut started = place.start("--record t.csv", "linked exec 1");
    assert_eq!(started.0.wait().unwrap().code(), Some(4));
    check(format!("t.{}.2.csv", started.0.id()));
    // Each trace has a page, and none is left of those that nobody has asked for.
    let printed = place.prints("--report p.html", "linked fork");
    let process = printed.trim_end().rsplit_once(' ').unwrap().1;
    for page in ["p.html".to_owned(), format!("p.{process}.html")] {
        assert!(fs::read_to_string(place.folder.path(&page)).unwrap().contains("Memory report"));
    }
    let left = fs::read_dir(place.folder.path("aquifer")).unwrap();
    assert!(left.map(|left| left.unwrap().path()).all(|left| left.is_dir()));
}

#[test]
fn a_program_ends_as_natively_and_a_page_is_written_even_if_it_crashes() {
    let Some(place) = Place::new() else { return };
    for words in ["linked end", "linked crash", "linked abort", "linked signals"] {
        let native = place.native(words).output().unwrap();
        for flags in ["", "--record t.csv", "--report p.html", "--share", "--limit 1GiB --stacks"] {
            assert_eq!(all(&place.run(flags, words)), all(&native));
        }
        assert!(place.events("t.csv")[0].starts_with("a "), "{words}");
        assert!(fs::read_to_string(place.folder.path("p.html")).unwrap().contains("Memory report"));
        fs::remove_file(place.folder.path("p.html")).unwrap();
    }
    for (flags, has_page) in [("", false), ("--report p.html", true)] {
        let mut started = place.start(flags, "linked wait");
        kill(nix::unistd::Pid::from_raw(started.0.id().cast_signed()), SIGTERM).unwrap();
        assert_eq!(started.0.wait().unwrap().signal(), Some(SIGTERM as i32));
        assert_eq!(fs::exists(place.folder.path("p.html")).unwrap(), has_page);
    }
}

#[test]
fn a_driver_that_is_opened_past_the_library_is_told_once_and_fails_a_limit() {
    let Some(place) = Place::new() else { return };
    let words = format!("env DRIVER={}/libcuda.so.1 opened one", place.built.0.path("driver"));
    for (flags, status) in [("--record t.csv", 4), ("--limit 7=1GiB", 2), ("--pinned-limit 1g", 2)]
    {
        check_said(&place.run(flags, &words), status, "has opened the CUDA driver past");
    }
    assert!(!fs::exists(place.folder.path("t.csv")).unwrap());
    assert_eq!(place.prints("--limit 1GiB", "echo nothing"), "nothing\n");
}

#[test]
fn a_driver_that_lacks_functions_is_used_as_far_as_it_goes_and_none_leaves_the_program_alone() {
    let Some(mut place) = Place::new() else { return };
    place.driver = "old";
    let native = place.native("linked all").output().unwrap();
    assert_eq!(all(&place.run("--record t.csv --limit 1GiB --share", "linked all")), all(&native));
    let events = place.events("t.csv");
    assert!(events.len() == 25 && !events.iter().any(|event| event.contains("Async")));
    let output = place.run("--serve", "linked all");
    check_said(&output, 5, "nothing is served");
    assert_eq!(output.stdout, native.stdout);
    let printed = place.prints("--limit 300MiB", "linked limits");
    assert!(printed.starts_with("free 300 total 300\ntotal 300\ngot 300\n"), "{printed}");
    place.driver = "none";
    for flags in ["", "--limit 1GiB --record t.csv", "--share"] {
        let output = place.run(flags, "expr 1 - 1");
        check_said(&output, 1, "there is no CUDA driver here");
        assert_eq!(text(&output.stdout), "0\n");
    }
}

#[test]
fn what_else_is_preloaded_stays_and_aquifer_run_runs_under_itself() {
    let Some(place) = Place::new() else { return };
    let other = place.built.0.path("driver/libnvidia-ml.so.1");
    let words = format!("env LD_PRELOAD={other} aquifer run cat /proc/self/maps");
    let maps = text(&place.native(&words).output().unwrap().stdout);
    assert!(maps.contains("libnvidia-ml.so.1\n") && maps.contains("aquifer_interposer.so\n"));
    for flags in ["--record t.csv", "--record t.csv --report p.html", "--limit 1GiB"] {
        let outer = "--limit 1GiB --record t.csv";
        let output = place.run(outer, &format!("aquifer run {flags} -- linked one"));
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(4), String::new()));
        assert_eq!(place.events("t.csv"), ["a 7340032 0 cached 0 cuMemAlloc"]);
    }
    // What the inner one does not say stays.
    let [inner, outer] = [("", "303MiB"), ("--limit 303MiB", "200MiB")].map(|(inner, outer)| {
        place
            .prints(&format!("--limit {outer}"), &format!("aquifer run {inner} -- linked limits 1"))
    });
    assert!(inner == outer && inner.starts_with("free 203 total 303\n"), "{inner} {outer}");
    assert!(json(&place.run("", "aquifer doctor --json"))["warnings"].is_array());
}

#[test]
fn a_program_that_runs_is_shown_with_its_device_what_it_holds_and_its_limit() {
    let Some(place) = Place::new() else { return };
    let started = place.start("--limit 300MiB", "linked wait 20");
    let (process, pool) = loop {
        let process = &json(&place.native("aquifer top --json").output().unwrap())["processes"][0];
        if process["pools"][0]["live"] == 20_971_520 {
            break (process["pid"].clone(), process["pools"][0].clone());
        }
    };
    assert_eq!(process, started.0.id());
    let shown = ["name", "device", "kind", "physical", "limit"].map(|name| pool[name].to_string());
    // Of 300 MiB the driver has 100 itself.
    assert_eq!(shown.join(" "), "\"Stand-in 0\" 0 \"source\" 20971520 209715200");
    let metrics = text(&place.native("aquifer metrics").output().unwrap().stdout);
    let line = format!("live_bytes{{pid=\"{process}\",process=\"linked\",device=\"0000:01:00.0\",");
    let line = line + "node=\"\",kind=\"source\",pool=\"Stand-in 0\"} 20971520\n";
    assert!(metrics.contains(&line), "{metrics}");
}

#[test]
fn programs_that_share_divide_a_device_and_a_killed_one_leaves_its_part() {
    let Some(place) = Place::new() else { return };
    let holding = place.start("--share=ledgers --guarantee 300MiB", "linked wait 100");
    let mut asking = place.start("--share=ledgers", "linked ask");
    assert_eq!(asking.ask(), "got 720");
    let mut limited = place.start("--share=ledgers --limit 500MiB", "linked ask");
    assert_eq!(limited.ask(), "got 0");
    drop(holding);
    assert_eq!(asking.ask(), "got 300");
    drop(asking);
    assert_eq!(limited.ask(), "got 400");
    assert_eq!(place.start("--share", "linked ask").ask(), "got 1020");
    // The driver has 100 MiB in this program, and others use 200.
    let beside = place.native("env OUTSIDE=200 aquifer run --share -- linked ask");
    assert_eq!(Place::begin(beside).ask(), "got 720");
}

#[test]
fn what_makes_no_sense_is_told_in_one_line_and_what_cannot_be_started_with_the_status_of_env() {
    let Some(place) = Place::new() else { return };
    let limits = ["--limit much", "--limit 1=2=3", "--limit x=1GiB", "--pinned-limit 0"];
    for flags in limits.into_iter().chain(["--guarantee 1GiB", "--no-such-flag"]) {
        check_said(&place.run(flags, "linked one"), 2, "aquifer: ");
    }
    place.folder.file("text", "no program");
    for flags in ["", "--report p.html"] {
        check_said(&place.run(flags, "no-such-program"), 127, "no-such-program: No such file");
        check_said(&place.run(flags, "./text"), 126, "Permission denied");
    }
    for (variable, words, said) in [
        ("CUDA_DEVICE_MEMORY_LIMIT=much", "", "PROGRAM"),
        ("CUDA_DEVICE_MEMORY_LIMIT=much", "-- linked one", "MEMORY_LIMIT is \"much\""),
        ("AQUIFER_LEDGER=off", "--share -- linked one", "AQUIFER_LEDGER=off"),
    ] {
        let words = format!("env {variable} aquifer run {words}");
        check_said(&place.native(&words).output().unwrap(), 2, said);
    }
    let native = place.native("linked all").output().unwrap();
    for (flags, words, said) in [
        ("", "env AQUIFER_RUN_LIMIT=much linked all", "AQUIFER_RUN_LIMIT is much"),
        ("", "env AQUIFER_RUN_PINNED_LIMIT=-1 linked all", "AQUIFER_RUN_PINNED_LIMIT is -1"),
        ("--record no/t.csv", "linked all", "no trace is written"),
    ] {
        let output = place.run(flags, words);
        check_said(&output, 5, said);
        assert_eq!(output.stdout, native.stdout);
    }
    let unreadable = OsStr::from_bytes(b"A\xff");
    let mut command = place.native("aquifer run linked all");
    assert_eq!(all(&command.env(unreadable, unreadable).output().unwrap()), all(&native));
}
