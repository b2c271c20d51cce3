"""Tensors over reserved addresses, whose pages get memory and lose it again. All but `tensor` works without PyTorch.

    cache = aquifer_torch.elastic((1 << 20, 8, 128), "bfloat16")    # after setup() or install(); takes no memory
    cache.commit(range(0, 4096))                        # rows of the first dimension, in whole pages
    keys = cache[0:4096]                                # a tensor; Uncommitted for a row without memory
    cache.idle(range(1024, 4096))                       # these hold nothing now: another process may have the memory

A kernel that accesses a page without memory, by `cache.tensor` or an older slice, loses the context: CUDA reports an illegal
address, and so does each later call.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Union

from .errors import AquiferError, Uncommitted
from .library import Library

if TYPE_CHECKING:
    import torch

Rows = Union[int, range, slice]


def _item_size(dtype: torch.dtype | str) -> int:
    if not isinstance(dtype, str):
        return int(dtype.itemsize)
    bits = re.match(r"bool$|[a-z]+(8|16|32|64|128)", dtype)
    if bits is None:
        raise ValueError(f"dtype={dtype!r}: a torch.dtype, or the name of one, such as 'bfloat16'")
    return int(bits[1] or 8) // 8


def _destroy(library: Library, number: int) -> None:
    # The runtime may be gone.
    with contextlib.suppress(AquiferError):
        library.aq_elastic_destroy(number)


class Elastic:
    """Reserved addresses for a tensor of `shape`, after setup() or install(): aquifer_torch.elastic(). Rows are along the first
    dimension.

    dtype      a torch.dtype, or its name
    device     the current one unless named
    page_size  bytes that are committed together, rounded up to the device's granularity, usually 2 MiB; 0 for the pool's

    Pages are for the stream that is current now, and for work on others that is ordered behind it. ValueError; AquiferError, as
    for aq_elastic_reserve.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype | str = "float32",
        device: torch.device | int | None = None,
        page_size: int = 0,
    ) -> None:
        from . import _device, _library_or_raise

        self._library, self.device, self.dtype = _library_or_raise(), _device(device), dtype
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape={shape!r}: each dimension has at least one element")
        self._row = math.prod(self.shape[1:]) * _item_size(dtype)
        self.nbytes = self.shape[0] * self._row
        library = self._library
        self._simulated = bool(library.facts(self.device).simulated)
        self._owner, handle = self._stream()
        page, number, address = ctypes.c_uint64(page_size), ctypes.c_uint64(), ctypes.c_uint64()
        results = ctypes.byref(number), ctypes.byref(address)
        library.aq_elastic_reserve(library.runtime(), self.device, self.nbytes, ctypes.byref(page), handle, *results)
        self.page_size, self.address, self._number = page.value, address.value, number.value
        self._tensor: torch.Tensor | None = None
        self._end = weakref.finalize(self, _destroy, library, self._number)

    def _stream(self) -> tuple[torch.cuda.Stream | None, int | None]:
        """PyTorch's current stream, and its handle. Without PyTorch, and on a simulated device, the default stream."""
        torch = sys.modules.get("torch")
        if torch is None or self._simulated:
            return None, None
        stream = torch.cuda.current_stream(self.device)
        return stream, stream.cuda_stream

    def _bytes(self, rows: Rows) -> tuple[int, int]:
        """The offset and the size of rows."""
        if isinstance(rows, int):
            rows = range(rows, rows + 1)
        elif isinstance(rows, slice):
            rows = range(*rows.indices(self.shape[0]))
        if rows.step != 1 or rows.start < 0 or rows.stop > self.shape[0]:
            raise ValueError(f"{rows!r}: consecutive rows, of the {self.shape[0]} that there are")
        return rows.start * self._row, len(rows) * self._row

    def commit(self, rows: Rows) -> None:
        """Gives the pages of rows memory, all or none: their own, if they are idle or still being released, else memory with
        unspecified contents. Blocks as an allocation does. ValueError; AquiferError (AQ_ERROR_OUT_OF_MEMORY)."""
        self._library.aq_elastic_commit(self._number, *self._bytes(rows))
        stream, _ = self._stream()
        if stream is not None and self._owner is not None and stream != self._owner:
            stream.wait_stream(self._owner)

    def release(self, rows: Rows) -> None:
        """Gives the memory of the pages that lie wholly in rows back, after the work queued so far on the current stream, on that
        of commit(), and on those of earlier such calls. Does not block. ValueError."""
        self._library.aq_elastic_release(self._number, *self._bytes(rows), self._stream()[1], 0)

    def idle(self, rows: Rows) -> None:
        """As release(), for pages that may be wanted again. They keep their memory until this process needs it, or another that
        shares the device (setup(shared=...)), or trim() is called."""
        self._library.aq_elastic_release(self._number, *self._bytes(rows), self._stream()[1], 1)

    def _ranges(self) -> tuple[list[tuple[int, int]], int]:
        count, idle, capacity = ctypes.c_size_t(64), ctypes.c_uint64(), 0
        while capacity < count.value:
            capacity = count.value
            found = (ctypes.c_uint64 * (2 * capacity))()
            self._library.aq_elastic_committed(self._number, found, capacity, ctypes.byref(count), ctypes.byref(idle))
        return [(found[2 * n], found[2 * n + 1]) for n in range(count.value)], idle.value

    @property
    def committed(self) -> list[range]:
        """The rows of which every byte has memory."""
        rows = (range(-(-start // self._row), end // self._row) for start, end in self._ranges()[0])
        return [part for part in rows if part]

    @property
    def idle_bytes(self) -> int:
        """The bytes of idle pages that still have their memory."""
        return self._ranges()[1]

    @property
    def tensor(self) -> torch.Tensor:
        """A torch.Tensor over all rows, of which only committed ones may be accessed. Keeps the addresses."""
        if self._tensor is None:
            import torch

            managed = ctypes.c_void_p()
            self._library.aq_elastic_dlpack(self._number, ctypes.byref(managed))
            new = ctypes.pythonapi.PyCapsule_New
            new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
            # It asks the driver nothing about the address, which has no memory yet.
            flat = torch.utils.dlpack.from_dlpack(new(managed, b"dltensor", None))
            dtype = getattr(torch, self.dtype) if isinstance(self.dtype, str) else self.dtype
            self._tensor = flat.view(dtype).view(self.shape)
        return self._tensor

    def check(self, rows: Rows) -> None:
        """Uncommitted, with the first bytes that have no memory; ValueError."""
        try:
            self._library.aq_elastic_check(self._number, *self._bytes(rows))
        except AquiferError as error:
            if error.name != "AQ_ERROR_UNCOMMITTED":
                raise
            raise Uncommitted(error.status, error.name, f"{rows!r} of {self!r}: {error.text}") from None

    def __getitem__(self, rows: Rows) -> torch.Tensor:
        """The tensor of rows, as check() allows."""
        self.check(rows)
        return self.tensor[slice(rows.start, rows.stop) if isinstance(rows, range) else rows]

    def close(self) -> None:
        """Ends the reservation. Once the tensors are gone, memory goes back after all work of the device, at the next trim() or
        when it is needed. May be called again."""
        self._tensor = None
        self._end()

    def __repr__(self) -> str:
        return f"Elastic({self.shape}, {self.dtype!s})"


class KvPages:
    """Keys and values of `num_layers` layers, with the two calls by which kvcached maps its pages (kvcached.vmm_ops).

    As after kvcached's create_kv_tensors() there is a tensor of `size` bytes for each layer, in `num_kv_buffers` equal parts,
    such as keys and values. The page at an offset is that of each part of each layer. For kvcached's contiguous layout, give one
    layer of one part, and its compound page as page_size.

    keep  unmapped pages are idle; else they are released. No kernel may access them: kvcached has a page of zeros there

    ValueError; AquiferError. It ends with its last reference and its tensors.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype | str,
        num_layers: int,
        num_kv_buffers: int = 2,
        device: torch.device | int | None = None,
        page_size: int = 2 << 20,
        keep: bool = True,
    ) -> None:
        if min(size, page_size, num_layers, num_kv_buffers) < 1 or size % (page_size * num_kv_buffers):
            raise ValueError(f"size={size}: a multiple of {num_kv_buffers} pages of {page_size} bytes, in at least one layer")
        items = size // _item_size(dtype)
        self.layers = [Elastic(items, dtype, device, page_size) for _ in range(num_layers)]
        if self.layers[0].page_size != page_size:
            raise ValueError(f"page_size={page_size}: a multiple of {self.layers[0].page_size}, the device's granularity")
        self.page_size, self._keep = page_size, keep
        self._parts, self._items = range(0, size, size // num_kv_buffers), page_size * items // size

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors, of one dimension."""
        return [layer.tensor for layer in self.layers]

    def _pages(self, offsets: Sequence[int]) -> Iterator[tuple[Elastic, range]]:
        for offset in offsets:
            if offset % self.page_size or not 0 <= offset < self._parts.step:
                raise ValueError(f"offset {offset}: a multiple of {self.page_size} below {self._parts.step}")
        for layer in self.layers:
            for part in self._parts:
                for offset in offsets:
                    first = (part + offset) // self.page_size * self._items
                    yield layer, range(first, first + self._items)

    def map_to_kv_tensors(self, offsets: Sequence[int]) -> bool:
        """Maps pages, all or none; mapped ones stay. Returns True. ValueError; AquiferError (AQ_ERROR_OUT_OF_MEMORY)."""
        new: list[tuple[Elastic, range]] = []
        try:
            for layer, items in self._pages(offsets):
                try:
                    layer.check(items)
                except Uncommitted:
                    layer.commit(items)
                    new.append((layer, items))
        except AquiferError:
            self._unmap(new)
            raise
        return True

    def unmap_from_kv_tensors(self, offsets: Sequence[int]) -> bool:
        """Unmaps pages after the work queued so far on the current stream. Returns True. ValueError."""
        self._unmap(self._pages(offsets))
        return True

    def _unmap(self, pages: Iterable[tuple[Elastic, range]]) -> None:
        for layer, items in pages:
            layer.idle(items) if self._keep else layer.release(items)
