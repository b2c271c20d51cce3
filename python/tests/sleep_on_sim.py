"""Tests of sleep on a simulated device, without PyTorch: on_sim.py runs them in its process."""

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from unittest import mock

import aquifer_torch
from aquifer_torch import library as binding, sleep


MIB = 1 << 20


class Graphs:
    """The functions for graphs, which the package leaves to the companion."""

    FILTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    DROP = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def __init__(self, library):
        self.library, self.cdll = library, library._cdll
        self.filter, self.drop = self.FILTER(lambda data, stream: 1), self.DROP(lambda data: None)

    def call(self, name, *arguments):
        status = getattr(self.cdll, name)(*arguments)
        assert status == 0, (name, self.library.aq_status_name(status), self.library.aq_last_error())

    def capture(self, stream, pool, work):
        """Captures what `work` does on the stream."""
        runtime, graph, u64 = ctypes.c_uint64(self.library.runtime()), ctypes.c_uint64(), ctypes.c_uint64
        self.call("aq_torch_pool_begin", 0, u64(pool), u64(0), self.filter, None, self.drop)
        self.call("aq_sim_capture_begin", runtime, 0, stream)
        work()
        self.call("aq_sim_capture_end", runtime, 0, stream, ctypes.byref(graph))
        self.call("aq_torch_pool_end", 0, u64(pool), u64(0))
        return graph

    def launch(self, graph, stream):
        self.call("aq_sim_graph_launch", ctypes.c_uint64(self.library.runtime()), 0, graph, stream)

    def end(self, graph, pool):
        self.call("aq_sim_graph_destroy", ctypes.c_uint64(self.library.runtime()), 0, graph)
        self.call("aq_torch_pool_release", 0, ctypes.c_uint64(pool), ctypes.c_uint64(0))


class SleepTests:
    """What the tests share. For a TestCase with `library`, `malloc` and `stream`, in a process with one runtime of 200 MiB."""

    def setUp(self):
        # As under install(): blocks come one by one, without PyTorch's segments.
        patch = mock.patch.object(aquifer_torch, "_installed", True)
        patch.start()
        self.addCleanup(patch.stop)
        self.saver = aquifer_torch.MemorySaver()
        self.library.trim(0, 0)

    def tearDown(self):
        self.saver.resume()
        super().tearDown()
        self.library.trim(0, 0)
        self.assertEqual(aquifer_torch.statistics(0)["reserved_bytes.all.current"], 0)

    def free(self, *blocks):
        for block in blocks:
            self.library.aq_torch_free(block, 0, -1, None)

    def write(self, block, byte, size, stream=None):
        data = bytes([byte]) * size
        self.copy("aq_upload", block, ctypes.create_string_buffer(data, size), size, stream)

    def read(self, block, size, stream=None):
        data = ctypes.create_string_buffer(size)
        self.copy("aq_download", block, data, size, stream)
        return data.raw

    def backup(self, block, size):
        data = ctypes.create_string_buffer(size)
        return data.raw if self.library.backup(block, size, ctypes.addressof(data)) else None

    def copy(self, call, block, data, size, stream):
        u64 = ctypes.c_uint64
        arguments = (u64(self.library.runtime()), 0, u64(block), u64(0), data, u64(size), stream)
        status = getattr(self.library._cdll, call)(*arguments)
        if status:
            raise aquifer_torch.AquiferError(status, self.library.aq_status_name(status).decode(), "")

    def touch(self, stream, block, size, access=binding.WRITE):
        self.library.aq_sim_touch(self.library.runtime(), 0, stream, block, size, access)

    def used(self):
        return aquifer_torch.limit(0)[1]

    def refused(self, name):
        return self.assertRaisesRegex(aquifer_torch.AquiferError, name)


class RegionTests(SleepTests):
    """Of aquifer_torch.torch_memory_saver."""

    # ---- regions

    def test_memory_of_a_region_goes_back_and_returns_with_its_contents_at_its_address(self):
        for pins in (False, True):
            with mock.patch.object(aquifer_torch, "_pins", lambda pins=pins: pins):
                with self.saver.region("weights", enable_cpu_backup=True):
                    kept = self.malloc(9 * MIB)
                elsewhere = self.malloc(3 * MIB)
                self.write(kept, 7, 9 * MIB)
                self.write(elsewhere, 8, 3 * MIB)
                before, held = self.used(), self.saver.held("weights")
                self.assertGreaterEqual(held, 9 * MIB)
                for _ in range(2):
                    pinned = aquifer_torch.pinned_statistics(0)["requested"]
                    self.assertEqual(self.saver.pause("weights"), held)
                    self.assertEqual(aquifer_torch.pinned_statistics(0)["requested"] - pinned, 9 * MIB if pins else 0)
                    self.assertEqual((self.used(), self.saver.held()), (before - held, 0))
                    self.assertEqual(self.read(elsewhere, 3 * MIB), b"\x08" * 3 * MIB, "it is in no region")
                    with self.refused("AQ_ERROR_PARKED"):
                        self.read(kept, MIB)
                    self.assertEqual((self.saver.resume("weights"), self.used()), (held, before))
                    self.assertEqual(self.read(kept, 9 * MIB), b"\x07" * 9 * MIB)
                self.free(kept, elsewhere)

    def test_contents_that_are_not_kept_take_no_host_memory_and_the_memory_can_be_written(self):
        with self.saver.region("cache"):
            block = self.malloc(4 * MIB)
        self.write(block, 1, 4 * MIB)
        self.saver.pause("cache")
        self.saver.resume("cache")
        self.write(block, 2, 4 * MIB)
        self.assertEqual(self.read(block, 4 * MIB), b"\x02" * 4 * MIB)
        self.free(block)

    def test_regions_are_nested_and_an_exception_leaves_the_outer_one_as_it_was(self):
        with self.saver.region("outer", enable_cpu_backup=True):
            first = self.malloc(MIB)
            with self.assertRaises(KeyError), self.saver.region("inner"):
                inner = self.malloc(MIB)
                raise KeyError
            with self.saver.disable():
                nowhere = self.malloc(MIB)
            second = self.malloc(MIB)
        outside = self.malloc(MIB)
        self.saver.pause("outer")
        for block in (first, second):
            with self.refused("AQ_ERROR_PARKED"):
                self.read(block, 512)
        for block in (inner, nowhere, outside):
            self.write(block, 3, MIB)
        self.saver.resume("outer")
        self.saver.pause("inner")
        self.assertTrue(self.saver.is_paused("inner") and not self.saver.is_paused("outer"))
        with self.refused("AQ_ERROR_PARKED"):
            self.read(inner, 512)
        self.saver.resume()
        self.free(first, second, inner, nowhere, outside)

    def test_a_region_is_its_threads_alone(self):
        blocks = []
        with self.saver.region("mine"):
            thread = threading.Thread(target=lambda: blocks.append(self.malloc(MIB)))
            thread.start()
            thread.join()
            blocks.append(self.malloc(MIB))
        self.saver.pause("mine")
        self.write(blocks[0], 1, MIB)
        with self.refused("AQ_ERROR_PARKED"):
            self.read(blocks[1], MIB)
        self.saver.resume("mine")
        self.free(*blocks)

    def test_a_region_that_is_open_is_not_paused_and_a_paused_one_is_not_entered(self):
        with self.saver.region("weights"):
            block = self.malloc(MIB)
            with self.assertRaisesRegex(RuntimeError, "'weights' is open"):
                self.saver.pause()
            self.assertFalse(self.saver.is_paused("weights"))
        self.saver.pause()
        with self.assertRaisesRegex(aquifer_torch.Asleep, "'weights' is paused"), self.saver.region("weights"):
            self.fail("entered")
        self.saver.resume()
        with self.saver.region("weights"):
            self.free(self.malloc(MIB))
        self.free(block)

    def test_what_is_wrong_is_refused_by_name(self):
        for tag in ("", "a\0b"):
            with self.assertRaises(ValueError), self.saver.region(tag):
                self.fail("entered")
        both = {"enable_disk_backup": True, "enable_cpu_backup": True}
        for wrong in (both, {"cpu_backup_backend": "tape"}, {"cpu_backup_backend": "pinned"}):
            with self.assertRaises(ValueError), self.saver.region("x", **wrong):
                self.fail("entered")
        with self.saver.region("a", enable_cpu_backup=True):
            pass
        with self.assertRaisesRegex(ValueError, "another tag"), self.saver.region("a (kept)"):
            self.fail("entered")
        with self.refused("AQ_ERROR_BAD_ARGUMENT"):
            self.library.pause({"x": 4})
        with self.assertRaises(NotImplementedError):
            self.saver.memory_margin_bytes = MIB
        for is_cuda, is_contiguous in ((False, True), (True, False)):
            x = types.SimpleNamespace(is_cuda=is_cuda, is_contiguous=lambda: is_contiguous, device="a device", stride=lambda: ())
            with self.assertRaisesRegex(ValueError, "contiguous and on a GPU"):
                self.saver.get_cpu_backup(x)
        with tempfile.NamedTemporaryFile() as file, self.assertRaises(OSError):
            self.saver.set_disk_backup_dir(file.name)

    # ---- pause and resume

    def test_pausing_twice_and_resuming_what_is_not_paused_do_nothing(self):
        self.assertEqual((self.saver.pause("unknown"), self.saver.resume("unknown")), (0, 0))
        self.assertFalse(self.saver.is_paused("unknown"))
        with self.saver.region("weights", enable_cpu_backup=True):
            block = self.malloc(MIB)
        self.write(block, 9, MIB)
        self.assertEqual(self.saver.resume("weights"), 0)
        self.assertGreater(self.saver.pause("weights"), 0)
        self.assertEqual(self.saver.pause("weights"), 0)
        self.assertGreater(self.saver.resume("weights"), 0)
        self.assertEqual((self.saver.resume("weights"), self.read(block, MIB)), (0, b"\x09" * MIB))
        self.free(block)

    PLACES = {
        "pinned": {"enable_cpu_backup": True, "cpu_backup_backend": "pinned"},
        "pageable": {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
        "disk": {"enable_disk_backup": True},
    }

    def test_contents_are_read_while_paused_and_as_long_as_they_are_retained(self):
        for place, kept in self.PLACES.items():
            with self.saver.region(place, **kept):
                size = 65 * MIB if place == "pinned" else MIB
                large, small = self.malloc(size), self.malloc(4096)
            self.write(large, 1, size)
            self.write(small, 2, 4096)
            self.assertIsNone(self.backup(small, 4096), place)
            self.saver.pause(place)
            self.assertEqual(self.backup(small + 512, 1024), b"\x02" * 1024)
            # The larger one is in two pieces.
            self.assertEqual(self.backup(large, size), b"\x01" * size)
            self.assertIsNone(self.backup(small, 4097), "it is beyond the block")
            self.saver.retain_cpu_backup = True
            self.saver.resume(place)
            self.write(small, 3, 4096)
            self.assertEqual(self.backup(small, 4096), b"\x02" * 4096, "as of the pause")
            self.saver.retain_cpu_backup = False
            self.saver.pause(place)
            self.assertEqual(self.backup(small, 4096), b"\x03" * 4096)
            self.saver.resume(place)
            self.assertIsNone(self.backup(small, 4096))
            self.assertEqual(self.read(large, size), b"\x01" * size)
            self.free(large, small)

    def test_host_memory_is_given_back_after_a_resume_and_on_a_free_and_disk_takes_none(self):
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        for place, kept in self.PLACES.items():
            with self.saver.region(place, **kept):
                # Each below the size from which malloc maps.
                blocks = [self.malloc(2 * MIB) for _ in range(16)]
            for block in blocks:
                self.write(block, 5, 2 * MIB)
            # Copies are staged in pinned memory, too.
            self.library.trim_pinned(0)
            before, staging = resident(), aquifer_torch.pinned_statistics(0)
            for retains in (False, True, False):
                self.saver.retain_cpu_backup = retains
                self.saver.pause(place)
                # Without the simulated device's memory.
                away = before - resident()
                if place == "disk":
                    self.assertGreater(away, 24 * MIB)
                taken = aquifer_torch.pinned_statistics(0)["requested"] - staging["requested"]
                self.assertEqual(taken, 32 * MIB if place == "pinned" else 0)
                self.saver.resume(place)
                pinned = aquifer_torch.pinned_statistics(0)
                if retains:
                    self.assertEqual(pinned["requested"] - staging["requested"], taken)
                else:
                    self.assertEqual(pinned["physical"], staging["physical"])
                    self.assertLess(resident() - before, 12 * MIB, place)
                self.assertTrue(all(self.read(block, 512) == b"\x05" * 512 for block in blocks))
            self.saver.pause(place)
            self.free(*blocks)
            self.assertEqual(aquifer_torch.pinned_statistics(0)["requested"], staging["requested"])
            self.saver.resume(place)

    def test_files_have_no_names_and_a_full_disk_refuses_the_pause(self):
        with tempfile.TemporaryDirectory() as folder:
            self.saver.set_disk_backup_dir(folder)
            with self.saver.region("weights", enable_disk_backup=True):
                block = self.malloc(3 * MIB)
            self.write(block, 6, 3 * MIB)
            self.saver.pause()
            self.assertEqual(os.listdir(folder), [])
            self.saver.resume()
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, limits[1]))
            try:
                with self.refused("AQ_ERROR_SYSTEM"):
                    self.saver.pause()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            self.assertEqual(os.listdir(folder), [])
        with self.refused("AQ_ERROR_SYSTEM"):
            self.saver.pause()
        self.assertFalse(self.saver.is_paused("weights"))
        self.assertEqual(self.read(block, 3 * MIB), b"\x06" * 3 * MIB)
        self.free(block)

    def test_a_wake_that_does_not_fit_is_refused_whole_and_fits_later(self):
        sizes = {"weights": 40 * MIB, "cache": 60 * MIB}
        blocks = {}
        for tag, size in sizes.items():
            with self.saver.region(tag, enable_cpu_backup=True):
                blocks[tag] = self.malloc(size)
            self.write(blocks[tag], len(tag), size)
        self.saver.pause()
        self.assertEqual(self.used(), 0)
        # Room for the weights alone.
        other = self.malloc(120 * MIB)
        used = self.used()
        for _ in range(3):
            with self.refused("AQ_ERROR_OUT_OF_MEMORY"):
                self.saver.resume()
            self.assertEqual(self.used(), used)
            self.assertTrue(all(self.saver.is_paused(tag) for tag in sizes))
        self.saver.resume("weights")
        self.assertEqual(self.read(blocks["weights"], sizes["weights"]), b"\x07" * sizes["weights"])
        with self.refused("AQ_ERROR_OUT_OF_MEMORY"):
            self.saver.resume()
        self.assertFalse(self.saver.is_paused("weights"))
        self.free(other)
        self.saver.resume()
        for tag, size in sizes.items():
            self.assertEqual(self.read(blocks[tag], size), bytes([len(tag)]) * size)
        self.free(*blocks.values())

    def test_a_tensor_is_freed_while_asleep_and_after_it(self):
        other = self.stream()
        with self.saver.region("weights", enable_cpu_backup=True):
            blocks = [self.malloc(2 * MIB) for _ in range(4)]
        for n, block in enumerate(blocks):
            self.write(block, n + 1, 2 * MIB)
        self.library.aq_sim_stream_wait(self.library.runtime(), 0, other, None)
        # One of them is used by another stream at its free, as record_stream says.
        self.library.aq_torch_record_stream(blocks[0], other)
        self.touch(other, blocks[0], 2 * MIB, binding.READ)
        self.saver.pause()
        self.free(*blocks[:2])
        self.saver.resume()
        self.assertEqual([self.read(block, 2 * MIB)[0] for block in blocks[2:]], [3, 4])
        with self.saver.region("weights", enable_cpu_backup=True):
            again = [self.malloc(2 * MIB) for _ in range(2)]
        self.assertFalse(set(again) & set(blocks[2:]))
        for block in again:
            self.write(block, 5, 2 * MIB)
        self.free(*blocks[2:], *again)

    def test_work_that_is_queued_is_waited_for(self):
        home, other = self.stream(), self.stream()
        for _ in range(20):
            with self.saver.region("weights", enable_cpu_backup=True):
                block = self.malloc(MIB, home)
            self.touch(home, block, MIB)
            # Ordered by the program, and told to no allocator.
            self.library.aq_sim_stream_wait(self.library.runtime(), 0, other, home)
            self.touch(other, block, MIB, binding.READ)
            self.saver.pause()
            self.saver.resume()
            self.touch(home, block, MIB)
            self.free(block)

    def test_nothing_is_paused_while_a_graph_is_captured(self):
        graphs, stream = Graphs(self.library), self.stream()
        with self.saver.region("weights", enable_cpu_backup=True):
            block = self.malloc(MIB)
        self.write(block, 6, MIB)

        def work():
            with self.refused("AQ_ERROR_CAPTURING"):
                self.saver.pause()
            self.free(self.malloc(MIB, stream))

        graph = graphs.capture(stream, 31, work)
        self.assertFalse(self.saver.is_paused("weights"))
        self.saver.pause()
        self.saver.resume()
        self.assertEqual(self.read(block, MIB), b"\x06" * MIB)
        graphs.end(graph, 31)
        self.free(block)

    # ---- graphs

    def test_a_graph_of_a_region_sleeps_with_its_tag_and_is_launched_after_it(self):
        graphs, stream, other = Graphs(self.library), self.stream(), self.stream()
        made = []

        def work():
            temporary = self.malloc(3 * MIB, stream)
            self.touch(stream, temporary, 3 * MIB)
            self.free(temporary)
            made.append(self.malloc(MIB, stream))
            self.touch(stream, made[0], MIB)

        before = self.used()
        # As cuda_graph() does it.
        self.library.aq_torch_pool_tag(0, 32, 0, self.saver._name("graphs", True, None).encode())
        graph = graphs.capture(stream, 32, work)
        graphs.launch(graph, stream)
        self.write(made[0], 4, MIB, stream)
        held = self.saver.held("graphs")
        self.assertGreaterEqual(held, 4 * MIB)
        for _ in range(2):
            self.assertEqual((self.saver.pause("graphs"), self.used()), (held, before))
            with self.refused("AQ_ERROR_PARKED"):
                self.read(made[0], MIB)
            self.assertEqual(self.saver.resume("graphs"), held)
            self.assertEqual(self.read(made[0], MIB, stream), b"\x04" * MIB)
            self.library.aq_sim_stream_wait(self.library.runtime(), 0, other, stream)
            graphs.launch(graph, other)
        with self.refused("AQ_ERROR_BAD_ARGUMENT"):
            self.library.aq_torch_pool_tag(0, 32, 0, b"another")
        self.saver.pause("graphs")
        with self.refused("AQ_ERROR_PARKED"):
            self.library.aq_torch_pool_tag(0, 33, 0, self.saver._name("graphs", True, None).encode())
        self.free(*made)
        graphs.end(graph, 32)
        self.saver.resume("graphs")

    def test_a_graph_among_ranks_is_warned_of_what_nccl_registers(self):
        torch = types.ModuleType("torch")
        for ranks, variable, times in ((1, None, 0), (2, None, 1), (2, "0", 0), (2, "1", 1)):
            torch.distributed = mock.Mock(**{"get_world_size.return_value": ranks})
            variables = {"NCCL_GRAPH_REGISTER": variable} if variable else {}
            with mock.patch.dict(sys.modules, torch=torch), mock.patch.dict(os.environ, variables):
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    sleep._warn_of_registration()
            self.assertEqual(len(said), times, (ranks, variable))

    # ---- without install()

    def test_beside_pytorchs_own_allocator_each_name_has_segments_of_its_own(self):
        entered = []

        class MemPool:
            pass

        @contextlib.contextmanager
        def use_mem_pool(pool):
            entered.append(pool)
            yield
            entered.pop()

        torch = types.ModuleType("torch")
        torch.cuda = types.SimpleNamespace(
            MemPool=MemPool, use_mem_pool=use_mem_pool, current_device=lambda: 0, is_initialized=lambda: False
        )
        pools = iter(MemPool() for _ in range(9))
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.dict(sys.modules, torch=torch))
            patches.enter_context(mock.patch.object(aquifer_torch, "_installed", False))
            patches.enter_context(mock.patch.object(aquifer_torch, "mem_pool", lambda: next(pools)))
            with self.saver.region("weights"):
                weights = entered[-1]
                block = self.malloc(20 * MIB)
                with self.saver.region("cache", enable_cpu_backup=True):
                    cache = entered[-1]
                    self.assertEqual(entered, [cache], "the inner one alone")
                self.assertEqual(entered, [weights])
                with self.saver.disable():
                    self.assertEqual(entered, [])
                self.assertEqual(entered, [weights])
            with self.saver.region("weights"):
                self.assertIs(entered[-1], weights)
            self.assertIsNot(weights, cache)
            self.assertEqual(entered, [])
            self.assertGreater(self.saver.pause("weights"), 0)
            self.saver.resume()
            with self.assertRaisesRegex(RuntimeError, "install"), self.saver.cuda_graph(None):
                self.fail("entered")
        self.free(block)

    # ---- the process

    def test_a_process_may_end_while_asleep(self):
        program = (
            "import ctypes, aquifer_torch\n"
            "library = aquifer_torch.setup(driver=1, sim_memory=256 << 20)\n"
            "aquifer_torch._installed = True\n"
            "saver, memory = aquifer_torch.torch_memory_saver, ctypes.c_void_p()\n"
            "with saver.region(enable_cpu_backup=True):\n"
            "    library.aq_torch_malloc(1 << 20, 0, None, ctypes.byref(memory))\n"
            "assert saver.pause() > 0\n"
            "print('asleep')\n"
        )
        environment = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(aquifer_torch.__file__))}
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
        self.assertEqual((ran.returncode, ran.stdout, ran.stderr), (0, "asleep\n", ""))
