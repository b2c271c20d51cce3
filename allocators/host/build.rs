//! Sets `cfg(asan)` in builds with `AddressSanitizer`, which the compiler tells nobody but build scripts on stable Rust.
use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(asan)");
    if env::var("CARGO_CFG_SANITIZE").is_ok_and(|all| all.split(',').any(|one| one == "address")) {
        println!("cargo::rustc-cfg=asan");
    }
}
