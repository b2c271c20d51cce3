//! The message for tests without a GPU, and the text of kernels for a GPU.
//!
//! The tests of several crates include this file by its path, so it names no items of theirs.
#![allow(dead_code, clippy::print_stdout, reason = "each test binary uses some of it")]

use std::{env, fmt::Display};

/// Prints why a test does nothing. With `AQUIFER_REQUIRE_GPU=1` that is a failure.
#[track_caller]
pub(crate) fn skip(reason: impl Display) {
    assert_ne!(env::var("AQUIFER_REQUIRE_GPU").as_deref(), Ok("1"), "no GPU to test on: {reason}");
    println!("skipped: {reason}");
}

/// Clock cycles after which the host is far ahead: about ten milliseconds.
pub(crate) const SPIN: u64 = 20_000_000;

/// The PTX of a kernel that spins, and then runs `body` once for each of some elements of four
/// bytes.
///
/// Among its `params` are `.u64 spin`, in clock cycles, and `.u32 n`, how many elements there are;
/// the order is free. The body finds where its element begins in `%at`, in bytes, and may use `%a1`
/// to `%a3` (64 bits), `%r1` and `%r2` (32) and `%f1` and `%f2` (floats).
pub(crate) fn kernel(name: &str, params: &str, body: &str) -> String {
    format!(
        "
.version 7.0
.target sm_70
.address_size 64
.visible .entry {name}({params})
{{
    .reg .pred %early, %outside;
    .reg .b64 %at, %begun, %now, %least;
    .reg .b32 %i, %block, %threads, %count;
    .reg .b64 %a<4>;
    .reg .b32 %r<3>;
    .reg .f32 %f<3>;
    ld.param.u64 %least, [spin];
    mov.u64 %begun, %clock64;
AGAIN:
    mov.u64 %now, %clock64;
    sub.s64 %now, %now, %begun;
    setp.lt.u64 %early, %now, %least;
    @%early bra AGAIN;
    ld.param.u32 %count, [n];
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %i, %tid.x;
    mad.lo.s32 %i, %block, %threads, %i;
    setp.ge.u32 %outside, %i, %count;
    @%outside bra DONE;
    mul.wide.u32 %at, %i, 4;
{body}
DONE:
    ret;
}}
"
    )
}

/// `fill(x, value, n, spin)`: `x[i] = value`.
pub(crate) fn fill() -> String {
    let params = ".param .u64 x, .param .u32 value, .param .u32 n, .param .u64 spin";
    let body = "
    ld.param.u64 %a1, [x];
    cvta.to.global.u64 %a1, %a1;
    add.s64 %a1, %a1, %at;
    ld.param.u32 %r1, [value];
    st.global.u32 [%a1], %r1;";
    kernel("fill", params, body)
}

/// `add(spin, from, n, more, to)`: `to[i] = from[i] + more`. The pointers come second and last.
pub(crate) fn add() -> String {
    let params =
        ".param .u64 spin, .param .u64 from, .param .u32 n, .param .u32 more, .param .u64 to";
    let body = "
    ld.param.u64 %a1, [from];
    cvta.to.global.u64 %a1, %a1;
    add.s64 %a1, %a1, %at;
    ld.param.u64 %a2, [to];
    cvta.to.global.u64 %a2, %a2;
    add.s64 %a2, %a2, %at;
    ld.param.u32 %r1, [more];
    ld.global.u32 %r2, [%a1];
    add.u32 %r2, %r2, %r1;
    st.global.u32 [%a2], %r2;";
    kernel("add", params, body)
}

/// `scale(x, by, n, spin)`: `x[i] *= by`, where `x` and `by` are floats.
pub(crate) fn scale() -> String {
    let params = ".param .u64 x, .param .f32 by, .param .u32 n, .param .u64 spin";
    let body = "
    ld.param.u64 %a1, [x];
    cvta.to.global.u64 %a1, %a1;
    add.s64 %a1, %a1, %at;
    ld.param.f32 %f1, [by];
    ld.global.f32 %f2, [%a1];
    mul.f32 %f2, %f2, %f1;
    st.global.f32 [%a1], %f2;";
    kernel("scale", params, body)
}
