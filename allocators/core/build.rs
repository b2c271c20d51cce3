//! Sets `cfg(std_allocator)` where the compiler has `std::alloc::Allocator` without a feature gate
//! (1.100 and later), and `cfg(asan)` in builds with `AddressSanitizer`, which the compiler tells
//! build scripts alone on stable Rust.
use std::{env, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(std_allocator)");
    println!("cargo::rustc-check-cfg=cfg(asan)");
    if env::var("CARGO_CFG_SANITIZE").is_ok_and(|all| all.split(',').any(|one| one == "address")) {
        println!("cargo::rustc-cfg=asan");
    }
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let Ok(output) = Command::new(rustc).arg("--version").output() else { return };
    let version = String::from_utf8_lossy(&output.stdout);
    // "rustc 1.95.0 (…)": anything else counts as a compiler without the trait, and so do nightlies
    // of 1.100, of which some are older than it.
    let minor = version
        .strip_prefix("rustc 1.")
        .and_then(|rest| rest.split('.').next())
        .and_then(|minor| minor.parse::<u32>().ok());
    let first = if version.contains("nightly") { 101 } else { 100 };
    if minor.is_some_and(|minor| minor >= first) {
        println!("cargo::rustc-cfg=std_allocator");
    }
}
