"""The memories of a machine, and how Ray counts them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

# Ray's custom resources, counted in MiB: Ray keeps four decimals of a number, so bytes would be too large.
GPU_MEMORY, PINNED_MEMORY = "aquifer_gpu_mem", "aquifer_pinned_mem"
MIB = 1 << 20
# The label of a node that says how many GPUs it has, for models that need several, and the most of a machine.
GPUS_LABEL, MOST_GPUS = "aquifer-gpus", 64


@dataclasses.dataclass(frozen=True)
class Memory:
    """A memory that processes share by its ledger.

    name      of the ledger
    capacity  in bytes
    resource  as which Ray counts it: GPU_MEMORY or PINNED_MEMORY
    folder    of the ledger, else that of AQUIFER_LEDGER
    """

    name: str
    capacity: int
    resource: str = GPU_MEMORY
    folder: str | None = None

    @property
    def visible(self) -> str | None:
        """What CUDA_VISIBLE_DEVICES calls the device. None for what is no GPU with a UUID."""
        digits = self.name[4:]
        if not self.name.startswith("GPU-") or len(digits) != 32:
            return None
        return "GPU-" + "-".join(digits[begin:end] for begin, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


def in_units(size: int) -> int:
    """Returns the units of Ray's resource that hold `size` bytes."""
    return -(-size // MIB)


def needs(size: int, pinned: int = 0) -> dict[str, Any]:
    """Returns the options of a task or an actor that leases `size` bytes of a device, and `pinned` bytes of pinned memory:
    @ray.remote(**needs(20 << 30)). Rounded up to MiB."""
    wanted = {GPU_MEMORY: in_units(size), PINNED_MEMORY: in_units(pinned)}
    return {"resources": {resource: units for resource, units in wanted.items() if units}}


def machine(keep: int = 0) -> list[Memory]:
    """Returns the memories of this machine: its GPUs and pinned memory, less `keep` bytes of each GPU for contexts and others.

    Asked in a process of its own, so that this one has no CUDA context. With CUDA_VISIBLE_DEVICES only those that it names,
    unless it is empty, as Ray sets it in workers without a GPU.
    """
    environment = dict(os.environ)
    if not environment.get("CUDA_VISIBLE_DEVICES", "x"):
        del environment["CUDA_VISIBLE_DEVICES"]
    command = [sys.executable, "-m", "aquifer_ray", "memories", "--keep", str(keep)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ran.returncode:
        raise RuntimeError(f"the memories of this machine are not known:\n{ran.stderr}")
    return [Memory(**found) for found in json.loads(ran.stdout)]


def here(keep: int = 0) -> list[Memory]:
    """As machine(), in this process, which gets a context on each GPU."""
    from aquifer_torch import ledger
    from aquifer_torch.library import DRIVER_MACHINE

    import aquifer_torch

    library = aquifer_torch.setup(driver=DRIVER_MACHINE)
    found = []
    for device in range(library.devices()):
        name, capacity = ledger.device(device)
        if keep >= capacity:
            raise ValueError(f"{keep} bytes cannot be kept of {capacity} of {name}")
        found.append(Memory(name, capacity - keep))
    name, capacity = ledger.pinned()
    return [*found, Memory(name, capacity, PINNED_MEMORY)]


def labels(memories: list[Memory]) -> dict[str, str]:
    """Returns the labels that a node with these memories has for Ray."""
    return {GPUS_LABEL: str(sum(memory.resource == GPU_MEMORY for memory in memories))}


def resources(memories: list[Memory]) -> dict[str, int]:
    """Returns the resources that a node with these memories has for Ray: whole MiB of each."""
    counted: dict[str, int] = {}
    for memory in memories:
        counted[memory.resource] = counted.get(memory.resource, 0) + memory.capacity // MIB
    return counted
