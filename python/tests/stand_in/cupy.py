"""What CuPy 14 asks of its allocators, as cupy/cuda/memory.pyx and pinned_memory.pyx do."""

from types import SimpleNamespace


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        super().__init__(f"{size} {total} {limit}")


class Memory:
    def __init__(self, size, malloc_func, free_func):
        self._free_func, self.ptr = free_func, 0
        self.ptr = malloc_func(size, 0) if size > 0 else 0

    def __del__(self):
        if self.ptr:
            self._free_func(self.ptr, 0)


class PythonFunctionAllocator:
    def __init__(self, malloc_func, free_func):
        self.malloc = lambda size: Memory(size, malloc_func, free_func)


class PinnedMemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset

    def size(self):
        return self.mem.size - (self.ptr - self.mem.ptr)


chosen, current = {}, SimpleNamespace(ptr=0)
cuda = SimpleNamespace(
    PythonFunctionAllocator=PythonFunctionAllocator,
    PinnedMemoryPointer=PinnedMemoryPointer,
    memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    runtime=SimpleNamespace(getDevice=lambda: 0),
    get_current_stream=lambda: current,
    set_allocator=lambda allocator: chosen.update(device=allocator),
    set_pinned_memory_allocator=lambda allocator: chosen.update(pinned=allocator),
)
