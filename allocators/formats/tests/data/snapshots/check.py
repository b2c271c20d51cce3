"""Whether a memory snapshot holds what PyTorch's tools take for granted.

    python3 check.py FILE...

Three readers are stood in for, by what they do and without their code:

* Python's `pickle.load`, with no import allowed;
* `_memory_viz.py`: a segment's blocks fill it, and what is asked for in a block is no more than the block;
* the memory viewer: it knows some instructions of pickles and no others, and goes through the events backwards from
  the segments, in which each block has to lie and each free has to find its block.

Where torch is installed its own `_memory_viz` prints the file as well. The last line says how much there was.
"""

import io
import pickle
import pickletools
import sys

# What the viewer's machine runs.
KNOWN = """APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1 LONG_BINGET MARK MEMOIZE PROTO
SETITEMS SHORT_BINUNICODE STOP TUPLE2 APPEND NEWFALSE BINPUT BINUNICODE EMPTY_TUPLE NEWTRUE NONE BINFLOAT TUPLE TUPLE1
TUPLE3 LONG_BINPUT LIST DICT SETITEM""".split()


class Nothing(pickle.Unpickler):
    def find_class(self, module, name):
        raise AssertionError(f"imports {module}.{name}")


def instructions(data):
    for code, value, _ in pickletools.genops(data):
        assert code.name in KNOWN, f"the viewer does not know {code.name}"
        if code.name == "PROTO":
            assert 2 <= value <= 4, value
        if code.name == "LONG1":
            assert value != 0 and -(1 << 63) <= value < 1 << 63, value


def blocks_of(segment):
    at, asked, active, allocated = segment["address"], 0, 0, 0
    for block in segment["blocks"]:
        assert block["address"] == at, "blocks are not side by side"
        assert 0 < block["size"] and 0 <= block["requested_size"] <= block["size"], block
        assert block["state"] in ("active_allocated", "active_pending_free", "inactive"), block
        for frame in block["frames"]:
            assert set(frame) == {"filename", "line", "name"}, frame
        if block["state"] != "inactive":
            asked += block["requested_size"]
            active += block["size"]
            allocated += block["size"] if block["state"] == "active_allocated" else 0
        at += block["size"]
    assert at == segment["address"] + segment["total_size"], "blocks do not fill their segment"
    assert (segment["requested_size"], segment["active_size"], segment["allocated_size"]) == (asked, active, allocated)
    assert segment["segment_type"] in ("small", "large") and len(segment["segment_pool_id"]) == 2
    assert isinstance(segment["stream"], int) and segment["frames"] == []


def backwards(device, events, segments):
    """The viewer's state of memory, event by event from the end."""
    memory = sorted([s["address"], s["address"] + s["total_size"]] for s in segments if s["device"] == device)
    assert all(a[1] <= b[0] for a, b in zip(memory, memory[1:])), "segments overlap"
    live = {}
    for segment in segments:
        if segment["device"] == device:
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    live[block["address"]] = block["state"] == "active_pending_free"

    def inside(address):
        return any(start <= address < end for start, end in memory)

    assert all(map(inside, live))
    for number in range(len(events) - 1, -1, -1):
        event = events[number]
        action = event["action"]
        assert event["stream"] >= 0 and event["time_us"] >= 0 and event["size"] >= 0
        if action == "oom":
            assert "device_free" in event
            continue
        address, size = event["addr"], event["size"]
        if action == "free_completed":
            assert address not in live, f"event {number} completes what is there"
            live[address] = True
        elif action == "free_requested":
            assert live[address] is True, f"event {number} frees what is not freed behind it"
            live[address] = False
        elif action == "alloc":
            assert live.pop(address) is False, f"event {number} allocates what is freed"
        elif action == "segment_map":
            home = next(m for m in memory if m[0] <= address and address + size <= m[1])
            memory.remove(home)
            memory += [part for part in ([home[0], address], [address + size, home[1]]) if part[0] < part[1]]
            assert all(map(inside, live)), f"event {number} leaves a block without memory"
        else:
            raise AssertionError(f"no such action: {action}")
        if action != "segment_map":
            assert address not in live or inside(address), f"event {number}: no memory at {address:#x}"
    return len(live)


def check(path):
    with open(path, "rb") as file:
        data = file.read()
    instructions(data)
    snapshot = Nothing(io.BytesIO(data)).load()
    assert set(snapshot) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    assert snapshot["external_annotations"] == [] and snapshot["allocator_settings"]["allocator"].startswith("aquifer")
    categories = {e.get("category") for trace in snapshot["device_traces"] for e in trace}
    assert categories <= {None} or "unknown" in categories, "the viewer fails without an unknown category"
    for segment in snapshot["segments"]:
        blocks_of(segment)
    for device, events in enumerate(snapshot["device_traces"]):
        backwards(device, events, snapshot["segments"])
    try:
        from torch.cuda import _memory_viz
    except ImportError:
        pass
    else:
        _memory_viz.segsum(snapshot)
        _memory_viz.trace(snapshot)
        _memory_viz.trace_plot(snapshot)
    return snapshot


if __name__ == "__main__":
    for path in sys.argv[1:]:
        snapshot = check(path)
        events = sum(map(len, snapshot["device_traces"]))
        live = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
        print(f"{events} events, {len(snapshot['segments'])} segments, {len(live)} blocks of "
              f"{sum(b['requested_size'] for b in live)} bytes live")
