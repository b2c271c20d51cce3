"""Runs the programs here under PyTorch's own allocators and under aquifer, and compares.

    python python/clients/compare.py [PROGRAM ...] [--steps N] [--repeat N] [--json FILE] [--no-limit]

Each run is a process of its own. What a program puts out (losses, tokens) must be the same under every allocator, to the bit.
The programs know nothing of aquifer: they run on it by `python -m aquifer_torch`. `ddp_train` and `fsdp_train` need two devices,
and run only where they are named.
An allocator of PyTorch's that refuses a program is named with what it lacks.
aquifer runs once without a limit that matters, once so with --slack 6, and once under 1.02 times the most that the native
allocator had allocated at once (1.05 times for ddp_train). Less than five minutes for all of it on an H200. Steps wait for the
processor as much as for the device, so times of one run go up and down by a tenth: --repeat runs all in turn several times,
and keeps the one in the middle of each. Exit: 0 if every run ended, with equal outputs, and aquifer stayed under its limit.

step      ms, the middle of the last two thirds of the steps; mean: their mean
reserved  MB, the most that the allocator held from the driver, as it says itself
NVML      MB, the most that the device had in use, less what it had before: contexts, modules and libraries as well
pinned    MB, the most pinned memory that was held, as the allocator says itself
host      MB, the most that the program had resident, without its workers (of several ranks, the first)
"""

import argparse
import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = ("llama_train", "resnet_train", "serve_mixed", "loader_train")
# How many ranks a program has, each with a device of its own.
RANKS = {"ddp_train": 2, "fsdp_train": 2}
MARGIN = 1.02
# The peak of ddp_train itself differs by 4 % from run to run, under every allocator.
MARGINS = {"ddp_train": 1.05}
# Seconds for one run.
PATIENCE = 150
NAMES = ["native", "expandable", "cudaMallocAsync", "aquifer", "aquifer, slack 6", "aquifer, limited"]
# What PyTorch says where one of its own allocators lacks what a program uses.
REFUSED = re.compile(r"\w+ does not yet support \w+")


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """Bytes in use on the device, by the driver's own account; None where there is no NVML."""

    def __init__(self):
        self.device = None
        try:
            self.calls = ctypes.CDLL("libnvidia-ml.so.1")
            device = ctypes.c_void_p()
            # The first device that is visible: by its number, or by its name.
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
            if self.calls.nvmlInit_v2():
                return
            if visible.isdigit():
                failed = self.calls.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(visible)), ctypes.byref(device))
            else:
                failed = self.calls.nvmlDeviceGetHandleByUUID(visible.encode(), ctypes.byref(device))
            if not failed:
                self.device = device
        except OSError:
            pass

    def used(self):
        memory = Memory()
        if self.device is None or self.calls.nvmlDeviceGetMemoryInfo(self.device, ctypes.byref(memory)):
            return None
        return memory.used


class Peak:
    """The most that was in use while it is open, seen every 3 ms from another process than the one that is measured."""

    def __init__(self, nvml):
        self.nvml, self.over = nvml, threading.Event()
        self.before = self.most = nvml.used()

    def __enter__(self):
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self):
        while self.before is not None and not self.over.wait(0.003):
            self.most = max(self.most, self.nvml.used() or 0)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def bytes(self):
        return None if self.before is None else self.most - self.before


def run(program, allocator, nvml, steps=None, limit=None, slack=None):
    """Runs a program, and answers with its report, with {"failed": why}, or with {"refused": what PyTorch's allocator lacks}."""
    command = [sys.executable]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    if allocator == "aquifer":
        command += ["-m", "aquifer_torch", "--limit", str(limit or 0.95)]
        command += ["--slack", str(slack)] if slack else []
    if program in RANKS:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[program])]
    command += [str(HERE / f"{program}.py")]
    command += ["--allocator", allocator] if allocator != "aquifer" else []
    command += ["--steps", str(steps)] if steps else []
    begun = time.monotonic()
    with Peak(nvml) as peak:
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
        except subprocess.TimeoutExpired:
            return {"failed": f"it ran for more than {PATIENCE} s"}
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not lines:
        # Where ranks are started, the reason stands far above the end.
        refusal = REFUSED.search(ran.stderr) if allocator != "aquifer" else None
        if refusal:
            return {"refused": refusal[0]}
        return {"failed": f"exit {ran.returncode}: {ran.stderr.strip()[-1500:] or ran.stdout.strip()[-500:]}"}
    report = json.loads(lines[-1])
    report.update(nvml=peak.bytes(), wall_s=time.monotonic() - begun, limit=limit)
    return report


def mb(number):
    return "-" if number is None else f"{number / 1e6:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=PROGRAMS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--no-limit", action="store_true")
    arguments = parser.parse_args()
    nvml, rows, bad = Nvml(), [], []
    for program in arguments.programs:
        runs, refused = {}, {}
        # In turn, so that a host which gets slower does so under each allocator.
        for name in NAMES * arguments.repeat:
            if name in refused:
                continue
            allocator, limit = name.split(",")[0], None
            if "limited" in name:
                if arguments.no_limit or "peak_allocated" not in runs.get("native", [{}])[0]:
                    continue
                limit = int(runs["native"][0]["peak_allocated"] * MARGINS.get(program, MARGIN))
            report = run(program, allocator, nvml, arguments.steps, limit, 6 if "slack" in name else None)
            if "skipped" in report:
                print(f"skipped: {report['skipped']}")
                return 1 if os.environ.get("AQUIFER_REQUIRE_GPU") == "1" else 0
            report.update(name=name, program=program)
            print(json.dumps(report), file=sys.stderr, flush=True)
            if "refused" in report:
                refused[name] = report
            else:
                runs.setdefault(name, []).append(report)
        same = {}
        for name in NAMES:
            if name in refused:
                rows.append(refused[name])
                continue
            strange = [one for one in runs.get(name, ()) if "failed" in one]
            if strange:
                rows.append(strange[0])
                bad.append(f"{program} under {name}: {strange[0]['failed']}")
                continue
            if name not in runs:
                continue
            said = {one["outputs"] for one in runs[name]}
            if len(said) > 1:
                bad.append(f"{program} under {name} puts out other numbers from run to run: {said}")
            # The one in the middle: the quickest of runs whose times go up and down is a matter of luck.
            by_time = sorted(runs[name], key=lambda one: one["step_ms"])
            report = by_time[len(by_time) // 2]
            report["steps_ms"] = [one["step_ms"] for one in runs[name]]
            rows.append(report)
            same[name] = report
            limit = report["limit"]
            if limit and report["peak_reserved"] > limit:
                bad.append(f"{program} under {name} held {report['peak_reserved']} bytes, with a limit of {limit}")
        outputs = {name: report["outputs"] for name, report in same.items()}
        if len(set(outputs.values())) > 1:
            bad.append(f"{program} puts out different numbers: {outputs}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print("| program | allocator | step ms | mean ms | of native | peak allocated MB | reserved MB | reserved / allocated | NVML MB | pinned MB | host MB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    native = {}
    for row in rows:
        if "failed" in row or "refused" in row:
            print(f"| {row['program']} | {row['name']} | {row.get('refused', 'failed')} | | | | | | | | |")
            continue
        if row["name"] == "native":
            native[row["program"]] = row
        base = native.get(row["program"], row)
        print(
            f"| {row['program']} | {row['name']} | {row['step_ms']:.2f} | {row['mean_ms']:.2f} | {row['step_ms'] / base['step_ms']:.3f} "
            f"| {mb(row['peak_allocated'])} | {mb(row['peak_reserved'])} "
            f"| {row['peak_reserved'] / base['peak_allocated']:.3f} | {mb(row['nvml'])} | {mb(row['peak_pinned'])} "
            f"| {mb(row['peak_host'])} |"
        )
    for line in bad:
        print(f"NOT SO: {line}")
    if not bad:
        print("every program put out the same numbers under every allocator, and aquifer kept its limit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
