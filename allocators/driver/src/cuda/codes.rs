//! The results of driver calls.

use crate::Result;
pub(super) use crate::codes::{
    CAPTURE_IMPLICIT, INVALID_DEVICE, INVALID_VALUE, OUT_OF_MEMORY, error,
};

/// Success.
const SUCCESS: u32 = 0;
/// The driver has shut down because the process is exiting.
pub(super) const DEINITIALIZED: u32 = 4;
/// No device exists.
pub(super) const NO_DEVICE: u32 = 100;
/// Queued work is not done yet: a result, not an error.
pub(super) const NOT_READY: u32 = 600;

/// Converts a call's code to a result.
pub(super) fn check(call: &'static str, code: u32) -> Result<()> {
    if code == SUCCESS { Ok(()) } else { Err(error(call, code)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::sys::CUresult;

    #[test]
    fn names_match_the_bindings() {
        for code in [
            CUresult::CUDA_ERROR_INVALID_VALUE,
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_DEINITIALIZED,
            CUresult::CUDA_ERROR_NO_DEVICE,
            CUresult::CUDA_ERROR_INVALID_DEVICE,
            CUresult::CUDA_ERROR_INVALID_HANDLE,
            CUresult::CUDA_ERROR_NOT_READY,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
            CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUresult::CUDA_ERROR_UNKNOWN,
        ] {
            assert_eq!(crate::codes::name(code as u32), format!("{code:?}"));
        }
    }

    #[test]
    fn unknown_code_keeps_its_number() {
        let error = error("cuMemCreate", 31_337);
        assert_eq!(error.to_string(), "cuMemCreate: unknown (31337)");
    }
}
