"""What must hold of aquifer_torch.nixl, between two agents in two processes, in host memory and without a GPU.

    AQUIFER_LIB=... python python/tests/nixl_on_host.py

Needs NIXL and NumPy: ci/nixl installs them.
"""

import ctypes
import gc
import multiprocessing
import pathlib
import random
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import numpy  # noqa: E402
from nixl_cu13._api import nixl_agent, nixl_agent_config  # noqa: E402

import aquifer_torch  # noqa: E402
from aquifer_torch.library import DRIVER_SIM  # noqa: E402
from aquifer_torch.nixl import ALIGN, MemoryMoves, PoolFull, RegisteredPool, Registration, block_of  # noqa: E402
from nixl_transfers import PATIENCE, transfer  # noqa: E402

MIB = 1 << 20


def setup():
    return aquifer_torch.setup(driver=DRIVER_SIM, sim_memory=256 * MIB)


def agent(name):
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def content(size):
    return numpy.random.default_rng(7).integers(0, 256, size, "uint8")


def serve(connection, size):
    """The other process: it has an array to be read and one to be written, and sees what was written."""
    setup()
    pool = RegisteredPool(agent("server"), 2 * size + MIB)
    source, target = pool.empty(size, "uint8"), pool.empty(size, "uint8")
    source[:], target[:] = content(size), 0
    connection.send((pool.agent.get_agent_metadata(), pool.location(source), pool.location(target)))
    connection.recv()
    connection.send(bool((target == content(size)[::-1]).all()))


def remote(agent, location):
    return agent.get_xfer_descs([location], "DRAM")


class Counting:
    """An agent that counts its registrations."""

    def __init__(self):
        self.live = []

    def register_memory(self, ranges, kind, backends):
        self.live.append((kind, ranges))
        return len(self.live) - 1

    def deregister_memory(self, registered, backends):
        if self.live[registered] is None:
            raise AssertionError("ended twice")
        self.live[registered] = None


def pinned_live():
    return LIBRARY.pinned_stats(0)["live"]


class Transfers(unittest.TestCase):
    def test_two_processes_read_and_write_each_others_pools(self):
        size = 32 * MIB
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, size))
        process.start()
        self.addCleanup(process.join)
        self.addCleanup(process.terminate)
        pool = RegisteredPool(agent("client"), 2 * size)
        read, written = pool.empty(size, "uint8"), pool.empty(size, "uint8")
        read[:], written[:] = 0, content(size)[::-1]
        self.assertTrue(ours.poll(PATIENCE), "the other process has no agent")
        metadata, source, target = ours.recv()
        peer = pool.agent.add_remote_agent(metadata)
        seconds = [transfer(pool.agent, "READ", pool.descriptors(read), remote(pool.agent, source), peer) for _ in range(5)]
        self.assertTrue((read == content(size)).all())
        transfer(pool.agent, "WRITE", pool.descriptors(written), remote(pool.agent, target), peer)
        ours.send("done")
        self.assertTrue(ours.poll(PATIENCE) and ours.recv(), "what was written is not what is there")
        # One thread copies as much beside it.
        begun = time.monotonic()
        for _ in range(5):
            read[:] = written
        copied = (time.monotonic() - begun) / 5
        print(f"NIXL reads {size / min(seconds) / 1e9:.1f} GB/s, NumPy copies {size / copied / 1e9:.1f}", file=sys.stderr)


class Pools(unittest.TestCase):
    def setUp(self):
        self.agent = Counting()
        self.before = pinned_live()

    def tearDown(self):
        gc.collect()
        self.assertTrue(all(found is None for found in self.agent.live), "a registration is left")
        self.assertEqual(pinned_live(), self.before)

    def test_a_pool_is_one_registration_that_its_arrays_keep(self):
        pool = RegisteredPool(self.agent, MIB)
        arrays = [pool.empty(100, "float64") for _ in range(8)]
        self.assertEqual(len(self.agent.live), 1)
        (kind, ((address, size, device, _),)) = self.agent.live[0]
        self.assertEqual((kind, size, device), ("DRAM", MIB, 0))
        for array in arrays:
            begin, length, _ = pool.location(array)
            self.assertTrue(address <= begin and begin + length <= address + size and begin % ALIGN == 0)
        last = arrays[3][10:20]
        del pool, arrays, array
        gc.collect()
        self.assertIsNotNone(self.agent.live[0], "a view has no registration")
        self.assertGreater(pinned_live(), self.before)
        last[:] = 1

    def test_ranges_never_overlap_and_all_come_back(self):
        pool, drawn, live = RegisteredPool(self.agent, MIB), random.Random(3), []
        for _ in range(3000):
            if drawn.random() < 0.5 and live:
                live.pop(drawn.randrange(len(live)))
            try:
                live.append(pool.empty(drawn.randint(0, 60_000), "uint8"))
            except PoolFull:
                live.clear()
            ranges = sorted(pool.location(array)[:2] for array in live)
            self.assertTrue(all(a + n <= b for (a, n), (b, _) in zip(ranges, ranges[1:])))
        self.assertLess(pool.free, MIB)
        live.clear()
        self.assertEqual(pool.free, MIB)
        self.assertEqual(pool.empty(MIB, "uint8").nbytes, MIB, "free neighbours are joined")

    def test_what_is_not_in_the_pool_or_has_gaps_is_refused(self):
        pool = RegisteredPool(self.agent, MIB)
        with self.assertRaisesRegex(ValueError, "is not in the pool"):
            pool.location(numpy.zeros(3))
        with self.assertRaisesRegex(ValueError, "gaps"):
            pool.location(pool.empty((8, 8))[:, ::2])
        with self.assertRaises(TypeError):
            pool.empty(3, "object")
        with self.assertRaisesRegex(PoolFull, "the largest free range of the pool's 1048576 has 1048576"):
            pool.empty(MIB + 1, "uint8")

    def test_a_registration_keeps_its_memory_and_ends_before_it(self):
        array = numpy.arange(1000)
        gone = []
        made = Registration(self.agent, array, array)
        self.assertEqual(self.agent.live[0][1], [(array.ctypes.data, array.nbytes, 0, "")])
        base = weakref_to(array, lambda: gone.append(self.agent.live[0]))
        del array
        gc.collect()
        self.assertEqual(gone, [])
        made.release()
        made.release()
        del made
        gc.collect()
        self.assertEqual(gone, [None], "the memory went before its registration")
        del base

    def test_memory_that_moves_is_refused(self):
        memory, size = ctypes.c_void_p(), 4 * MIB
        LIBRARY.aq_torch_malloc(size, 0, None, ctypes.byref(memory))
        self.assertEqual(block_of(memory.value + 4096), (memory.value, size))
        self.assertIsNone(block_of(0x1234000))
        LIBRARY.aq_torch_region(b"weights")
        moving = ctypes.c_void_p()
        LIBRARY.aq_torch_malloc(size, 0, None, ctypes.byref(moving))
        LIBRARY.aq_torch_region(None)

        class Tensor:
            """As much of a CUDA tensor as matters here."""

            is_cuda = True

            def __init__(self, address):
                self.data_ptr = lambda: address

            def is_contiguous(self):
                return True

            def numel(self):
                return 1000

            def element_size(self):
                return 4

            def get_device(self):
                return 0

        with self.assertRaisesRegex(MemoryMoves, "a region that can be paused"):
            Registration(self.agent, numpy.zeros(3), Tensor(moving.value))
        self.assertEqual(self.agent.live, [], "a failed call has changed nothing")
        # Of one block once, as a whole.
        Registration(self.agent, Tensor(memory.value), Tensor(memory.value + 4096)).release()
        self.assertEqual(len(self.agent.live), 1)
        for at in (memory, moving):
            LIBRARY.aq_torch_free(at, 0, -1, None)


def weakref_to(array, call):
    import weakref

    return weakref.finalize(array, call)


if __name__ == "__main__":
    LIBRARY = setup()
    unittest.main()
