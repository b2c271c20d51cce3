"""What RMM 26.10 asks of a resource of two callbacks, as _memory_resource.pyx does."""

from types import SimpleNamespace


class CallbackMemoryResource:
    def __init__(self, allocate_func, deallocate_func):
        self.allocate, self.deallocate = allocate_func, deallocate_func


resources = {}
mr = SimpleNamespace(CallbackMemoryResource=CallbackMemoryResource, set_per_device_resource=resources.__setitem__)
