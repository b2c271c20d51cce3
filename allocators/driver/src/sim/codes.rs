//! The driver error codes that the simulator returns.

pub(crate) use crate::codes::{
    CAPTURE_IMPLICIT, ErrorCode, INVALID_DEVICE, INVALID_VALUE, OUT_OF_MEMORY, error,
};

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
pub(crate) const CAPTURED_EVENT: u32 = 907;
pub(crate) const CAPTURE_WRONG_THREAD: u32 = 908;
