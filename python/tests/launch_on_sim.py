"""The launcher, with a stand-in for PyTorch: a part of on_sim.py."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
# It initialises CUDA as PyTorch does. `_C._cuda_init` is read anew at each call.
PYTORCH = """
import types
_C = types.SimpleNamespace(_cuda_init=lambda: said.append("initialised"))
said = []
def use_cuda():
    _C._cuda_init()
cuda = types.SimpleNamespace(init=use_cuda)
class TensorBase:
    def pin_memory(self):
        said.append("pinned")
        return self
class Tensor(TensorBase):
    pass
"""
# What the launcher calls, with what it called.
RECORDING = """
import torch, aquifer_torch
def install(**settings):
    torch.said.append(["install", settings])
    aquifer_torch._installed = True
def install_pinned(**settings):
    torch.said.append(["install_pinned", settings])
    aquifer_torch._pinning = True
aquifer_torch.install, aquifer_torch.install_pinned = install, install_pinned
"""
USE = RECORDING + "torch.use_cuda(); torch.use_cuda()\nimport json; print(json.dumps(torch.said))\n"
USED = ["initialised", "initialised"]


class LauncherTests:
    def ran(self, program, *options, environment=None, files=None):
        """What `program` printed under the launcher, a value a line."""
        with tempfile.TemporaryDirectory() as at:
            place = pathlib.Path(at)
            for name, text in {"torch.py": PYTORCH, "use.py": USE, "program.py": program, **(files or {})}.items():
                (place / name).write_text(text)
            environment = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{PACKAGE}", **(environment or {})}
            command = [sys.executable, "-m", "aquifer_torch", *options, str(place / "program.py")]
            ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return [json.loads(line) for line in ran.stdout.splitlines()]

    def test_installs_at_the_first_use_of_cuda_and_once(self):
        said = self.ran(USE, "--limit", "0.5", "--slack", "6", "--pinned-limit", "4096")
        settings = {"limit": 0.5, "slack": 6}
        self.assertEqual(said, [[["install", settings], ["install_pinned", {"pinned_limit": 4096}], *USED]])
        self.assertEqual(self.ran(USE, "--no-pinned"), [[["install", {}], *USED]])

    def test_installs_before_the_first_tensor_is_pinned(self):
        program = RECORDING + (
            "pinned = [torch.Tensor().pin_memory() for _ in range(2)]\n"
            "import json; print(json.dumps([torch.said, 'pin_memory' in vars(torch.Tensor)]))\n"
        )
        pinned = ["install_pinned", {"pinned_limit": None}]
        self.assertEqual(self.ran(program), [[[["install", {}], pinned, "initialised", "pinned", "pinned"], False]])
        self.assertEqual(self.ran(program, "--no-pinned"), [[["pinned", "pinned"], False]])

    def test_installs_in_no_process_that_does_not_use_cuda(self):
        program = "import sys, json, torch\nprint(json.dumps([torch.said, 'aquifer_torch.companion' in sys.modules]))"
        self.assertEqual(self.ran(program), [[[], False]])

    def test_covers_the_processes_that_the_program_starts_and_theirs(self):
        start = "import os, subprocess, sys\nsubprocess.run([sys.executable, sys.argv[1], *sys.argv[2:]], check=True)\n"
        program = start.replace("sys.argv[1], *sys.argv[2:]", "os.path.join(os.path.dirname(__file__), 'child.py'), os.path.join(os.path.dirname(__file__), 'use.py')")
        said = self.ran(program, "--limit", "0.25", files={"child.py": start})
        self.assertEqual(said, [[["install", {"limit": 0.25}], ["install_pinned", {"pinned_limit": None}], *USED]])

    def test_covers_what_multiprocessing_spawns(self):
        program = (
            "import multiprocessing, runpy\nif __name__ == '__main__':\n"
            "    child = multiprocessing.get_context('spawn').Process(target=runpy.run_module, args=('use',))\n"
            "    child.start(); child.join(); assert child.exitcode == 0\n"
        )
        said = self.ran(program, "--no-pinned")
        self.assertEqual(said, [[["install", {}], *USED]])

    def test_leaves_a_program_that_installs_it_by_itself_its_own_settings(self):
        program = RECORDING + "aquifer_torch.install(limit=7)\ntorch.use_cuda()\nimport json; print(json.dumps(torch.said))\n"
        self.assertEqual(self.ran(program, "--limit", "9", "--slack", "6", "--no-pinned"), [[["install", {"limit": 7}], "initialised"]])

    def test_leaves_a_program_that_makes_the_runtime_by_itself_its_own_limit(self):
        program = RECORDING + (
            "library = aquifer_torch.setup(driver=1, sim_memory=1 << 30, limit=1 << 20)\n"
            "torch.use_cuda()\nimport json; print(json.dumps([torch.said, library.limit(0)[0]]))\n"
        )
        said = self.ran(program, "--limit", "0.5", "--no-pinned")
        self.assertEqual(said, [[[["install", {}], "initialised"], 1 << 20]])

    def test_tries_again_after_a_failure_and_never_initialises_without(self):
        program = RECORDING + (
            "right = aquifer_torch.install\n"
            "def broken(**settings): raise aquifer_torch.CompanionError('as planned')\n"
            "aquifer_torch.install = broken\n"
            "try: torch.use_cuda()\nexcept aquifer_torch.CompanionError as error: assert 'as planned' in str(error)\n"
            "else: raise SystemExit('no error')\n"
            "assert torch.said == [], torch.said\n"
            "aquifer_torch.install = right\ntorch.use_cuda()\nimport json; print(json.dumps(torch.said))\n"
        )
        self.assertEqual(self.ran(program, "--no-pinned"), [[["install", {}], "initialised"]])

    def test_runs_the_environments_own_sitecustomize_as_well(self):
        start = "import os, subprocess, sys\nsubprocess.run([sys.executable, os.path.join(os.path.dirname(__file__), 'child.py')], check=True)\n"
        files = {"sitecustomize.py": "found = 'theirs'\n", "child.py": "import sitecustomize, json\nprint(json.dumps(sitecustomize.found))\n"}
        self.assertEqual(self.ran(start, files=files), ["theirs"])

    def test_refuses_a_limit_or_a_slack_that_is_none(self):
        limits = [("--limit", wrong) for wrong in ("0", "-1", "1.5", "0.0", "much")]
        for option, wrong in [*limits, *(("--slack", wrong) for wrong in ("0", "-1", "10001", "1.5", "much"))]:
            ran = subprocess.run(
                [sys.executable, "-m", "aquifer_torch", f"{option}={wrong}", "none.py"],
                capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(PACKAGE)}, timeout=60,
            )  # fmt: skip
            self.assertEqual(ran.returncode, 2, wrong)
            self.assertIn(option, ran.stderr)


if __name__ == "__main__":
    unittest.main()
