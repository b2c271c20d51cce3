"""CUDA tensors of PyTorch for the transport between actors: how they are described, and copied from mapped memory. Imports
PyTorch when it is used, and Ray not at all."""

from __future__ import annotations

from typing import Any


class _View:
    """Device memory as what PyTorch takes for an array."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class TorchTensors:
    """How the transport handles CUDA tensors of PyTorch."""

    device_type = "cuda"

    @staticmethod
    def describe(tensor: Any) -> tuple[int, int, Any, Any]:
        """Returns the address, the bytes, the shape and the type of a contiguous tensor, whose queued work is complete."""
        import torch

        if tensor.device.type != "cuda" or not tensor.is_contiguous():
            raise ValueError(f"a tensor of {tensor.device} with strides {tensor.stride()}: it must be contiguous, on a GPU")
        torch.cuda.current_stream(tensor.device).synchronize()
        return tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.shape, tensor.dtype

    @staticmethod
    def device() -> int:
        """Returns the device that tensors are received on."""
        import torch

        return int(torch.cuda.current_device())

    @staticmethod
    def copy(address: int, size: int, shape: Any, dtype: Any, target: Any) -> Any:
        """Returns a copy of mapped memory, in `target` if there is one. The copy is complete."""
        import torch

        view = torch.as_tensor(_View(address, size), device="cuda").view(dtype).reshape(shape)
        copied = torch.empty_like(view) if target is None else target
        copied.copy_(view)
        torch.cuda.current_stream().synchronize()
        return copied
