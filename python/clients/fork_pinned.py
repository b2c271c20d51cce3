"""Measures what a fork costs a process with pinned memory, by how the memory is mapped, and what the child can read.

    python3 python/clients/fork_pinned.py --gib 8 --workers 8

Needs Python and Linux 5.14 only: on a GPU host the CUDA driver registers the memory (`cuMemHostRegister`), elsewhere io_uring does
(`IORING_REGISTER_BUFFERS`), which pins pages for as long, within the limit of locked memory (`ulimit -l`) of other users than root.

    withheld    private, MADV_DONTFORK: what pinned pools do unless they are told otherwise
    copied      private, inherited: the kernel copies every pinned page at the fork
    shared      MAP_SHARED: parent and child have the same pages

Each worker is forked, reads a byte of each page, and has ended before the next one: where pages are copied, all of them together
would need the memory that often (`--together`). After the last fork the parent writes its memory and checks that the pinned pages
are still its own: by their numbers (as root), and on a GPU by a copy to the device and back.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import resource
import signal
import struct
import sys
import time

PAGE = mmap.PAGESIZE
GIB = 1 << 30
MADV_DONTFORK, MADV_HUGEPAGE, MADV_POPULATE_WRITE = 10, 14, 23
SYS_IO_URING_SETUP, SYS_IO_URING_REGISTER = 425, 427
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def check(answer: int, call: str) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
    return answer


class Cuda:
    """Registers by the CUDA driver, on device 0."""

    name = "cuMemHostRegister"

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        if code := getattr(self.driver, name)(*arguments):
            raise OSError(f"{name} failed with {code}")

    def pin(self, address: int, size: int) -> None:
        for start in range(0, size, GIB):
            self.call("cuMemHostRegister_v2", ctypes.c_void_p(address + start), ctypes.c_size_t(min(GIB, size - start)), 1)

    def round_trip(self, address: int, size: int) -> bool:
        """Returns whether the device sees what the process sees."""
        device = ctypes.c_uint64()
        size = min(size, GIB)
        back = ctypes.create_string_buffer(size)
        self.call("cuMemAlloc_v2", ctypes.byref(device), ctypes.c_size_t(size))
        self.call("cuMemcpyHtoD_v2", device, ctypes.c_void_p(address), ctypes.c_size_t(size))
        self.call("cuMemcpyDtoH_v2", back, device, ctypes.c_size_t(size))
        self.call("cuMemFree_v2", device)
        return libc.memcmp(ctypes.c_void_p(address), back, ctypes.c_size_t(size)) == 0


class Uring:
    """Pins by io_uring's registered buffers, of at most 1 GiB each."""

    name = "io_uring, IORING_REGISTER_BUFFERS"

    def __init__(self) -> None:
        self.ring = check(libc.syscall(SYS_IO_URING_SETUP, 1, ctypes.create_string_buffer(120)), "io_uring_setup")

    def pin(self, address: int, size: int) -> None:
        parts = [(address + start, min(GIB, size - start)) for start in range(0, size, GIB)]
        vectors = struct.pack(f"{2 * len(parts)}Q", *[number for part in parts for number in part])
        check(libc.syscall(SYS_IO_URING_REGISTER, self.ring, 0, vectors, len(parts)), "io_uring_register")

    def round_trip(self, _address: int, _size: int) -> bool:
        return True


def frames(address: int, size: int, count: int = 1024) -> list[int]:
    """Returns the numbers of the physical pages of some addresses. Zeros without the right to see them."""
    step = max(size // count // PAGE, 1) * PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        entries = [os.pread(table.fileno(), 8, at // PAGE * 8) for at in range(address, address + size, step)]
    return [int.from_bytes(entry, "little") & ((1 << 55) - 1) for entry in entries]


def available() -> int:
    with open("/proc/meminfo") as table:
        return next(int(line.split()[1]) << 10 for line in table if line.startswith("MemAvailable"))


def work(view: memoryview, tell: int) -> None:
    """A worker: reads a byte of each page, reports the time and the first byte, and waits to be told to end."""
    begun = time.perf_counter()
    seen = bytes(view[::PAGE])
    os.write(tell, struct.pack("dB", time.perf_counter() - begun, seen[0]))


def measure(kind: str, pinner: Cuda | Uring, size: int, workers: int, together: bool) -> dict[str, str]:
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if kind == "shared" else mmap.MAP_PRIVATE)
    memory = mmap.mmap(-1, size, flags=flags)
    view = memoryview(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    span = ctypes.c_void_p(address), ctypes.c_size_t(size)
    libc.madvise(*span, MADV_HUGEPAGE)
    started = time.perf_counter()
    check(libc.madvise(*span, MADV_POPULATE_WRITE), "MADV_POPULATE_WRITE")
    populated = time.perf_counter()
    pinner.pin(address, size)
    pinned = time.perf_counter()
    if kind == "withheld":
        check(libc.madvise(*span, MADV_DONTFORK), "MADV_DONTFORK")
    before, free = frames(address, size), available()
    forks, reads, ended, least = [], [], [], free
    alive: list[tuple[int, int]] = []
    for number in range(workers):
        tells, tell = os.pipe()
        hold, held = os.pipe()
        begun = time.perf_counter()
        if (child := os.fork()) == 0:
            os.close(held)
            work(view, tell)
            os.read(hold, 1)
            os._exit(0)
        forks.append(time.perf_counter() - begun)
        os.close(tell)
        os.close(hold)
        if told := os.read(tells, 16):
            reads.append(struct.unpack("dB", told)[0])
        os.close(tells)
        least = min(least, available())
        alive.append((child, held))
        if number + 1 == workers:
            # The parent writes while a child has the memory.
            libc.memset(span[0], 7, span[1])
            kept = frames(address, size) == before if any(before) else None
            right = pinner.round_trip(address, size) and view[::PAGE] == bytes([7]) * (size // PAGE)
        if not together or number + 1 == workers:
            for child, held in alive:
                os.close(held)
                status = os.waitpid(child, 0)[1]
                ended.append(signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "ended")
            alive.clear()
    def range_of(times: list[float]) -> str:
        return f"{1e3 * min(times):.1f} to {1e3 * max(times):.1f}" if times else "-"

    return {
        "memory": kind,
        "populate + pin, s": f"{populated - started:.2f} + {pinned - populated:.2f}",
        "fork, ms": range_of(forks),
        "the child reads all, ms": range_of(reads),
        "the child": "/".join(sorted(set(ended))),
        "taken, GiB": f"{(free - least) / GIB:.2f}",
        "the parent's pages": {True: "kept", False: "REPLACED", None: "unknown"}[kept],
        "its transfers": "right" if right else "WRONG",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8, help="pinned memory in GiB")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--together", action="store_true", help="all workers live at the same time")
    parser.add_argument("--kinds", default="withheld,copied,shared")
    options = parser.parse_args()
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limits[1], limits[1]))
    print(f"{options.gib:g} GiB, {options.workers} workers, Linux {os.uname().release}, {os.cpu_count()} CPUs")
    for kind in options.kinds.split(","):
        # A process of its own, so that it begins with nothing.
        if (child := os.fork()) == 0:
            try:
                try:
                    pinner: Cuda | Uring = Cuda()
                except OSError:
                    pinner = Uring()
                row = measure(kind, pinner, int(options.gib * GIB) // PAGE * PAGE, options.workers, options.together)
                print(f"pinned by {pinner.name}", *(f"{name}: {value}" for name, value in row.items()), sep="; ", flush=True)
            except OSError as error:
                print(f"{kind}: {error}", flush=True)
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
