//! How the library is linked: under the name of the CUDA driver, and with the real driver behind
//! it.
//!
//! The library needs `libaquifer-real-cuda.so`, a name that `aquifer run` gives to the driver in
//! the folder from which it preloads. So a symbol of the driver that this library does not have is
//! found there, by programs that are linked to the driver and by `dlsym` alike. Here an empty
//! library stands in for it.

use std::{env, path::PathBuf, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CC");
    let Some(folder) = env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let name = "libaquifer-real-cuda.so";
    let stand_in = folder.join(name);
    let made = Command::new(compiler)
        .args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-o"])
        .arg(&stand_in)
        .arg(format!("-Wl,-soname,{name}"))
        .status();
    assert!(made.is_ok_and(|status| status.success()), "the C compiler makes a shared library");
    let link = |argument: String| println!("cargo::rustc-cdylib-link-arg={argument}");
    link("-Wl,-soname,libcuda.so.1".to_owned());
    link("-Wl,--no-as-needed".to_owned());
    link(stand_in.display().to_string());
    link("-Wl,--as-needed".to_owned());
    link("-Wl,-rpath,$ORIGIN".to_owned());
    link("-Wl,-z,nodelete".to_owned());
}
