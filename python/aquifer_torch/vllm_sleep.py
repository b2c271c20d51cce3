"""vLLM's sleep mode over aquifer's memory.

    vllm serve MODEL --enable-sleep-mode --sleep-mode-backend aquifer

vLLM finds `register` by the entry point `aquifer` of the group `vllm.general_plugins`, in each of its processes, and enters the
backend into its SleepModeBackendFactory (vllm/device_allocator/sleep_mode_backend.py, since vLLM 0.26). An older vLLM has no
such option; there `register` does nothing.

A backend sleeps and wakes, but does not allocate: the worker takes memory from get_mem_allocator_instance(), which is
CuMemAllocator.get_instance(), with any backend (Worker._maybe_get_memory_pool_context in vllm/v1/worker/gpu_worker.py). So in
a worker whose configuration names this backend, that function returns an `Allocator`. In all other workers nothing is changed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, Iterator

from .library import KEEP_NONE, KEEP_PINNED
from .sleep import Regions

NAME = "aquifer"
# What may be woken alone. Any wake brings back all else.
_ALONE = ("weights", "kv_cache")


def register() -> None:
    """Registers the backend. vLLM calls it in each of its processes, any number of times."""
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError:
        return
    with contextlib.suppress(ValueError):
        # It is registered already.
        SleepModeBackendFactory.register_backend(NAME, "aquifer_torch.vllm_backend", "AquiferBackend")
    _serve_workers(WorkerBase)


def _serve_workers(worker: Any) -> None:
    """From now on each new worker allocates here, if its configuration names the backend."""
    made = worker.__init__
    if hasattr(made, "aquifer"):
        return

    @functools.wraps(made)
    def make(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        if getattr(self.vllm_config.model_config, "sleep_mode_backend", None) == NAME:
            from vllm.device_allocator.cumem import CuMemAllocator

            CuMemAllocator.get_instance = staticmethod(allocator)

    make.aquifer = True  # type: ignore[attr-defined]
    worker.__init__ = make


class Allocator:
    """What of vLLM's CuMemAllocator a worker calls: vllm.device_allocator.MemAllocator."""

    default_tag = "default"

    def __init__(self) -> None:
        self._regions = Regions()

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Tensors made in it can be put to sleep by their tag."""
        import torch

        with _one_segment_each(), self._regions.enter(tag or self.default_tag):
            yield
            # Segments of temporaries, as of weights that were quantised, would sleep and wake with the rest.
            torch.cuda.empty_cache()

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Gives all memory back, with the contents of these tags on the host. All of it, or none."""
        kept = (offload_tags,) if isinstance(offload_tags, str) else offload_tags
        kept = (self.default_tag,) if kept is None else kept
        self._regions.pause({tag: KEEP_PINNED if tag in kept else KEEP_NONE for tag in self._regions.names()})

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Gives the memory of these tags back, without their contents."""
        wanted = (tags,) if isinstance(tags, str) else tags
        self._regions.pause({tag: KEEP_NONE for tag in self._regions.names() if tag in wanted})

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes memory for these tags at their addresses, and brings back their contents. All of it, or none."""
        names = self._regions.names()
        self._regions.resume([tag for tag in names if tags is None or tag in tags or tag not in _ALONE])

    def release_host_memory(self) -> int:
        """Gives pinned memory that no contents lie in back to the kernel. Returns the bytes."""
        import aquifer_torch
        import torch

        return aquifer_torch._library_or_raise().trim_pinned(torch.cuda.current_device())

    def get_current_usage(self) -> int:
        """Returns the bytes of device memory that are held."""
        return sum(self._regions.held(tag) for tag in self._regions.names())

    def is_asleep(self) -> bool:
        """Returns whether any of it is asleep."""
        return any(self._regions.is_paused(tag) for tag in self._regions.names())

    def is_used(self) -> bool:
        """Returns whether anything was allocated in it."""
        return bool(self._regions.names())


@functools.lru_cache(maxsize=None)
def allocator() -> Allocator:
    """Returns the one of this process. What bounds it is vLLM's own gpu_memory_utilization."""
    import aquifer_torch

    if aquifer_torch._library is None:
        aquifer_torch.setup(limit=1.0)
    return Allocator()


@contextlib.contextmanager
def _one_segment_each() -> Iterator[None]:
    """PyTorch's expandable segments do not go with a MemPool (pytorch#147851): off until the end, where they are on."""
    import torch

    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" not in settings:
        yield
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
