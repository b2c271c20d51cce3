"""RMM's buffers in aquifer's memory, by a callback resource.

AQUIFER_LIB=libaquifer_ffi.so python python/examples/on_rmm.py
"""

import ctypes
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from skip import skip
try:
    import rmm
except ImportError as error:
    skip(f"RMM cannot be imported: {error}")
from aquifer_torch import AquiferError, setup

# Python destroys streams at a time of its own, without a call to the library.
library = setup(limit=1 << 30, streams_retired=False)
runtime = library.runtime()


def allocate(size, stream):
    memory = ctypes.c_void_p()
    try:
        library.aq_torch_malloc(size, 0, stream.__cuda_stream__()[1], ctypes.byref(memory))
    except AquiferError as error:
        # RMM turns it into its own rmm::out_of_memory.
        raise MemoryError(str(error)) from error
    return memory.value or 0


def deallocate(memory, size, stream):
    # On whichever stream RMM says: what was queued there before still has the memory.
    library.aq_free_on(runtime, 0, memory, stream.__cuda_stream__()[1])


rmm.mr.set_current_device_resource(rmm.mr.CallbackMemoryResource(allocate, deallocate))

made, used = rmm.pylibrmm.stream.Stream(), rmm.pylibrmm.stream.Stream()
before = library.stats(0)["requested"]
text = bytes(range(256)) * 4096
buffer = rmm.DeviceBuffer.to_device(text, stream=made)
assert library.stats(0)["requested"] - before == len(text)
made.synchronize()
copy = rmm.DeviceBuffer(ptr=buffer.ptr, size=buffer.size, stream=used)
assert copy.tobytes() == text
try:
    rmm.DeviceBuffer(size=2 << 30)
    raise AssertionError("two GiB under a limit of one")
except MemoryError as error:
    print("two GiB under a limit of one:", str(error).splitlines()[0])
del buffer, copy
assert library.stats(0)["requested"] == before
print(f"RMM {rmm.__version__} over aquifer: {library.stats(0)['allocations']} allocations, none is out")
