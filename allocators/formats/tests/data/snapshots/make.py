#!/usr/bin/env python3
"""Writes the snapshots beside it, in the form of torch.cuda.memory._dump_snapshot().

Small ones, with stack frames that events share as PyTorch's do. Run it again after a change; the files are checked in.
"""

import lzma
import pickle
from pathlib import Path

HERE = Path(__file__).parent
BASE = 0x7F00_0000_0000
FRAMES = [
    {"name": "forward", "filename": "/home/user/model.py", "line": 17},
    {"name": "torch::autograd::Engine::execute", "filename": "??", "line": 0},
]


def event(action, slot, size, stream=0):
    return {
        "action": action,
        "addr": BASE + slot * 0x200000,
        "size": size,
        "stream": stream,
        "time_us": 1_700_000_000_000_000 + slot,
        "compile_context": None,
        "user_metadata": "",
        "pool_id": (0, 0),
        "frames": FRAMES,
    }


def a(slot, size, stream=0):
    return event("alloc", slot, size, stream)


def f(slot, size, stream=0):
    return event("free_requested", slot, size, stream)


def c(slot, size, stream=0):
    return event("free_completed", slot, size, stream)


def segment(slot, blocks, stream=0, device=0):
    address = BASE + slot * 0x200000
    at, listed = address, []
    for requested, state in blocks:
        size = -(-requested // 512) * 512
        listed.append({"address": at, "size": size, "requested_size": requested, "state": state, "frames": FRAMES})
        at += size
    return {
        "device": device,
        "address": address,
        "total_size": 0x200000,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": listed,
    }


def snapshot(segments, *traces):
    return {
        "segments": segments,
        "device_traces": list(traces),
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "roundup_power2_divisions": {"1": 0}},
        "external_annotations": [],
    }


def write(name, value, protocol=4):
    (HERE / name).write_bytes(pickle.dumps(value, protocol=protocol))


SIDE = 0x55D0_C0FF_EE00  # a stream's handle

# From the start: an address that is used again, a second stream, segments that come and go, a request that failed.
start = snapshot(
    [segment(1, [(2_000_000, "active_allocated")])],
    [
        event("segment_alloc", 0, 0x200000),
        a(0, 1000),
        a(1, 2_000_000, SIDE),
        f(0, 1000),
        c(0, 1000),
        {"action": "oom", "device_free": 4096, "size": 1 << 40, "stream": 0, "frames": FRAMES},
        a(0, 3000),
        event("segment_map", 2, 0x200000),
        f(0, 3000),
        c(0, 3000),
        f(1, 2_000_000, SIDE),
        c(1, 2_000_000, SIDE),
        event("segment_free", 0, 0x200000),
        a(1, 2_000_000, SIDE),
        event("snapshot", 0, 0),
    ],
)
write("start.pickle", start)
write("start.protocol2.pickle", start, 2)
write("start.protocol5.pickle", start, 5)
(HERE / "start.pickle.xz").write_bytes(lzma.compress(pickle.dumps(start, protocol=4)))

# From the middle of a ring. Slot 0: live at the start and freed; 1: freed before, done here; 2: live all the time;
# 3: freed all the time, never done; 4: lives and dies here; 5: inactive.
write(
    "ring.pickle",
    snapshot(
        [
            segment(2, [(700_000, "active_allocated"), (100_000, "inactive")]),
            segment(3, [(300, "active_pending_free")], SIDE),
            segment(5, [(512, "inactive")]),
        ],
        [a(4, 4000), f(0, 1000), c(0, 1000), c(1, 2_000, SIDE), f(4, 4000), c(4, 4000)],
    ),
)

# Uses that outlive the free: done late, and never.
write(
    "pending.pickle",
    snapshot(
        [segment(1, [(2000, "active_awaiting_free")])],
        [a(0, 1000), a(1, 2000), f(0, 1000), f(1, 2000), a(2, 50, SIDE), c(0, 1000), f(2, 50, SIDE), c(2, 50, SIDE)],
    ),
)

# Two devices, of which the second did more; their addresses are the same.
write(
    "devices.pickle",
    snapshot(
        [segment(0, [(10, "active_allocated")]), segment(1, [(20, "active_allocated")], 0, 1)],
        [a(0, 10)],
        [a(0, 30), a(1, 20), f(0, 30), c(0, 30)],
        [],
    ),
)

# As PyTorch 2.0 wrote it: no address and no size as asked for in the blocks, no device in the segments.
old = snapshot([segment(0, [(512, "inactive"), (1024, "active_allocated")])], [a(3, 99)])
for part in old["segments"]:
    del part["device"]
    for block in part["blocks"]:
        del block["address"], block["requested_size"]
del old["external_annotations"], old["allocator_settings"]
write("old.pickle", old)

# What torch.cuda.memory_snapshot() returns, and a snapshot whose events were not recorded or not asked for.
live = [segment(1, [(700, "active_allocated"), (512, "inactive"), (90, "active_pending_free")]), segment(0, [(5000, "active_allocated")])]
write("live.pickle", live)
write("still.pickle", snapshot(live, []))


# As PyTorch 2.14 writes it: phases, text of blocks, annotations after the fact, pinned memory, a field and an action of the
# future. The profiler's step begins before the ring, and the last phase has not ended.
def phase(name, stage, slot, device=0):
    return {"name": name, "stage": stage, "device": device, "time_us": 1_700_000_000_000_000 + slot}


def at(slot, event, **more):
    return {**event, "time_us": 1_700_000_000_000_000 + slot, **more}


modern = snapshot(
    [segment(1, [(2000, "active_allocated")])],
    [
        at(0, a(0, 1000), user_metadata="weights"),
        at(10, a(1, 2000)),
        at(20, event("annotate", 1, 0), user_metadata="saved for backward"),
        at(25, event("annotate", 0, 1000), user_metadata="pinned down"),
        at(30, event("teleport", 0, 1000)),
        at(40, f(0, 1000)),
        at(40, c(0, 1000)),
    ],
)
modern["external_annotations"] = [
    phase("ProfilerStep#1", "END", 5),
    phase("forward", "START", 8),
    phase("attention", "START", 9),
    phase("elsewhere", "START", 9, 1),
    phase("attention", "END", 15),
    phase("forward", "END", 20),
    phase("backward", "START", 22),
    {"name": "no stage", "device": 0, "time_us": 1_700_000_000_000_030},
]
modern["host_segments"] = [segment(9, [(4096, "active_allocated"), (512, "inactive")])]
modern["host_traces"] = [at(12, a(8, 8192)), at(33, f(8, 8192)), at(34, c(8, 8192))]
modern["fields of the future"] = {"a": [1, 2]}
write("modern.pickle", modern)
write("pinned.pickle", {key: modern[key] for key in ("host_segments", "host_traces")} | {"segments": [], "device_traces": []})

# skip_actions of _record_memory_history(): the same program without some kinds of events.
told = [a(0, 1000), a(1, 2000), f(0, 1000), c(0, 1000), a(0, 600), f(1, 2000), c(1, 2000), a(1, 2500), f(0, 600), c(0, 600)]
for name, skipped in [
    ("requests", ["free_requested"]),
    ("completions", ["free_completed"]),
    ("frees", ["free_requested", "free_completed"]),
    ("allocations", ["alloc"]),
]:
    kept = [e for e in told if e["action"] not in skipped]
    write(f"skipped.{name}.pickle", snapshot([segment(0, [(600, "inactive")]), segment(1, [(2500, "active_allocated")])], kept))


# What makes no sense.
class Harm:
    def __reduce__(self):
        return print, ("called",)


write("broken.list.pickle", [1, 2, 3])
write("broken.harm.pickle", Harm())
write("broken.keys.pickle", {"segments": []})
write("broken.empty.pickle", snapshot([], [], []))
write("broken.event.pickle", snapshot([], [a(0, 1), {"action": "alloc", "addr": BASE, "stream": 0}]))
write("broken.action.pickle", snapshot([], [event("borrow", 0, 1)]))
write("broken.size.pickle", snapshot([], [a(0, 0)]))
write("broken.twice.pickle", snapshot([], [a(0, 1), f(0, 1), f(0, 1)]))
write("broken.order.pickle", snapshot([], [a(0, 1), c(0, 1)]))
write("broken.reuse.pickle", snapshot([], [a(0, 1), a(0, 2)]))
write("broken.sizes.pickle", snapshot([], [a(0, 1), f(0, 2)]))
write("broken.state.pickle", snapshot([segment(0, [(1, "lost")])], [a(1, 1)]))
