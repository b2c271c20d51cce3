"""What cuda.core 1.2 asks of a memory resource, as cuda/core/_memory/_buffer.pyx does."""


class MemoryResource:
    pass


class Buffer:
    @staticmethod
    def from_handle(ptr, size, mr=None, owner=None, *, stream=None):
        made = Buffer()
        made.handle, made.size, made._mr, made._stream = ptr, size, mr, stream
        return made

    def close(self, stream=None):
        if self.handle:
            self._mr.deallocate(self.handle, self.size, stream=stream or self._stream)
            self.handle = 0

    __del__ = close


class Device:
    device_id = 0

    def __new__(cls, device_id=None):
        # One object for each device and thread.
        if "only" not in cls.__dict__:
            cls.only = super().__new__(cls)
        return cls.only
