//! Files of runs and pictures.

use super::run::{BenchRun, PlotError};
use std::{
    fs::{self, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process,
};

/// The largest file that is read. The largest runs have about 100 kB.
const LARGEST: u64 = 1 << 20;

impl BenchRun {
    /// Reads a run from a file.
    ///
    /// # Errors
    /// [`PlotError`], with the path.
    pub fn read(path: &Path) -> Result<Self, PlotError> {
        let unreadable = |e| PlotError::Unreadable(path.to_owned(), e);
        let mut text = String::new();
        let file = fs::File::open(path).map_err(unreadable)?;
        file.take(LARGEST + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > LARGEST {
            return Err(PlotError::TooLarge(path.to_owned()));
        }
        Self::parse(&text).map_err(|e| PlotError::BadFile(path.to_owned(), Box::new(e)))
    }
}

/// The file that a picture is written to, which was found to be writable.
///
/// The picture is written under another name beside it and renamed, so the file always holds a
/// whole picture, or what it held before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PictureFile {
    path: PathBuf,
    /// The name until the picture is whole.
    unfinished: PathBuf,
}

impl PictureFile {
    /// Checks that a picture can be written, before anything is measured for it. Creates and
    /// removes a file beside it.
    ///
    /// # Errors
    /// [`PlotError::Unwritable`], also if the path is that of a folder, a device or a pipe.
    pub fn at(path: &Path) -> Result<Self, PlotError> {
        let unwritable = |e| PlotError::Unwritable(path.to_owned(), e);
        let found = match fs::canonicalize(path) {
            Ok(found) if !found.is_file() => {
                return Err(unwritable(io::Error::other("it is not a regular file")));
            }
            // A link stays one: the file that it leads to is replaced.
            Ok(found) => found,
            Err(e) if e.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(e) => return Err(unwritable(e)),
        };
        let Some(name) = found.file_name() else {
            return Err(unwritable(io::Error::other("it has no file name")));
        };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.tmp", process::id()));
        let file = Self { unfinished: found.with_file_name(hidden), path: found };
        file.create("").map_err(unwritable)?;
        fs::remove_file(&file.unfinished).map_err(unwritable)?;
        Ok(file)
    }

    /// Writes the picture.
    ///
    /// # Errors
    /// [`PlotError::Unwritable`]. The file then holds what it held before.
    pub fn write(&self, svg: &str) -> Result<(), PlotError> {
        let written = self.create(svg).and_then(|()| fs::rename(&self.unfinished, &self.path));
        written.map_err(|e| {
            // The first error is the one that matters.
            let _ = fs::remove_file(&self.unfinished);
            PlotError::Unwritable(self.path.clone(), e)
        })
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn create(&self, text: &str) -> io::Result<()> {
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&self.unfinished)?
            .write_all(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of a test's own.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("aquifer-plot-{name}-{}", process::id()));
            fs::create_dir(&path).unwrap();
            Self(path)
        }
        fn files(&self) -> Vec<String> {
            let mut names: Vec<_> = fs::read_dir(&self.0)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
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

    #[test]
    fn a_picture_replaces_the_file_and_leaves_no_other() {
        let folder = Folder::new("whole");
        let path = folder.0.join("a.svg");
        fs::write(&path, "before").unwrap();
        let file = PictureFile::at(&path).unwrap();
        assert_eq!(
            (fs::read_to_string(&path).unwrap(), folder.files()),
            ("before".into(), vec!["a.svg".into()])
        );
        file.write("after").unwrap();
        assert_eq!(
            (fs::read_to_string(&path).unwrap(), folder.files()),
            ("after".into(), vec!["a.svg".into()])
        );
        let link = folder.0.join("link.svg");
        std::os::unix::fs::symlink("a.svg", &link).unwrap();
        PictureFile::at(&link).unwrap().write("by a link").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "by a link");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn what_cannot_be_written_is_refused_before_and_loses_nothing() {
        let folder = Folder::new("refused");
        for path in [
            folder.0.clone(),
            folder.0.join("none/a.svg"),
            "/dev/null".into(),
            "".into(),
            "..".into(),
        ] {
            let refused = PictureFile::at(&path);
            assert!(matches!(&refused, Err(PlotError::Unwritable(..))), "{path:?}: {refused:?}");
        }
        assert!(folder.files().is_empty());
        let file = PictureFile::at(&folder.0.join("a.svg")).unwrap();
        fs::create_dir(file.path()).unwrap();
        let refused = file.write("a picture");
        assert!(matches!(&refused, Err(PlotError::Unwritable(..))), "{refused:?}");
        assert_eq!(folder.files(), ["a.svg"], "the folder, and nothing else");
    }

    #[test]
    fn the_error_of_a_file_names_it() {
        let folder = Folder::new("named");
        let path = folder.0.join("run.json");
        assert!(matches!(BenchRun::read(&path), Err(PlotError::Unreadable(..))));
        fs::write(&path, "{}").unwrap();
        let said = BenchRun::read(&path).unwrap_err().to_string();
        assert!(said.contains("run.json: not a run: `rows` is missing"), "{said}");
        fs::write(&path, vec![b' '; LARGEST as usize + 1]).unwrap();
        assert!(matches!(BenchRun::read(&path), Err(PlotError::TooLarge(_))));
    }
}
