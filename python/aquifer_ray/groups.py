"""Placement groups of models that need several devices: a bundle of bytes for each."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from .errors import NoMemory
from .memory import GPU_MEMORY, GPUS_LABEL, MIB, MOST_GPUS, in_units

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


def placement_group(sizes: list[int], resource: str = GPU_MEMORY, strategy: str = "STRICT_PACK") -> PlacementGroup:
    """Reserves bytes of several devices in Ray: one bundle for each of `sizes`. On its node, each lease() in a bundle gets a
    device of its own, and the first one waits until there is room for all bundles of the node.

    strategy  Ray's: "STRICT_PACK" for one node, "PACK", "SPREAD" or "STRICT_SPREAD". The first two choose nodes whose label,
              see labels(), says that they have as many GPUs as there are bundles. With the others a node that gets more bundles
              than it has devices refuses their leases

    Wait for its `ready()`, and name it in the scheduling strategy of tasks and actors, as any other of Ray's. NoMemory if no node
    has the label.
    """
    import ray
    from ray.util.placement_group import placement_group as reserve

    if not sizes or min(sizes) <= 0:
        raise ValueError(f"sizes={sizes}: bytes of at least one device")
    selectors = None
    if len(sizes) > 1 and resource == GPU_MEMORY and strategy in ("STRICT_PACK", "PACK"):
        enough = [str(gpus) for gpus in range(len(sizes), MOST_GPUS + 1)]
        if not any(known["Alive"] and known["Labels"].get(GPUS_LABEL) in enough for known in ray.nodes()):
            raise NoMemory(f"no node has a label {GPUS_LABEL}={len(sizes)} or more: ray start --labels=...")
        selectors = [{GPUS_LABEL: f"in({','.join(enough)})"} for _ in sizes]
    return reserve([{resource: in_units(size)} for size in sizes], strategy=strategy, bundle_label_selector=selectors)


def remove_placement_group(group: PlacementGroup) -> None:
    """Removes a group from Ray, which ends its tasks and actors and so their leases, and from the nodes' actors."""
    import ray
    from ray.util.placement_group import placement_group_table
    from ray.util.placement_group import remove_placement_group as remove

    from .node import NAMESPACE, actor_name

    nodes = set(placement_group_table(group)["bundles_to_node_id"].values())
    remove(group)
    for node_id in nodes:
        try:
            ray.get_actor(actor_name(node_id), namespace=NAMESPACE).forget.remote(group.id.hex())
        except ValueError:
            # The node has no actor, or is not alive.
            pass


@dataclasses.dataclass(frozen=True)
class Part:
    """A bundle: its group, its number, and the bytes of all bundles of the group on this node."""

    key: str
    part: int
    sizes: dict[int, int]


def of_this_worker(resource: str, part: int | None) -> Part | None:
    """Returns the bundle that this task or actor runs in, or None if it is in no group of this resource."""
    import ray
    from ray.util.placement_group import get_current_placement_group, placement_group_table

    group = get_current_placement_group()
    if group is None:
        return None
    table = placement_group_table(group)
    here = ray.get_runtime_context().get_node_id()
    sizes = {
        number: int(bundle[resource] * MIB)
        for number, bundle in table["bundles"].items()
        if bundle.get(resource) and table["bundles_to_node_id"][number] == here
    }
    if not sizes:
        return None
    found = _bundle(resource) if part is None else part
    if found is None or found not in sizes:
        raise ValueError(f"lease(part={found}) names none of the bundles on this node: {sorted(sizes)}")
    return Part(group.id.hex(), found, sizes)


def _bundle(resource: str) -> int | None:
    """Returns the bundle whose resource is assigned to this worker. Ray has no public call for it: its names of the resources
    of a group have the number."""
    import ray

    assigned = ray._private.worker.global_worker.core_worker.resource_ids()
    pattern = re.compile(re.escape(resource) + r"_group_(\d+)_[0-9a-f]+")
    found = {int(match[1]) for match in map(pattern.fullmatch, assigned) if match}
    return found.pop() if len(found) == 1 else None
