"""What Warp 1.13 asks of its allocators, as warp/_src/context.py does."""

from types import SimpleNamespace

calls, stream = [], None


def init():
    calls.append("init")


def is_cuda_available():
    return True


def get_cuda_device():
    return SimpleNamespace(ordinal=0, stream=stream)


set_cuda_allocator = calls.append
