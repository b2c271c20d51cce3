"""Device memory for PyTorch that a transport registers, once for each chunk: NCCL, NIXL, RDMA.

    pool = aquifer_torch.registered_pool(1 << 30, register=aquifer_torch.nccl())
    with pool:
        gradients = torch.empty(1 << 28, device="cuda")     # NCCL's user buffer
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from .errors import AquiferError
from .library import Library

if TYPE_CHECKING:
    import torch


class Functions(NamedTuple):
    """Two C functions that register memory and end a registration, by their addresses, and their first argument: of the forms
    of aquifer.h's aq_register_memory and aq_unregister_memory. They are called within allocations and frees.

    exported   whether a chunk is a physical handle that the transport exports, as NCCL does, and not an allocation of the driver"""

    register: int
    unregister: int
    context: int
    exported: bool = False


def nccl(group: torch.distributed.ProcessGroup | None = None) -> Functions:
    """NCCL's functions and the communicator of a group (the default one), for registered_pool(). End the pool and its tensors
    before the group. A thread that allocates from the pool must not run beside another that uses the communicator.

    RuntimeError, where the group has no communicator yet, or PyTorch no call for it (ProcessGroupNCCL._comm_ptr)."""
    import torch
    import torch.distributed as dist

    chosen: Any = group if group is not None else dist.group.WORLD
    backend = chosen._get_backend(torch.device("cuda"))
    if not hasattr(backend, "_comm_ptr"):
        raise RuntimeError(f"{type(backend).__name__} of PyTorch {torch.__version__} has no _comm_ptr(): pass the functions and a communicator of your own")
    communicator = int(backend._comm_ptr())
    if not communicator:
        raise RuntimeError("the group has no communicator yet: pass device_id to init_process_group(), or run a collective first")
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = {line.split(maxsplit=5)[5].strip() for line in maps if "/libnccl.so" in line}
    if not loaded:
        raise RuntimeError("PyTorch has loaded no libnccl.so: pass the addresses of ncclCommRegister and ncclCommDeregister")
    library = ctypes.CDLL(sorted(loaded)[0])
    register, unregister = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in ("ncclCommRegister", "ncclCommDeregister"))
    return Functions(register, unregister, communicator, exported=True)


# Pools whose registrations are Python's, by number, until they have no chunk.
_deferred: dict[int, _Registrations] = {}


def _pending(number: int) -> int:
    """Called by the main thread between two instructions, after a chunk of this pool has lost its last part."""
    try:
        if number in _deferred:
            _deferred[number].settle(wait=False)
    except BaseException:
        # What a callback raises leaves its result undefined.
        sys.excepthook(*sys.exc_info())
    return 0


_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_pending)


class _Registrations:
    """The registrations of a pool's chunks. Python is never called within an allocation, where PyTorch's lock is held."""

    def __init__(self, library: Library, number: int, register: Callable[[int, int], Any], unregister: Callable[[Any], object] | None) -> None:
        self.library, self.number = library, number
        self._register, self._unregister = register, unregister
        self._handles: dict[int, Any] = {}
        self._lock, self._wanted = threading.Lock(), False
        _deferred[number] = self
        defer = ctypes.cast(ctypes.pythonapi.Py_AddPendingCall, ctypes.c_void_p)
        library.aq_registered_defer(number, defer, ctypes.cast(_CALL, ctypes.c_void_p))

    def settle(self, wait: bool = True) -> None:
        """Registers new chunks, and releases those that are left. With `wait=False`, a thread that does so already looks again."""
        self._wanted = True
        while self._lock.acquire(blocking=wait):
            try:
                self._wanted = False
                for address, size, leaving in chunks(self.library, self.number):
                    if not leaving:
                        if address not in self._handles:
                            self._handles[address] = self._register(address, size)
                        continue
                    if address in self._handles:
                        if self._unregister is not None:
                            self._unregister(self._handles[address])
                        del self._handles[address]
                    self.library.aq_registered_release(self.number, address)
                    # The last one of a pool that is gone ends it.
                    self._wanted = True
            except AquiferError as error:
                if error.name != "AQ_ERROR_CLOSED":
                    raise
                _deferred.pop(self.number, None)
                return
            finally:
                self._lock.release()
            if not self._wanted:
                return


def chunks(library: Library, number: int) -> list[tuple[int, int, bool]]:
    """Returns the address and the bytes of each chunk of a pool, and whether it waits for its release."""
    address, size, leaving = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()
    found: list[tuple[int, int, bool]] = []
    while True:
        library.aq_registered_chunk(number, address.value, ctypes.byref(address), ctypes.byref(size), ctypes.byref(leaving))
        if not address.value:
            return found
        found.append((address.value, size.value, bool(leaving.value)))


def _end(library: Library, number: int) -> None:
    library.aq_registered_destroy(number)
    _pending(number)


class RegisteredMemPool:
    """What aquifer_torch.registered_pool() returns. A context manager: allocations of this thread within it are in the pool,
    and other threads wait for their turn. Tensors outlive it."""

    def __init__(self, library: Library, size: int, register: Any = None, unregister: Callable[[Any], object] | None = None, device: int = 0) -> None:
        if size <= 0:
            raise ValueError(f"bytes={size}: the size of a chunk")
        if hasattr(register, "register_memory"):
            from .nixl import registrar

            register, unregister = registrar(register, device)
        called = register if isinstance(register, Functions) else Functions(0, 0, 0)
        number, functions = ctypes.c_uint64(), (ctypes.c_void_p * 2)()
        callbacks = (called.register, called.unregister, called.context)
        library.aq_registered_create(device, size, int(called.exported), *callbacks, ctypes.byref(number), functions)
        self._library, self._number, self.functions = library, number.value, (functions[0], functions[1])
        self._registrations = None if register is called or register is None else _Registrations(library, number.value, register, unregister)
        self._turn = threading.RLock()
        self._entered: Any = None
        weakref.finalize(self, _end, library, number.value)

    @functools.cached_property
    def pool(self) -> torch.cuda.MemPool:
        """The torch.cuda.MemPool, for torch.cuda.use_mem_pool and graphs. It allocates as long as this object lives."""
        import torch

        allocator = torch._C._cuda_customAllocator(*self.functions)
        _kept.append(allocator)
        return torch.cuda.MemPool(allocator)

    def register(self) -> None:
        """Calls Python's `register` for new chunks and `unregister` for those without tensors, as the end of a `with` does.
        Raises what they raise; the chunk is tried again at the next call."""
        if self._registrations is not None:
            self._registrations.settle()

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The address and the bytes of each chunk."""
        return [(address, size) for address, size, _ in chunks(self._library, self._number)]

    def __enter__(self) -> RegisteredMemPool:
        import torch

        # PyTorch refuses a second thread in one pool.
        self._turn.acquire()
        try:
            context = torch.cuda.use_mem_pool(self.pool)
            context.__enter__()
        except BaseException:
            self._turn.release()
            raise
        self._entered = context
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            self._entered.__exit__(*raised)
        finally:
            self._turn.release()
        self.register()


# Allocators that PyTorch holds by bare pointers.
_kept: list[object] = []
