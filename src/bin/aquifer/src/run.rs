//! `run`: a program under the library that observes and limits its CUDA calls.
//!
//! The library is preloaded from a folder of three links: itself as `libcuda.so.1` and
//! `libcuda.so`, and the driver under the name by which the library needs it. The folder is first
//! in `LD_LIBRARY_PATH` as well, for programs that open `libcuda.so`. Processes that the program
//! starts inherit both by the environment, with the variables that say what to do.
//!
//! Without `--report` this process becomes the program. With it, this process waits for the
//! program, passes signals on, writes the page, and ends as the program did.
#![expect(unsafe_code, reason = "asks the dynamic linker for the driver, and sets signals")]

use crate::{amount::AmountError, cli, error::CommandError, report};
use aquifer_status::{folder, ledger};
use nix::{
    libc,
    sys::signal::{SigSet, SigmaskHow, Signal, kill, raise, sigprocmask},
    unistd::Pid,
};
use std::{
    env,
    ffi::{CStr, OsStr, OsString},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::symlink,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{self, Child, Command, ExitStatus},
    time::SystemTime,
};

/// The library's file.
const LIBRARY: &str = "libaquifer_interposer.so";
/// The name under which it needs the driver.
const REAL: &str = "libaquifer-real-cuda.so";
/// The names under which programs open the driver.
const DRIVER: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// Exit statuses where the program cannot be started, as of `env`.
const NOT_FOUND: u8 = 127;
const NOT_STARTED: u8 = 126;

/// Runs the program. Returns its exit status if this process has waited for it.
pub(crate) fn run(args: &cli::Run) -> Result<u8, CommandError> {
    let Some((program, arguments)) = args.program.split_first() else {
        return Ok(NOT_FOUND);
    };
    let mut command = Command::new(program);
    command.args(arguments);
    match driver() {
        Some(driver) => prepare(args, &driver, &mut command)?,
        None => super::report_error(
            "there is no CUDA driver here (libcuda.so.1), so the program runs as without aquifer run",
        ),
    }
    match &args.report {
        None => Ok(not_started(program, &command.exec())),
        Some(page) => wait(args, &mut command, program, page),
    }
}

/// Sets the environment of the program.
fn prepare(args: &cli::Run, driver: &Path, command: &mut Command) -> Result<(), CommandError> {
    let folder = linked_folder(&library()?, driver)?;
    let joined = |name: &str, first: &Path| {
        let mut value = first.as_os_str().to_owned();
        if let Some(before) = env::var_os(name).filter(|before| !before.is_empty()) {
            value.push(":");
            value.push(before);
        }
        value
    };
    command.env("LD_PRELOAD", joined("LD_PRELOAD", &folder.join(DRIVER[0])));
    command.env("LD_LIBRARY_PATH", joined("LD_LIBRARY_PATH", &folder));
    // What is not asked for here stays as an outer `aquifer run` has set it.
    let mut set = |name, value: Option<OsString>| {
        value.into_iter().for_each(|value| _ = command.env(name, value));
    };
    let flag = |is_set: bool| is_set.then(|| OsString::from("1"));
    let trace = trace(args)?;
    if let Some(trace) = &trace {
        // Further processes of the program see by an existing file that they are not the first.
        match fs::remove_file(trace) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(CommandError::Output(trace.clone(), error));
            }
            _ => {}
        }
    }
    set("AQUIFER_RUN_RECORD", trace.map(OsString::from));
    set("AQUIFER_RUN_LIMIT", limits(args)?.map(OsString::from));
    set("AQUIFER_RUN_PINNED_LIMIT", args.pinned_limit.map(|limit| limit.0.to_string().into()));
    set("AQUIFER_RUN_STACKS", flag(args.stacks));
    set("AQUIFER_RUN_SERVE", flag(args.serve));
    let guarantee = args.guarantee.map_or(0, |guarantee| guarantee.0);
    set("AQUIFER_RUN_SHARE", args.share.as_ref().map(|_| guarantee.to_string().into()));
    match &args.share {
        Some(Some(folder)) => {
            let absolute = std::path::absolute(folder);
            let absolute = absolute.map_err(|error| CommandError::Output(folder.clone(), error))?;
            command.env(ledger::VARIABLE, absolute);
        }
        Some(None) if matches!(ledger::folder_of_environment(), Ok(None)) => {
            return Err(CommandError::NoLedger);
        }
        _ => {}
    }
    Ok(())
}

/// Returns the limits as the library reads them. Without a flag they are those of `HAMi`'s
/// variables.
fn limits(args: &cli::Run) -> Result<Option<String>, CommandError> {
    let mut limits: Vec<String> = args.limit.iter().map(cli::DeviceLimit::to_string).collect();
    if limits.is_empty() {
        const VARIABLE: &str = "CUDA_DEVICE_MEMORY_LIMIT";
        for (name, value) in env::vars_os() {
            let (name, value) = (name.to_string_lossy(), value.to_string_lossy());
            let Some(rest) = name.strip_prefix(VARIABLE) else { continue };
            let device = match rest.strip_prefix('_') {
                None if rest.is_empty() => String::new(),
                Some(number) if number.parse::<u32>().is_ok() => format!("{number}="),
                _ => continue,
            };
            match format!("{device}{value}").parse::<cli::DeviceLimit>() {
                Ok(limit) => limits.push(limit.to_string()),
                // As of `HAMi` it is no limit.
                Err(AmountError::Zero) => {}
                Err(_) if value.is_empty() => {}
                Err(_) => {
                    let (name, value) = (name.into_owned(), value.into_owned());
                    return Err(CommandError::Variable { name, value });
                }
            }
        }
        limits.sort();
    }
    Ok((!limits.is_empty()).then(|| limits.join(",")))
}

/// Returns the path of the driver's library, by the dynamic linker's own search, or `None` if there
/// is none.
fn driver() -> Option<PathBuf> {
    // Under another `aquifer run` the driver has this name, and the library has the driver's.
    let names = [c"libaquifer-real-cuda.so", c"libcuda.so.1"];
    names.into_iter().find_map(|name| {
        // SAFETY: 1. Loading the driver runs its start-up code, which is safe to run.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) };
        if library.is_null() {
            return None;
        }
        // SAFETY: 1. An open library, and a text that ends with a zero byte.
        let symbol = unsafe { libc::dlsym(library, c"cuInit".as_ptr()) };
        // SAFETY: 1. An all-zero value is valid.
        let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: 1. The result is a local.
        if symbol.is_null() || unsafe { libc::dladdr(symbol, &raw mut found) } == 0 {
            return None;
        }
        // SAFETY: 1. The linker's text, which stays while the library is loaded.
        let path = unsafe { CStr::from_ptr(found.dli_fname) };
        fs::canonicalize(OsStr::from_bytes(path.to_bytes())).ok()
    })
}

/// Returns the path of the library: where Cargo builds it, beside this program, or where an
/// installation puts libraries.
fn library() -> Result<PathBuf, CommandError> {
    let program = env::current_exe().and_then(fs::canonicalize).unwrap_or_default();
    let beside = program.parent().unwrap_or(Path::new(""));
    let folders = [beside.join("deps"), beside.to_owned(), beside.join("../lib")];
    let found = folders.iter().find_map(|folder| fs::canonicalize(folder.join(LIBRARY)).ok());
    found.ok_or_else(|| CommandError::NoLibrary { name: LIBRARY, folder: beside.to_owned() })
}

/// Returns the folder with the links, which it creates. It stays: processes of an earlier program
/// may still use it.
fn linked_folder(library: &Path, driver: &Path) -> Result<PathBuf, CommandError> {
    let mut hasher = DefaultHasher::new();
    (library, driver).hash(&mut hasher);
    let parent = folder::default_folder();
    let path = parent.join(format!("run-{:016x}", hasher.finish()));
    let failed = |error| CommandError::Output(path.clone(), error);
    folder::create(&parent).map_err(CommandError::Status)?;
    if path.as_os_str().as_bytes().iter().any(|byte| b" :;".contains(byte)) {
        let error =
            "the dynamic linker cannot preload from a path with a space, colon or semicolon";
        return Err(failed(io::Error::other(error)));
    }
    fs::create_dir_all(&path).map_err(failed)?;
    let links = [(DRIVER[0], library), (DRIVER[1], library), (REAL, driver)];
    for (name, target) in links {
        let link = path.join(name);
        if fs::read_link(&link).is_ok_and(|found| found == target) {
            continue;
        }
        // Another process may be creating the same.
        let new = path.join(format!("{name}.{}", process::id()));
        symlink(target, &new).and_then(|()| fs::rename(&new, &link)).map_err(failed)?;
    }
    Ok(path)
}

/// Says why a program was not started, and returns the status for it.
fn not_started(program: &OsStr, error: &io::Error) -> u8 {
    super::report_error(&format!("{}: {error}", program.display()));
    if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_STARTED }
}

/// Runs the program to its end, and writes the page.
fn wait(
    args: &cli::Run,
    command: &mut Command,
    program: &OsStr,
    page: &Path,
) -> Result<u8, CommandError> {
    let forwarded =
        [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGCONT];
    // A terminal sends these to the program as well.
    let left = [Signal::SIGINT, Signal::SIGQUIT];
    let waited: SigSet = forwarded.into_iter().chain(left).chain([Signal::SIGCHLD]).collect();
    let mut before = SigSet::empty();
    let masked = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&waited), Some(&mut before));
    masked.map_err(|error| CommandError::Signals(error.into()))?;
    // SAFETY: 1. Sets the mask of the new process, which is safe between a fork and an exec.
    unsafe {
        command.pre_exec(move || Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&before), None)?));
    }
    let begun = SystemTime::now();
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Ok(not_started(program, &error)),
    };
    let status = end_of(&mut child, &waited, &forwarded)?;
    write_pages(args, page, begun)?;
    end_as(status)
}

/// Writes the page of each trace that has come since `begun`: the first process's by the name that
/// was asked for, and others' with what their traces have in the name as well. Traces that nobody
/// has asked for are removed.
fn write_pages(args: &cli::Run, page: &Path, begun: SystemTime) -> Result<(), CommandError> {
    let Some(first) = trace(args)?.filter(|trace| trace.exists()) else {
        super::report_error("the program took no memory of a GPU, so there is no page");
        return Ok(());
    };
    let stem = |path: &Path| path.file_stem().unwrap_or_default().as_bytes().to_owned();
    let beginning = [&stem(&first), &b"."[..]].concat();
    let folder = first.parent().unwrap_or(Path::new("/"));
    let is_new = |path: &Path| {
        let modified = fs::metadata(path).and_then(|found| found.modified());
        path.extension() == first.extension() && modified.is_ok_and(|at| at >= begun)
    };
    let found = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    for trace in found.filter(|path| is_new(path)) {
        let stem = stem(&trace);
        let page = match stem.strip_prefix(&beginning[..]) {
            _ if trace == first => page.to_owned(),
            Some(process) => {
                let process = OsStr::from_bytes(process).to_string_lossy().into_owned();
                page.with_extension(process + ".html")
            }
            None => continue,
        };
        if let Err(error) = report::run(&cli::Report::page(trace.clone(), page)) {
            super::report_error(&error.to_string());
        }
        if args.record.is_none() {
            let _removed = fs::remove_file(trace);
        }
    }
    Ok(())
}

/// Returns the path of the trace, if one is to be written.
fn trace(args: &cli::Run) -> Result<Option<PathBuf>, CommandError> {
    match (&args.record, &args.report) {
        (Some(record), _) => match std::path::absolute(record) {
            Ok(path) => Ok(Some(path)),
            Err(error) => Err(CommandError::Output(record.clone(), error)),
        },
        (None, Some(_)) => {
            Ok(Some(folder::default_folder().join(format!("run-{}.csv", process::id()))))
        }
        (None, None) => Ok(None),
    }
}

/// Waits for the program, and passes signals on to it.
fn end_of(
    child: &mut Child,
    waited: &SigSet,
    forwarded: &[Signal],
) -> Result<ExitStatus, CommandError> {
    loop {
        if let Some(status) = child.try_wait().map_err(CommandError::Signals)? {
            return Ok(status);
        }
        let signal = waited.wait().map_err(|error| CommandError::Signals(error.into()))?;
        if forwarded.contains(&signal) {
            // It may have ended by now.
            let _sent = kill(Pid::from_raw(child.id().cast_signed()), signal);
        }
    }
}

/// Ends this process by the signal that has ended the program, or returns its status.
fn end_as(status: ExitStatus) -> Result<u8, CommandError> {
    if let Some(signal) = status.signal().and_then(|signal| Signal::try_from(signal).ok()) {
        // SAFETY: 1. The default action is no handler.
        let _reset =
            unsafe { nix::sys::signal::signal(signal, nix::sys::signal::SigHandler::SigDfl) };
        let mut only = SigSet::empty();
        only.add(signal);
        let _unblocked = sigprocmask(SigmaskHow::SIG_UNBLOCK, Some(&only), None);
        let _raised = raise(signal);
    }
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Ok(u8::try_from(code).unwrap_or(1))
}
