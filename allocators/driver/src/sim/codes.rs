//! The driver error codes that the simulator returns, and their names.

use crate::DriverError;

/// An error code of the driver.
pub(crate) type ErrorCode = u32;

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const ILLEGAL_STATE: u32 = 401;
pub(crate) const OPERATING_SYSTEM: u32 = 304;
pub(crate) const PEER_ACCESS_UNSUPPORTED: u32 = 217;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: u32 = 712;
pub(crate) const HOST_MEMORY_NOT_REGISTERED: u32 = 713;
pub(crate) const NOT_PERMITTED: u32 = 800;
pub(crate) const NOT_SUPPORTED: u32 = 801;
pub(crate) const CAPTURE_UNSUPPORTED: u32 = 900;
pub(crate) const CAPTURE_INVALIDATED: u32 = 901;
pub(crate) const CAPTURE_MERGE: u32 = 902;
pub(crate) const CAPTURE_UNMATCHED: u32 = 903;
pub(crate) const CAPTURE_UNJOINED: u32 = 904;
pub(crate) const CAPTURE_ISOLATION: u32 = 905;
pub(crate) const CAPTURE_IMPLICIT: u32 = 906;
pub(crate) const CAPTURED_EVENT: u32 = 907;
pub(crate) const CAPTURE_WRONG_THREAD: u32 = 908;

/// Creates the error of a call.
pub(crate) fn error(call: &'static str, code: u32) -> DriverError {
    DriverError { call, code, name: name(code) }
}

fn name(code: u32) -> &'static str {
    match code {
        INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
        3 => "CUDA_ERROR_NOT_INITIALIZED",
        4 => "CUDA_ERROR_DEINITIALIZED",
        100 => "CUDA_ERROR_NO_DEVICE",
        INVALID_DEVICE => "CUDA_ERROR_INVALID_DEVICE",
        201 => "CUDA_ERROR_INVALID_CONTEXT",
        214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
        PEER_ACCESS_UNSUPPORTED => "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        OPERATING_SYSTEM => "CUDA_ERROR_OPERATING_SYSTEM",
        INVALID_HANDLE => "CUDA_ERROR_INVALID_HANDLE",
        ILLEGAL_STATE => "CUDA_ERROR_ILLEGAL_STATE",
        600 => "CUDA_ERROR_NOT_READY",
        ILLEGAL_ADDRESS => "CUDA_ERROR_ILLEGAL_ADDRESS",
        702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
        HOST_MEMORY_ALREADY_REGISTERED => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        HOST_MEMORY_NOT_REGISTERED => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        719 => "CUDA_ERROR_LAUNCH_FAILED",
        NOT_PERMITTED => "CUDA_ERROR_NOT_PERMITTED",
        NOT_SUPPORTED => "CUDA_ERROR_NOT_SUPPORTED",
        CAPTURE_UNSUPPORTED => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        CAPTURE_INVALIDATED => "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        CAPTURE_MERGE => "CUDA_ERROR_STREAM_CAPTURE_MERGE",
        CAPTURE_UNMATCHED => "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        CAPTURE_UNJOINED => "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        CAPTURE_ISOLATION => "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        CAPTURE_IMPLICIT => "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        CAPTURED_EVENT => "CUDA_ERROR_CAPTURED_EVENT",
        CAPTURE_WRONG_THREAD => "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        999 => "CUDA_ERROR_UNKNOWN",
        _ => "unknown",
    }
}
