"""Warp's arrays (Warp 1.13 and later).

    import aquifer_plugs.warp
    aquifer_plugs.warp.install()
"""

from __future__ import annotations

import functools
from typing import Any

import warp

from . import free, malloc


class Allocator:
    """What warp.set_cuda_allocator() takes."""

    def allocate(self, size_in_bytes: int) -> int:
        """Allocates for the current stream of the current device. MemoryError with the library's report."""
        device = warp.get_cuda_device()
        return malloc(size_in_bytes, device.ordinal, device.stream)

    def deallocate(self, ptr: int, size_in_bytes: int) -> None:
        """Frees in the order of the stream that was current at the allocation."""
        free(ptr, -1)


def install() -> None:
    """Makes aquifer the allocator of all CUDA devices. Initialises Warp. Arrays that are there stay where they are."""
    warp.set_cuda_allocator(Allocator())


def at_import() -> None:
    """Installs it when the program calls warp.init(), not earlier: the program may configure Warp before."""
    init = warp.init

    @functools.wraps(init)
    def init_and_install(*arguments: Any, **named: Any) -> None:
        init(*arguments, **named)
        warp.init = init
        if warp.is_cuda_available():
            install()

    warp.init = init_and_install
