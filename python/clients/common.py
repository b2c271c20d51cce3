"""What the programs here have in common: which allocator, determinism, and the report at the end."""

import argparse
import hashlib
import json
import os
import pathlib
import statistics as stat
import sys
import time

# What PyTorch's setting says for each of its allocators.
SETTINGS = {"native": None, "expandable": "expandable_segments:True", "cudaMallocAsync": "backend:cudaMallocAsync"}


def choose(allocator, environment):
    """Sets PyTorch's variables for one of its own allocators. PyTorch reads them when it is imported."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment.pop(variable, None)
        if SETTINGS.get(allocator):
            environment[variable] = SETTINGS[allocator]


def start(program: str):
    """Reads the command line, chooses the allocator, and answers with (arguments, torch). Nothing has touched CUDA yet.

    Under `python -m aquifer_torch` the allocator is aquifer, and the program needs no line for it.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--allocator", choices=SETTINGS, default="native", help="of PyTorch's own")
    parser.add_argument("--steps", type=int, help="how many, in place of the program's own number")
    arguments = parser.parse_args()
    arguments.program = program
    if "AQUIFER_TORCH" in os.environ:
        arguments.allocator = "aquifer"
    choose(arguments.allocator, os.environ)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # A rank of several sees its own device only. PyTorch reads the variable when it first uses CUDA.
    if "LOCAL_RANK" in os.environ:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(n) for n in range(int(os.environ["LOCAL_WORLD_SIZE"]))]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(os.environ["LOCAL_RANK"])]
    import torch

    if not torch.cuda.is_available():
        print(json.dumps({"program": program, "skipped": "PyTorch sees no CUDA device"}))
        sys.exit(0)
    torch.manual_seed(20)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    # Memory is not filled for the sake of determinism: a program that reads what it has not written is to be found out.
    torch.utils.deterministic.fill_uninitialized_memory = False
    return arguments, torch


def resident_peak():
    """The most bytes that this process has had resident."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


class Run:
    """Times steps, and reports."""

    def __init__(self, arguments, torch):
        self.arguments, self.torch, self.times = arguments, torch, []
        self.outputs = hashlib.sha256()
        self.shown = []

    def step(self, work):
        """Runs one step, and keeps what it answers with: numbers that are the same under every allocator."""
        self.torch.cuda.synchronize()
        begun = time.perf_counter()
        answer = work()
        self.torch.cuda.synchronize()
        self.times.append(time.perf_counter() - begun)
        for number in answer.detach().double().flatten().tolist():
            self.outputs.update(float(number).hex().encode())
            self.shown.append(number)

    def report(self):
        """One line of JSON."""
        torch, arguments = self.torch, self.arguments
        found = torch.cuda.memory_stats()
        settled = self.times[len(self.times) // 3 :]
        line = {
            "program": arguments.program,
            "allocator": arguments.allocator,
            "steps": len(self.times),
            "outputs": self.outputs.hexdigest(),
            "last": self.shown[-3:],
            # The middle of the last two thirds, and their mean: a step that is slow now and then shows in the second.
            "step_ms": stat.median(settled) * 1e3,
            "mean_ms": stat.mean(settled) * 1e3,
            "all_s": sum(self.times),
            "peak_allocated": found["allocated_bytes.all.peak"],
            "peak_requested": found.get("requested_bytes.all.peak", 0),
            "peak_reserved": found["reserved_bytes.all.peak"],
            "allocations": found.get("allocation.all.allocated", 0),
            "peak_pinned": torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0),
            "peak_host": resident_peak(),
        }
        if arguments.allocator == "aquifer":
            import aquifer_torch

            line["aquifer"] = {name: value for name, value in aquifer_torch.statistics(0).items() if name.startswith("aquifer.")}
        print(json.dumps(line), flush=True)
