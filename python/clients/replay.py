"""Replays traces under PyTorch's own allocators, as `aquifer replay` does under aquifer, and compares.

    python python/clients/replay.py TRACE [TRACE ...] [--rounds N] [--limits] [--only NAME ...] [--aquifer PROGRAM] [--json FILE]

TRACE has the rows of aquifer's traces (`t_us,op,id,bytes,stream`), as a file or compressed with xz, like those in tests/data.
`aquifer replay made:sharded --save-trace FILE` writes those of a made program. Each allocator is a process of its own. Needs a
GPU, PyTorch with nvcc, and for the rows of aquifer its command line, which comes with the wheel.

Both sides do the same: the streams are the same in all rounds; a stream that uses another one's block waits for it first, by an
event; a block that is freed while another stream still uses it is freed where that use ends, after `record_stream`; where memory
is refused, open uses end early, as if the program waited for them. Only the allocator's calls and these waits are timed, with no
other work on the device.

memory         the most that was held from the driver in any round, over the peak of live bytes
ns             an operation, in the round in the middle of those after the first
first ns       an operation, in the first round
limit          the smallest limit that completes three rounds, over the peak of live bytes (with --limits); aquifer's must also
               hold with 0.5 and 2 % more, and a plan's is its size
ns at limit    an operation there, in the quicker round after the first; aquifer's at the smallest limit of PyTorch's allocators
"""

import argparse
import json
import lzma
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from common import SETTINGS, choose

HERE = pathlib.Path(__file__).resolve()
OURS = {"aquifer": [], "aquifer, slack 6": ["--slack", "6"], "aquifer, plan": ["--plan"]}
ROUNDS_AT_LIMIT = 3
# What the driver maps at once.
SLOT = 2 << 20
# Halvings of the range between what must be too little and what is enough.
SEARCH = 9

# What happens to a block: the cases in SOURCE.
ALLOCATE, FREE, LEND, COMPLETE, USE = range(5)

SOURCE = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <chrono>
#include <vector>
namespace allocator = c10::cuda::CUDACachingAllocator;

struct Live { void* at = nullptr; int home = 0; int user = -1; };

// Plays the operations once. Returns the nanoseconds, or -1 if memory was refused.
double replay(torch::Tensor ops, torch::Tensor ids, torch::Tensor sizes, torch::Tensor on, int64_t blocks, int64_t count) {
    static std::vector<c10::cuda::CUDAStream> streams;
    static std::vector<at::cuda::CUDAEvent> events;
    const auto device = c10::Device(c10::kCUDA, 0);
    if (streams.empty()) streams.push_back(c10::cuda::getDefaultCUDAStream());
    while ((int64_t)streams.size() < count) streams.push_back(c10::cuda::getStreamFromPool());
    while ((int64_t)events.size() < count) events.emplace_back();
    auto op = ops.accessor<int8_t, 1>();
    auto id = ids.accessor<int32_t, 1>();
    auto size = sizes.accessor<int64_t, 1>();
    auto stream = on.accessor<int32_t, 1>();
    std::vector<Live> live(blocks);
    auto wait = [&](int user, int home) {
        events[home].record(streams[home]);
        events[home].block(streams[user]);
    };
    auto record = [&](void* at, int user) {
        // The pointer is only looked up: it keeps its owner.
        c10::DataPtr pointer(at, at, allocator::get()->raw_deleter(), device);
        allocator::recordStream(pointer, streams[user]);
        pointer.release_context();
    };
    auto end = [&](Live& block) {
        if (block.user >= 0) record(block.at, block.user);
        allocator::raw_delete(block.at);
        block = Live();
    };
    std::vector<int32_t> lent;
    auto allocate = [&](int64_t n) {
        try {
            return allocator::raw_alloc_with_stream(size[n], streams[stream[n]]);
        } catch (const c10::OutOfMemoryError&) {
            if (lent.empty()) throw;
        }
        for (int32_t number : lent)
            if (live[number].at && live[number].user >= 0) end(live[number]);
        lent.clear();
        return allocator::raw_alloc_with_stream(size[n], streams[stream[n]]);
    };
    bool complete = true;
    const auto begun = std::chrono::steady_clock::now();
    try {
        for (int64_t n = 0; n < ops.size(0); n++) {
            Live& block = live[id[n]];
            switch (op[n]) {
                case 0:
                    block.at = allocate(n);
                    block.home = stream[n];
                    break;
                case 1: end(block); break;
                case 2: wait(stream[n], block.home); block.user = stream[n]; lent.push_back(id[n]); break;
                case 3: if (block.at) end(block); break;
                case 4: wait(stream[n], block.home); record(block.at, stream[n]); break;
            }
        }
    } catch (const c10::Error&) {
        complete = false;
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begun;
    for (Live& block : live)
        if (block.at) end(block);
    return complete ? took.count() : -1.0;
}
"""


class Trace:
    """The operations of a trace, in columns."""

    def __init__(self, path):
        self.name = pathlib.Path(path).name.split(".")[0]
        opened = lzma.open(path, "rt") if str(path).endswith(".xz") else open(path)
        with opened as file:
            if not next(file, "").startswith("t_us,op,id,bytes,stream"):
                sys.exit(f"{path} has no rows of t_us,op,id,bytes,stream")
            rows = [line.rstrip("\n").split(",")[1:5] for line in file]
        rows = [(op, int(name), int(size), int(stream)) for op, name, size, stream in rows if op in "afc"]
        self.streams = max(stream for *_, stream in rows) + 1
        self.ops, self.ids, self.sizes, self.on = [], [], [], []
        self.operations = self.peak_live = live = number_of_blocks = 0
        blocks = {}
        for place, (op, name, size, stream) in enumerate(rows):
            if op == "a":
                blocks[name] = [number_of_blocks, stream, False]
                number_of_blocks += 1
                self.add(ALLOCATE, blocks[name][0], size, stream)
                live += size
                self.peak_live = max(self.peak_live, live)
            elif op == "f":
                number, home, _ = blocks[name]
                live -= size
                if stream != home:
                    self.add(USE, number, 0, stream)
                lingers = place + 1 == len(rows) or rows[place + 1][:2] != ("c", name)
                if lingers:
                    blocks[name][2] = True
                    self.add(LEND, number, 0, home)
                else:
                    self.add(FREE, number, 0, stream)
            elif blocks[name][2]:
                self.add(COMPLETE, blocks[name][0], 0, stream)
            self.operations += op in "af"
        # The user of a block that lingers is the stream after its own.
        needed = max(self.streams, 2) if LEND in self.ops else self.streams
        self.on = [(stream + 1) % needed if op == LEND else stream for op, stream in zip(self.ops, self.on)]
        self.streams, self.blocks = needed, max(self.ids) + 1

    def add(self, op, number, size, stream):
        for column, value in zip((self.ops, self.ids, self.sizes, self.on), (op, number, size, stream)):
            column.append(value)


def replay_here(paths, rounds, limits):
    """Replays traces under the allocator of this process. Prints a line of JSON for each."""
    import torch
    from torch.utils.cpp_extension import load_inline

    if not torch.cuda.is_available():
        sys.exit("no GPU")
    module = load_inline(
        "replay_trace", SOURCE, functions=["replay"], with_cuda=True, build_directory=os.environ["REPLAY_BUILD"], extra_cflags=["-O2"]
    )
    torch.empty(1, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    for path in paths:
        trace = Trace(path)
        columns = [
            torch.tensor(values, dtype=kind)
            for values, kind in zip((trace.ops, trace.ids, trace.sizes, trace.on), (torch.int8, torch.int32, torch.int64, torch.int32))
        ]

        def play(count, fraction=1.0):
            """Returns ns an operation of each round until one is refused, and the most that was held."""
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(fraction)
            torch.cuda.reset_peak_memory_stats()
            each = []
            while len(each) < count:
                took = module.replay(*columns, trace.blocks, trace.streams)
                torch.cuda.synchronize()
                if took < 0:
                    return None, None
                each.append(took / trace.operations)
            return each, torch.cuda.max_memory_reserved()

        each, held = play(rounds)
        row = {"trace": trace.name, "peak_live": trace.peak_live, "held": held, "first_ns": each[0], "ns": statistics.median_low(each[1:])}
        # cudaMallocAsync counts the bytes in use against its limit, not what it holds.
        if limits and os.environ["REPLAY_ALLOCATOR"] != "cudaMallocAsync":
            low, high = trace.peak_live / total * 0.995, min(1.0, held / total * 1.002)
            for _ in range(SEARCH):
                middle = (low + high) / 2
                each, _ = play(ROUNDS_AT_LIMIT, middle)
                low, high = (low, middle) if each else (middle, high)
                if each:
                    row.update(limit=middle * total / trace.peak_live, ns_at_limit=min(each[1:]))
        print(json.dumps(row), flush=True)


def of_pytorch(name, arguments, build):
    environment = {**os.environ, "REPLAY_ALLOCATOR": name, "REPLAY_BUILD": build}
    choose(name, environment)
    command = [sys.executable, str(HERE), *arguments.traces, "--rounds", str(arguments.rounds)]
    command += ["--limits"] if arguments.limits else []
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode:
        sys.exit(f"the replay under {name} failed: {ran.stderr.strip()[-1500:]}")
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def of_aquifer(name, arguments, folder, peers):
    def call(*words):
        ran = subprocess.run([arguments.aquifer, *words, "--json"], capture_output=True, text=True)
        if ran.returncode:
            sys.exit(f"aquifer {' '.join(words)} failed: {ran.stderr.strip() or ran.stdout.strip()[-1500:]}")
        return json.loads(ran.stdout)

    rows = []
    for path in arguments.traces:
        flags, plan = list(OURS[name]), None
        if "--plan" in flags:
            plan = str(pathlib.Path(folder) / f"{pathlib.Path(path).name}.plan")
            top = call("plan", path, "-o", plan)["top_bytes"]
            flags.append(plan)
        cuda = ["replay", path, "--device", "cuda", *flags, "--repeat"]
        said = call(*cuda, str(arguments.rounds))
        each = [one["ns_per_op"] for one in said["rounds"]]
        trace, peak = pathlib.Path(path).name.split(".")[0], said["peak_live_bytes"]
        held = said["peak_physical_bytes_of_all_rounds"]
        row = {"trace": trace, "peak_live": peak, "held": held, "first_ns": each[0], "ns": statistics.median_low(each[1:])}
        # The smallest limit does not depend on the slack.
        if arguments.limits and name != "aquifer, slack 6":
            if plan:
                limit = -(-top // SLOT) * SLOT
            else:
                limit = call("replay", path, "--device", "cuda", "--fit", "--repeat", str(ROUNDS_AT_LIMIT))["fit_bytes"]
            of_peers = [int(one["limit"] * peak) for one in peers if one["trace"] == trace and "limit" in one]
            said = call(*cuda, str(ROUNDS_AT_LIMIT), "--budget", str(max(limit, min(of_peers, default=limit))))
            row.update(limit=limit / peak, ns_at_limit=min(one["ns_per_op"] for one in said["rounds"][1:]))
        rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[*OURS, *SETTINGS], default=[*OURS, *SETTINGS])
    parser.add_argument("--aquifer", default=shutil.which("aquifer"))
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: at least 2, since the first one fills the allocator")
    for path in arguments.traces:
        if not pathlib.Path(path).is_file():
            parser.error(f"{path} is no file")
    if "REPLAY_ALLOCATOR" in os.environ:
        return replay_here(arguments.traces, arguments.rounds, arguments.limits)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        # PyTorch's first, whose limits are taken for aquifer's times.
        for name in sorted(arguments.only, key=lambda name: name in OURS):
            if name in OURS and not arguments.aquifer:
                print(f"left out: {name}, since there is no command line of aquifer on the path", file=sys.stderr)
                continue
            found = of_aquifer(name, arguments, folder, rows) if name in OURS else of_pytorch(name, arguments, folder)
            rows += [{"allocator": name, **row} for row in found]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print("| trace | allocator | memory | ns | first ns | limit | ns at limit |")
    print("|---|---|---|---|---|---|---|")
    for trace in dict.fromkeys(row["trace"] for row in rows):
        for row in (row for row in rows if row["trace"] == trace):
            limit = f"{row['limit']:.4f} | {row['ns_at_limit']:.0f}" if "limit" in row else "- | -"
            print(
                f"| {trace} | {row['allocator']} | {row['held'] / row['peak_live']:.4f} | {row['ns']:.0f} "
                f"| {row['first_ns']:.0f} | {limit} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
