"""Blocks of pinned host memory from the process's pool, as NumPy arrays. Needs neither PyTorch nor a GPU."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from .ledger import library

if TYPE_CHECKING:
    import numpy


class PinnedBlock:
    """A block of the pinned pool near a device, not zeroed, which is freed with the last array over it.

    AquiferError if there is no memory.
    """

    def __init__(self, size: int, device: int = 0) -> None:
        found = ctypes.c_void_p()
        # Pages are registered with a network as a whole.
        library().aq_pinned_alloc(library().runtime(), device, max(size, 1), 4096, ctypes.byref(found))
        self.address, self.size = found.value or 0, size
        self._free = library().aq_pinned_free
        self.__array_interface__ = {"data": (self.address, False), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._free(self.address)


def form_of(shape: int | tuple[int, ...], dtype: Any) -> tuple[Any, tuple[int, ...], int]:
    """Returns the type, the shape and the bytes of an array. TypeError for objects, which are references."""
    import numpy

    form = numpy.dtype(dtype)
    if form.hasobject:
        raise TypeError(f"an array of {form} has references, which cannot be in pinned memory")
    whole = (shape,) if isinstance(shape, int) else tuple(shape)
    return form, whole, int(numpy.prod(whole, dtype=numpy.int64)) * form.itemsize


def pinned_array(shape: int | tuple[int, ...], dtype: Any = "float32", device: int = 0) -> numpy.ndarray[Any, Any]:
    """Returns an array in pinned memory near a device, not zeroed, from the pool of this process's runtime: see
    aquifer_torch.setup(), and set_pinned_limit() for its limit. Without a GPU it is pageable. Copies that are queued on a stream
    must be complete before its last reference goes. torch.from_numpy() gives the tensor. AquiferError if there is no memory."""
    import numpy

    form, whole, size = form_of(shape, dtype)
    return numpy.asarray(PinnedBlock(size, device)).view(form).reshape(whole)
