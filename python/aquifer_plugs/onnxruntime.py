"""Memory of ONNX Runtime's CUDA provider.

    options = aquifer_plugs.onnxruntime.provider_options(device=0)
    onnxruntime.InferenceSession(model, providers=[("CUDAExecutionProvider", options)])
"""

from __future__ import annotations

from . import library


def provider_options(device: int = 0) -> dict[str, str]:
    """Returns the options of the CUDA provider with which it allocates from aquifer, without an arena of its own. Makes the
    runtime of the process. Add others to them, but not `enable_cuda_graph`: each free waits for the device, as cudaFree() does."""
    made = library()
    functions = {"alloc": "aq_fenced_alloc", "free": "aq_fenced_free", "empty_cache": "aq_torch_reset"}
    addresses = {f"gpu_external_{name}": str(made.address(function)) for name, function in functions.items()}
    return {"device_id": str(device), **addresses}
