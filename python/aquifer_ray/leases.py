"""Leases: bytes that Ray has assigned to a task or an actor, claimed by its process in the ledger of a memory. And shares: the
same bytes as the guarantee of a process that may borrow more."""

from __future__ import annotations

import collections
import os
import threading
import time
import warnings
import weakref
from types import TracebackType
from typing import Any

from aquifer_torch.ledger import ClaimRefused, GuaranteeRefused, Member, device
from aquifer_torch.library import Library

from . import groups
from .errors import LeaseRefused, NotAssigned
from .memory import GPU_MEMORY, MIB, Memory
from .node import Ticket, node_actor

# How long a worker waits in turn before it asks again, in seconds.
ASK_AGAIN = 5.0

# Leases of this process that have not ended.
_live: weakref.WeakSet[Lease] = weakref.WeakSet()
_lock = threading.Lock()
# By resource, the bytes that this process waits for, or that its runtime is guaranteed.
_pending: collections.Counter[str] = collections.Counter()


class Lease:
    """Bytes of a memory, until release(), the end of a `with` block, its last reference, or the death of the process.

    memory  which one
    size    in bytes
    """

    def __init__(self, member: Member, memory: Memory, size: int, task: str | None) -> None:
        self.memory, self.size = memory, size
        # Of a task, whose worker serves other tasks afterwards. None of an actor.
        self._task = task
        self._member = member

    @property
    def is_live(self) -> bool:
        """Whether it has not been given back."""
        return self._member.is_live

    @property
    def owed(self) -> int:
        """The bytes that others wait for beyond what is guaranteed to this lease."""
        return self._member.owed

    def release(self) -> None:
        """Gives the bytes back. May be called again."""
        self._member.leave()

    def use(self) -> None:
        """Makes the device of the lease the only one that CUDA sees in this process, as number 0. Before the first use of
        CUDA: Ray hides all devices from a worker without num_gpus. Does nothing for simulated and for pinned memory."""
        _make_visible(self.memory)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __reduce__(self) -> Any:
        raise TypeError("a lease belongs to the process that claims it, and cannot be sent to another")

    def __repr__(self) -> str:
        return f"Lease({self.size} bytes of {self.memory.name}, {'live' if self.is_live else 'released'})"


def _make_visible(memory: Memory) -> None:
    if memory.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = memory.visible


def assigned(resource: str) -> int:
    """Returns the bytes of a resource that Ray has assigned to the task or actor that runs."""
    import ray

    return int(ray.get_runtime_context().get_assigned_resources().get(resource, 0.0) * MIB)


def _task() -> str | None:
    import ray

    context = ray.get_runtime_context()
    return None if context.get_actor_id() else context.get_task_id()


def _end_leaked(task: str | None) -> None:
    """Ends leases of tasks that this worker has run before: Ray has given their bytes to others."""
    for lease in list(_live):
        if lease.is_live and lease._task is not None and lease._task != task:
            warnings.warn(f"{lease} was kept after its task had ended, and is released", RuntimeWarning, stacklevel=4)
            lease.release()


def _ticket(size: int, resource: str, part: int | None, wait: float, priority: int, since: float) -> tuple[Any, Ticket]:
    """Waits in turn for a promise, as `since` and the priority order the requests. Returns the node's actor with it."""
    import ray

    actor = node_actor()
    group = groups.of_this_worker(resource, part)
    deadline = time.monotonic() + wait
    while True:
        # In pieces, so that the place of a worker that has died is soon no longer kept.
        left = max(0.0, deadline - time.monotonic())
        terms = (resource, min(left, ASK_AGAIN), priority, since)
        if group is None:
            answer = actor.place.remote(size, *terms)
        else:
            answer = actor.place_in_group.remote(group.key, group.part, group.sizes, size, *terms)
        try:
            ticket: Ticket = ray.get(answer)
            return actor, ticket
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, LeaseRefused):
                raise error.cause from None
            if time.monotonic() >= deadline:
                raise LeaseRefused(f"not within {wait:.1f} s: {error.cause}") from None


def _join(memory: Memory, size: int, deadline: float, priority: int) -> Member:
    """Joins the ledger and claims the bytes. Within its guarantee, the claim comes before what others have borrowed."""
    member = Member(memory.name, memory.capacity, folder=memory.folder, guarantee=size, limit=size, priority=priority)
    try:
        member.claim(size, wait=max(0.0, deadline - time.monotonic()))
    except BaseException:
        member.leave()
        raise
    return member


def lease(
    size: int | None = None, *, resource: str = GPU_MEMORY, wait: float = 60.0, priority: int = 0, part: int | None = None
) -> Lease:
    """Leases bytes of one memory of this node, in a task or an actor. This process claims them in the memory's ledger, with a
    guarantee: other processes give back what they hold beyond their own guarantees.

    size      at most what Ray has assigned, see needs(), less other live leases; else all of that
    resource  GPU_MEMORY or PINNED_MEMORY
    wait      seconds until the bytes are there: for its turn on the node, and for other processes
    priority  of requests that wait on the node, higher ones come first
    part      in a placement group which bundle this is, if Ray does not say so

    NotAssigned; LeaseRefused if they are not free in time; NoMemory if no memory of the node is large enough; AquiferError for
    a ledger that cannot be used. Blocks: an async actor calls it in a thread.
    """
    begun, task = time.monotonic(), _task()
    size = _reserve(size, resource, task)
    try:
        made = _lease(size, resource, begun, wait, priority, part, task)
        _live.add(made)
        return made
    finally:
        _unreserve(size, resource)


def _reserve(size: int | None, resource: str, task: str | None) -> int:
    """Counts bytes of what Ray has assigned as in use. Returns them."""
    with _lock:
        _end_leaked(task)
        others = sum(held.size for held in _live if held.is_live and held.memory.resource == resource)
        most = assigned(resource) - others - _pending[resource]
        size = most if size is None else size
        if size <= 0 or size > most:
            raise NotAssigned(f"{size} bytes of {resource}: Ray has assigned {most} more to this task. See aquifer_ray.needs()")
        _pending[resource] += size
        return size


def _unreserve(size: int, resource: str) -> None:
    with _lock:
        _pending[resource] -= size


def _lease(size: int, resource: str, begun: float, wait: float, priority: int, part: int | None, task: str | None) -> Lease:
    deadline = begun + wait
    while True:
        actor, ticket = _ticket(size, resource, part, max(0.0, deadline - time.monotonic()), priority, begun)
        try:
            return Lease(_join(ticket.memory, size, deadline, priority), ticket.memory, size, task)
        except (ClaimRefused, GuaranteeRefused) as error:
            # A process beside Ray was faster, or does not give back.
            if time.monotonic() >= deadline:
                raise LeaseRefused(f"not within {wait:.1f} s: {error.text}") from None
        finally:
            actor.claimed.remote(ticket.number)
        time.sleep(0.02)


def share(
    guarantee: int | None = None, *, wait: float = 60.0, priority: int = 0, part: int | None = None, **settings: Any
) -> Library:
    """Makes the runtime of this process in an actor, with bytes of one device as its guarantee: it takes more than that while
    others leave it, and gives it back on their need. It ends with the process. aquifer_torch.install() uses it afterwards.

    guarantee  at most what Ray has assigned, see needs(), less live leases; else all of that
    settings   of aquifer_torch.setup()

    CUDA must not have been used in this process, and sees this device only, as number 0. Otherwise as lease(), and AlreadyInitialised
    or AquiferError as setup() raises them. RuntimeError if the runtime's device is another one than that which was placed.
    """
    import aquifer_torch

    begun, task = time.monotonic(), _task()
    if task is not None:
        raise NotAssigned("a runtime lives as long as its process, and Ray's bytes as long as the task: share() is for actors")
    size = _reserve(guarantee, GPU_MEMORY, task)
    try:
        actor, ticket = _ticket(size, GPU_MEMORY, part, wait, priority, begun)
        try:
            _make_visible(ticket.memory)
            terms: dict[str, Any] = {"shared": size, "shared_priority": priority, "ledger_folder": ticket.memory.folder}
            library = aquifer_torch.setup(**terms, **settings)
        finally:
            actor.claimed.remote(ticket.number)
    except BaseException:
        _unreserve(size, GPU_MEMORY)
        raise
    found = device(0)[0] if library.devices() else "no device"
    if found != ticket.memory.name:
        raise RuntimeError(f"the runtime of this process is on {found}, and not on {ticket.memory.name}: CUDA was in use before")
    return library
