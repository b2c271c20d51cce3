"""CuPy's arrays in aquifer's memory, by its Python allocator, which knows the current stream, and by its C one.

AQUIFER_LIB=libaquifer_ffi.so python python/examples/on_cupy.py
"""

import ctypes
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from skip import skip
try:
    import cupy
except ImportError:
    skip("no CuPy")
from aquifer_torch import AquiferError, setup

try:
    cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError as error:
    skip(f"{error}")

# Python destroys streams at a time of its own, without a call to the library.
library = setup(limit=1 << 30, streams_retired=False)


# In Python: each array belongs to the stream that is current when it is made, and goes back in that stream's order.
def malloc(size, device):
    memory = ctypes.c_void_p()
    try:
        library.aq_torch_malloc(size, device, cupy.cuda.get_current_stream().ptr, ctypes.byref(memory))
    except AquiferError as error:
        raise MemoryError(str(error)) from error
    return memory.value or 0


def free(memory, device):
    library.aq_torch_free(memory, 0, device, None)


cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(malloc, free).malloc)
with cupy.cuda.Stream(non_blocking=True) as stream:
    x = cupy.arange(1 << 20, dtype=cupy.float32)
    total = float((x * 2 + 1).sum())
    stream.synchronize()
assert abs(total / 2**40 - 1) < 1e-3, total
held = library.stats(0)
assert held["requested"] >= 4 << 20, held
try:
    cupy.empty(2 << 30, dtype=cupy.uint8)
    raise AssertionError("two GiB under a limit of one")
except MemoryError as error:
    print("two GiB under a limit of one:", str(error).splitlines()[0])
del x

# In C, without Python's costs: an allocator for each stream, which is its first argument. What is made by it goes before the stream.
stream = cupy.cuda.Stream(non_blocking=True)
allocator = cupy.cuda.CFunctionAllocator(stream.ptr, library.address("aq_cupy_alloc"), library.address("aq_cupy_free"), library)
assert allocator.malloc(512).ptr, f"no memory: {library.aq_last_error().decode()}"
with cupy.cuda.using_allocator(allocator.malloc), stream:
    before = library.stats(0)["allocations"]
    a = cupy.arange(1 << 20, dtype=cupy.float32)
    b = cupy.sqrt(a * a) - a
    assert float(cupy.abs(b).max()) < 1.0
    stream.synchronize()
    made = library.stats(0)["allocations"] - before
del a, b
print(f"CuPy made {made} blocks by the C allocator; {library.stats(0)['requested']} bytes are out")
