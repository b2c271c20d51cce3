//! How the shared library is linked.

fn main() {
    // Its workers and its threads' destructors run on after a dlclose, which therefore must not
    // unload it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
