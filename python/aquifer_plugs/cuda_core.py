"""cuda.core's buffers.

    import aquifer_plugs.cuda_core
    aquifer_plugs.cuda_core.install()                               # Device().allocate() of this thread
    buffer = aquifer_plugs.cuda_core.Resource().allocate(1 << 20, stream=stream)
"""

from __future__ import annotations

from typing import Any

from cuda.core import Buffer, Device, MemoryResource

from . import free, malloc


class Resource(MemoryResource):  # type: ignore[misc]
    """Memory of a device, the current one unless named."""

    def __init__(self, device: int | None = None) -> None:
        self._device = int(Device(device).device_id)

    def allocate(self, size: int, stream: Any = None) -> Buffer:
        """Allocates for work on a stream, the default one for None. MemoryError with the library's report."""
        address = malloc(size, self._device, stream)
        try:
            return Buffer.from_handle(address, size, mr=self, stream=stream)
        except TypeError:
            # Older releases keep no stream for a buffer that is dropped.
            return Buffer.from_handle(address, size, mr=self)

    def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
        """Frees in the order of the stream of the allocation, and behind what is queued on `stream`."""
        free(int(ptr), self._device, stream)

    @property
    def device_id(self) -> int:
        return self._device

    @property
    def is_device_accessible(self) -> bool:
        return True

    @property
    def is_host_accessible(self) -> bool:
        return False

    @property
    def is_managed(self) -> bool:
        return False


def install(device: int | None = None) -> None:
    """Makes aquifer the memory of a device, the current one unless named, for this thread: cuda.core's devices are per thread."""
    found = Device(device)
    found.memory_resource = Resource(found.device_id)
