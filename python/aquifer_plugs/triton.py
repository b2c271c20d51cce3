"""Scratch memory of Triton's kernels, such as their tensor descriptors.

    import aquifer_plugs.triton
    aquifer_plugs.triton.install()
"""

from __future__ import annotations

import triton

from . import free, malloc


class Scratch:
    """Memory for one launch. Triton drops it after the launch, and later work of the stream may reuse it."""

    def __init__(self, size: int, alignment: int, stream: int | None) -> None:
        self._device = int(triton.runtime.driver.active.get_current_device())
        # Blocks are aligned to 512.
        self._address = malloc(size + max(0, alignment - 512), self._device, stream)
        self._start = -(-self._address // alignment) * alignment

    def data_ptr(self) -> int:
        return self._start

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            free(self._address, self._device)


def install() -> None:
    """Makes aquifer Triton's allocator for this thread: Triton keeps it in a context variable, so each thread calls this."""
    triton.set_allocator(Scratch)
