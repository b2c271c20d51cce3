"""RMM's buffers, and with them cuDF's, cuML's and polars'.

    import aquifer_plugs.rmm
    aquifer_plugs.rmm.install()
    engine = polars.GPUEngine(memory_resource=aquifer_plugs.rmm.resource())
"""

from __future__ import annotations

from typing import Any

import rmm

from . import free, malloc

# Of as many devices install() sets the resource. To count them would start CUDA.
DEVICES = 32


def resource(device: int = 0) -> rmm.mr.CallbackMemoryResource:
    """Returns a resource of a device. What does not fit is RMM's own MemoryError with the library's report."""

    def allocate(size: int, stream: Any) -> int:
        return malloc(size, device, stream)

    def deallocate(address: int, size: int, stream: Any) -> None:
        # RMM frees on any stream: what was queued there before still has the memory.
        free(address, device, stream)

    return rmm.mr.CallbackMemoryResource(allocate, deallocate)


def install() -> None:
    """Makes aquifer the current resource of each device. Buffers that are there keep theirs. Calls no driver function."""
    for device in range(DEVICES):
        rmm.mr.set_per_device_resource(device, resource(device))
