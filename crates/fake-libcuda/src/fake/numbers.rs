//! Constants of cuda.h that only a driver needs.

use std::ffi::{c_int, c_uint};

use crate::types::CUresult;

pub(crate) const CUDA_ERROR_LAUNCH_TIMEOUT: CUresult = 702;
pub(crate) const CUDA_ERROR_INVALID_HANDLE: CUresult = 400;
pub(crate) const CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: CUresult = 713;
pub(crate) const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 102;
pub(crate) const ALLOWED_HANDLE_TYPES: c_int = 14;
pub(crate) const STREAM_MEM_OP_WRITE_VALUE_64: c_uint = 5;
pub(crate) const MEM_ALLOCATION_TYPE_PINNED: c_int = 1;
pub(crate) const GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT: c_int = 2;
