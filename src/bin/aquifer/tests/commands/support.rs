//! The program, its data, and folders of a test's own.

use serde_json::Value;
use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{self, Command, Output},
    sync::atomic::{AtomicU32, Ordering},
};

/// Returns the program: the one that was built with these tests, or one that was brought along.
pub(crate) fn program() -> Command {
    let path = env::var_os("AQUIFER_BIN")
        .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_aquifer")), PathBuf::from);
    Command::new(path)
}

pub(crate) fn aquifer<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Output {
    program().args(arguments).output().expect("the program starts")
}

/// Returns a recorded trace: where the repository has it, or where `AQUIFER_DATA` says.
pub(crate) fn data(name: &str) -> String {
    let folder = env::var_os("AQUIFER_DATA").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/data"),
        PathBuf::from,
    );
    folder.join(name).to_str().expect("text").to_owned()
}

/// Returns a small memory snapshot, by a path that fits into a report.
pub(crate) fn snapshot(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../allocators/formats/tests/data/snapshots");
    let file = folder.canonicalize().expect("the snapshots").join(name);
    file.to_str().expect("text").to_owned()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

pub(crate) fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}{}", text(&output.stdout), text(&output.stderr)))
}

pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("a whole number: {value}"))
}

/// A folder that only this user can read. It is removed with the test.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = env::temp_dir().join(format!("aquifer-test-{}-{count}", process::id()));
        fs::create_dir(&path).expect("a new folder");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("it is ours");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("text").to_owned()
    }

    /// Writes a file, and returns its path.
    pub(crate) fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        fs::write(&path, bytes).expect("a file");
        path
    }

    /// Returns the names of its files, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("a folder");
        let mut names: Vec<_> = entries
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
            .collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A file in a folder of its own.
pub(crate) struct File {
    path: String,
    _folder: Folder,
}

impl File {
    pub(crate) fn new(name: &str, bytes: impl AsRef<[u8]>) -> Self {
        let folder = Folder::new();
        Self { path: folder.file(name, bytes), _folder: folder }
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }
}
