"""Memory of aquifer in NIXL's registrations. Needs NIXL, and neither PyTorch nor a GPU.

    from nixl_cu13._api import nixl_agent          # or another build of NIXL
    agent = nixl_agent("server")
    pool = RegisteredPool(agent, 1 << 30)           # one registration, before the agent's metadata is sent
    cache = pool.empty((1024, 4096), "float16")
    peer.send((agent.get_agent_metadata(), pool.location(cache)))

A registration keeps its memory alive and in place, and ends before the memory is freed. It must not end during a transfer.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import threading
import weakref
from typing import TYPE_CHECKING, Any, Sequence

from .errors import AquiferError
from .host import PinnedBlock, form_of
from .ledger import library

if TYPE_CHECKING:
    import numpy

# Of the parts of a pool: the lines of two processors' caches, and what transports copy at full speed.
ALIGN = 256


class MemoryMoves(ValueError):
    """The memory can be given back or moved while it is registered, so that a peer would read or write other memory."""


class PoolFull(MemoryError):
    """A registered pool has no free range that is large enough."""


def _end(agent: Any, registered: list[Any], backends: list[str], kept: Any) -> None:
    # `kept` is the memory, which goes after this.
    while registered:
        agent.deregister_memory(registered.pop(), backends)


class _Part:
    """A range of a pool, which is free again with the last array over it."""

    def __init__(self, pool: RegisteredPool, offset: int, size: int, room: int) -> None:
        self._pool, self._range = pool, (offset, room)
        address = pool._block.address + offset
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        # Not at once: this may run within a call of the pool.
        self._pool._freed.append(self._range)


class RegisteredPool:
    """Pinned memory near a device, as one block and one registration with an agent. Arrays are ranges of it, first fit.

    agent     a nixl_agent
    size      in bytes
    device    the index of the device that the memory is near
    backends  NIXL's, else all that take host memory

    The registration ends with the pool and all its arrays: each array keeps the pool. AquiferError if there is no memory;
    NIXL's error if it is not registered.
    """

    def __init__(self, agent: Any, size: int, device: int = 0, backends: Sequence[str] = ()) -> None:
        if size <= 0:
            raise ValueError(f"size={size}: the bytes of the pool")
        self.agent, self.size = agent, size
        self._block = PinnedBlock(size, device)
        self._lock = threading.Lock()
        self._free = [(0, size)]
        self._freed: collections.deque[tuple[int, int]] = collections.deque()
        registered = [agent.register_memory([(self._block.address, size, 0, "")], "DRAM", list(backends))]
        self._finalizer = weakref.finalize(self, _end, agent, registered, list(backends), self._block)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> numpy.ndarray[Any, Any]:
        """Returns an array in the pool, not zeroed, whose range is free again with its last reference. PoolFull."""
        import numpy

        form, whole, size = form_of(shape, dtype)
        room = max(-(-size // ALIGN), 1) * ALIGN
        with self._lock:
            self._collect()
            found = next((at for at, (_, free) in enumerate(self._free) if free >= room), None)
            if found is None:
                largest = max((free for _, free in self._free), default=0)
                raise PoolFull(f"{size} bytes; the largest free range of the pool's {self.size} has {largest}")
            offset, free = self._free[found]
            self._free[found : found + 1] = [(offset + room, free - room)] if free > room else []
            part = _Part(self, offset, size, room)
        return numpy.asarray(part).view(form).reshape(whole)

    @property
    def free(self) -> int:
        """The free bytes, in ranges of any size."""
        with self._lock:
            self._collect()
            return sum(free for _, free in self._free)

    def location(self, array: Any) -> tuple[int, int, int]:
        """Returns address, bytes and device of a contiguous array of the pool, as NIXL's descriptors have them. A peer that has
        the agent's metadata names the array by it. ValueError for an array that is not in the pool."""
        address, size = _range(array)
        if not self._block.address <= address or address + size > self._block.address + self.size:
            raise ValueError(f"an array at {address:#x} is not in the pool")
        return address, size, 0

    def descriptors(self, *arrays: Any) -> Any:
        """Returns NIXL's transfer descriptors of arrays of the pool."""
        return self.agent.get_xfer_descs([self.location(array) for array in arrays], "DRAM")

    def _collect(self) -> None:
        """Joins ranges that were freed to their free neighbours."""
        while self._freed:
            offset, size = self._freed.popleft()
            at = bisect.bisect(self._free, (offset, 0))
            begin = end = at
            if at > 0 and sum(self._free[at - 1]) == offset:
                begin, offset, size = at - 1, self._free[at - 1][0], size + self._free[at - 1][1]
            if at < len(self._free) and offset + size == self._free[at][0]:
                end, size = at + 1, size + self._free[at][1]
            self._free[begin:end] = [(offset, size)]


def _range(memory: Any) -> tuple[int, int]:
    """Returns the address and the bytes of a contiguous array or tensor. ValueError for one with gaps."""
    if hasattr(memory, "data_ptr"):
        contiguous, address, size = memory.is_contiguous(), memory.data_ptr(), memory.numel() * memory.element_size()
    else:
        contiguous, address, size = memory.flags["C_CONTIGUOUS"], memory.ctypes.data, memory.nbytes
    if not contiguous:
        raise ValueError("an array with gaps cannot be sent: make it contiguous")
    return address, size


def block_of(address: int) -> tuple[int, int] | None:
    """Returns the first byte and the size of the block of aquifer's device memory around an address, which stays in place from
    now on until it is freed. None for memory of others. MemoryMoves for memory of a region, which can be paused, and for what
    has no virtual memory behind it."""
    handle, offset, size = ctypes.create_string_buffer(32), ctypes.c_size_t(), ctypes.c_size_t()
    try:
        library().aq_torch_share(address, handle, ctypes.byref(offset))
    except AquiferError as error:
        if error.name == "AQ_ERROR_FOREIGN_BLOCK":
            return None
        if error.name in ("AQ_ERROR_UNSUPPORTED", "AQ_ERROR_PARKED"):
            text = f"device memory at {address:#x} may move or be given back: it is of a region that can be paused, or of a graph's pool"
            raise MemoryMoves(f"{text}, or has no virtual memory behind it. Register memory that was made outside of them") from None
        raise
    begin = address - offset.value
    library().aq_torch_base_alloc(begin, ctypes.byref(size))
    return begin, size.value


def registrar(agent: Any, device: int, backends: Sequence[str] = ()) -> tuple[Any, Any]:
    """Returns the two functions of aquifer_torch.registered_pool() for an agent, whose metadata changes with each chunk."""

    def register(address: int, size: int) -> Any:
        return agent.register_memory([(address, size, device, "")], "VRAM", list(backends))

    return register, lambda registered: agent.deregister_memory(registered, list(backends))


class Registration:
    """One registration of arrays and tensors with an agent: CUDA tensors under aquifer_torch.install(), tensors and arrays of the
    host. It keeps them alive and in place until release(), or its last reference.

    Of a CUDA tensor the whole block is registered, once for all tensors in it. MemoryMoves for memory of a region of
    torch_memory_saver; ValueError for tensors with gaps; NIXL's error.
    """

    def __init__(self, agent: Any, *memories: Any, backends: Sequence[str] = ()) -> None:
        ranges: dict[str, set[tuple[int, int, int]]] = {"DRAM": set(), "VRAM": set()}
        for memory in memories:
            address, size = _range(memory)
            if getattr(memory, "is_cuda", False):
                begin, whole = block_of(address) or (address, size)
                ranges["VRAM"].add((begin, whole, memory.get_device()))
            else:
                ranges["DRAM"].add((address, size, 0))
        registered: list[Any] = []
        self._finalizer = weakref.finalize(self, _end, agent, registered, list(backends), memories)
        try:
            for kind, found in ranges.items():
                if found:
                    wanted = [(address, size, device, "") for address, size, device in sorted(found)]
                    registered.append(agent.register_memory(wanted, kind, list(backends)))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Ends the registration. Not during a transfer. May be called again."""
        self._finalizer()
