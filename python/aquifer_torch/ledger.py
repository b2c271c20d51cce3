"""Bytes of one memory that processes of one user share: aquifer.h's ledgers. Needs neither PyTorch nor a GPU.

    from aquifer_torch.ledger import Member, figures
    with Member("GPU-...", capacity=80 << 30, guarantee=20 << 30) as member:
        member.claim(30 << 30, wait=5)
        print(figures("GPU-...")["free"])

A process claims bytes before it takes them. Its memberships end with it, also by SIGKILL, by the kernel's hand. A runtime of
aquifer_torch.setup(shared=...) is a member by itself.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import weakref
from types import TracebackType
from typing import Any

from .errors import AquiferError
from .library import Library, LedgerOptions

# The name of the ledger of pinned memory, as aq_ledger_of_pinned returns it.
PINNED = "pinned-memory"

_NEVER, _NOT_NOW = "AQ_ERROR_OUT_OF_BUDGET", "AQ_ERROR_OUT_OF_MEMORY"


class ClaimRefused(AquiferError):
    """A claim or a guarantee was refused. Nothing was claimed.

    `is_final`: the member's own limit or the capacity excludes it, so that no release of others helps.
    """

    @property
    def is_final(self) -> bool:
        return self.name == _NEVER


class GuaranteeRefused(AquiferError):
    """The guarantees of all members would exceed the capacity. The process has not joined; another may leave."""


@functools.lru_cache(maxsize=None)
def library() -> Library:
    """Returns the library, loaded once."""
    return Library()


def _folder(folder: str | os.PathLike[str] | None) -> bytes | None:
    return None if folder is None else os.fsencode(folder)


def _leave(number: int) -> None:
    try:
        library().aq_ledger_leave(number)
    except AquiferError:
        # It has been left by hand.
        pass


class Member:
    """A membership in the ledger of a memory. Ends with leave(), a `with` block, its last reference, or the process.

    name       the memory: a device's as device() returns it, PINNED, or any other name
    capacity   its bytes, the same for all members; 0: the ledger exists
    folder     of the ledgers, else that of AQUIFER_LEDGER
    guarantee  a claim up to this sum comes before those of others beyond their guarantees
    limit      the most that this member claims, else the capacity; limits of administrators for the process count beside it
    priority   of members that wait beyond their guarantees, higher ones come first
    reserve    the guarantee is kept free while it is not used, and not lent

    GuaranteeRefused if the guarantees of all members would exceed the capacity; AquiferError for what is no ledger, bad terms,
    or 256 members.
    """

    def __init__(
        self,
        name: str,
        capacity: int = 0,
        *,
        folder: str | os.PathLike[str] | None = None,
        guarantee: int = 0,
        limit: int = 0,
        priority: int = 0,
        reserve: bool = False,
    ) -> None:
        self.name, self.folder = name, folder
        options = LedgerOptions(
            size=ctypes.sizeof(LedgerOptions),
            folder=_folder(folder),
            name=name.encode(),
            capacity=capacity,
            guarantee=guarantee,
            limit=limit,
            priority=priority,
            reserve=reserve,
        )
        number = ctypes.c_uint64()
        try:
            library().aq_ledger_join(ctypes.byref(options), ctypes.byref(number))
        except AquiferError as error:
            if error.name == _NEVER:
                raise GuaranteeRefused(error.status, error.name, error.text) from None
            raise
        self._number = number.value
        self._end = weakref.finalize(self, _leave, self._number)

    def claim(self, size: int, wait: float = 0.0) -> None:
        """Claims `size` bytes, or nothing. Waits for up to `wait` seconds until other members release them.

        ClaimRefused; AquiferError after leave(), and in a forked child.
        """
        try:
            library().aq_ledger_claim(self._number, size, int(wait * 1e9))
        except AquiferError as error:
            if error.name in (_NEVER, _NOT_NOW):
                raise ClaimRefused(error.status, error.name, error.text) from None
            raise

    def release(self, size: int) -> None:
        """Releases `size` bytes of what is claimed. AquiferError for more than that."""
        library().aq_ledger_release(self._number, size)

    def leave(self) -> None:
        """Ends the membership with its claims. May be called again."""
        self._end()

    @property
    def is_live(self) -> bool:
        """Whether the membership has not been left."""
        return self._end.alive

    def _figures(self) -> tuple[int, int, int, int]:
        found = [ctypes.c_uint64() for _ in range(4)]
        library().aq_ledger_member(self._number, *map(ctypes.byref, found))
        claimed, limit, room, owed = (figure.value for figure in found)
        return claimed, limit, room, owed

    @property
    def claimed(self) -> int:
        """The bytes that are claimed."""
        return self._figures()[0]

    @property
    def limit(self) -> int:
        """The most that this member can claim, in bytes."""
        return self._figures()[1]

    @property
    def room(self) -> int:
        """The bytes that a claim could take now."""
        return self._figures()[2]

    @property
    def owed(self) -> int:
        """The bytes beyond the guarantee that others wait for."""
        return self._figures()[3]

    def measure(self, in_use: int) -> None:
        """Records the bytes of the memory that are in use by all processes, as its driver counts them. What no member has
        claimed of them is unaccounted, and taken from the capacity."""
        library().aq_ledger_measure(self._number, in_use)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave()

    def __repr__(self) -> str:
        return f"Member({self.name!r}, {'live' if self.is_live else 'left'})"


def figures(name: str, folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Returns the figures of a ledger and of its live members, in bytes: "capacity", "claimed", "free", "unaccounted",
    "members". Joins nothing. AquiferError if there is no such ledger."""
    call = library().aq_ledger_figures
    found: dict[str, Any] = json.loads(library().text(call, _folder(folder), name.encode()))
    return found


def names(folder: str | os.PathLike[str] | None = None) -> list[str]:
    """Returns the names of the ledgers of a folder, none if there is no such folder."""
    found: list[str] = json.loads(library().text(library().aq_ledger_names, _folder(folder)))
    return found


def _memory(call: Any, *arguments: Any) -> tuple[str, int]:
    capacity = ctypes.c_uint64()
    found = ctypes.c_void_p()
    call(*arguments, ctypes.byref(found), ctypes.byref(capacity))
    try:
        return ctypes.string_at(found.value or 0).decode(), capacity.value
    finally:
        library().aq_text_free(found)


def device(index: int) -> tuple[str, int]:
    """Returns the name and the capacity of the ledger of a device of this process's runtime, which is created if there is
    none yet."""
    return _memory(library().aq_ledger_of_device, library().runtime(), index)


def pinned() -> tuple[str, int]:
    """Returns the name and the capacity of the ledger of pinned memory, which is half of the host's memory. As device()."""
    return _memory(library().aq_ledger_of_pinned, library().runtime())
