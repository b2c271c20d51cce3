//! Synthetic machines for tests.
#![allow(dead_code, clippy::unwrap_used, reason = "each test binary uses some of it, to test")]

use aquifer_host::topology::Topology;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process,
};

/// A machine whose files change.
pub(crate) struct Machine(PathBuf);

impl Machine {
    pub(crate) fn new(name: &str) -> Self {
        Self(env::temp_dir().join(format!("aquifer-{name}-{}", process::id())))
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Replaces a file that may be read at the same time.
    pub(crate) fn swap(&self, path: &str, text: &str) {
        self.write("next", text);
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::rename(self.0.join("next"), path).unwrap();
    }

    pub(crate) fn root(&self) -> &Path {
        &self.0
    }

    pub(crate) fn read(&self) -> Topology {
        Topology::read_under(&self.0).unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
