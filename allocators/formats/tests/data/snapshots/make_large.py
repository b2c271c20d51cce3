#!/usr/bin/env python3
"""Writes a large input for measurements: a snapshot with call stacks, or a trace of this library.

Usage: make_large.py FILE EVENTS [FRAMES]

A FILE that ends in .pickle is a snapshot in the form of torch.cuda.memory._dump_snapshot(), whose
events have lists of FRAMES frames (default 40): the lists differ as objects, and their frames are
shared, as PyTorch's are. Any other FILE is CSV. Sizes, lives and stacks are drawn from a fixed
seed.
"""

import pickle
import random
import sys

BASE = 0x7F00_0000_0000
SLOT = 2 << 20


def history(events, seed=1):
    """Yields (operation, slot, bytes, stack): `events` of them, a, f and c of some 5,000 blocks."""
    draw = random.Random(seed)
    live, free, count = [], list(range(6000)), 0
    while count < events:
        if len(live) < 5000 and (len(live) < 100 or draw.random() < 0.5):
            slot = free.pop(draw.randrange(len(free)))
            block = (slot, draw.choice((512, 4096, 1 << 16, 1 << 20)) + draw.randrange(512), draw.randrange(400))
            live.append(block)
            yield ("a", *block)
            count += 1
        else:
            at = draw.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            block = live.pop()
            free.append(block[0])
            yield ("f", *block)
            yield ("c", *block)
            count += 2


def trace(path, events):
    with open(path, "w") as out:
        out.write("t_us,op,id,bytes,stream,kind,device,tag,address,thread\n")
        ids, last = {}, 0
        for at, (op, slot, size, stack) in enumerate(history(events)):
            if op == "a":
                last += 1
                ids[slot] = last
            address = BASE + slot * SLOT
            out.write(f"{at * 3},{op},{ids[slot]},{size},{stack % 4},cached,0,layer {stack % 50},{address:#x},{stack % 8 + 1}\n")


def snapshot(path, events, frames):
    known = [{"name": f"function_{n}", "filename": f"/home/user/project/module_{n % 300}.py", "line": n} for n in range(4000)]
    draw = random.Random(2)
    stacks = [draw.sample(known, frames) for _ in range(400)]
    actions = {"a": "alloc", "f": "free_requested", "c": "free_completed"}
    trace = [
        {
            "action": actions[op],
            "addr": BASE + slot * SLOT,
            "size": size,
            "stream": 0,
            "time_us": 1_700_000_000_000_000 + at * 3,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, 0),
            "frames": list(stacks[stack]),
        }
        for at, (op, slot, size, stack) in enumerate(history(events))
    ]
    whole = {"segments": [], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}
    with open(path, "wb") as out:
        pickle.dump(whole, out, protocol=4)


def main():
    path, events = sys.argv[1], int(sys.argv[2])
    if path.endswith(".pickle"):
        snapshot(path, events, int(sys.argv[3]) if len(sys.argv) > 3 else 40)
    else:
        trace(path, events)


main()
