//! A kernel launched by cudarc on memory of the pool. The pool's stream waits for the kernel, and
//! the kernel for the pool's stream, without explicit synchronisation in the program.
//!
//! The kernel is embedded as PTX, which the driver compiles when it is loaded, so no toolkit is
//! needed. Without a GPU the example prints a message and exits.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]
#![cfg_attr(
    feature = "cuda",
    expect(unsafe_code, reason = "a kernel's launch is unsafe: nobody can check its arguments")
)]

use std::error::Error;

/// `x[i] *= by` for each `i` below `n`.
#[cfg(feature = "cuda")]
const SCALE: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry scale(.param .u64 x, .param .f32 by, .param .u32 n)
{
    .reg .pred %outside;
    .reg .f32 %f<3>;
    .reg .b32 %r<6>;
    .reg .b64 %a<4>;
    ld.param.u64 %a1, [x];
    ld.param.f32 %f1, [by];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %outside, %r5, %r1;
    @%outside bra DONE;
    cvta.to.global.u64 %a2, %a1;
    mul.wide.u32 %a3, %r5, 4;
    add.s64 %a2, %a2, %a3;
    ld.global.f32 %f2, [%a2];
    mul.f32 %f2, %f2, %f1;
    st.global.f32 [%a2], %f2;
DONE:
    ret;
}
";

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn Error>> {
    use aquifer::{DeviceBuffer, Runtime, cuda::Lend};
    use cudarc::{
        driver::{CudaContext, LaunchConfig, PushKernelArg},
        nvrtc::Ptx,
    };

    let rt = Runtime::builder().build()?;
    let Ok(pool) = rt.device(0) else {
        println!("no GPU here, and kernels run nowhere else");
        return Ok(());
    };
    // A program based on cudarc already has a stream and a kernel.
    let cu = CudaContext::new(pool.device().0 as usize)?.new_stream()?;
    let scale = cu.context().load_module(Ptx::from_src(SCALE))?.load_function("scale")?;

    let s = pool.stream()?;
    let host: Vec<f32> = (0..1u16 << 12).map(f32::from).collect();
    let mut x: DeviceBuffer<f32> = pool.buffer(&s, host.len())?;
    s.try_scope(|c| c.upload(&host, &mut x))?;

    let (by, n) = (3.0f32, u32::try_from(x.len())?);
    let mut lent = x.on_mut(&cu)?; // `cu` waits for the upload on `s`
    // SAFETY: 1. the kernel takes a float pointer, a float and a count. 2. it accesses only the `n`
    // floats of `lent`. 3. it is launched on the stream that they are lent to.
    unsafe {
        cu.launch_builder(&scale)
            .arg(&mut lent)
            .arg(&by)
            .arg(&n)
            .launch(LaunchConfig::for_num_elems(n))
    }?;

    let mut back = vec![0.0f32; host.len()];
    s.try_scope(|c| c.download(&x, &mut back))?; // `s` waits for the kernel on `cu`
    assert!(host.iter().zip(&back).all(|(before, after)| before * by == *after));
    println!("scaled {n} floats on {}", pool.info().name);
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn main() -> Result<(), Box<dyn Error>> {
    println!("built without the feature `cuda`");
    Ok(())
}
