"""libaquifer_ffi by ctypes: what aquifer.h declares, as far as this package needs it. Knows nothing of PyTorch."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
from typing import TYPE_CHECKING, Any, Callable

from .errors import AquiferError, LibraryNotFound, LibraryVersion

# The version of aquifer.h that the declarations here follow.
VERSION = (0, 4)

DRIVER_MACHINE, DRIVER_SIM, DRIVER_MACHINE_OR_SIM = 0, 1, 2
DRIVERS = {"cuda": DRIVER_MACHINE, "sim": DRIVER_SIM, "cuda-or-sim": DRIVER_MACHINE_OR_SIM}
STREAMS_UNTOLD, STREAMS_RETIRED = 0, 1
READ, WRITE = 1, 2
# What becomes of the contents of memory that is paused.
KEEP_NONE, KEEP_PAGEABLE, KEEP_PINNED, KEEP_DISK = 0, 1, 2, 3
# What a runtime shares with other processes.
SHARED_DEVICES, SHARED_PINNED, SHARED_RESERVED = 1, 2, 4
# The per cent of the peak of live bytes that a device pool may hold beyond it.
SLACK = range(1, 10_001)


class Options(ctypes.Structure):
    """aq_runtime_options."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("driver", ctypes.c_uint32),
        ("streams", ctypes.c_uint32),
        ("sim_devices", ctypes.c_uint32),
        ("sim_flags", ctypes.c_uint32),
        ("sim_memory", ctypes.c_uint64),
        ("sim_seed", ctypes.c_uint64),
        ("device_limit", ctypes.c_uint64),
        ("pinned_limit", ctypes.c_uint64),
        ("wait_ns", ctypes.c_uint64),
        ("release_threshold", ctypes.c_uint64),
        ("history", ctypes.c_uint64),
        ("shared", ctypes.c_uint32),
        ("shared_priority", ctypes.c_int32),
        ("shared_guarantee", ctypes.c_uint64),
        ("pinned_guarantee", ctypes.c_uint64),
        ("ledger_folder", ctypes.c_char_p),
        ("plan", ctypes.c_char_p),
        ("slack", ctypes.c_uint64),
    ]


class LedgerOptions(ctypes.Structure):
    """aq_ledger_options."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("folder", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("capacity", ctypes.c_uint64),
        ("guarantee", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("priority", ctypes.c_int32),
        ("reserve", ctypes.c_uint32),
    ]


class Stats(ctypes.Structure):
    """aq_stats."""

    _fields_ = [("size", ctypes.c_size_t)] + [
        (name, ctypes.c_uint64)
        for name in (
            "live", "requested", "cached", "pending", "physical", "peak_live", "peak_requested", "peak_physical",
            "blocks", "allocations", "frees", "failures", "growths", "reaped", "moves", "adoptions", "fences",
            "stream_waits", "host_waits", "plan_hits", "plan_strays", "plan_overlaps", "plan_resynchronisations",
        )
    ]  # fmt: skip


class Facts(ctypes.Structure):
    """aq_device_facts."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("memory", ctypes.c_uint64),
        ("free_memory", ctypes.c_uint64),
        ("granularity", ctypes.c_uint64),
        ("ordinal", ctypes.c_uint32),
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("node", ctypes.c_int32),
        ("simulated", ctypes.c_uint32),
        ("virtual_memory", ctypes.c_uint32),
        ("name", ctypes.c_char * 128),
        ("pci_address", ctypes.c_char * 32),
    ]


_status, _int, _u32, _u64 = ctypes.c_int32, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64
_size, _ptr, _to = ctypes.c_ssize_t, ctypes.c_void_p, ctypes.POINTER

# Of each function what it answers and takes.
_DECLARED: dict[str, tuple[Any, list[Any]]] = {
    "aq_version": (_u32, []),
    "aq_status_name": (ctypes.c_char_p, [_status]),
    "aq_last_error": (ctypes.c_char_p, []),
    "aq_text_free": (None, [_ptr]),
    "aq_runtime_create": (_status, [_to(Options), _to(_u64)]),
    "aq_runtime_destroy": (_status, [_u64]),
    "aq_device_count": (_status, [_u64, _to(_u32)]),
    "aq_device": (_status, [_u64, _u32, _to(Facts)]),
    "aq_free_on": (_status, [_u64, _u32, _u64, _ptr]),
    "aq_trim": (_status, [_u64, _u32, _u64, _to(_u64)]),
    "aq_stream_retire": (_status, [_u64, _u32, _ptr]),
    "aq_limit": (_status, [_u64, _u32, _to(_u64), _to(_u64)]),
    "aq_set_limit": (_status, [_u64, _u32, _u64, _to(_u64)]),
    "aq_pinned_limit": (_status, [_u64, _to(_u64), _to(_u64)]),
    "aq_set_pinned_limit": (_status, [_u64, _u64, _to(_u64)]),
    "aq_device_stats": (_status, [_u64, _u32, _to(Stats)]),
    "aq_pinned_stats": (_status, [_u64, _u32, _to(Stats)]),
    "aq_pinned_trim": (_status, [_u64, _u32, _u64, _to(_u64)]),
    "aq_snapshot": (_status, [_u64, _to(_ptr)]),
    "aq_memory_snapshot": (_status, [_u64, _u32, ctypes.c_char_p]),
    "aq_torch_setup": (_status, [_to(Options)]),
    "aq_torch_runtime": (_status, [_to(_u64)]),
    "aq_torch_init": (_status, [_int]),
    "aq_torch_alloc": (_ptr, [_size, _int, _ptr]),
    "aq_torch_malloc": (_status, [_size, _int, _ptr, _to(_ptr)]),
    "aq_torch_free": (_status, [_ptr, _size, _int, _ptr]),
    "aq_torch_record_stream": (_status, [_ptr, _ptr]),
    "aq_torch_base_alloc": (_ptr, [_ptr, _to(ctypes.c_size_t)]),
    "aq_torch_memory_fraction": (_status, [ctypes.c_double, _int]),
    "aq_torch_reset": (_status, []),
    "aq_torch_region": (_status, [ctypes.c_char_p]),
    "aq_torch_pool_tag": (_status, [_int, _u64, _u64, ctypes.c_char_p]),
    "aq_torch_pause": (_status, [_to(ctypes.c_char_p), _to(_u32), ctypes.c_size_t, ctypes.c_char_p, _to(_u64)]),
    "aq_torch_resume": (_status, [_to(ctypes.c_char_p), ctypes.c_size_t, _int, _to(_u64)]),
    "aq_torch_backup": (_status, [_ptr, ctypes.c_size_t, _ptr, _to(_int)]),
    "aq_torch_tag": (_status, [ctypes.c_char_p, _to(_u64), _to(_int)]),
    "aq_elastic_reserve": (_status, [_u64, _u32, _u64, _to(_u64), _ptr, _to(_u64), _to(_u64)]),
    "aq_elastic_commit": (_status, [_u64, _u64, _u64]),
    "aq_elastic_release": (_status, [_u64, _u64, _u64, _ptr, _u32]),
    "aq_elastic_check": (_status, [_u64, _u64, _u64]),
    "aq_elastic_committed": (_status, [_u64, _to(_u64), ctypes.c_size_t, _to(ctypes.c_size_t), _to(_u64)]),
    "aq_elastic_dlpack": (_status, [_u64, _to(_ptr)]),
    "aq_elastic_destroy": (_status, [_u64]),
    "aq_torch_share": (_status, [_ptr, _ptr, _to(ctypes.c_size_t)]),
    "aq_torch_receive": (_status, [_int, _ptr, ctypes.c_size_t, _to(_ptr)]),
    "aq_torch_close": (_status, [_ptr]),
    "aq_fenced_alloc": (_ptr, [ctypes.c_size_t]),
    "aq_fenced_free": (_status, [_ptr]),
    "aq_registered_create": (_status, [_int, _u64, _int, _ptr, _ptr, _ptr, _to(_u64), _to(_ptr)]),
    "aq_registered_defer": (_status, [_u64, _ptr, _ptr]),
    "aq_registered_chunk": (_status, [_u64, _u64, _to(_u64), _to(_u64), _to(_int)]),
    "aq_registered_has": (_u32, [_ptr]),
    "aq_registered_release": (_status, [_u64, _u64]),
    "aq_registered_destroy": (_status, [_u64]),
    "aq_ledger_join": (_status, [_to(LedgerOptions), _to(_u64)]),
    "aq_ledger_leave": (_status, [_u64]),
    "aq_ledger_claim": (_status, [_u64, _u64, _u64]),
    "aq_ledger_release": (_status, [_u64, _u64]),
    "aq_ledger_member": (_status, [_u64, _to(_u64), _to(_u64), _to(_u64), _to(_u64)]),
    "aq_ledger_measure": (_status, [_u64, _u64]),
    "aq_ledger_figures": (_status, [ctypes.c_char_p, ctypes.c_char_p, _to(_ptr)]),
    "aq_ledger_names": (_status, [ctypes.c_char_p, _to(_ptr)]),
    "aq_ledger_of_device": (_status, [_u64, _u32, _to(_ptr), _to(_u64)]),
    "aq_ledger_of_pinned": (_status, [_u64, _to(_ptr), _to(_u64)]),
    "aq_pinned_alloc": (_status, [_u64, _u32, _u64, _u64, _to(_ptr)]),
    "aq_pinned_free": (_status, [_ptr]),
    "aq_pinned_is_pinned": (_status, [_ptr, _to(_int)]),
    "aq_alloc": (_status, [_u64, _u32, _u64, _ptr, _to(_u64)]),
    "aq_free": (_status, [_u64, _u32, _u64]),
    "aq_upload_begin": (_status, [_u64, _u32, _u64, _u64, _ptr, _u64, _ptr, _to(_u64)]),
    "aq_download": (_status, [_u64, _u32, _u64, _u64, _ptr, _u64, _ptr]),
    "aq_ticket_wait": (_status, [_u64]),
    "aq_ticket_free": (_status, [_u64]),
    "aq_sim_stream_create": (_status, [_u64, _u32, _to(_ptr)]),
    "aq_sim_stream_wait": (_status, [_u64, _u32, _ptr, _ptr]),
    "aq_sim_stream_synchronize": (_status, [_u64, _u32, _ptr]),
    "aq_sim_touch": (_status, [_u64, _u32, _ptr, _u64, _u64, _u32]),
    "aq_sim_violations": (_status, [_u64, _to(_u64), _to(_ptr)]),
}


def _names(form: type[ctypes.Structure]) -> list[str]:
    return [field[0] for field in form._fields_]


def find(path: str | os.PathLike[str] | None = None) -> str:
    """Where the library is: `path`, or $AQUIFER_LIB, or beside this package, or in a build of the project around it."""
    if path is not None or "AQUIFER_LIB" in os.environ:
        places = [pathlib.Path(path if path is not None else os.environ["AQUIFER_LIB"])]
    else:
        here = pathlib.Path(__file__).resolve().parent
        name, project = "libaquifer_ffi.so", here.parent.parent
        places = [here / name] + [project / place / name for place in (".gpu/lib", "target/release", "target/debug")]
    for place in places:
        if place.is_file():
            return str(place.resolve())
    looked = "\n".join(f"  {place}" for place in places)
    raise LibraryNotFound(
        f"libaquifer_ffi.so is in none of these places:\n{looked}\n"
        "Build it (cargo build --release -p aquifer-ffi) and name it: install(lib=...) or AQUIFER_LIB=..."
    )


class Library:
    """The library, loaded. Its functions are attributes under their own names; what answers with a status is wrapped, and
    raises AquiferError where that is not AQ_OK."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    # Whether the process's runtime relies on retire() before a stream is destroyed: see aquifer_torch.setup().
    streams_retired = True

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = find(path)
        self._cdll = ctypes.CDLL(self.path)
        for name, (answer, takes) in _DECLARED.items():
            try:
                call = getattr(self._cdll, name)
            except AttributeError:
                raise LibraryVersion(f"{self.path} has no {name}: it is of another version than this package") from None
            call.restype, call.argtypes = answer, takes
            setattr(self, name, self._checked(call) if answer is _status else call)
        version = divmod(self.aq_version(), 1 << 16)
        if version != VERSION:
            raise LibraryVersion(f"{self.path} speaks version {version} of its interface, this package {VERSION}")

    def _checked(self, call: Callable[..., int]) -> Callable[..., None]:
        def checked(*arguments: Any) -> None:
            status = call(*arguments)
            if status:
                name = self.aq_status_name(status).decode()
                raise AquiferError(status, name, self.aq_last_error().decode(errors="replace"))

        return checked

    def address(self, name: str) -> int:
        """Where a function is, for those who take function pointers."""
        return ctypes.cast(getattr(self._cdll, name), ctypes.c_void_p).value or 0

    def runtime(self) -> int:
        """The runtime that serves PyTorch in this process."""
        found = _u64()
        self.aq_torch_runtime(ctypes.byref(found))
        return found.value

    def stats(self, device: int) -> dict[str, int]:
        """What a device's pool holds: the fields of aq_stats."""
        stats = Stats(size=ctypes.sizeof(Stats))
        self.aq_device_stats(self.runtime(), device, ctypes.byref(stats))
        return {name: getattr(stats, name) for name in _names(Stats) if name != "size"}

    def pinned_stats(self, device: int) -> dict[str, int]:
        """The figures of the pool of pinned memory next to a device: the fields of aq_stats."""
        stats = Stats(size=ctypes.sizeof(Stats))
        self.aq_pinned_stats(self.runtime(), device, ctypes.byref(stats))
        return {name: getattr(stats, name) for name in _names(Stats) if name != "size"}

    def facts(self, device: int) -> Facts:
        """What a device is."""
        facts = Facts(size=ctypes.sizeof(Facts))
        self.aq_device(self.runtime(), device, ctypes.byref(facts))
        return facts

    def devices(self) -> int:
        """How many devices there are."""
        count = _u32()
        self.aq_device_count(self.runtime(), ctypes.byref(count))
        return count.value

    def limit(self, device: int) -> tuple[int, int]:
        """What a device may hold at most, and holds: bytes."""
        limit, used = _u64(), _u64()
        self.aq_limit(self.runtime(), device, ctypes.byref(limit), ctypes.byref(used))
        return limit.value, used.value

    def set_limit(self, device: int, limit: int) -> int:
        """Sets it, and answers with the bytes that are held above it."""
        excess = _u64()
        self.aq_set_limit(self.runtime(), device, limit, ctypes.byref(excess))
        return excess.value

    def pinned_limit(self) -> tuple[int, int]:
        """The limit of pinned memory, and the bytes that are in use: bytes."""
        limit, used = _u64(), _u64()
        self.aq_pinned_limit(self.runtime(), ctypes.byref(limit), ctypes.byref(used))
        return limit.value, used.value

    def set_pinned_limit(self, limit: int) -> int:
        """Sets the limit of pinned memory. Returns the bytes that are held above it."""
        excess = _u64()
        self.aq_set_pinned_limit(self.runtime(), limit, ctypes.byref(excess))
        return excess.value

    def trim(self, device: int, keep: int = 0) -> int:
        """Gives free memory above `keep` bytes back to the driver, and answers with how much that was."""
        given = _u64()
        self.aq_trim(self.runtime(), device, keep, ctypes.byref(given))
        return given.value

    def trim_pinned(self, device: int, keep: int = 0) -> int:
        """Gives free pinned memory next to a device, above `keep` bytes, back to the kernel. Returns the bytes."""
        given = _u64()
        self.aq_pinned_trim(self.runtime(), device, keep, ctypes.byref(given))
        return given.value

    def pause(self, keep: dict[str, int], folder: str | None = None) -> int:
        """Parks tags, with one of KEEP_... for each. Returns the bytes that went back to the devices."""
        names = (ctypes.c_char_p * len(keep))(*(name.encode() for name in keep))
        released = _u64()
        at = None if folder is None else os.fsencode(folder)
        self.aq_torch_pause(names, (_u32 * len(keep))(*keep.values()), len(keep), at, ctypes.byref(released))
        return released.value

    def resume(self, tags: list[str], retain: bool = False) -> int:
        """Resumes tags, and frees their contents in host memory, or retains them. Returns the bytes that were taken."""
        names = (ctypes.c_char_p * len(tags))(*(name.encode() for name in tags))
        taken = _u64()
        self.aq_torch_resume(names, len(tags), retain, ctypes.byref(taken))
        return taken.value

    def backup(self, address: int, size: int, into: int) -> bool:
        """Copies the contents that the last pause has kept of a range of device memory to host memory. Returns whether there
        are any."""
        found = _int()
        self.aq_torch_backup(address, size, into, ctypes.byref(found))
        return bool(found.value)

    def tag(self, tag: str) -> tuple[int, bool]:
        """The bytes of device memory that a tag holds, and whether it is paused."""
        held, paused = _u64(), _int()
        self.aq_torch_tag(tag.encode(), ctypes.byref(held), ctypes.byref(paused))
        return held.value, bool(paused.value)

    def text(self, call: Callable[..., None], *arguments: Any) -> str:
        """Calls a function that stores a text in its argument behind these. Returns the text."""
        found = _ptr()
        call(*arguments, ctypes.byref(found))
        try:
            return ctypes.string_at(found.value or 0).decode()
        finally:
            self.aq_text_free(found)

    def snapshot(self) -> dict[str, Any]:
        """All that the runtime knows of itself."""
        found: dict[str, Any] = json.loads(self.text(self.aq_snapshot, self.runtime()))
        return found

    def memory_snapshot(self, device: int, path: str | os.PathLike[str]) -> None:
        """Writes what a device's pool did last and holds, as PyTorch's memory viewer reads it."""
        self.aq_memory_snapshot(self.runtime(), device, os.fsencode(path))
