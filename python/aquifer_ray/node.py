"""The actor of a node: it knows the node's memories, places requests on them, and lets them wait in turn.

It holds no bytes: each worker joins the ledger by itself, so that its claim ends with it, and not with this actor. What the
actor has promised and no worker has claimed yet lapses after HOLD seconds. So its death loses no lease, and a worker that dies
before it claims delays others by no more than that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from aquifer_torch import AquiferError
from aquifer_torch import ledger

from . import placing
from .errors import LeaseRefused, NoMemory
from .memory import MIB, Memory, machine, resources
from .placing import POLICIES, Request, Room

if TYPE_CHECKING:
    import ray

__all__ = ["Node", "POLICIES", "Ticket", "node_actor", "start"]

NAMESPACE = "aquifer"
# How long a promise is kept for a worker that has not claimed, and for the workers of a group, which are still to start.
HOLD, HOLD_GROUP = 10.0, 60.0
# How often the ledgers are read while requests wait: the death of a member wakes no process.
PAUSE = 0.02
# The most groups whose places are remembered.
MOST_GROUPS = 1024


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A promise of bytes of a memory."""

    number: int
    memory: Memory
    size: int


@dataclasses.dataclass
class _Hold:
    memory: int
    size: int
    until: float


@dataclasses.dataclass
class _Waiting:
    request: Request
    hold: float
    granted: asyncio.Future[list[Ticket]]


class Node:
    """The memories of one node. An actor: see start()."""

    def __init__(self, memories: list[Memory] | None, declared: dict[str, float], policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is none of {', '.join(POLICIES)}")
        self.memories = machine() if memories is None else memories
        self.policy = policy
        has = resources(self.memories)
        for resource, units in declared.items():
            if units > has.get(resource, 0):
                raise NoMemory(f"the node declares {units:.0f} MiB of {resource} to Ray, and has {has.get(resource, 0)}")
        self.holds: dict[int, _Hold] = {}
        self.next = 1
        self.waiting: list[_Waiting] = []
        self.groups: dict[str, asyncio.Future[dict[int, Ticket]]] = {}
        self.server: asyncio.Task[None] | None = None

    async def known(self) -> list[Memory]:
        """Returns the memories."""
        return self.memories

    async def figures(self) -> list[dict[str, Any]]:
        """Returns the figures of the ledgers of the memories, as aquifer_torch.ledger.figures() does, with "resource" and
        "promised"."""
        self._expire()
        found = []
        for number, memory in enumerate(self.memories):
            promised = sum(hold.size for hold in self.holds.values() if hold.memory == number)
            found.append({**self._figures(memory), "resource": memory.resource, "promised": promised})
        return found

    async def place(self, size: int, resource: str, wait: float, priority: int, since: float) -> Ticket:
        """Waits in turn for `size` bytes of one memory, and promises them. `since` is the time at which the caller first
        asked, by the clock of the node. LeaseRefused, NoMemory."""
        among = self._among(resource)
        (ticket,) = await self._wait(Request([size], among, priority, since), wait, HOLD)
        return ticket

    async def place_in_group(
        self, group: str, part: int, sizes: dict[int, int], size: int, resource: str, wait: float, priority: int, since: float
    ) -> Ticket:
        """As place(), for a part of a group, whose parts on this node get memories of their own. The first part that asks
        waits for all of them. A part that asks again, as after a restart, gets `size` bytes of the memory that it had."""
        among = self._among(resource)
        if group in self.groups:
            ticket = (await asyncio.shield(self.groups[group]))[part]
            if self._promised(ticket):
                return ticket
            number = self.memories.index(ticket.memory)
            (again,) = await self._wait(Request([size], [number], priority, since), wait, HOLD)
            return again
        placed: asyncio.Future[dict[int, Ticket]] = asyncio.get_running_loop().create_future()
        self.groups[group] = placed
        try:
            parts = sorted(sizes)
            request = Request([sizes[part] for part in parts], among, priority, since)
            tickets = dict(zip(parts, await self._wait(request, wait, HOLD_GROUP)))
        except BaseException as error:
            del self.groups[group]
            placed.set_exception(error)
            # It may be that no other part waits.
            placed.exception()
            raise
        placed.set_result(tickets)
        if len(self.groups) > MOST_GROUPS:
            del self.groups[next(iter(self.groups))]
        return tickets[part]

    async def claimed(self, number: int) -> None:
        """Ends a promise whose worker has claimed the bytes, or gives up."""
        self.holds.pop(number, None)

    async def forget(self, group: str) -> None:
        """Forgets the places of a group."""
        placed = self.groups.get(group)
        if placed is not None and placed.done():
            del self.groups[group]

    def _among(self, resource: str) -> list[int]:
        return [number for number, memory in enumerate(self.memories) if memory.resource == resource]

    def _promised(self, ticket: Ticket) -> bool:
        self._expire()
        return ticket.number in self.holds

    def _expire(self) -> None:
        now = time.monotonic()
        self.holds = {number: hold for number, hold in self.holds.items() if hold.until > now}

    def _figures(self, memory: Memory) -> dict[str, Any]:
        try:
            return ledger.figures(memory.name, memory.folder)
        except AquiferError as error:
            # Nothing has joined it yet.
            if error.name != "AQ_ERROR_SYSTEM":
                raise
            return {"name": memory.name, "capacity": memory.capacity, "claimed": 0, "unaccounted": 0, "members": []}

    def _rooms(self) -> list[Room]:
        self._expire()
        rooms = []
        for memory in self.memories:
            found = self._figures(memory)
            guaranteed = sum(member["guarantee"] for member in found["members"])
            taken = sum(max(member["guarantee"], member["claimed"]) for member in found["members"])
            free = memory.capacity - found["unaccounted"]
            rooms.append(Room(memory.capacity, free - taken, free - guaranteed))
        for hold in self.holds.values():
            rooms[hold.memory].take(hold.size)
        return rooms

    async def _wait(self, request: Request, wait: float, hold: float) -> list[Ticket]:
        if not placing.could_ever(request, [memory.capacity for memory in self.memories]):
            sizes = ", ".join(f"{size / MIB:.0f}" for size in request.sizes)
            has = ", ".join(f"{self.memories[number].capacity / MIB:.0f}" for number in request.among)
            raise NoMemory(f"{sizes} MiB do not fit in memories of {has or 'no'} MiB, one for each")
        waiting = _Waiting(request, hold, asyncio.get_running_loop().create_future())
        self.waiting.append(waiting)
        self._serve()
        if self.waiting and (self.server is None or self.server.done()):
            self.server = asyncio.create_task(self._serve_until_none_waits())
        try:
            return await asyncio.wait_for(waiting.granted, wait)
        except (TimeoutError, asyncio.TimeoutError):
            raise LeaseRefused(self._described(request)) from None
        finally:
            if waiting in self.waiting:
                self.waiting.remove(waiting)

    def _described(self, request: Request) -> str:
        sizes = " and ".join(f"{size / MIB:.0f} MiB" for size in request.sizes)
        rooms = self._rooms()
        lines = [f"{sizes} of the node's memories"]
        for number in request.among:
            memory, room = self.memories[number], rooms[number]
            lines.append(f"  {memory.name}: {room.admissible / MIB:.0f} of {memory.capacity / MIB:.0f} MiB can be leased")
            for member in self._figures(memory)["members"]:
                has = f"{member['claimed'] / MIB:.0f} MiB, {member['guarantee'] / MIB:.0f} guaranteed"
                lines.append(f"    process {member['process']} holds {has}: {member['command'][:60]}")
        return "\n".join(lines)

    async def _serve_until_none_waits(self) -> None:
        while self.waiting:
            await asyncio.sleep(PAUSE)
            self._serve()

    def _serve(self) -> None:
        try:
            served = placing.serve([waiting.request for waiting in self.waiting], self._rooms(), self.policy)
        except Exception as error:
            # Such as of a ledger that cannot be read. It is that of the requests that wait.
            failed, self.waiting = self.waiting, []
            for waiting in failed:
                if not waiting.granted.done():
                    waiting.granted.set_exception(error)
            return
        for request, memories in served:
            waiting = next(waiting for waiting in self.waiting if waiting.request is request)
            self.waiting.remove(waiting)
            if not waiting.granted.done():
                waiting.granted.set_result([self._promise(waiting, part, at) for part, at in enumerate(memories)])

    def _promise(self, waiting: _Waiting, part: int, memory: int) -> Ticket:
        size = waiting.request.sizes[part]
        ticket = Ticket(self.next, self.memories[memory], size)
        self.next += 1
        self.holds[ticket.number] = _Hold(memory, size, time.monotonic() + waiting.hold)
        return ticket


def actor_name(node_id: str) -> str:
    """Returns the name of a node's actor in NAMESPACE."""
    return f"aquifer-node-{node_id}"


def node_actor(
    node_id: str | None = None, memories: list[Memory] | None = None, policy: str = "most_free"
) -> ray.actor.ActorHandle[Node]:
    """Returns the actor of a node, by default of this one, which is created if it does not exist."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = node_id or ray.get_runtime_context().get_node_id()
    name = actor_name(node_id)
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        pass
    has = next((found["Resources"] for found in ray.nodes() if found["NodeID"] == node_id and found["Alive"]), None)
    if has is None:
        raise ValueError(f"no node {node_id} is alive")
    declared = {resource: units for resource, units in has.items() if resource.startswith("aquifer_") and "_group_" not in resource}
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    return ray.remote(Node).options(**options).remote(memories, declared, policy)


def start(
    memories: dict[str, list[Memory]] | None = None, policy: str = "most_free"
) -> dict[str, ray.actor.ActorHandle[Node]]:
    """Creates the actors of nodes that declare memory to Ray, and waits until they know their memories. Not needed, since the
    first lease() of a node does so, except to choose a policy or memories.

    memories  of each node by its id; else of all nodes that are alive those that machine() finds there
    policy    which memory a request gets, of those with room: "most_free", "best_fit" for the least that suffices, so that
              large requests find room later, or "least_loaded"

    NoMemory if a node declares more than it has.
    """
    import ray

    found = {}
    for known in ray.nodes():
        node_id = known["NodeID"]
        declares = known["Alive"] and any(resource.startswith("aquifer_") for resource in known["Resources"])
        if declares if memories is None else node_id in memories:
            found[node_id] = node_actor(node_id, None if memories is None else memories[node_id], policy)
    for actor in found.values():
        try:
            ray.get(actor.known.remote())
        except ray.exceptions.ActorDiedError as error:
            # It would be started again, with the same result.
            ray.kill(actor)
            if NoMemory.__name__ in str(error):
                raise NoMemory(str(error)) from None
            raise
    return found
