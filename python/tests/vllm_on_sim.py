"""Tests of the sleep-mode backend against vLLM's interface, as its sources have it: on_sim.py runs them in its process.

vLLM itself is not there. What stands for it follows vllm/device_allocator/{__init__,sleep_mode_backend}.py and
vllm/v1/worker/{worker_base,gpu_worker}.py of vLLM 0.26 as far as a backend meets them.
"""

import importlib
import pathlib
import re
import sys
import types
from unittest import mock

import aquifer_torch
from sleep_on_sim import MIB, SleepTests


def stand_in():
    """The modules of vLLM that are met, by name."""
    names = ("", ".device_allocator", ".device_allocator.sleep_mode_backend", ".device_allocator.cumem", ".v1", ".v1.worker")
    modules = {f"vllm{name}": types.ModuleType(f"vllm{name}") for name in (*names, ".v1.worker.worker_base")}

    class SleepModeBackend:
        def __init__(self):
            self._state = "RUNNING"

        def state(self):
            return self._state

        @classmethod
        def is_supported(cls):
            return True

    class SleepModeBackendFactory:
        registry = {}

        @classmethod
        def register_backend(cls, name, module_path, class_name):
            if name in cls.registry:
                raise ValueError(f"Sleep-mode backend '{name}' is already registered.")
            cls.registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

        @classmethod
        def create_backend(cls, model_config):
            return cls.registry[model_config.sleep_mode_backend]()()

    class CuMemAllocator:
        @staticmethod
        def get_instance():
            return "vLLM's own"

    class WorkerBase:
        def __init__(self, vllm_config, local_rank, rank):
            self.vllm_config, self.rank = vllm_config, rank

    def get_mem_allocator_instance():
        return CuMemAllocator.get_instance()

    class Worker(WorkerBase):
        backend = None

        def get_sleep_mode_backend(self):
            if self.backend is None:
                self.backend = SleepModeBackendFactory.create_backend(self.vllm_config.model_config)
            return self.backend

        def pool(self, tag):
            allocator = get_mem_allocator_instance()
            if tag == "weights":
                assert allocator.get_current_usage() == 0
            return allocator.use_memory_pool(tag=tag)

    modules["vllm"].envs = types.SimpleNamespace()
    modules["vllm.device_allocator"].get_mem_allocator_instance = get_mem_allocator_instance
    modules["vllm.device_allocator.cumem"].CuMemAllocator = CuMemAllocator
    backend = modules["vllm.device_allocator.sleep_mode_backend"]
    backend.SleepModeBackend, backend.SleepModeBackendFactory = SleepModeBackend, SleepModeBackendFactory
    modules["vllm.v1.worker.worker_base"].WorkerBase = WorkerBase
    return modules, Worker


def configured(backend):
    return types.SimpleNamespace(model_config=types.SimpleNamespace(sleep_mode_backend=backend))


class VllmTests(SleepTests):
    """As SleepTests."""

    def setUp(self):
        super().setUp()
        modules, self.Worker = stand_in()
        self.modules = modules
        torch = types.ModuleType("torch")
        torch.cuda = types.SimpleNamespace(
            empty_cache=lambda: None, is_initialized=lambda: False, current_device=lambda: 0
        )
        patch = mock.patch.dict(sys.modules, modules, torch=torch)
        patch.start()
        self.addCleanup(patch.stop)
        for name in ("vllm_sleep", "vllm_backend"):
            sys.modules.pop(f"aquifer_torch.{name}", None)
        self.plugin = importlib.import_module("aquifer_torch.vllm_sleep")
        self.factory = modules["vllm.device_allocator.sleep_mode_backend"].SleepModeBackendFactory
        self.plugin.register()
        self.plugin.register()

    def tearDown(self):
        self.plugin.allocator().wake_up()
        super().tearDown()

    def worker(self):
        """A worker with 20 MiB of weights and 50 of cache."""
        worker = self.Worker(configured("aquifer"), 0, rank=3)
        self.assertEqual(worker.rank, 3)
        with worker.pool("weights"):
            weights = self.malloc(20 * MIB)
        with worker.pool("kv_cache"):
            cache = self.malloc(50 * MIB)
        self.write(weights, 1, 20 * MIB)
        self.write(cache, 2, 50 * MIB)
        return worker, weights, cache

    def test_the_entry_point_names_the_function_that_registers_the_backend(self):
        project = (pathlib.Path(aquifer_torch.__file__).parent.parent / "pyproject.toml").read_text()
        found = re.search(r'\[project.entry-points."vllm.general_plugins"\]\naquifer = "aquifer_torch.(\w+):(\w+)"', project)
        self.assertIs(getattr(sys.modules[f"aquifer_torch.{found[1]}"], found[2]), self.plugin.register)
        self.assertEqual(list(self.factory.registry), ["aquifer"])

    def test_level_one_keeps_the_weights_and_level_two_nothing(self):
        worker, weights, cache = self.worker()
        before = self.used()
        backend = worker.get_sleep_mode_backend()
        self.assertTrue(backend.preserves_communicators())
        for level in (1, 2):
            backend.suspend(level)
            self.assertEqual((backend.state(), self.used()), ("SUSPENDED", 0))
            for block in (weights, cache):
                with self.refused("AQ_ERROR_PARKED"):
                    self.read(block, MIB)
            backend.resume(["weights"])
            self.assertEqual(backend.state(), "SUSPENDED")
            if level == 1:
                self.assertEqual(self.read(weights, 20 * MIB), b"\x01" * 20 * MIB)
            self.write(weights, 1, 20 * MIB)
            with self.refused("AQ_ERROR_PARKED"):
                self.read(cache, MIB)
            backend.resume(["kv_cache"])
            self.assertEqual((backend.state(), self.used()), ("RUNNING", before))
            self.write(cache, 3, 50 * MIB)
            self.assertEqual(self.read(weights, 20 * MIB), b"\x01" * 20 * MIB)
        with self.assertRaisesRegex(ValueError, "level 3"):
            backend.suspend(3)
        self.free(weights, cache)

    def test_a_wake_that_does_not_fit_leaves_all_of_it_asleep(self):
        worker, weights, cache = self.worker()
        backend = worker.get_sleep_mode_backend()
        backend.suspend(1)
        other = self.malloc(150 * MIB)
        used = self.used()
        with self.refused("AQ_ERROR_OUT_OF_MEMORY"):
            backend.resume()
        self.assertEqual((backend.state(), self.used()), ("SUSPENDED", used))
        self.free(other)
        backend.resume()
        self.assertEqual((backend.state(), self.read(weights, 20 * MIB)), ("RUNNING", b"\x01" * 20 * MIB))
        self.free(weights, cache)

    def test_host_memory_is_given_back_after_a_wake_if_vllm_is_told_so(self):
        worker, weights, cache = self.worker()
        backend = worker.get_sleep_mode_backend()
        # What the tests' own copies go through.
        other = aquifer_torch.pinned_statistics(0)["requested"]
        for releases in (False, True):
            sys.modules["aquifer_torch.vllm_backend"].envs.VLLM_SLEEP_MODE_RELEASE_HOST_MEMORY = releases
            backend.suspend(1)
            self.assertGreaterEqual(aquifer_torch.pinned_statistics(0)["requested"], other + 20 * MIB)
            with mock.patch.object(self.library, "trim_pinned", wraps=self.library.trim_pinned) as trimmed:
                backend.resume()
            self.assertEqual((trimmed.call_count, aquifer_torch.pinned_statistics(0)["requested"]), (int(releases), other))
        self.free(weights, cache)

    def test_tags_are_discarded_alone_and_any_wake_brings_back_what_cannot_be_woken_alone(self):
        worker, weights, cache = self.worker()
        with worker.pool("other"):
            other = self.malloc(MIB)
        backend = worker.get_sleep_mode_backend()
        backend.discard(("kv_cache",))
        self.assertEqual(self.read(weights, 20 * MIB), b"\x01" * 20 * MIB)
        backend.resume()
        backend.suspend(1)
        backend.resume(["weights"])
        self.write(other, 1, MIB)
        backend.resume()
        self.free(weights, cache, other)

    def test_a_worker_with_another_backend_keeps_vllms_own_allocator(self):
        self.Worker(configured("cumem"), 0, 0)
        instance = self.modules["vllm.device_allocator"].get_mem_allocator_instance
        self.assertEqual(instance(), "vLLM's own")
        self.Worker(configured("aquifer"), 0, 0)
        self.assertIs(instance(), self.plugin.allocator())

    def test_a_backend_whose_worker_has_no_memory_here_says_so(self):
        self.factory.registry["aquifer"]()
        backend = self.factory.create_backend(configured("aquifer").model_config)
        with self.assertRaisesRegex(RuntimeError, "--sleep-mode-backend aquifer"):
            backend.suspend(1)

    def test_a_vllm_without_backends_is_left_alone(self):
        with mock.patch.dict(sys.modules, {"vllm.device_allocator.sleep_mode_backend": None}):
            self.plugin.register()
