"""What must hold of the Python wrapper, on a simulated device and without PyTorch.

    AQUIFER_LIB=... python python/tests/on_sim.py
"""

import ctypes
import json
import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import time
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import aquifer_torch  # noqa: E402
from aquifer_torch import host, library as binding  # noqa: E402
from elastic_on_sim import ElasticTests, TwoProcesses  # noqa: E402
from launch_on_sim import LauncherTests  # noqa: E402
from ledger_on_sim import LedgerTests  # noqa: E402
from placing_on_sim import PlacingTests  # noqa: E402
from registered_on_sim import RegisteredTests  # noqa: E402
from sleep_on_sim import RegionTests  # noqa: E402
from vllm_on_sim import VllmTests  # noqa: E402

HEADER = HERE.parent.parent / "allocators/ffi/include/aquifer.h"
MIB = 1 << 20


def declared():
    """Of each function of the header how many arguments it takes."""
    text = re.sub(r"/\*.*?\*/", " ", HEADER.read_text(), flags=re.S)
    found = {}
    for name, arguments in re.findall(r"\b(aq_\w+)\s*\(((?:[^()]|\([^()]*\))*)\)\s*;", text):
        flat = re.sub(r"\([^()]*\)", "", arguments).strip()
        found[name] = 0 if flat in ("", "void") else flat.count(",") + 1
    return found


class TheCompanionsCache(unittest.TestCase):
    def test_loads_nothing_that_another_user_could_have_written(self):
        from aquifer_torch import companion

        with tempfile.TemporaryDirectory() as at:
            folder = pathlib.Path(at) / "cache" / "aquifer_torch"
            companion._own_folder(folder)
            self.assertEqual(folder.stat().st_mode & 0o777, 0o700)
            folder.chmod(0o777)
            companion._own_folder(folder)
            self.assertEqual(folder.stat().st_mode & 0o022, 0)
            library = folder / "companion.so"
            library.write_bytes(b"")
            for mode, ours in [(0o700, True), (0o755, True), (0o775, False), (0o707, False)]:
                library.chmod(mode)
                self.assertEqual(companion._only_ours(library), ours, oct(mode))
            link = folder / "link.so"
            link.symlink_to(library)
            self.assertFalse(companion._only_ours(link))
            elsewhere = pathlib.Path(at) / "elsewhere"
            elsewhere.symlink_to(folder)
            with self.assertRaises(aquifer_torch.CompanionError):
                companion._own_folder(elsewhere)
            if os.geteuid() == 0:
                os.chown(library, 12345, -1)
                self.assertFalse(companion._only_ours(library))
                os.chown(folder, 12345, -1)
                with self.assertRaises(aquifer_torch.CompanionError):
                    companion._own_folder(folder)


class PrebuiltCompanions(unittest.TestCase):
    """On a stand-in for PyTorch: its version, its headers, and a folder of companions."""

    def setUp(self):
        from aquifer_torch import companion, prebuilt

        self.companion, self.prebuilt = companion, prebuilt
        at = tempfile.TemporaryDirectory()
        self.addCleanup(at.cleanup)
        self.at = pathlib.Path(at.name)
        self.header = self.at / "torch/include/c10/core/Allocator.h"
        self.header.parent.mkdir(parents=True)
        self.header.write_text("struct Allocator {};")
        self.torch = types.ModuleType("torch")
        self.torch.__version__, self.torch.__file__ = "2.11.0+cu130", str(self.at / "torch/__init__.py")
        self.torch.version = types.SimpleNamespace(cuda="13.0")
        self.torch._C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
        self.source = self.at / "companion.cpp"
        self.source.write_text("int answer() { return 1; }")
        (self.at / "companions").mkdir()
        # Without a compiler, so that what cannot be loaded is an error.
        environment = {"CXX": str(self.at / "no-compiler"), "AQUIFER_CACHE": str(self.at / "cache")}
        for patch in (
            mock.patch.dict(sys.modules, torch=self.torch),
            mock.patch.dict(os.environ, environment),
            mock.patch.object(prebuilt, "FOLDER", self.at / "companions"),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def make(self, returns):
        """Compiles what stands for the companion of the present stand-in, under its name."""
        name = self.prebuilt.file_name(self.source, "2.11.0", "13.0", self.at / "torch/include")
        (self.at / "made.c").write_text(f"int missing(void); int answer(void) {{ return {returns}; }}")
        made = self.at / "companions" / name
        subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", f"{self.at}/made.c", "-o", made], check=True)
        return made

    def test_are_loaded_without_a_compiler(self):
        self.make(42)
        self.assertEqual(self.companion.load(self.source).answer(), 42)
        # A patch release with the same class layouts.
        self.torch.__version__ = "2.11.1+cu130"
        self.assertEqual(self.companion.load(self.source).answer(), 42)

    def test_of_another_pytorch_or_other_sources_are_not_loaded(self):
        self.make(42)
        with self.subTest("version"), mock.patch.object(self.torch, "__version__", "2.12.0+cu130"):
            with self.assertRaisesRegex(aquifer_torch.CompanionError, r"fits PyTorch 2\.12\.0.*prebuilt: 2\.11 \(CUDA 13\)"):
                self.companion.load(self.source)
        with self.subTest("CUDA"), mock.patch.object(self.torch.version, "cuda", "12.8"):
            with self.assertRaisesRegex(aquifer_torch.CompanionError, r"with CUDA 12\.8.*no-compiler"):
                self.companion.load(self.source)
        with self.subTest("ABI"), mock.patch.object(self.torch._C, "_GLIBCXX_USE_CXX11_ABI", False):
            with self.assertRaisesRegex(aquifer_torch.CompanionError, "old ABI"):
                self.companion.load(self.source)
        for changed in (self.header, self.source, self.at / "shared.h"):
            with self.subTest(changed.name):
                before = changed.read_text() if changed.is_file() else ""
                changed.write_text(before + "// changed")
                with self.assertRaisesRegex(aquifer_torch.CompanionError, "no prebuilt companion fits"):
                    self.companion.load(self.source)
                changed.write_text(before) if before else changed.unlink()
        self.assertEqual(self.companion.load(self.source).answer(), 42)

    def test_that_do_not_load_are_reported_and_compiled_instead(self):
        made = self.make("missing()")
        with self.assertWarnsRegex(RuntimeWarning, "does not load.*undefined symbol: missing.*companion.cpp is compiled"):
            with self.assertRaisesRegex(aquifer_torch.CompanionError, "missing.*and it cannot be compiled.*no-compiler"):
                self.companion.load(self.source)
        other = self.make(7).rename(self.at / "other.so")
        made.write_bytes(b"no library")
        with self.assertWarns(RuntimeWarning), mock.patch.object(self.companion, "build", return_value=other):
            self.assertEqual(self.companion.load(self.source).answer(), 7)

    def test_that_cannot_be_compiled_name_the_missing_package(self):
        include, os.environ["CXX"] = self.at / "include", os.environ.get("CC", "cc")
        (include / "crt").mkdir(parents=True)
        with mock.patch.object(self.companion, "_cuda_includes", return_value=[include]):
            for name, package in self.companion._CUDA_HEADERS.items():
                with self.assertRaisesRegex(aquifer_torch.CompanionError, f"(?s){name} was not found.*{package.split()[0]}"):
                    self.companion.build(self.source)
                (include / name).write_text("")

    def test_are_compiled_as_their_pytorch_needs(self):
        standards = {"2.9.1": "c++17", "2.13.0+cu130": "c++17", "2.14.0a0": "c++20", "3.0": "c++20"}
        self.assertEqual({version: self.prebuilt.standard(version) for version in standards}, standards)


class TheBinding(unittest.TestCase):
    def test_declares_what_the_header_declares(self):
        header = declared()
        for name, (_, takes) in binding._DECLARED.items():
            self.assertEqual(header[name], len(takes), name)

    def test_structs_have_the_headers_form(self):
        structs = {
            "aq_runtime_options": binding.Options,
            "aq_stats": binding.Stats,
            "aq_device_facts": binding.Facts,
            "aq_ledger_options": binding.LedgerOptions,
        }
        source = '#include "aquifer.h"\n#include <stdio.h>\nint main(void) {\n'
        expected = []
        for name, form in structs.items():
            source += f'printf("%zu\\n", sizeof({name}));\n'
            expected.append(ctypes.sizeof(form))
            for field, _ in form._fields_:
                source += f'printf("%zu\\n", offsetof({name}, {field}));\n'
                expected.append(getattr(form, field).offset)
        with tempfile.TemporaryDirectory() as at:
            (pathlib.Path(at) / "form.c").write_text(source + "return 0;\n}\n")
            compiler = os.environ.get("CC", "cc")
            subprocess.run([compiler, f"-I{HEADER.parent}", f"{at}/form.c", "-o", f"{at}/form"], check=True)
            said = subprocess.run([f"{at}/form"], capture_output=True, text=True, check=True).stdout
        self.assertEqual([int(line) for line in said.split()], expected)

    def test_has_the_headers_version(self):
        numbers = tuple(int(re.search(rf"#define AQ_VERSION_{part} (\d+)", HEADER.read_text())[1]) for part in ("MAJOR", "MINOR"))
        self.assertEqual(numbers, binding.VERSION)

    def test_the_companion_calls_what_the_library_has(self):
        source, header = (HERE.parent / "aquifer_torch/companion.cpp").read_text(), declared()
        called = set(re.findall(r"call\((aq_\w+)\)", source))
        self.assertGreater(len(called), 10)
        self.assertEqual(set(re.findall(r"\baq\.(aq_\w+)", source)), called)
        for name in called:
            self.assertIn(name, header)
            self.assertTrue(LIBRARY.address(name), name)

    def test_a_library_that_is_not_there_is_looked_for_by_name(self):
        with self.assertRaisesRegex(aquifer_torch.LibraryNotFound, "/nowhere/libx.so"):
            aquifer_torch.Library("/nowhere/libx.so")

    def test_another_library_is_refused(self):
        with tempfile.TemporaryDirectory() as at:
            (pathlib.Path(at) / "other.c").write_text("unsigned aq_version(void) { return 7u << 16; }\n")
            subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", f"{at}/other.c", "-o", f"{at}/other.so"], check=True)
            with self.assertRaisesRegex(aquifer_torch.LibraryVersion, "aq_"):
                aquifer_torch.Library(f"{at}/other.so")


class OneProcess:
    """For tests in the process's one runtime, on one simulated device of 256 MiB, whose limit is 200."""

    @property
    def library(self):
        return LIBRARY

    def stream(self):
        made = ctypes.c_void_p()
        LIBRARY.aq_sim_stream_create(LIBRARY.runtime(), 0, ctypes.byref(made))
        return made

    def malloc(self, size, stream=None):
        memory = ctypes.c_void_p()
        LIBRARY.aq_torch_malloc(size, 0, stream, ctypes.byref(memory))
        return memory.value

    def tearDown(self):
        count, report = ctypes.c_uint64(), ctypes.c_void_p()
        LIBRARY.aq_sim_violations(LIBRARY.runtime(), ctypes.byref(count), ctypes.byref(report))
        self.assertEqual(count.value, 0, ctypes.string_at(report.value))
        LIBRARY.aq_text_free(report)
        self.assertEqual(aquifer_torch.statistics(0)["allocation.all.current"], 0)


class TheProcess(OneProcess, unittest.TestCase):
    def test_counts_what_is_out(self):
        memory = self.malloc(3 * MIB)
        found = aquifer_torch.statistics(0)
        self.assertEqual(found["requested_bytes.all.current"], 3 * MIB)
        self.assertGreaterEqual(found["reserved_bytes.all.current"], 3 * MIB)
        self.assertEqual(found["aquifer.limit"], 200 * MIB)
        shot = aquifer_torch.snapshot()
        self.assertEqual((shot["format"], shot["devices"][0]["stats"]["blocks"]), ("aquifer-snapshot", 1))
        LIBRARY.aq_torch_free(memory, 3 * MIB, -1, None)

    def test_writes_what_pytorchs_viewer_reads(self):
        memory = self.malloc(3 * MIB)
        LIBRARY.aq_torch_free(self.malloc(MIB), MIB, -1, None)
        with tempfile.TemporaryDirectory() as at:
            path = pathlib.Path(at) / "memory.pickle"
            aquifer_torch.dump_snapshot(path, 0)
            shot = pickle.loads(path.read_bytes())
        told = [(entry["action"], entry["size"]) for entry in shot["device_traces"][0]][-3:]
        self.assertEqual(told, [("alloc", MIB), ("free_requested", MIB), ("free_completed", MIB)])
        held = [block for segment in shot["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"]
        self.assertEqual([(block["address"], block["requested_size"]) for block in held], [(memory, 3 * MIB)])
        LIBRARY.aq_torch_free(memory, 3 * MIB, -1, None)

    def test_says_why_there_is_no_memory(self):
        with self.assertRaises(aquifer_torch.AquiferError) as refused:
            self.malloc(300 * MIB)
        self.assertEqual(refused.exception.name, "AQ_ERROR_OUT_OF_MEMORY")
        self.assertIn("out of memory", refused.exception.text)
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_FOREIGN_BLOCK"):
            LIBRARY.aq_torch_free(0x123400, 0, -1, None)

    def test_a_limit_binds_and_can_be_moved(self):
        self.assertEqual(aquifer_torch.limit(0)[0], 200 * MIB)
        try:
            self.assertEqual(aquifer_torch.set_limit(8 * MIB, 0), max(0, aquifer_torch.limit(0)[1] - 8 * MIB))
            aquifer_torch.trim(0, 0)
            with self.assertRaises(aquifer_torch.AquiferError):
                self.malloc(16 * MIB)
        finally:
            aquifer_torch.set_limit(200 * MIB, 0)

    def test_slack_bounds_what_is_held(self):
        source = """
import ctypes, sys, aquifer_torch
from aquifer_torch import library as binding
library, MIB = aquifer_torch.setup(driver=binding.DRIVER_SIM, slack=int(sys.argv[1]) or None), 1 << 20
def malloc(size):
    memory = ctypes.c_void_p()
    library.aq_torch_malloc(size, 0, None, ctypes.byref(memory))
    return memory.value
first, rest = malloc(64 * MIB), malloc(32 * MIB)
library.aq_torch_free(first, 64 * MIB, 0, None)
larger = malloc(66 * MIB)
print(library.stats(0)["physical"] // MIB)
"""
        held = {}
        for slack in (6, 17, 0):
            command = [sys.executable, "-c", source, str(slack)]
            environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
            said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
            held[slack] = int(said)
        # 1.06 times 98 MiB.
        self.assertLessEqual(held[6], 103)
        self.assertGreater(held[17], 103)
        self.assertEqual(held[0], held[17])

    def test_what_was_recorded_on_a_stream_is_not_given_out_before_it_is_done(self):
        runtime, home, other = LIBRARY.runtime(), self.stream(), self.stream()
        for _ in range(50):
            memory = self.malloc(MIB, home)
            LIBRARY.aq_sim_touch(runtime, 0, home, memory, MIB, binding.WRITE)
            LIBRARY.aq_sim_stream_wait(runtime, 0, other, home)
            LIBRARY.aq_torch_record_stream(memory, other)
            LIBRARY.aq_sim_touch(runtime, 0, other, memory, MIB, binding.READ)
            LIBRARY.aq_torch_free(memory, MIB, -1, None)
            again = self.malloc(MIB, home)
            LIBRARY.aq_sim_touch(runtime, 0, home, again, MIB, binding.WRITE)
            LIBRARY.aq_torch_free(again, MIB, -1, None)

    def share(self, memory):
        handle, offset = ctypes.create_string_buffer(32), ctypes.c_size_t()
        LIBRARY.aq_torch_share(memory, handle, ctypes.byref(offset))
        return handle.raw, offset.value

    def receive(self, handle):
        memory = ctypes.c_void_p()
        LIBRARY.aq_torch_receive(0, handle, len(handle), ctypes.byref(memory))
        return memory.value

    def test_a_block_is_mapped_by_its_handle_until_it_is_freed(self):
        other, memory = self.malloc(3 * MIB), self.malloc(5 * MIB)
        handle, offset = self.share(memory)
        self.assertEqual((self.share(memory), self.share(memory + MIB), offset), ((handle, 0), (handle, MIB), 0))
        self.assertNotEqual(self.share(other)[0], handle)
        mapped = [self.receive(handle) for _ in range(3)]
        self.assertEqual(len({memory, *mapped}), 4)
        LIBRARY.aq_sim_touch(LIBRARY.runtime(), 0, None, mapped[0], 5 * MIB, binding.WRITE)
        LIBRARY.aq_sim_stream_synchronize(LIBRARY.runtime(), 0, None)
        for at in mapped:
            LIBRARY.aq_torch_close(at)
            with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_FOREIGN_BLOCK"):
                LIBRARY.aq_torch_close(at)
        for at in (memory, other):
            LIBRARY.aq_torch_free(at, 0, -1, None)
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_FOREIGN_BLOCK.*has freed the memory"):
            self.receive(handle)
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_FOREIGN_BLOCK"):
            self.share(memory)
        again = self.malloc(5 * MIB)
        self.assertNotEqual(self.share(again)[0], handle, "another block at the same address is another")
        LIBRARY.aq_torch_free(again, 0, -1, None)

    def test_a_thousand_shares_leave_no_descriptor_open(self):
        memory = self.malloc(40 * MIB)
        before = None
        for n in range(1000):
            LIBRARY.aq_torch_close(self.receive(self.share(memory)[0]))
            before = len(os.listdir("/proc/self/fd")) if n == 10 else before
        # The thread that serves may still close those of the last shares.
        end = time.monotonic() + 20
        while len(os.listdir("/proc/self/fd")) > before + 1 and time.monotonic() < end:
            time.sleep(0.001)
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), before + 1)
        LIBRARY.aq_torch_free(memory, 0, -1, None)

    def test_what_is_no_handle_or_of_a_process_that_has_ended_is_refused(self):
        memory = self.malloc(MIB)
        handle, _ = self.share(memory)
        for wrong in (b"", handle[:-1], handle + b"x", b"\x01" + handle[1:], os.urandom(64)):
            with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_BAD_ARGUMENT.*not shared by aquifer"):
                self.receive(wrong)
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_CLOSED.*has ended"):
            self.receive(handle[:10] + os.urandom(14) + handle[24:])
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_FOREIGN_BLOCK"):
            self.receive(handle[:24] + (1 << 60).to_bytes(8, "little"))
        LIBRARY.aq_torch_free(memory, 0, -1, None)

    def test_strangers_and_silent_connections_get_nothing_and_stop_no_one(self):
        memory = self.malloc(MIB)
        handle, _ = self.share(memory)
        name = "\0aquifer-share-%d-%s" % (int.from_bytes(handle[4:8], "little"), handle[8:24].hex())
        block = b"%d" % int.from_bytes(handle[24:], "little")
        request = (b"aqask-4 1 " + block).ljust(256, b"\0")

        def connected():
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(20)
            made.connect(name)
            return made

        with connected() as silent, connected() as wrong, connected() as gone:
            wrong.sendall(b"x" * 16)
            gone.sendall(request)
            gone.close()
            self.assertEqual(wrong.recv(100), b"")
            LIBRARY.aq_torch_close(self.receive(handle))
            self.assertEqual(silent.recv(100), b"")
        if os.geteuid() == 0:
            source = "import os, socket, sys; s = socket.socket(socket.AF_UNIX); os.setuid(65534); s.connect(sys.argv[1].replace('@', chr(0)))\n"
            source += "try: s.sendall(bytes.fromhex(sys.argv[2])); print(s.recv(100))\nexcept OSError: print(b'')"
            command = [sys.executable, "-c", source, name.replace("\0", "@"), request.hex()]
            self.assertEqual(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(), "b''")
        LIBRARY.aq_torch_free(memory, 0, -1, None)

    def test_a_forked_child_has_a_socket_of_its_own(self):
        memory = self.malloc(MIB)
        handle, _ = self.share(memory)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, self.share(memory)[0])
            finally:
                os._exit(0)
        os.close(writer)
        theirs = os.read(reader, 32)
        os.close(reader)
        os.waitpid(child, 0)
        self.assertEqual(int.from_bytes(theirs[4:8], "little"), child)
        self.assertEqual(int.from_bytes(handle[4:8], "little"), os.getpid())
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_CLOSED"):
            self.receive(theirs)
        LIBRARY.aq_torch_close(self.receive(handle))
        LIBRARY.aq_torch_free(memory, 0, -1, None)

    def test_a_forked_child_reads_what_its_parent_has_pinned(self):
        block = host.PinnedBlock(MIB)
        ctypes.memset(block.address, 7, MIB)
        child = os.fork()
        if child == 0:
            # As NumPy's array over it would read it. A read of memory that is not there ends the child by a signal.
            os._exit(0 if ctypes.string_at(block.address, MIB) == bytes([7]) * MIB else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)

    def test_settings_come_once(self):
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_BUSY"):
            aquifer_torch.setup(driver=binding.DRIVER_SIM)
        with self.assertRaises(ValueError):
            aquifer_torch.setup(driver=binding.DRIVER_SIM, limit=1.5)
        for slack in (0, -1, 10_001, 1 << 64 | 17, 0.06, "17"):
            with self.assertRaisesRegex(ValueError, "slack=.*from 1 to 10000"):
                aquifer_torch.setup(driver=binding.DRIVER_SIM, slack=slack)


class WithoutPyTorch(unittest.TestCase):
    """What a machine without a GPU and without PyTorch is documented to do."""

    SCRIPT = """
import sys, aquifer_torch
sys.modules["torch"] = None                                     # importing it fails, as where there is none
library = aquifer_torch.setup(driver="sim", sim_memory=64 << 20)
statistics = aquifer_torch.statistics()
assert library.facts(0).simulated
assert statistics["allocation.all.current"] == 0, statistics
assert aquifer_torch.limit()[0] > 0
"""

    def run_with(self, driver):
        command = [sys.executable, "-c", self.SCRIPT.replace('"sim"', repr(driver))]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def test_a_simulated_device_is_asked_for_by_its_name_and_has_statistics(self):
        for driver in "sim", "cuda-or-sim":
            ran = self.run_with(driver)
            self.assertEqual(ran.returncode, 0, ran.stderr)

    def test_the_current_device_is_pytorchs_once_it_uses_cuda(self):
        cuda = types.SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 3)
        with mock.patch.dict(sys.modules, torch=types.SimpleNamespace(cuda=cuda)):
            self.assertEqual(aquifer_torch._device(None), 3)
            cuda.is_initialized = lambda: False
            self.assertEqual(aquifer_torch._device(None), 0)

    def test_an_unknown_driver_is_refused_with_the_known_ones(self):
        ran = self.run_with("gpu")
        self.assertIn("ValueError: driver='gpu': it can be 'cuda', 'sim', 'cuda-or-sim'", ran.stderr)


class Sleep(RegionTests, OneProcess, unittest.TestCase):
    """Regions that are paused and resumed."""


class Registered(RegisteredTests, OneProcess, unittest.TestCase):
    """Memory that a transport registers."""


class VllmSleep(VllmTests, OneProcess, unittest.TestCase):
    """vLLM's sleep mode."""


class Elastic(ElasticTests, OneProcess, unittest.TestCase):
    """Tensors whose pages come and go."""


class ElasticOfTwo(TwoProcesses, unittest.TestCase):
    """Pages that go from one process to another."""


class Ledgers(LedgerTests, unittest.TestCase):
    """Memory that processes share."""

    def test_a_device_and_pinned_memory_have_ledgers_by_name(self):
        from aquifer_torch import ledger

        self.assertEqual(ledger.device(0), ("simulated-0", 256 * MIB))
        name, capacity = ledger.pinned()
        self.assertEqual(name, ledger.PINNED)
        self.assertGreater(capacity, 0)


class Placing(PlacingTests, unittest.TestCase):
    """Where the leases of Ray's tasks lie."""

    def setUp(self):
        at = tempfile.TemporaryDirectory()
        self.addCleanup(at.cleanup)
        self.folder = at.name


class Launcher(LauncherTests, unittest.TestCase):
    """python -m aquifer_torch."""


class TheTestsOnAGpu(unittest.TestCase):
    """What can be seen of them without one."""

    def test_of_pytorchs_own_are_compared_with_what_passes_natively(self):
        outcomes = {
            "TestCuda.test_a": ("passed", "passed"),
            "TestCuda.test_b": ("passed", "failed"),
            "TestCuda.test_graph_two_successive": ("passed", "failed"),
            "TestCuda.test_graph_two_successive_more": ("passed", "crashed"),
            "TestCuda.test_c": ("failed", "passed"),
            "TestCuda.test_d": ("skipped", "skipped"),
            "TestCuda.test_e": ("not run", "passed"),
        }
        found = {"test_cuda.py": {name: {"native": [native, "", 0], "aquifer": [ours, "why\nthe last line", 0]} for name, (native, ours) in outcomes.items()}}
        with tempfile.TemporaryDirectory() as at:
            path = pathlib.Path(at) / "found.json"
            path.write_text(json.dumps(found))
            command = [sys.executable, str(HERE / "pytorchs_own.py"), "--show", str(path)]
            ran = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(ran.returncode, 1)
            self.assertIn("| test_cuda.py | 1 | 2 | 1 | 1 | 1 | 1 | 25.0 % |", ran.stdout)
            self.assertRegex(ran.stdout, "does not apply +TestCuda.test_graph_two_successive: sizes")
            self.assertRegex(ran.stdout, "fails here +TestCuda.test_graph_two_successive_more: crashed: the last line")
            # Of those that apply, 19 in 20 are enough.
            right = {f"TestCuda.test_{n}": {"native": ["passed", "", 0], "aquifer": ["passed" if n else "failed", "", 0]} for n in range(20)}
            path.write_text(json.dumps({"test_cuda.py": right}))
            self.assertEqual(subprocess.run(command, capture_output=True).returncode, 0)
            right["TestCuda.test_1"]["aquifer"][0] = "timed out"
            path.write_text(json.dumps({"test_cuda.py": right}))
            self.assertEqual(subprocess.run(command, capture_output=True).returncode, 1)


if __name__ == "__main__":
    LIBRARY = aquifer_torch.setup(driver=binding.DRIVER_SIM, sim_memory=256 * MIB, limit=200 * MIB, history=1000)
    unittest.main()
