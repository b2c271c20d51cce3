"""Group `history`: PyTorch's own history, snapshots, statistics and profiler over aquifer."""

import pathlib
import pickle
import tempfile

import torch
from groups import MIB, of, raises


def entries(kind):
    return [e for trace in torch.cuda.memory._snapshot()["device_traces"] for e in trace if e["action"] == kind]


@of("history")
def a_snapshot_has_every_live_block_with_its_size_and_state():
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    y = torch.empty(700, dtype=torch.uint8, device="cuda")
    blocks = {b["address"]: b for s in torch.cuda.memory_snapshot() for b in s["blocks"]}
    for tensor in (x, y):
        block = blocks[tensor.data_ptr()]
        assert block["requested_size"] == tensor.numel() and block["size"] % 512 == 0
        assert block["state"] == "active_allocated"
    gone = y.data_ptr()
    del y, tensor
    assert gone not in {b["address"] for s in torch.cuda.memory_snapshot() for b in s["blocks"]}
    assert sum(s["allocated_size"] for s in torch.cuda.memory_snapshot()) == torch.cuda.memory_allocated()


@of("history")
def history_has_allocations_frees_and_refusals_with_the_lines_that_made_them():
    torch.cuda.memory._record_memory_history(max_entries=1000)
    assert torch._C._cuda_isHistoryEnabled()
    x = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    at = x.data_ptr()
    state = torch.cuda.memory._snapshot()
    block = next(b for s in state["segments"] for b in s["blocks"] if b["address"] == at)
    assert any(frame["filename"].endswith("history.py") for frame in block["frames"]), block
    del x
    with raises(torch.OutOfMemoryError):
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    made = [e for e in entries("alloc") if e["addr"] == at and e["size"] == 5 * MIB]
    freed = [e for e in entries("free_completed") if e["addr"] == at]
    assert len(made) == 1 and len(freed) == 1 and made[0]["time_us"] <= freed[0]["time_us"]
    assert any(frame["name"].startswith("history_has") for frame in made[0]["frames"])
    assert any(e["size"] == 1 << 45 for e in entries("oom"))
    torch.cuda.memory._record_memory_history(enabled=None)
    assert not torch._C._cuda_isHistoryEnabled() and entries("alloc") == []


@of("history")
def the_history_is_bounded_and_costs_nothing_when_it_is_off():
    torch.cuda.memory._record_memory_history(max_entries=10, stacks="python")
    for _ in range(100):
        torch.empty(4096, device="cuda")
    assert sum(len(trace) for trace in torch.cuda.memory._snapshot()["device_traces"]) <= 10
    torch.cuda.memory._record_memory_history(enabled=None)


@of("history")
def a_dumped_snapshot_is_read_by_pytorchs_own_viewer():
    from torch.cuda import _memory_viz as viewer

    torch.cuda.memory._record_memory_history(max_entries=10000)
    kept = [torch.empty(n * MIB, dtype=torch.uint8, device="cuda") for n in (1, 2, 3)]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "memory.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        state = pickle.loads(path.read_bytes())
    torch.cuda.memory._record_memory_history(enabled=None)
    assert viewer.trace(state)
    for view in (viewer.trace_plot, viewer.segment_plot):
        assert "<html" in view(state).lower() or "<!doctype" in view(state).lower() or "script" in view(state)
    assert len(kept) == 3


@of("history")
def accumulated_counts_begin_anew():
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] > 0
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    x = torch.empty(1, device="cuda")
    del x
    stats = torch.cuda.memory_stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 1


@of("history")
def accumulated_bytes_count_requests_and_begin_anew():
    kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_accumulated_memory_stats()
    for _ in range(4):
        torch.empty(MIB + 1, dtype=torch.uint8, device="cuda")
    del kept
    stats = torch.cuda.memory_stats()
    for name in ("allocated_bytes", "active_bytes", "requested_bytes"):
        assert stats[f"{name}.all.allocated"] == 4 * (MIB + 1), (name, stats[f"{name}.all.allocated"])
        assert stats[f"{name}.all.freed"] == 7 * MIB + 4, (name, stats[f"{name}.all.freed"])
    reserved = stats["reserved_bytes.all.current"]
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats()
    returned = reserved - stats["reserved_bytes.all.current"]
    assert stats["reserved_bytes.all.freed"] - stats["reserved_bytes.all.allocated"] >= returned - 4 * MIB, stats


@of("history")
def live_blocks_keep_their_stacks_when_the_history_ends():
    torch.cuda.memory._record_memory_history(stacks="python")
    kept = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    gone = torch.empty(6 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.memory._record_memory_history(enabled=None)
    address = gone.data_ptr()
    del gone
    later = torch.empty(6 * MIB, dtype=torch.uint8, device="cuda")
    assert later.data_ptr() == address
    blocks = {
        block["address"]: block["frames"]
        for segment in torch.cuda.memory._snapshot()["segments"]
        for block in segment["blocks"]
    }
    assert any(frame["name"] == "live_blocks_keep_their_stacks_when_the_history_ends" for frame in blocks[kept.data_ptr()])
    # Another block at the address of one that was recorded has no stack.
    assert blocks[later.data_ptr()] == []


@of("history")
def the_profiler_reports_memory():
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as told:
        x = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        del x
        y = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    del y
    sizes = [e.device_memory_usage for e in told.events() if e.device_memory_usage]
    assert 2 * MIB in sizes or 10 * MIB in sizes or 8 * MIB in sizes, sizes
