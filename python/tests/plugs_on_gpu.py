"""What must hold of aquifer_plugs on a GPU: a program of each framework has the same results with its plug, to the bit.

    AQUIFER_LIB=... python python/tests/plugs_on_gpu.py [FRAMEWORK ...]

Each program runs natively and under `python -m aquifer_plugs`, in processes of their own. Prints ms a step of both, and how many
blocks came from aquifer. Prints `skipped: ...` for a framework that is missing, and fails without a GPU under
AQUIFER_REQUIRE_GPU=1. ONNX Runtime's functions are those that numba's plug calls.
"""

import hashlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]
from skip import skip  # noqa: E402

STEPS, COUNT = 20, 1 << 20
PLUGGED = "AQUIFER_TORCH" in os.environ


def cupy(step):
    import cupy
    import cupyx

    results = []
    for number in range(2):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.arange(COUNT, dtype=cupy.float32) * (step + number + 1)
            # Sums of integers, which do not depend on their order.
            y = cupy.sort(cupy.sin(x) * 1000 + x[::-1]).astype(cupy.int32).cumsum()
            host = cupyx.empty_pinned(y.shape, y.dtype)
            y.get(out=host, stream=stream)
        results.append((host, stream))
    for _, stream in results:
        stream.synchronize()
    return [host for host, _ in results]


def numba(step):
    import numpy

    # numba-cuda 0.30 with NumPy 2.5, which has it no more.
    numpy.row_stack = numpy.vstack
    from numba import cuda

    if not hasattr(numba, "kernel"):

        @cuda.jit
        def kernel(x, y, factor):
            i = cuda.grid(1)
            if i < x.size:
                y[i] = x[i] * factor + i

        numba.kernel = kernel
    results = []
    for number in range(3):
        stream = cuda.stream()
        x = cuda.to_device(numpy.arange(COUNT, dtype=numpy.float32), stream=stream)
        y = cuda.device_array_like(x)
        numba.kernel[COUNT // 256, 256, stream](x, y, step + number)
        # It is freed while its work is queued.
        del x
        results.append(y.copy_to_host(stream=stream))
        stream.synchronize()
    return results


def cuda_core(step):
    import cupy
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    if PLUGGED and step == 0:
        importlib.import_module("aquifer_plugs.cuda_core").install()
    stream = device.create_stream()
    source, target = (device.memory_resource.allocate(COUNT, stream=stream) for _ in range(2))
    source.fill(step + 1, stream=stream)
    target.copy_from(source, stream=stream)
    source.close(stream)
    stream.sync()
    return [cupy.asnumpy(cupy.from_dlpack(target))]


def triton(step):
    import torch
    import triton_kernel

    if not PLUGGED:
        triton_kernel.triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    x = torch.arange(COUNT, dtype=torch.float32, device="cuda").reshape(1024, -1) * (step + 1)
    return [triton_kernel.doubled(x).cpu().numpy()]


def rmm(step):
    import rmm

    made, used = rmm.pylibrmm.stream.Stream(), rmm.pylibrmm.stream.Stream()
    buffer = rmm.DeviceBuffer.to_device(bytes((step + n) % 256 for n in range(256)) * 4096, stream=made)
    made.synchronize()
    copy = rmm.DeviceBuffer(ptr=buffer.ptr, size=buffer.size, stream=used)
    del buffer
    return [copy.tobytes()]


# With what each needs.
PROGRAMS = {cupy: ["cupy"], numba: ["numba.cuda"], cuda_core: ["cuda.core", "cupy"], triton: ["triton", "torch"], rmm: ["rmm"]}


def one(program):
    """Runs it, and prints what came of it."""
    try:
        for module in PROGRAMS[program]:
            importlib.import_module(module)
    except Exception as error:
        return print(json.dumps({"skipped": f"{type(error).__name__}: {error}".splitlines()[0]}))
    digest, times = hashlib.sha256(), []
    for step in range(STEPS):
        start = time.perf_counter()
        results = program(step)
        times.append(time.perf_counter() - start)
        for result in results:
            digest.update(result)
    library = PLUGGED and sys.modules["aquifer_torch"]._library
    blocks = library.stats(0)["allocations"] if library else 0
    print(json.dumps({"digest": digest.hexdigest(), "ms": sorted(times)[STEPS // 2] * 1e3, "blocks": blocks}))


def ran(name, launcher):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *launcher, __file__, "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, f"{name} {' '.join(launcher)} ended with {done.returncode}:\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def main():
    import aquifer_torch

    if not aquifer_torch.setup(limit=1 << 26).devices():
        skip("there is no GPU")
    failed = []
    print("| framework | native, ms a step | aquifer | its blocks |\n|---|---|---|---|")
    for name in sys.argv[1:] or [program.__name__ for program in PROGRAMS]:
        native = ran(name, [])
        if "skipped" in native:
            print(f"{name}: skipped: {native['skipped']}")
            continue
        plugged = ran(name, ["-m", "aquifer_plugs", "--limit", "0.5"])
        print(f"| {name} | {native['ms']:.2f} | {plugged['ms']:.2f} | {plugged['blocks']} |", flush=True)
        if native["digest"] != plugged["digest"] or not plugged["blocks"]:
            failed.append(name)
    print(f"NOT SO: {failed}" if failed else "all of it holds")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(globals()[sys.argv[2]])
    else:
        sys.exit(main())
