"""Arrays that arrive in pinned memory.

Ray's object store is pageable: a copy from there to a device goes through the driver's own buffers, at a fraction of the
link's speed, and is not asynchronous.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from aquifer_torch.host import pinned_array

if TYPE_CHECKING:
    import numpy


class _Arriving:
    def __init__(self, array: numpy.ndarray[Any, Any], device: int) -> None:
        self.array, self.device = array, device

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Apart from the pickle, so that the receiver copies from the object store itself.
        content = pickle.PickleBuffer(self.array.reshape(-1).view("u1")) if protocol >= 5 else self.array.tobytes()
        return _arrive, (content, self.array.dtype, self.array.shape, self.device)


def _arrive(content: Any, dtype: Any, shape: tuple[int, ...], device: int) -> numpy.ndarray[Any, Any]:
    import numpy

    array = pinned_array(shape, dtype, device)
    array.reshape(-1).view("u1")[:] = numpy.frombuffer(content, "u1")
    return array


def arrives_pinned(array: Any, device: int = 0) -> Any:
    """Returns a value to send instead of a NumPy array, or a CPU tensor: ray.put(), the result or an argument of a task. What
    arrives is a NumPy array in pinned memory near a device of the receiver, see aquifer_torch.host.pinned_array(), with one copy
    out of the object store."""
    import numpy

    found = numpy.ascontiguousarray(array)
    if found.dtype.hasobject:
        raise TypeError(f"an array of {found.dtype} has references, which cannot be in pinned memory")
    return _Arriving(found, device)
