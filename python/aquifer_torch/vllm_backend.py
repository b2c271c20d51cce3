"""The sleep-mode backend itself, which vLLM imports where it is chosen: see vllm_sleep.py."""

from __future__ import annotations

from vllm import envs
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from .vllm_sleep import allocator


class AquiferBackend(SleepModeBackend):  # type: ignore[misc, unused-ignore]
    """Level 1: weights go to pinned host memory, all else is dropped. Level 2: all is dropped.

    What fails changes nothing: a sleep without host memory leaves the worker awake, and a wake that does not fit leaves all of
    it asleep, to be tried again.
    """

    def suspend(self, level: int = 1) -> None:
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}: 1 or 2")
        if not allocator().is_used():
            raise RuntimeError(
                "the worker has no memory of aquifer's: start vLLM with --enable-sleep-mode and --sleep-mode-backend aquifer"
            )
        allocator().sleep(("weights",) if level == 1 else ())
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        allocator().wake_up(tags)
        if getattr(envs, "VLLM_SLEEP_MODE_RELEASE_HOST_MEMORY", False):
            allocator().release_host_memory()
        self._state = "SUSPENDED" if allocator().is_asleep() else "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        allocator().discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        # They lie outside of the regions.
        return True
