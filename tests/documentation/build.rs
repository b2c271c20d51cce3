//! Collects the documentation that contains code, one module for each comment.
#![expect(clippy::unwrap_used, reason = "a build script ends with what it cannot read")]

use std::{
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

/// The crates with `doctest = false`.
const CRATES: [&str; 9] =
    ["adapters", "core", "device", "driver", "formats", "global", "host", "status", "stream"];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Adds the comment that ends before line `end`, if it contains code.
fn add(comment: &mut String, name: &str, end: usize, examples: &mut String) {
    let text = std::mem::take(comment);
    if text.contains("```") {
        writeln!(examples, "#[doc = {text:?}]\npub mod {name}_to_line_{end} {{}}").unwrap();
    }
}

fn main() {
    let allocators = Path::new("../../allocators");
    let mut examples = String::new();
    for name in CRATES {
        let folder = allocators.join(name).join("src");
        println!("cargo::rerun-if-changed={}", folder.display());
        let mut files = Vec::new();
        sources(&folder, &mut files);
        files.sort();
        for file in files {
            let path = file.strip_prefix(allocators).unwrap().with_extension("");
            let module = path.to_str().unwrap().replace("/src/", "_").replace('/', "_");
            let (mut comment, mut last) = (String::new(), 0);
            for (at, line) in fs::read_to_string(&file).unwrap().lines().enumerate() {
                let line = line.trim_start();
                match line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) {
                    Some(text) => {
                        comment.push_str(text.strip_prefix(' ').unwrap_or(text));
                        comment.push('\n');
                    }
                    None => add(&mut comment, &module, at, &mut examples),
                }
                last = at + 1;
            }
            add(&mut comment, &module, last, &mut examples);
        }
    }
    let out = Path::new(&env::var_os("OUT_DIR").unwrap()).join("examples.rs");
    fs::write(out, examples).unwrap();
}
