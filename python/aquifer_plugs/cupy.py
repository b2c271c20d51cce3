"""CuPy's arrays and its pinned memory.

    import aquifer_plugs.cupy
    aquifer_plugs.cupy.install()
"""

from __future__ import annotations

import cupy
from aquifer_torch import AquiferError
from aquifer_torch.host import PinnedBlock

from . import _settings, free, library, malloc, out_of_memory


def allocate(size: int, device: int) -> int:
    """Allocates on a device for the current stream: PythonFunctionAllocator's `malloc`. cupy.cuda.memory.OutOfMemoryError, whose
    cause has the library's report."""
    try:
        return malloc(size, device, cupy.cuda.get_current_stream())
    except MemoryError as error:
        limit, held = library().limit(device)
        raise cupy.cuda.memory.OutOfMemoryError(size, held, limit) from error


def deallocate(address: int, device: int) -> None:
    """Frees in the order of the stream that was current at the allocation, as CuPy's own pool does."""
    free(address, device)


class Pinned(PinnedBlock):
    """A block of pinned memory as cupy.cuda.PinnedMemoryPointer takes it. CuPy keeps it until its copies are complete."""

    def __init__(self, size: int, device: int) -> None:
        # Before the block, which would make another runtime.
        library()
        try:
            super().__init__(size, device)
        except AquiferError as error:
            raise out_of_memory(error) from error
        self.ptr = self.address


def allocate_pinned(size: int) -> cupy.cuda.PinnedMemoryPointer:
    """Allocates pinned memory near the current device, for cupy.cuda.set_pinned_memory_allocator()."""
    return cupy.cuda.PinnedMemoryPointer(Pinned(size, cupy.cuda.runtime.getDevice()), 0)


def install(pinned: bool = True) -> None:
    """Makes aquifer CuPy's allocator, of pinned memory as well unless `pinned` is false. Arrays that are there stay where they
    are. Calls no driver function."""
    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(allocate, deallocate).malloc)
    if pinned:
        cupy.cuda.set_pinned_memory_allocator(allocate_pinned)


def at_import() -> None:
    install(pinned=_settings.get("pinned", True))
