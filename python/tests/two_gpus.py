"""What only two GPUs of one host can show, natively and with aquifer, in one call. Prints a table as it goes.

    AQUIFER=target/release/aquifer AQUIFER_LIB=... python python/tests/two_gpus.py [--samples FOLDER] [--fleet BINARY] [PART ...]

--samples   a checkout of github.com/NVIDIA/cuda-samples, three of whose programs are built with nvcc and run
--fleet     the test program on_gpu, of which the tests `fleet` run: placement, copies between devices, a lost device
PART        train, samples, count, limits, registered, fleet or trade: all of them unless named

Needs PyTorch with NCCL and two GPUs. Exit: 0 if all holds. Otherwise skipped, and an error under AQUIFER_REQUIRE_GPU=1.
"""

import argparse
import csv
import ctypes
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

PYTHON = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PYTHON), str(PYTHON / "examples")]
from skip import skip  # noqa: E402

AQUIFER = os.environ.get("AQUIFER", "aquifer")
# Samples run in another folder.
RUN = [os.path.abspath(AQUIFER) if "/" in AQUIFER else AQUIFER, "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
GIB, MIB = 1 << 30, 1 << 20
# Of each device: what the first job is guaranteed, and takes; and the second's guarantee.
FIRST, TAKEN, SECOND = 20, 90, 30


def start(command, cwd=None, **environment):
    """Starts a program of which this one reads and writes lines."""
    # NVLink multicast stays off. The package need not be installed.
    path = os.pathsep.join(filter(None, (str(PYTHON), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "PYTHONPATH": path, **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen([str(part) for part in command], cwd=cwd, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def output(command, seconds=120, cwd=None, **environment):
    """Runs a program to its end. Returns what it has written."""
    process = start(command, cwd, **environment)
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, f"{command}: exit {process.returncode}\n{text[-2000:]}"
    return text


def row(what, *found):
    print("|", " | ".join([what, *(str(part) for part in found)]), "|", flush=True)


class Device:
    """One device through the driver itself, for a program that has no line for aquifer."""

    def __init__(self):
        self.cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    def allocate(self, size):
        """Returns an address, or nothing if there is no memory."""
        address = ctypes.c_uint64()
        status = self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        assert status in (0, 2), status
        return address.value if status == 0 else None


def count_here():
    """Allocates and frees at random, as blocks and from the driver's pool."""
    device, stream = Device(), ctypes.c_void_p()
    random.seed(1)
    blocks = [device.allocate(random.randrange(1000) * random.randrange(3000) + 1) for _ in range(3000)]
    for block in blocks[::2]:
        device.call("cuMemFree_v2", ctypes.c_uint64(block))
    device.call("cuStreamCreate", ctypes.byref(stream), 1)
    for size in range(1, 51):
        block = ctypes.c_uint64()
        device.call("cuMemAllocAsync", ctypes.byref(block), ctypes.c_size_t(size * MIB), stream)
        if size % 2:
            device.call("cuMemFreeAsync", block, stream)
    device.call("cuStreamSynchronize", stream)
    # Until NVML has been read once more.
    time.sleep(0.4)


def hold_here():
    """Takes as many GiB as each line asks for, and answers with those that it got."""
    device = Device()
    for line in sys.stdin:
        wanted = int(line)
        taken = 0
        while taken < wanted and device.allocate(GIB) is not None:
            taken += 1
        print(taken, flush=True)


def train(folder):
    """Training by two ranks: equal losses, and the time of a step in two rounds each."""
    for program in ("ddp", "fsdp"):
        work = [PYTHON / f"clients/{program}_train.py", "--steps", "30"]
        ways = {
            "native": [*TORCHRUN, *work],
            "install()": [sys.executable, "-m", "aquifer_torch", "--limit", "0.95", *TORCHRUN[1:], *work],
            "aquifer run": [*RUN, "--record", folder / "trace.csv", "--", *TORCHRUN, *work],
        }
        found = {way: [] for way in ways}
        for _ in range(2):
            for way, command in ways.items():
                for trace in folder.iterdir():
                    trace.unlink()
                lines = [line for line in output(command).splitlines() if line.startswith("{")]
                found[way].append(json.loads(lines[-1]))
        native = found["native"][0]
        for way, runs in found.items():
            assert all(run["outputs"] == native["outputs"] for run in runs), (program, way)
            allocators = {run["allocator"] for run in runs}
            assert allocators == {"aquifer" if way == "install()" else "native"}, (program, way, allocators)
            steps = ", ".join(f"{run['step_ms']:.1f}" for run in runs)
            row(f"{program}, 2 ranks: {way}", f"{steps} ms a step", f"{runs[0]['peak_reserved'] / 1e6:,.0f} MB of a rank")
        traces = [path.name for path in folder.iterdir() if any(line["op"] == "a" for line in rows(path))]
        assert len(traces) == 2, traces
        row(f"{program}: traces with allocations", "one of each rank")


def rows(trace):
    with open(trace, encoding="utf-8") as text:
        return list(csv.DictReader(line for line in text if not line.startswith("#")))


def samples(folder, checkout):
    """Three of NVIDIA's samples, natively and under `aquifer run`."""
    found = {path.name: path for path in pathlib.Path(checkout).rglob("*") if path.suffix in (".cu", ".cpp")}
    common = next(path.parent for path in pathlib.Path(checkout).rglob("helper_cuda.h"))
    stubs = next(path for path in pathlib.Path("/usr/local/cuda").rglob("stubs") if (path / "libcuda.so").exists())
    helper = found["helper_multiprocess.cpp"]
    nvcc = ["nvcc", "-O2", "-arch=sm_90", "-I", common]
    output([*nvcc, found["streamOrderedAllocationP2P.cu"], "-o", folder / "streamOrderedAllocationP2P"])
    output([*nvcc, found["simpleIPC.cu"], helper, "-o", folder / "simpleIPC"])
    output([*nvcc, "-ptx", found["memMapIpc_kernel.cu"], "-o", folder / "memMapIpc_kernel64.ptx"])
    output([*nvcc, found["memMapIpc.cpp"], helper, "-o", folder / "memMapIPCDrv", "-L", stubs, "-lcuda"])
    for name in ("streamOrderedAllocationP2P", "simpleIPC", "memMapIPCDrv"):
        # They look for their kernels in the working folder.
        native = output([folder / name], cwd=folder)
        same = output([*RUN, "--record", folder / f"{name}.csv", "--", folder / name], cwd=folder) == native
        assert any(line["op"] == "a" for trace in folder.glob(f"{name}*.csv") for line in rows(trace)), f"{name}: no allocation is recorded"
        row(f"NVIDIA's {name}", "passes natively and under aquifer run", "the same output" if same else "other output (of processes that race)")


def count(folder):
    """What is counted on each device, beside what NVML says."""
    for device in "01":
        trace = folder / f"count{device}.csv"
        output([*RUN, "--record", trace, "--", sys.executable, __file__, "--count"], CUDA_VISIBLE_DEVICES=device)
        found = rows(trace)
        outside = [int(line["bytes"]) for line in found if line["op"] == "o"]
        # A reading is written where it differs from the one before. Each also tells what the driver's memory grew by.
        assert outside and any(line["op"] == "g" for line in found), f"NVML was not read on device {device}"
        assert sum(line["op"] == "a" for line in found) >= 3000, len(found)
        assert outside[0] == outside[-1], f"{outside[-1] - outside[0]} bytes are not counted on device {device}"
        most = max(abs(value - outside[0]) for value in outside)
        row(f"counted on device {device}, and by NVML", "equal at the end", f"at most {most / MIB:.0f} MiB apart before")


def limits(_):
    """A limit of one device is none of the other."""
    code = "import torch; print(*(torch.cuda.mem_get_info(device)[1] for device in (0, 1)))"
    for device in (0, 1):
        shown = output([*RUN, "--limit", f"{device}=2GiB", "--", sys.executable, "-c", code]).split()[-2:]
        assert int(shown[device]) == 2 * GIB and int(shown[1 - device]) > 2 * GIB, shown
        row(f"--limit {device}=2GiB: memory that devices 0 and 1 show", ", ".join(f"{int(size) // MIB:,} MiB" for size in shown))


def registered(folder):
    """Collectives over registered memory, and what NCCL's log says of it."""
    for how in ([], ["installed"]):
        log = folder / f"nccl{len(how)}-%p"
        environment = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "REG", "NCCL_DEBUG_FILE": str(log)}
        text = output([*TORCHRUN, PYTHON / "tests/registered_on_two.py", *how], **environment)
        logs = "".join(path.read_text() for path in folder.glob(f"nccl{len(how)}-*"))
        used, reused, failed = (len(re.findall(pattern, logs)) for pattern in ("IPC register buffer", "IPC reuse buffer", "failed to IPC register"))
        print("\n".join(line for line in text.splitlines() if line.startswith(("|", "rank"))), flush=True)
        row(f"NCCL's log, {'installed' if how else 'native'}: user buffers", f"{used} mapped by peers, used {used + reused} times", f"{failed} refused")
        assert used > 0 and failed == 0, logs[-2000:]


def fleet(_, binary):
    """The GPU tests of placement, peers, the staged copy, and a lost device."""
    text = output([binary, "--test-threads", "1", "fleet::"], AQUIFER_REQUIRE_GPU="1")
    passed = re.findall(r"^test (\S+) \.\.\. ok", text, re.MULTILINE)
    assert passed, text[-2000:]
    row("the tests fleet", f"{len(passed)} pass")


def trade(folder):
    """Two jobs of two ranks share both devices by a ledger. One is killed."""
    ledger = folder / "ledgers"
    ledger.mkdir(mode=0o700)

    def job(guarantee):
        command = [*RUN, "--share", "--guarantee", f"{guarantee}GiB", "--", sys.executable, __file__, "--hold"]
        return [start(command, CUDA_VISIBLE_DEVICES=rank, AQUIFER_LEDGER=str(ledger)) for rank in "01"]

    def ask(ranks, wanted):
        for rank in ranks:
            rank.stdin.write(f"{wanted}\n")
            rank.stdin.flush()
        return [int(rank.stdout.readline()) for rank in ranks]

    first, second = job(FIRST), job(SECOND)
    try:
        taken, left = ask(first, TAKEN), ask(second, 1000)
        for rank in first:
            rank.kill()
            rank.wait()
        begun, more = time.perf_counter(), [0, 0]
        while min(more) < 0.98 * TAKEN and time.perf_counter() - begun < 10:
            more = [had + got for had, got in zip(more, ask(second, 1000))]
        seconds = time.perf_counter() - begun
    finally:
        for rank in first + second:
            rank.kill()
    row("two jobs of two ranks by a ledger", f"{taken} and {left} GiB", f"{seconds:.1f} s after SIGKILL of the first: {more} GiB more")
    assert min(taken) == TAKEN and min(left) >= SECOND and min(more) >= 0.98 * TAKEN


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples")
    parser.add_argument("--fleet")
    parser.add_argument("parts", nargs="*")
    chosen = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        skip(str(error))
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        skip("PyTorch sees fewer than two CUDA devices")
    parts = {"train": train, "samples": samples, "count": count, "limits": limits, "registered": registered, "fleet": fleet, "trade": trade}
    failed = []
    for name in chosen.parts or parts:
        needed = {"samples": chosen.samples, "fleet": chosen.fleet}
        if name in needed and not needed[name]:
            row(name, f"skipped: no --{name}")
            failed += [name] if chosen.parts or os.environ.get("AQUIFER_REQUIRE_GPU") == "1" else []
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                parts[name](pathlib.Path(folder), *([os.path.abspath(needed[name])] if name in needed else []))
            except (AssertionError, OSError, LookupError, StopIteration, ValueError, subprocess.TimeoutExpired) as error:
                failed.append(name)
                row(name, f"FAILED: {error}")
    sys.exit(f"two_gpus: {', '.join(failed)} failed" if failed else 0)


if __name__ == "__main__":
    alone = {"--count": count_here, "--hold": hold_here}.get(sys.argv[1] if sys.argv[1:] else "")
    alone() if alone else main()
