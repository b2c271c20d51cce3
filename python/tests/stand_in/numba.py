"""What numba-cuda 0.30 asks of a memory manager, as numba/cuda/cudadrv/driver.py does."""

import collections
import ctypes
import weakref
from types import SimpleNamespace


class HostOnlyCUDAMemoryManager:
    def __init__(self, *args, **kwargs):
        self.context = kwargs.pop("context")


class MemoryPointer:
    def __init__(self, context, pointer, size, owner=None, finalizer=None):
        assert isinstance(pointer, ctypes.c_void_p) and owner is None
        self.device_pointer_value, self.size = pointer.value, size
        self._finalizer = weakref.finalize(self, finalizer)


class Context:
    def __init__(self):
        self.device = SimpleNamespace(id=0)
        self.memory_manager = chosen["manager"](context=self)
        self.memory_manager.initialize()


chosen = {}


def set_memory_manager(mm_plugin):
    assert mm_plugin(context=None).interface_version == 1
    chosen["manager"] = mm_plugin


cuda = SimpleNamespace(
    HostOnlyCUDAMemoryManager=HostOnlyCUDAMemoryManager,
    MemoryPointer=MemoryPointer,
    MemoryInfo=collections.namedtuple("MemoryInfo", "free,total"),
    set_memory_manager=set_memory_manager,
)
