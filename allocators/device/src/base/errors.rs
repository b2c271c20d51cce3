//! Kinds of errors.

use aquifer_core::MemoryError;

/// Returns whether released memory could resolve the error.
pub(crate) fn is_shortage(error: &MemoryError) -> bool {
    match error {
        MemoryError::OutOfBudget(_) | MemoryError::OutOfMemory(_) => true,
        MemoryError::Driver(error) => error.is_out_of_memory(),
        _ => false,
    }
}
