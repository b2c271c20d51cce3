"""Memory that is given back while a program sleeps: tensors keep their addresses, graphs stay valid.

    import aquifer_torch
    saver = aquifer_torch.torch_memory_saver

    with saver.region(tag="weights", enable_cpu_backup=True):
        model = Model().cuda()
    saver.pause("weights")      # the contents are on the host, the memory is the device's again
    saver.resume("weights")     # at the same addresses, with the same contents

The object has the shape of torch_memory_saver's, for programs that use that one. Where that package has register_hook_mode,
it takes the object by one line:

    register_hook_mode("aquifer", lambda: aquifer_torch.torch_memory_saver, uses_preload=False)
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, Iterator

from .errors import Asleep
from .library import KEEP_DISK, KEEP_NONE, KEEP_PAGEABLE, KEEP_PINNED, Library

if TYPE_CHECKING:
    import torch

_DEFAULT = "default"


class Regions:
    """Tensors that a thread makes between `enter` and its end come from parkable memory of that name.

    Under install(), blocks come from there one by one. Otherwise PyTorch's own allocator takes segments from there, in a
    torch.cuda.MemPool for each name and device.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._here = threading.local()
        # Of each name in how many threads its region is open. Names stay when that is 0.
        self._open: dict[str, int] = {}
        self._pools: dict[tuple[str, int], Any] = {}

    @contextlib.contextmanager
    def enter(self, name: str | None) -> Iterator[None]:
        """Makes `name` the region of this thread until the end, or none. Asleep, while it is paused."""
        library = _library()
        previous: str | None = getattr(self._here, "name", None)
        with contextlib.nullcontext() if name is None else self.opened(name), _segments(self, name):
            self._set(library, name)
            try:
                yield
            finally:
                self._set(library, previous)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[None]:
        """Until the end, the name is not paused. Asleep, while it is."""
        with self._lock:
            if _library().tag(name)[1]:
                raise Asleep(f"the region {name!r} is paused: resume it first")
            self._open[name] = self._open.get(name, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._open[name] -= 1

    def _set(self, library: Library, name: str | None) -> None:
        library.aq_torch_region(name.encode() if name else None)
        self._here.name = name

    def pool(self, name: str) -> torch.cuda.MemPool:
        """Returns the MemPool whose segments belong to a name, on the current device."""
        import aquifer_torch
        import torch

        key = (name, torch.cuda.current_device())
        with self._lock:
            if not self._pools:
                # Before modules are torn down: a MemPool needs its allocator.
                atexit.register(self._pools.clear)
            if key not in self._pools:
                self._pools[key] = aquifer_torch.mem_pool()
            return self._pools[key]

    def names(self) -> list[str]:
        """Returns every name that was entered."""
        with self._lock:
            return list(self._open)

    def pause(self, keep: dict[str, int], folder: str | None = None) -> int:
        """Parks names, all or none, with one of library.KEEP_... for each. Returns the bytes that went back to the device."""
        with self._lock:
            for name in keep:
                if self._open.get(name, 0):
                    raise RuntimeError(f"the region {name!r} is open: leave it before it is paused")
            if not keep:
                return 0
            _check_not_capturing()
            released = _library().pause(keep, folder)
            _drop_workspaces()
            return released

    def resume(self, names: list[str], retain: bool = False) -> int:
        """Resumes names, all or none. Returns the bytes that were taken. AquiferError AQ_ERROR_OUT_OF_MEMORY where they do not
        fit."""
        with self._lock:
            return _library().resume(names, retain) if names else 0

    def held(self, name: str) -> int:
        """Returns the bytes of device memory that a name holds: 0 while it is paused."""
        return _library().tag(name)[0]

    def is_paused(self, name: str) -> bool:
        """Returns whether a name is paused."""
        return _library().tag(name)[1]


def _drop_workspaces() -> None:
    """cuBLAS' workspaces may lie in a region where it was first used, and work elsewhere would use them while it is paused.
    PyTorch makes new ones."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()


def _check_not_capturing() -> None:
    """PyTorch's own allocator tells nothing of its captures, which a wait for the device would break."""
    import aquifer_torch

    torch = sys.modules.get("torch")
    if torch is None or aquifer_torch._installed or not torch.cuda.is_initialized():
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a graph is captured: nothing is paused until its end")


def _warn_of_registration() -> None:
    """NCCL registers what the collectives of a graph use, and a resume takes other memory (torch_memory_saver#88)."""
    import torch

    several = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if several and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        text = "NCCL_GRAPH_REGISTER is not 0: a graph with collectives may hang after its memory was paused"
        warnings.warn(text, stacklevel=4)


def _library() -> Library:
    import aquifer_torch

    return aquifer_torch._opened({})


@contextlib.contextmanager
def _segments(regions: Regions, name: str | None) -> Iterator[None]:
    """Routes PyTorch's own allocator to the segments of a name, or to its own. An outer region is left meanwhile: which of two
    nested MemPools serves depends on PyTorch's version."""
    import aquifer_torch

    if aquifer_torch._installed:
        yield
        return
    outer: list[_Use] = regions._here.__dict__.setdefault("used", [])
    use = _Use(None if name is None else regions.pool(name))
    if outer:
        outer[-1].end()
    try:
        use.begin()
        outer.append(use)
        try:
            yield
        finally:
            outer.pop().end()
    finally:
        if outer:
            outer[-1].begin()


class _Use:
    """A torch.cuda.use_mem_pool that can be left and entered again."""

    def __init__(self, pool: torch.cuda.MemPool | None) -> None:
        self._pool, self._within = pool, contextlib.ExitStack()

    def begin(self) -> None:
        import torch

        if self._pool is not None:
            self._within.enter_context(torch.cuda.use_mem_pool(self._pool))

    def end(self) -> None:
        self._within.close()


def _keep(where: str | None) -> int:
    import aquifer_torch

    if where in (None, "disk"):
        return KEEP_DISK if where else KEEP_NONE
    pinned = where == "pinned" or (not where and aquifer_torch._pins())
    return KEEP_PINNED if pinned else KEEP_PAGEABLE


class MemorySaver:
    """What torch_memory_saver.torch_memory_saver is, over aquifer's memory.

    Works under install(), and beside PyTorch's own allocator. Memory outside of regions is not touched.

    Unlike torch_memory_saver's, `pause` and `resume` act on all of the memory or on none, may be called twice, wait for queued
    work, and return the bytes that went or came.
    """

    def __init__(self) -> None:
        self._regions = Regions()
        # Of each tag the names of its memory, and where its contents go: None for nowhere, "" for wherever is best.
        self._tags: dict[str, dict[str, str | None]] = {}
        self._folder: str | None = None
        # Whether a resume leaves the contents in host memory until the next pause, where get_cpu_backup finds them.
        self.retain_cpu_backup = False

    def _name(self, tag: str, enable_cpu_backup: bool, backend: str | None, on_disk: bool = False) -> str:
        if backend not in (None, "pinned", "mmap"):
            raise ValueError(f'cpu_backup_backend={backend!r}: "pinned" or "mmap"')
        if backend is not None and not enable_cpu_backup:
            raise ValueError("cpu_backup_backend needs enable_cpu_backup=True")
        if on_disk and enable_cpu_backup:
            raise ValueError("enable_disk_backup and enable_cpu_backup: contents are kept in one place")
        if not tag or "\0" in tag:
            raise ValueError(f"tag={tag!r}: a text that is not empty, without zero bytes")
        where = "disk" if on_disk else (backend or "") if enable_cpu_backup else None
        name = tag if where is None else f"{tag} (kept{where and f', {where}'})"
        if any(name in names for other, names in self._tags.items() if other != tag):
            raise ValueError(f"tag={tag!r}: {name!r} stands for contents of another tag that are kept")
        self._tags.setdefault(tag, {})[name] = where
        return name

    @contextlib.contextmanager
    def region(
        self,
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Tensors that this thread makes in it can be paused by their tag. With `enable_cpu_backup` they keep their contents;
        else these are unspecified after a pause.

        Regions may be nested: the inner one counts. The contents go to pinned memory if install_pinned() was called, or for
        cpu_backup_backend="pinned"; else to pageable memory. With `enable_disk_backup` they go to files in the folder of
        set_disk_backup_dir(), apart from blocks below 128 KiB. Asleep, while the tag is paused.
        """
        with self._regions.enter(self._name(tag, enable_cpu_backup, cpu_backup_backend, enable_disk_backup)):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """As torch.cuda.graph, with memory that can be paused by its tag: the graph can be replayed after it is resumed. Needs
        install().

        All graphs of a pool have one tag. With `enable_cpu_backup` tensors that are alive keep their contents; what a replay
        computes anew needs none. AquiferError AQ_ERROR_BAD_ARGUMENT, for a pool that has memory of another tag, or of none.
        """
        import aquifer_torch
        import torch

        if not aquifer_torch._installed:
            raise RuntimeError("graphs that can be paused need aquifer_torch.install()")
        _warn_of_registration()
        name = self._name(tag, enable_cpu_backup, cpu_backup_backend)
        handle = torch.cuda.graph_pool_handle() if pool is None else getattr(pool, "id", pool)
        with self._regions.opened(name):
            # Only the pool: what is made beside the capture, such as the state of random generators, is the process's.
            _library().aq_torch_pool_tag(torch.cuda.current_device(), *handle, name.encode())
            with torch.cuda.graph(cuda_graph, pool=handle, stream=stream, capture_error_mode=capture_error_mode):
                yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Within a region: tensors that this thread makes in it belong to no region."""
        with self._regions.enter(None):
            yield

    def pause(self, tag: str | None = None) -> int:
        """Gives the memory of a tag, or of all tags, back to the device. Returns the bytes.

        Waits until the device is idle and the contents are on the host. From then on, until it is resumed, nothing may use the
        tensors; they may be freed, and their contents with them. What is paused already, and tags without tensors, are left
        alone. If it fails, nothing has changed, but that retained contents may be gone. RuntimeError, while a region of the tag
        is open; AquiferError, while a graph is captured (AQ_ERROR_CAPTURING), or without host memory or space on the disk
        (AQ_ERROR_SYSTEM).
        """
        return self._regions.pause({name: _keep(where) for name, where in self._of(tag).items()}, self._folder)

    def resume(self, tag: str | None = None) -> int:
        """Takes memory for a tag, or for all tags, at the same addresses. Returns the bytes.

        Waits until the contents are there, then gives the host memory that they took back to the kernel, with all idle pinned
        memory, unless `retain_cpu_backup` is set. AquiferError AQ_ERROR_OUT_OF_MEMORY, if it does not fit: then all of it is
        still paused, and can be resumed later.
        """
        taken = self._regions.resume(list(self._of(tag)), self.retain_cpu_backup)
        if taken and not self.retain_cpu_backup:
            library = _library()
            for device in range(library.devices()):
                library.trim_pinned(device)
        return taken

    def is_paused(self, tag: str) -> bool:
        """Returns whether a tag is paused."""
        return any(self._regions.is_paused(name) for name in self._of(tag))

    def held(self, tag: str | None = None) -> int:
        """Returns the bytes of device memory that a tag holds, or all tags: 0 while paused."""
        return sum(self._regions.held(name) for name in self._of(tag))

    def _of(self, tag: str | None) -> dict[str, str | None]:
        if tag is not None:
            return self._tags.get(tag, {})
        return {name: where for names in self._tags.values() for name, where in names.items()}

    @property
    def enabled(self) -> bool:
        return True

    @property
    def hook_mode(self) -> str:
        """Nothing is hooked: whatever is set is ignored."""
        return "aquifer"

    @hook_mode.setter
    def hook_mode(self, hook_mode: str) -> None:
        pass

    @property
    def memory_margin_bytes(self) -> int:
        raise NotImplementedError("memory_margin_bytes: aquifer_torch.set_limit() bounds what a device holds")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        raise NotImplementedError("memory_margin_bytes: aquifer_torch.set_limit() bounds what a device holds")

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """Returns the contents of a CUDA tensor as of the last pause, as a tensor of the CPU: while it is paused, and after a
        resume with `retain_cpu_backup`. None, if they were not kept.

        It is a copy also with `zero_copy`: the contents are in pieces. ValueError, if `x` is not contiguous or not on a GPU.
        """
        if not x.is_cuda or not x.is_contiguous():
            raise ValueError(f"get_cpu_backup: x is on {x.device} with strides {x.stride()}; it must be contiguous and on a GPU")
        import torch

        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        return copy if x.nbytes and _library().backup(x.data_ptr(), x.nbytes, copy.data_ptr()) else None

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """Sets the folder for contents of later pauses on disk, which is made if it is not there. It should be on a disk. Before
        the first call it is that for temporary files (TMPDIR). OSError, if it cannot be made."""
        os.makedirs(path, exist_ok=True)
        self._folder = os.path.abspath(path)
