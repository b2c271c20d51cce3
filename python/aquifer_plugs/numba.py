"""numba's device arrays, by an external memory manager.

    NUMBA_CUDA_MEMORY_MANAGER=aquifer_plugs.numba python program.py

or, before numba's first use of CUDA:

    import aquifer_plugs.numba
    aquifer_plugs.numba.install()
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

from numba import cuda

from . import library


class Manager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Serves device memory. Pinned, mapped and managed memory stay numba's own.

    numba names no stream, so any may use a block: its free waits for the device, as that of numba's own memory does.
    """

    def initialize(self) -> None:
        """Called each time that the context becomes current. There is nothing to prepare."""

    def memalloc(self, size: int) -> Any:
        """Allocates on the current device. MemoryError with the library's report."""
        made = library()
        address = made.aq_fenced_alloc(size)
        if not address and size:
            raise MemoryError(made.aq_last_error().decode(errors="replace"))
        free = functools.partial(made.aq_fenced_free, address)
        return cuda.MemoryPointer(weakref.proxy(self.context), ctypes.c_void_p(address), size, finalizer=free)

    def get_memory_info(self) -> Any:
        """What is free of the device's limit, and the limit: bytes."""
        made, device = library(), self.context.device.id
        limit, _ = made.limit(device)
        stats = made.stats(device)
        return cuda.MemoryInfo(free=max(0, limit - stats["live"] - stats["pending"]), total=limit)

    def get_ipc_handle(self, memory: Any) -> Any:
        """NotImplementedError: CUDA has no such handles for mapped memory."""
        raise NotImplementedError("numba's IPC handles do not exist for aquifer's memory; aq_torch_share() has handles of its own")

    @property
    def interface_version(self) -> int:
        return 1


# What numba looks for.
_numba_memory_manager = Manager


def install() -> None:
    """Makes aquifer numba's memory manager. Contexts that numba has made keep theirs."""
    cuda.set_memory_manager(Manager)
