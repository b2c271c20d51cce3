"""aquifer as the allocator of CuPy, numba, cuda.core, Triton, ONNX Runtime, Warp and RMM: a module for each.

    import aquifer_plugs.cupy
    aquifer_plugs.cupy.install()

or, for an unchanged program, of those of them that it imports:

    python -m aquifer_plugs program.py

All serve from the runtime of the process, which PyTorch uses as well. aquifer_torch.setup(streams_retired=False, ...) makes it
with settings; else the first allocation makes it. aquifer_torch.statistics() has its figures.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from typing import Any

import aquifer_torch
from aquifer_torch import AlreadyInitialised, AquiferError, Library

__all__ = ["MODULES", "free", "library", "malloc", "plug"]

# The modules whose import `python -m aquifer_plugs` acts on, with their plugs here.
MODULES = {"cupy": "cupy", "rmm": "rmm", "triton": "triton", "warp": "warp"}

_lock = threading.Lock()
# Those of `python -m aquifer_plugs`, for the runtime that the first allocation makes.
_settings: dict[str, Any] = {}
# Those of live blocks, by address.
_streams: dict[int, Any] = {}


def library() -> Library:
    """Returns the library, with the runtime of the process. The first call makes one, if aquifer_torch.setup() has not.

    AlreadyInitialised, if the runtime relies on aquifer_torch.retire() before a stream is destroyed: frameworks destroy streams
    at any time. What setup() raises.
    """
    made = aquifer_torch._library
    if made is None:
        with _lock:
            made = aquifer_torch._library or _setup()
    if made.streams_retired:
        text = "the runtime of this process was made with streams_retired=True; make it with streams_retired=False: setup(), install()"
        raise AlreadyInitialised(text)
    return made


def _setup() -> Library:
    made = aquifer_torch.setup(limit=_settings.get("limit"), slack=_settings.get("slack"), streams_retired=False)
    if _settings.get("pinned_limit") is not None:
        made.set_pinned_limit(_settings["pinned_limit"])
    return made


def malloc(size: int, device: int, stream: Any) -> int:
    """Allocates on a device, for work queued from now on on a stream: an object with `__cuda_stream__` or `ptr`, which is kept
    alive until the block is freed, the driver's handle, or None for the default stream. Returns the address, aligned to 512; 0 for
    0 bytes. Blocks only where memory is short: see aq_alloc in aquifer.h.

    MemoryError with the library's report, if there is no memory; AquiferError.
    """
    memory = ctypes.c_void_p()
    try:
        library().aq_torch_malloc(size, device, _handle(stream), ctypes.byref(memory))
    except AquiferError as error:
        raise out_of_memory(error) from error
    if memory.value:
        _streams[memory.value] = stream
    return memory.value or 0


def out_of_memory(error: AquiferError) -> Exception:
    """Returns the MemoryError that an error stands for, or the error itself."""
    return MemoryError(str(error)) if error.name in ("AQ_ERROR_OUT_OF_MEMORY", "AQ_ERROR_OUT_OF_BUDGET") else error


def free(address: int, device: int, stream: Any = None) -> None:
    """Frees a block in the order of its own stream, and behind all work that is queued on `stream` now, if that is given.
    Never blocks. AquiferError for any other address: nothing was freed."""
    made, kept = library(), _streams.pop(address, None)
    if stream is None:
        made.aq_torch_free(address, 0, device, None)
    else:
        made.aq_free_on(made.runtime(), device, address, _handle(stream))
    # Only now may it be destroyed.
    del kept


def _handle(stream: Any) -> int | None:
    if stream is None or isinstance(stream, int):
        return stream
    # CuPy's have the protocol since 14.
    return int(stream.__cuda_stream__()[1] or 0) if hasattr(stream, "__cuda_stream__") else int(stream.ptr)


def plug(module: str, settings: dict[str, Any]) -> None:
    """Installs the plug of a module of MODULES that is being imported, as `python -m aquifer_plugs` does. Makes no runtime."""
    _settings.update(settings)
    made = importlib.import_module(f"{__name__}.{MODULES[module]}")
    getattr(made, "at_import", made.install)()
