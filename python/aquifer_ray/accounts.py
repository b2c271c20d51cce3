"""Ray's account of a node's memory beside that of its ledgers."""

from __future__ import annotations

import dataclasses

from .memory import GPU_MEMORY, MIB, PINNED_MEMORY
from .node import node_actor


@dataclasses.dataclass(frozen=True)
class Account:
    """What is in use of a resource on a node, in bytes.

    assigned  what Ray has assigned to tasks, actors and placement groups
    leased    what members of the ledgers have claimed or are guaranteed, whether Ray runs them or not
    declared  what the node has for Ray
    """

    node_id: str
    resource: str
    declared: int
    assigned: int
    leased: int

    @property
    def agrees(self) -> bool:
        """Whether all that is leased is assigned. What is assigned may be leased later."""
        return self.leased <= self.assigned


def accounts() -> list[Account]:
    """Returns the accounts of all nodes that are alive and declare memory. Ray's figures are up to a second old."""
    import ray

    # Ray has no public call for what is available on each node.
    available = ray._private.state.available_resources_per_node()
    found = []
    for known in ray.nodes():
        if not known["Alive"]:
            continue
        declared = {resource: known["Resources"].get(resource, 0) for resource in (GPU_MEMORY, PINNED_MEMORY)}
        if not any(declared.values()):
            continue
        node_id = known["NodeID"]
        figures = ray.get(node_actor(node_id).figures.remote())
        for resource, units in declared.items():
            if not units:
                continue
            members = [member for memory in figures if memory["resource"] == resource for member in memory["members"]]
            leased = sum(max(member["claimed"], member["guarantee"]) for member in members)
            left = available.get(node_id, {}).get(resource, 0)
            found.append(Account(node_id, resource, round(units * MIB), round((units - left) * MIB), leased))
    return found
