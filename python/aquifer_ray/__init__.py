"""Bytes of GPU memory as something that Ray schedules, and leases that end with their process.

    ray start --head --resources="$(python -m aquifer_ray resources)" --labels="$(python -m aquifer_ray labels)"

    @ray.remote(**aquifer_ray.needs(20 << 30))
    def train():
        with aquifer_ray.lease() as lease:              # what Ray has assigned, claimed in the node's ledger
            lease.use()                                 # CUDA sees its device; before the first use of CUDA
            aquifer_torch.install(limit=lease.size)

Ray counts the bytes of a node. One actor for each node, which needs no setup, chooses the device and lets tasks wait in turn.
The ledger of the device, which the worker process joins by itself, is what the bytes are claimed in: claims never exceed the
capacity, whatever runs beside Ray on the machine, and end with the worker by the kernel's hand. No process number is trusted.
"""

from __future__ import annotations

from .accounts import Account, accounts
from .errors import LeaseRefused, NoMemory, NotAssigned
from .groups import placement_group, remove_placement_group
from .leases import Lease, lease, share
from .memory import GPU_MEMORY, MIB, PINNED_MEMORY, Memory, labels, machine, needs, resources
from .node import POLICIES, Ticket, node_actor, start
from .pinned import arrives_pinned

__all__ = [
    "Account",
    "GPU_MEMORY",
    "Lease",
    "LeaseRefused",
    "MIB",
    "Memory",
    "NoMemory",
    "NotAssigned",
    "PINNED_MEMORY",
    "POLICIES",
    "Ticket",
    "accounts",
    "arrives_pinned",
    "labels",
    "lease",
    "machine",
    "needs",
    "node_actor",
    "placement_group",
    "register_transport",
    "remove_placement_group",
    "resources",
    "share",
    "start",
]


def register_transport() -> str:
    """Registers the transport of CUDA tensors between actors of a node with Ray, and returns its name:
    @ray.method(tensor_transport=NAME). Before the actors are created, in the process that creates them. All of them use
    aquifer_torch.install(). Ray calls the interface alpha; it is that of Ray 2.60."""
    import torch
    from ray.experimental.rdt import register_tensor_transport

    from .transport import NAME, HandleTransport

    register_tensor_transport(NAME, ["cuda"], HandleTransport, torch.Tensor)
    return NAME
