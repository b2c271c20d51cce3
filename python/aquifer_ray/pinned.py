"""Arrays in pinned memory, and arrays that arrive there.

Ray's object store is pageable: a copy from there to a device goes through the driver's own buffers, at a fraction of the
link's speed, and is not asynchronous.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import TYPE_CHECKING, Any

from aquifer_torch.ledger import library

if TYPE_CHECKING:
    import numpy


class _Block:
    """A block of the process's pinned pool, which is freed with the last array over it."""

    def __init__(self, size: int, device: int) -> None:
        found = ctypes.c_void_p()
        library().aq_pinned_alloc(library().runtime(), device, max(size, 1), 0, ctypes.byref(found))
        self.address = found.value or 0
        self._free = library().aq_pinned_free
        self.__array_interface__ = {"data": (self.address, False), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._free(self.address)


def pinned_empty(shape: int | tuple[int, ...], dtype: Any = "float32", device: int = 0) -> numpy.ndarray[Any, Any]:
    """Returns an array in pinned memory near a device, not zeroed, from the pool of this process's runtime: see
    aquifer_torch.setup(), and set_pinned_limit() for its limit. Without a GPU it is pageable. Copies that are queued on a stream
    must be complete before its last reference goes. torch.from_numpy() gives the tensor. AquiferError if there is no memory."""
    import numpy

    form = numpy.dtype(dtype)
    if form.hasobject:
        raise TypeError(f"an array of {form} has references, which cannot be in pinned memory")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size = int(numpy.prod(shape, dtype=numpy.int64)) * form.itemsize
    return numpy.asarray(_Block(size, device)).view(form).reshape(shape)


class _Arriving:
    def __init__(self, array: numpy.ndarray[Any, Any], device: int) -> None:
        self.array, self.device = array, device

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Apart from the pickle, so that the receiver copies from the object store itself.
        content = pickle.PickleBuffer(self.array.reshape(-1).view("u1")) if protocol >= 5 else self.array.tobytes()
        return _arrive, (content, self.array.dtype, self.array.shape, self.device)


def _arrive(content: Any, dtype: Any, shape: tuple[int, ...], device: int) -> numpy.ndarray[Any, Any]:
    import numpy

    array = pinned_empty(shape, dtype, device)
    array.reshape(-1).view("u1")[:] = numpy.frombuffer(content, "u1")
    return array


def arrives_pinned(array: Any, device: int = 0) -> Any:
    """Returns a value to send instead of a NumPy array, or a CPU tensor: ray.put(), the result or an argument of a task. What
    arrives is a NumPy array in pinned memory near a device of the receiver, with one copy out of the object store."""
    import numpy

    found = numpy.ascontiguousarray(array)
    if found.dtype.hasobject:
        raise TypeError(f"an array of {found.dtype} has references, which cannot be in pinned memory")
    return _Arriving(found, device)
