"""What must hold of aquifer_plugs, on a simulated device that checks every access, and with the frameworks' interfaces in
`stand_in` instead of the frameworks.

    AQUIFER_LIB=... python python/tests/plugs_on_sim.py
"""

import ctypes
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import weakref

HERE = pathlib.Path(__file__).resolve().parent
STAND_IN = str(HERE / "stand_in")
sys.path[:0] = [STAND_IN, str(HERE.parent)]
import aquifer_plugs  # noqa: E402
import aquifer_torch  # noqa: E402
import cuda.core  # noqa: E402
import cupy, numba, rmm, triton, warp  # noqa: E401, E402

MIB = 1 << 20
LIBRARY = aquifer_torch.setup(driver="sim", sim_memory=256 * MIB, limit=200 * MIB, streams_retired=False)
RUNTIME = LIBRARY.runtime()


def stream():
    made = ctypes.c_void_p()
    LIBRARY.aq_sim_stream_create(RUNTIME, 0, ctypes.byref(made))
    return made.value


FIRST, SECOND = stream(), stream()


def touch(stream, address, size=MIB):
    """Queues a kernel that writes."""
    LIBRARY.aq_sim_touch(RUNTIME, 0, stream, address, size, 2)


class Stream:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


class Block:
    """A block of a framework: made for a stream, freed on another or dropped."""

    def __init__(self, size, stream):
        self.size, self.stream = size, stream
        self.address = self.allocate()

    def free(self, stream):
        del self.held


class CuPy(Block):
    def allocate(self):
        cupy.current = Stream(self.stream)
        self.held, self.lives = cupy.chosen["device"](self.size), weakref.ref(cupy.current)
        cupy.current = None
        return self.held.ptr


class Triton(Block):
    def allocate(self):
        self.held = triton.allocator.get()(self.size, 16, self.stream)
        return self.held.data_ptr()


class Warp(Block):
    def allocate(self):
        warp.stream = Stream(self.stream)
        address, self.lives = warp.calls[1].allocate(self.size), weakref.ref(warp.stream)
        warp.stream = None
        return address

    def free(self, stream):
        warp.calls[1].deallocate(self.address, self.size)


class Rmm(Block):
    def allocate(self):
        return rmm.resources[0].allocate(self.size, Stream(self.stream))

    def free(self, stream):
        rmm.resources[0].deallocate(self.address, self.size, Stream(stream))


class CudaCore(Block):
    def allocate(self):
        self.held = cuda.core.Device().memory_resource.allocate(self.size, stream=Stream(self.stream))
        return self.held.handle

    def free(self, stream):
        self.held.close(Stream(stream))


class Numba(Block):
    def allocate(self):
        self.held = CONTEXT.memory_manager.memalloc(self.size)
        return self.held.device_pointer_value


class OnnxRuntime(Block):
    def allocate(self):
        address = CALLS["alloc"](self.size)
        if address is None:
            raise MemoryError(LIBRARY.aq_last_error().decode())
        return address

    def free(self, stream):
        CALLS["free"](self.address)


# By what a free is ordered with: the stream of the allocation, that and the one it names, or the device.
OWN, BOTH, ANY = (CuPy, Triton, Warp), (Rmm, CudaCore), (Numba, OnnxRuntime)
for name in ("cupy", "triton", "rmm", "cuda_core", "numba"):
    importlib.import_module(f"aquifer_plugs.{name}").install()
aquifer_plugs.plug("warp", {})
BEFORE = list(warp.calls)
warp.init()
CONTEXT = numba.Context()
OPTIONS = importlib.import_module("aquifer_plugs.onnxruntime").provider_options(device=3)
SIGNATURES = {"alloc": (ctypes.c_void_p, ctypes.c_size_t), "free": (None, ctypes.c_void_p), "empty_cache": (None,)}
CALLS = {name: ctypes.CFUNCTYPE(*form)(int(OPTIONS[f"gpu_external_{name}"])) for name, form in SIGNATURES.items()}


class Plugs(unittest.TestCase):
    def tearDown(self):
        count, report = ctypes.c_uint64(), ctypes.c_void_p()
        LIBRARY.aq_sim_violations(RUNTIME, ctypes.byref(count), ctypes.byref(report))
        self.assertEqual(count.value, 0, ctypes.string_at(report.value))
        LIBRARY.aq_text_free(report)
        self.assertEqual(LIBRARY.stats(0)["blocks"], 0)

    def test_memory_is_reused_in_the_order_of_the_streams_that_a_free_is_ordered_with(self):
        for framework in OWN + BOTH + ANY:
            for _ in range(20):
                block = framework(MIB, FIRST)
                self.assertEqual(LIBRARY.stats(0)["requested"], MIB, framework)
                touch(FIRST, block.address)
                if framework not in OWN:
                    LIBRARY.aq_sim_stream_wait(RUNTIME, 0, SECOND, FIRST)
                    touch(SECOND, block.address)
                block.free(SECOND)
                # Nothing orders the streams but the allocator.
                again = framework(MIB, SECOND if framework in ANY else FIRST)
                touch(again.stream, again.address)
                other = framework(MIB, SECOND)
                touch(SECOND, other.address)
                other.free(SECOND)
                again.free(again.stream)

    def test_memory_of_another_streams_pending_work_is_ready_for_any_stream(self):
        for framework in ANY:
            for _ in range(3):
                block = CuPy(150 * MIB, FIRST)
                touch(FIRST, block.address, block.size)
                block.free(FIRST)
                block = framework(150 * MIB, SECOND)
                touch(SECOND, block.address, block.size)
                block.free(SECOND)

    def test_what_does_not_fit_is_a_memory_error_with_the_report(self):
        for framework in OWN + BOTH + ANY:
            with self.assertRaises(MemoryError) as refused:
                framework(300 * MIB, FIRST)
            self.assertRegex(f"{refused.exception} {refused.exception.__cause__}", "out of memory", framework)
            self.assertEqual(isinstance(refused.exception, cupy.OutOfMemoryError), framework is CuPy)

    def test_a_stream_lives_as_long_as_memory_that_was_allocated_for_it(self):
        for framework in (CuPy, Warp):
            block = framework(MIB, FIRST)
            self.assertIsNotNone(block.lives(), framework)
            block.free(None)
            self.assertIsNone(block.lives(), framework)

    def test_any_other_failure_keeps_its_type(self):
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_NO_DEVICE"):
            rmm.resources[1].allocate(1, Stream(0))
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_FOREIGN_BLOCK"):
            LIBRARY.aq_fenced_free(0x123400)

    def test_cupys_pinned_memory_is_freed_with_its_last_pointer(self):
        pointer = cupy.chosen["pinned"](MIB)
        ctypes.memset(pointer.ptr, 7, pointer.size())
        self.assertEqual((pointer.size(), LIBRARY.pinned_stats(0)["requested"]), (MIB, MIB))
        del pointer
        self.assertEqual(LIBRARY.pinned_stats(0)["requested"], 0)

    def test_numba_is_told_of_the_limit(self):
        block = Numba(5 * MIB, None)
        self.assertEqual(CONTEXT.memory_manager.get_memory_info(), (195 * MIB, 200 * MIB))
        with self.assertRaises(NotImplementedError):
            CONTEXT.memory_manager.get_ipc_handle(block.held)

    def test_onnx_runtimes_options_empty_the_cache_and_take_nothing_for_nothing(self):
        self.assertEqual((len(OPTIONS), OPTIONS["device_id"]), (4, "3"))
        self.assertIsNone(CALLS["alloc"](0))
        CALLS["free"](None)
        CALLS["empty_cache"]()
        self.assertEqual(LIBRARY.stats(0)["physical"], 0)

    def test_cuda_cores_buffers_are_freed_when_they_are_dropped(self):
        made = cuda.core.Device().memory_resource
        facts = made.device_id, made.is_device_accessible, made.is_host_accessible, made.is_managed
        self.assertEqual(facts, (0, True, False, False))
        # Also in the form of older releases.
        self.assertGreater(made.allocate(MIB, Stream(FIRST)).handle, 0)

    def test_tritons_scratch_is_aligned(self):
        # So that what follows is not aligned to more than 512 by chance.
        before = aquifer_plugs.malloc(512, 0, None)
        for alignment in (16, 512, 4096):
            self.assertEqual(triton.allocator.get()(MIB, alignment, None).data_ptr() % alignment, 0)
        aquifer_plugs.free(before, 0)

    def test_warp_is_not_initialised_before_the_program_does_it(self):
        self.assertEqual((BEFORE, warp.calls[0]), ([], "init"))
        warp.init()
        self.assertEqual(warp.calls[2:], ["init"])

    def test_a_runtime_that_relies_on_retired_streams_is_refused(self):
        LIBRARY.streams_retired = True
        try:
            with self.assertRaisesRegex(aquifer_torch.AlreadyInitialised, "streams_retired=False"):
                aquifer_plugs.malloc(1, 0, None)
        finally:
            LIBRARY.streams_retired = False


class Launcher(unittest.TestCase):
    """python -m aquifer_plugs."""

    # Makes a simulated runtime of whatever a plug asks for, and prints that.
    SIMULATED = """
import aquifer_torch, json, sys
setup = aquifer_torch.setup
def simulated(**settings):
    print(json.dumps(settings))
    return setup(driver="sim", **settings)
aquifer_torch.setup = simulated
"""

    def ran(self, source, *options, status=0, interpreter=()):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([STAND_IN, str(HERE.parent)])}
        environment.pop("NUMBA_CUDA_MEMORY_MANAGER", None)
        with tempfile.TemporaryDirectory() as at:
            program = pathlib.Path(at) / "program.py"
            program.write_text(source)
            command = [sys.executable, *interpreter, "-m", "aquifer_plugs", *options, str(program), "a", "-b"]
            ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        self.assertEqual(ran.returncode, status, ran.stderr)
        return [json.loads(line) for line in ran.stdout.splitlines()], ran.stderr

    def test_sets_what_the_program_imports_with_the_settings(self):
        source = self.SIMULATED + """
import importlib.util, os
assert importlib.util.find_spec("cupy")             # which imports nothing
import cupy, rmm, triton
print(json.dumps([sorted(cupy.chosen), 0 in rmm.resources, triton.allocator.get().__name__]))
array = cupy.chosen["device"](100)
print(json.dumps(os.environ["NUMBA_CUDA_MEMORY_MANAGER"]))
"""
        said, _ = self.ran(source, "--limit", "4194304", "--slack", "6")
        settings = {"streams_retired": False, "limit": 4194304, "slack": 6}
        self.assertEqual(said, [[["device", "pinned"], True, "Scratch"], settings, "aquifer_plugs.numba"])
        said, _ = self.ran("import cupy, json; print(json.dumps(sorted(cupy.chosen)))", "--no-pinned")
        self.assertEqual(said, [["device"]])

    def test_leaves_the_program_as_it_is(self):
        source = "import json, sys; print(json.dumps([sys.argv[1:], __name__, __file__ == sys.argv[0], sys.flags.optimize,"
        source += " sorted({'aquifer_plugs', 'aquifer_torch', 'ctypes'} & set(sys.modules))])); sys.exit(7)"
        said, _ = self.ran(source, status=7, interpreter=["-O"])
        self.assertEqual(said, [[["a", "-b"], "__main__", True, 1, []]])

    def test_covers_the_processes_that_the_program_starts(self):
        child = "import cupy, json; print(json.dumps(sorted(cupy.chosen)))"
        said, _ = self.ran(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)")
        self.assertEqual(said, [["device", "pinned"]])

    def test_refuses_an_interpreter_that_finds_no_sitecustomize(self):
        _, stderr = self.ran("", status=1, interpreter=["-S"])
        self.assertIn("-I, -E or -S", stderr)


if __name__ == "__main__":
    unittest.main()
