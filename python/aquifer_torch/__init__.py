"""aquifer as PyTorch's CUDA allocator.

    import aquifer_torch
    aquifer_torch.install(limit=0.9)        # before PyTorch's first use of CUDA

    x = torch.empty(1 << 20, device="cuda") # from here on
    print(aquifer_torch.statistics())

or for a part of a program only, below PyTorch's own cache:

    with torch.cuda.use_mem_pool(aquifer_torch.mem_pool()):
        x = torch.empty(1 << 20, device="cuda")

or without a GPU and without PyTorch, on a simulated device:

    library = aquifer_torch.setup(driver="sim")
    print(aquifer_torch.statistics())
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any, Callable

from .elastic_memory import Elastic as elastic, KvPages
from .errors import AlreadyInitialised, AquiferError, Asleep, CompanionError, LibraryNotFound, LibraryVersion, Uncommitted
from .library import (
    DRIVERS,
    SHARED_DEVICES,
    SHARED_PINNED,
    SLACK,
    STREAMS_RETIRED,
    STREAMS_UNTOLD,
    Library,
    Options,
)
from .registered import RegisteredMemPool, nccl
from .sleep import MemorySaver

if TYPE_CHECKING:
    import torch

__all__ = [
    "AlreadyInitialised",
    "AquiferError",
    "Asleep",
    "CompanionError",
    "KvPages",
    "LibraryNotFound",
    "LibraryVersion",
    "Library",
    "MemorySaver",
    "RegisteredMemPool",
    "Uncommitted",
    "dump_snapshot",
    "elastic",
    "install",
    "install_pinned",
    "limit",
    "mem_pool",
    "nccl",
    "pinned_empty",
    "pinned_limit",
    "pinned_statistics",
    "registered_pool",
    "retire",
    "set_limit",
    "set_pinned_limit",
    "setup",
    "snapshot",
    "statistics",
    "torch_memory_saver",
    "trim",
    "uninstall_pinned",
]

_library: Library | None = None
_installed = False
# The companion that serves pinned memory, once install_pinned() was called.
_pinned: ctypes.CDLL | None = None
# Whether it serves new memory.
_pinning = False
# Allocators that PyTorch holds by bare pointers.
_kept: list[object] = []

# Memory that is given back while the program sleeps.
torch_memory_saver = MemorySaver()


def setup(
    lib: str | os.PathLike[str] | None = None,
    limit: int | float | None = None,
    wait: float | None = None,
    release_threshold: int | None = None,
    streams_retired: bool = True,
    history: int = 0,
    driver: str | int = "cuda",
    sim_memory: int | None = None,
    shared: int | None = None,
    shared_pinned: int | None = None,
    shared_priority: int = 0,
    ledger_folder: str | os.PathLike[str] | None = None,
    plan: str | os.PathLike[str] | None = None,
    slack: int | None = None,
) -> Library:
    """Loads the library and makes the process's runtime with these settings, once. install() and mem_pool() call it.

    lib                the file; else $AQUIFER_LIB, or the nearest build
    limit              what each device may hold at most: bytes, or a part of its memory as a float up to 1.0; else four fifths
                       of what is free now
    wait               seconds that an allocation waits for memory that is still in use, before it fails; else 10
    release_threshold  idle bytes of each device above which memory goes back to the driver by itself; else no bound
    streams_retired    whether streams are destroyed only after retire(). PyTorch's own live
                       for ever. Not so with CuPy's and RMM's: False, and each free and noted use records an event (0.2 us)
    history            how many of the last events are kept for dump_snapshot(), 64 bytes each; costs a pair of calls up to 0.5 us
    driver             "cuda", or without a GPU, for tests: "sim" for a simulated device, which checks every access, or "cuda-or-sim";
                       the numbers of aquifer.h mean the same
    sim_memory         the bytes of the simulated device
    shared             the bytes of each device that are guaranteed to this process, which shares the rest with the other
                       processes of the user that do so: see aquifer_torch.ledger. 0 for none guaranteed; else nothing is shared
    shared_pinned      the same of pinned memory
    shared_priority    the order among processes that wait for shared memory, higher ones first
    ledger_folder      the folder of the ledgers, else that of AQUIFER_LEDGER
    plan               a file of `aquifer plan` from an earlier run: blocks get their places in it; else that of AQUIFER_PLAN
    slack              per cent of the peak of its live bytes that each device may hold beyond it, from 1 to 10000; else 17, or
                       64 MiB if that is more. 6 packs tightly, against slower first steps and moves in later ones

    Makes a context on each device that CUDA_VISIBLE_DEVICES leaves, as PyTorch does on those that it uses; takes no memory.
    LibraryNotFound, LibraryVersion; AquiferError, where there is one already (AQ_ERROR_BUSY) or the driver refuses.
    """
    global _library
    if isinstance(driver, str):
        if driver not in DRIVERS:
            raise ValueError(f"driver={driver!r}: it can be {', '.join(map(repr, DRIVERS))}")
        driver = DRIVERS[driver]
    library = Library(lib)
    streams = STREAMS_RETIRED if streams_retired else STREAMS_UNTOLD
    options = Options(size=ctypes.sizeof(Options), driver=driver, streams=streams, history=history)
    if sim_memory is not None:
        options.sim_memory = sim_memory
    if isinstance(limit, int):
        options.device_limit = limit
    elif limit is not None and not 0 < limit <= 1:
        raise ValueError(f"limit={limit}: bytes as an int, or a part of the memory as a float above 0 and up to 1.0")
    if wait is not None:
        options.wait_ns = int(wait * 1e9)
    if release_threshold is not None:
        options.release_threshold = release_threshold
    if shared is not None:
        options.shared |= SHARED_DEVICES
        options.shared_guarantee = shared
    if shared_pinned is not None:
        options.shared |= SHARED_PINNED
        options.pinned_guarantee = shared_pinned
    options.shared_priority = shared_priority
    if ledger_folder is not None:
        options.ledger_folder = os.fsencode(ledger_folder)
    if plan is not None:
        options.plan = os.fsencode(plan)
    if slack is not None:
        if slack not in SLACK:
            raise ValueError(f"slack={slack!r}: per cent of the peak of live bytes, from 1 to {SLACK[-1]}")
        options.slack = slack
    library.aq_torch_setup(ctypes.byref(options))
    library.streams_retired = streams_retired
    if isinstance(limit, float):
        for device in range(library.devices()):
            library.set_limit(device, int(library.facts(device).memory * limit))
    _library = library
    return library


def _opened(settings: dict[str, Any]) -> Library:
    if _library is None:
        return setup(**settings)
    if settings:
        raise AlreadyInitialised("the runtime of this process is made already; its limit can be changed by set_limit()")
    return _library


def install(companion: bool = True, **settings: Any) -> None:
    """Makes aquifer the allocator of all CUDA tensors of this process.

    Best before PyTorch's first use of CUDA. Afterwards, tensors and graphs that are there stay in the native allocator's memory
    until they are freed, beside the limit; statistics and snapshots do not have them. No other thread may allocate meanwhile,
    and no stream may capture.

    Settings are those of setup(). With `companion=False` nothing is compiled, and PyTorch's own
    CUDAPluggableAllocator calls the library: then a request that cannot be served is a null pointer that the next kernel
    writes to, and graphs, torch.cuda.memory_stats() and cuDNN's benchmark mode are refused by PyTorch.

    AlreadyInitialised; CompanionError; what setup() raises.
    """
    global _installed
    import torch

    if _installed:
        raise AlreadyInitialised("aquifer_torch.install() was called before")
    if torch.cuda.is_initialized():
        if not companion:
            raise AlreadyInitialised("install(companion=False) comes before PyTorch's first use of CUDA, which has been")
        if torch.cuda.is_current_stream_capturing():
            raise AlreadyInitialised("the current stream is capturing a graph, whose memory is another allocator's")
    if companion:
        from . import companion as cpp

        # Before the runtime, which then need not be undone: this is what fails as a rule.
        loaded = cpp.load()
        cpp.install(loaded, _opened(settings).path)
    else:
        torch.cuda.memory.change_current_allocator(_pluggable(_opened(settings)))
    _installed = True


def _pluggable(library: Library) -> torch.cuda.memory.CUDAPluggableAllocator:
    """PyTorch's own class over the library, with the hooks that take C functions."""
    import torch

    made = torch.cuda.memory.CUDAPluggableAllocator(library.path, "aq_torch_alloc", "aq_torch_free")
    for hook, call in (
        ("set_init_fn", "aq_torch_init"),
        ("set_reset_fn", "aq_torch_reset"),
        ("set_memory_fraction_fn", "aq_torch_memory_fraction"),
        ("set_base_alloc_fn", "aq_torch_base_alloc"),
        ("set_record_stream_fn", "aq_torch_record_stream"),
    ):
        getattr(made.allocator(), hook)(library.address(call))
    _kept.append(made)
    return made


def mem_pool(use_on_oom: bool = False, no_split: bool = False, **settings: Any) -> torch.cuda.MemPool:
    """A torch.cuda.MemPool whose memory comes from aquifer, under PyTorch's own allocator: for torch.cuda.use_mem_pool.

    PyTorch caches in segments of 2 MiB and more above it, and raises its own torch.OutOfMemoryError. `use_on_oom` and `no_split`
    are MemPool's own. Settings are those of setup(), at the first call. With install() there is no need for one: then torch.cuda.MemPool() is aquifer's anyway.
    """
    import torch

    if _installed:
        raise AlreadyInitialised("aquifer is the allocator of this process: torch.cuda.MemPool() is one of its pools")
    made = _pluggable(_opened(settings))
    # Only what is asked for: older versions of PyTorch do not know them.
    asked = {name: True for name, wanted in (("use_on_oom", use_on_oom), ("no_split", no_split)) if wanted}
    return torch.cuda.MemPool(made.allocator(), **asked)


def registered_pool(
    bytes: int, register: Any = None, unregister: Callable[[Any], object] | None = None, device: torch.device | int | None = None, **settings: Any
) -> RegisteredMemPool:
    """A torch.cuda.MemPool for memory that a transport registers, as an object whose `pool` it is: `with` allocates in it.

    It grows by chunks of `bytes`, rounded up to 2 MiB, or of a larger request: one cudaMalloc each, which never moves. A chunk is
    registered once, and unregistered and released after its last tensor: below PyTorch's own allocator at empty_cache(), or when
    the pool is gone. Settings are those of setup(), at the first call.

    register    nccl(), or other `Functions` of C, called when the pool grows; a NIXL agent; or a function of Python that is called
                with address and bytes when the `with` ends, or by register(), and returns a handle
    unregister  called with that handle by the main thread, soon after the last tensor. Until then the chunk stays
    """
    return RegisteredMemPool(_opened(settings), bytes, register, unregister, _device(device))


def install_pinned(pinned_limit: int | None = None, **settings: Any) -> None:
    """Makes aquifer PyTorch's allocator of pinned host memory: for Tensor.pin_memory(), empty(pin_memory=True), DataLoader's
    pinning thread, non-blocking copies and graph captures.

    Blocks have their exact size, on the NUMA node next to the current device, first touched there by several threads.
    `pinned_limit` bounds all pinned memory, in bytes; half of the free host memory unless set. Other settings are those of
    setup(), at the first call. Works with and without install(), before and after PyTorch's first use of CUDA, and again after
    uninstall_pinned(). No other thread may allocate pinned memory meanwhile.

    CompanionError, where the allocator cannot be compiled or another one has a higher priority; what setup() raises.
    """
    global _pinned, _pinning
    from . import companion as cpp

    made = cpp.load_pinned() if _pinned is None else _pinned
    library = _opened(settings)
    if pinned_limit is not None:
        library.set_pinned_limit(pinned_limit)
    text = ctypes.create_string_buffer(4096)
    if made.aquifer_pinned_install(library.path.encode(), text, ctypes.c_size_t(len(text))):
        raise CompanionError(text.value.decode(errors="replace"))
    _pinned, _pinning = made, True


def uninstall_pinned() -> None:
    """New pinned memory comes from PyTorch's previous allocator again. Live blocks stay valid and are freed as before. Does
    nothing where install_pinned() was not called."""
    global _pinning
    _pinning = False
    if _pinned is not None:
        _pinned.aquifer_pinned_uninstall()


def pinned_empty(
    *shape: Any, dtype: torch.dtype | None = None, device: torch.device | int | None = None
) -> torch.Tensor:
    """Returns an uninitialised tensor in pinned memory next to a device, the current one unless named. Needs install_pinned()."""
    import torch

    if _pinned is None:
        raise RuntimeError("aquifer_torch.install_pinned() comes first")
    previous = _pinned.aquifer_pinned_device(_device(device))
    try:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)
    finally:
        _pinned.aquifer_pinned_device(previous)


def pinned_statistics(device: torch.device | int | None = None) -> dict[str, int]:
    """The figures of the pool of pinned memory next to a device, by the names of aquifer.h's aq_stats. No driver call."""
    return _library_or_raise().pinned_stats(_device(device))


def pinned_limit() -> tuple[int, int]:
    """The limit of all pinned memory, and how much is held: bytes."""
    return _library_or_raise().pinned_limit()


def set_pinned_limit(bytes: int) -> int:
    """Sets it. Nothing that is held is taken away. Returns the bytes that are held above it."""
    return _library_or_raise().set_pinned_limit(bytes)


def _device(device: torch.device | int | None) -> int:
    if device is None:
        # Before PyTorch uses CUDA, and without PyTorch, the first device is the current one.
        torch = sys.modules.get("torch")
        return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0
    return device if isinstance(device, int) else (device.index or 0)


def _pins() -> bool:
    """Whether new pinned memory is aquifer's."""
    return _pinning


def _library_or_raise() -> Library:
    if _library is None:
        raise RuntimeError("aquifer_torch.install(), install_pinned() or mem_pool() comes first")
    return _library


def statistics(device: torch.device | int | None = None) -> dict[str, int]:
    """What the pool of a device holds, by the names of torch.cuda.memory_stats() where these mean the same, and by the library's
    own under `aquifer.`. Bytes unless the name says otherwise. No driver call."""
    library = _library_or_raise()
    stats = library.stats(_device(device))
    limit, _ = library.limit(_device(device))
    active = stats["live"] + stats["pending"]
    named = {
        "allocated_bytes.all.current": stats["live"],
        "allocated_bytes.all.peak": stats["peak_live"],
        "requested_bytes.all.current": stats["requested"],
        "requested_bytes.all.peak": stats["peak_requested"],
        "active_bytes.all.current": active,
        "reserved_bytes.all.current": stats["physical"],
        "reserved_bytes.all.peak": stats["peak_physical"],
        "inactive_split_bytes.all.current": stats["cached"],
        "allocation.all.current": stats["blocks"],
        "allocation.all.allocated": stats["allocations"],
        "allocation.all.freed": stats["frees"],
        "num_ooms": stats["failures"],
        "num_device_alloc": stats["growths"],
        "aquifer.limit": limit,
    }
    named.update({f"aquifer.{name}": value for name, value in stats.items()})
    return named


def snapshot() -> dict[str, Any]:
    """All that the runtime knows of itself: devices, budgets, pools and findings. The format is aquifer.h's."""
    return _library_or_raise().snapshot()


def dump_snapshot(
    path: str | os.PathLike[str] = "aquifer_snapshot.pickle", device: torch.device | int | None = None
) -> None:
    """Writes what a device's pool did last and which blocks are out to a file, as torch.cuda.memory._dump_snapshot() does: for
    https://pytorch.org/memory_viz and `python -m torch.cuda._memory_viz`. Needs setup(history=...), or install(history=...)."""
    _library_or_raise().memory_snapshot(_device(device), path)


def limit(device: torch.device | int | None = None) -> tuple[int, int]:
    """What a device may hold at most, and what it holds: bytes."""
    return _library_or_raise().limit(_device(device))


def set_limit(bytes: int, device: torch.device | int | None = None) -> int:
    """Sets it. Nothing that is held is taken away; answers with the bytes that are held above it."""
    return _library_or_raise().set_limit(_device(device), bytes)


def trim(keep: int = 0, device: torch.device | int | None = None) -> int:
    """Gives free memory above `keep` bytes back to the driver, without waiting for work; answers with how much."""
    return _library_or_raise().trim(_device(device), keep)


def retire(stream: torch.cuda.Stream) -> None:
    """To be called before a stream is destroyed that PyTorch does not own (torch.cuda.ExternalStream). Waits for its work."""
    library = _library_or_raise()
    library.aq_stream_retire(library.runtime(), _device(stream.device), stream.cuda_stream)
