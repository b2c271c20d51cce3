"""Which memory of a node a request gets, and in which order requests are served. Knows neither Ray nor ledgers.

Requests wait in turn: higher priorities first, then earlier ones. A request that does not fit keeps the memory that is nearest
to fit it, until it is served: later requests are placed on the others only. So it waits no longer than the leases that lie there
when it begins to wait, and earlier requests. A group is one request for several memories at once, all of them different.
"""

from __future__ import annotations

import dataclasses
from typing import Callable


@dataclasses.dataclass
class Room:
    """What is free in a memory, in bytes.

    unclaimed   what no process has claimed, is guaranteed or uses
    admissible  what can still be guaranteed: others give back what they hold beyond their guarantees
    """

    capacity: int
    unclaimed: int
    admissible: int

    def take(self, size: int) -> None:
        self.unclaimed -= size
        self.admissible -= size


@dataclasses.dataclass
class Request:
    """What is wanted: for each part the bytes, on a memory of its own each.

    among   the memories that it may have, by their numbers
    kept    those that are kept for it while it waits
    """

    sizes: list[int]
    among: list[int]
    priority: int = 0
    arrival: float = 0.0
    kept: list[int] = dataclasses.field(default_factory=list)

    def order(self) -> tuple[int, float]:
        return -self.priority, self.arrival


# The key by which the best of several memories is chosen, of its room; the lowest wins. As aquifer's Policy of these names.
POLICIES: dict[str, Callable[[Room], float]] = {
    "most_free": lambda room: -room.unclaimed,
    "best_fit": lambda room: room.unclaimed,
    "least_loaded": lambda room: -room.unclaimed / room.capacity,
}


def choose(size: int, rooms: list[Room], among: list[int], policy: str) -> int | None:
    """Returns the memory for a part of `size` bytes, or None if none has room. Those that have it free come before those where
    others must give back."""
    key = POLICIES[policy]
    fitting = [number for number in among if rooms[number].admissible >= size]
    free = [number for number in fitting if rooms[number].unclaimed >= size]
    return min(free or fitting, key=lambda number: (key(rooms[number]), number), default=None)


def place(request: Request, rooms: list[Room], policy: str) -> list[int] | None:
    """Returns a memory for each part of a request, or None if not all of them fit now. Changes nothing."""
    left, chosen = list(request.among), dict[int, int]()
    # The largest first, since it fits in the fewest places.
    for part in sorted(range(len(request.sizes)), key=lambda part: -request.sizes[part]):
        found = choose(request.sizes[part], rooms, left, policy)
        if found is None:
            return None
        chosen[part] = found
        left.remove(found)
    return [chosen[part] for part in range(len(request.sizes))]


def could_ever(request: Request, capacities: list[int]) -> bool:
    """Returns whether the memories would do if they were empty."""
    empty = [Room(capacity, capacity, capacity) for capacity in capacities]
    return place(request, empty, "best_fit") is not None


def serve(requests: list[Request], rooms: list[Room], policy: str) -> list[tuple[Request, list[int]]]:
    """Returns the requests that are served now, with their memories. Takes them from the rooms."""
    served = []
    kept: set[int] = set()
    for request in sorted(requests, key=Request.order):
        among = [number for number in request.among if number not in kept]
        found = place(dataclasses.replace(request, among=among), rooms, policy)
        if found is not None:
            for number, size in zip(found, request.sizes):
                rooms[number].take(size)
            served.append((request, found))
            continue
        if not request.kept or kept.intersection(request.kept):
            nearest = sorted(among, key=lambda number: -rooms[number].admissible)
            request.kept = nearest[: len(request.sizes)]
        kept.update(request.kept)
    return served
