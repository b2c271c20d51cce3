//! Pauses of sampling.

use crate::thread_state::THREAD_STATE;

/// Runs `work` without sampling on this thread.
pub(crate) fn paused<R>(work: impl FnOnce() -> R) -> R {
    struct Resume(bool);
    impl Drop for Resume {
        fn drop(&mut self) {
            THREAD_STATE.with(|state| state.sampling_paused.set(self.0));
        }
    }
    let _resume = Resume(THREAD_STATE.with(|state| state.sampling_paused.replace(true)));
    work()
}
