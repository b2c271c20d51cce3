"""A transport of tensors between actors on one machine, for Ray's direct transport (alpha in Ray 2.60).

CUDA's own handles between processes are for memory of cudaMalloc, and Ray's transport by them is for GPUs that Ray has assigned.
Here a handle is that of aquifer_torch's blocks: the receiver asks the sender for the physical memory over a socket, maps it,
copies it on the device into a tensor of its own, and unmaps it. So the sender may free or reuse its memory as soon as Ray has no
reference to it any more.

Both actors use aquifer_torch.install(), and see the device. Imports Ray: see register_transport().
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Optional

import ray
from aquifer_torch import AquiferError
from aquifer_torch.ledger import library
from ray.experimental.rdt import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata

from .torch_tensors import TorchTensors

NAME = "AQUIFER"


@dataclasses.dataclass
class HandleMetadata(TensorTransportMetadata):  # type: ignore[misc]
    """What a receiver needs: of each tensor the handle of its block, where in the block it begins, and its bytes."""

    handles: Optional[list[tuple[bytes, int, int]]] = None
    node_id: Optional[str] = None


class HandleTransport(TensorTransportManager):  # type: ignore[misc]
    """Blocks of aquifer's device memory, by handles. One-sided: the sender's share server answers."""

    tensors: Any = TorchTensors

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return False

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> HandleMetadata:
        meta, handles = [], []
        for tensor in rdt_object:
            address, size, shape, dtype = self.tensors.describe(tensor)
            handle, offset = ctypes.create_string_buffer(32), ctypes.c_size_t()
            if size:
                try:
                    library().aq_torch_share(address, handle, ctypes.byref(offset))
                except AquiferError as error:
                    raise ValueError(f"a tensor that is not in aquifer's memory, or moves, cannot be sent: {error}") from None
            meta.append((shape, dtype))
            handles.append((handle.raw, offset.value, size))
        device = self.tensors.device_type if rdt_object else None
        node_id = ray.get_runtime_context().get_node_id()
        return HandleMetadata(tensor_meta=meta, tensor_device=device, handles=handles, node_id=node_id)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: Optional[str] = None) -> Any:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: HandleMetadata,
        communicator_metadata: Any,
        target_buffers: Optional[list[Any]] = None,
    ) -> list[Any]:
        here = ray.get_runtime_context().get_node_id()
        if tensor_transport_metadata.node_id != here:
            sender = tensor_transport_metadata.node_id
            raise ValueError(f"{NAME} sends tensors within a node: the sender is on {sender}, and the receiver on {here}")
        received = []
        targets = target_buffers or [None] * len(tensor_transport_metadata.tensor_meta)
        for (shape, dtype), handle, target in zip(
            tensor_transport_metadata.tensor_meta, tensor_transport_metadata.handles or [], targets
        ):
            received.append(self._receive(shape, dtype, handle, target))
        return received

    def _receive(self, shape: Any, dtype: Any, handle: tuple[bytes, int, int], target: Any) -> Any:
        name, offset, size = handle
        mapped = ctypes.c_void_p()
        if size:
            library().aq_torch_receive(self.tensors.device(), name, len(name), ctypes.byref(mapped))
        try:
            return self.tensors.copy((mapped.value or 0) + offset, size, shape, dtype, target)
        finally:
            if size:
                library().aq_torch_close(mapped)

    def send_multiple_tensors(self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError(f"{NAME} is one-sided: Ray calls the receiver only")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        """Does nothing: a share ends when its block is freed."""

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        raise NotImplementedError(f"{NAME} does not abort transfers")
