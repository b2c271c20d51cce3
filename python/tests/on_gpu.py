"""What must hold of PyTorch over aquifer, on a GPU.

    AQUIFER_LIB=... python python/tests/on_gpu.py [GROUP ...]

Each group is a process of its own, since a process has one allocator. A test is a function of its group; its name is the
property. Many stand for a test of PyTorch's own `test_cuda.py`, which no installed PyTorch has. Exit: 0 if all hold. Without a GPU: skipped, and an error
under AQUIFER_REQUIRE_GPU=1.
"""

import ctypes
import gc
import json
import os
import pathlib
import pickle
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]
from groups import GROUPS, MIB, live, of, raises, rest, together  # noqa: E402
from skip import skip  # noqa: E402

# ---- aquifer as the allocator of the process -----------------------------------------------------------------------------


@of("process")
def tensors_are_in_aquifers_memory_and_go_back():
    before = live()
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert live() == before + 3 * MIB
    assert torch.cuda.memory_allocated() == aquifer_torch.statistics(0)["allocated_bytes.all.current"]
    del x
    assert live() == before
    assert torch.cuda.get_allocator_backend() == "pluggable"


@of("process")
def empty_tensors_take_nothing():
    before = aquifer_torch.statistics(0)["allocation.all.allocated"]
    x = torch.empty(0, device="cuda")
    assert x.numel() == 0 and (x + 1).sum().item() == 0
    y = torch.empty(0, device="cuda")
    assert y.data_ptr() == 0 and aquifer_torch.statistics(0)["allocation.all.allocated"] >= before


@of("process")
def what_does_not_fit_is_pytorchs_own_error_with_our_account_and_the_next_fits():
    limit, _ = aquifer_torch.limit(0)
    before = live()
    with raises(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate", "has a total capacity of"):
        torch.empty(limit + MIB, dtype=torch.uint8, device="cuda")
    with raises(torch.OutOfMemoryError, "Tried to allocate more than 1EB memory"):
        torch.empty(1 << 63 >> 2, dtype=torch.uint8, device="cuda")
    with raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    assert live() == before
    assert torch.ones(1000, device="cuda").sum().item() == 1000


@of("process")
def memory_that_was_freed_serves_what_is_larger_than_any_part_of_it():
    limit, _ = aquifer_torch.limit(0)
    aquifer_torch.set_limit(512 * MIB, 0)
    torch.cuda.empty_cache()
    try:
        parts = [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda") for _ in range(14)]
        del parts[::2]
        whole = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda").fill_(7)
        assert whole.min().item() == whole.max().item() == 7
        assert aquifer_torch.statistics(0)["aquifer.physical"] <= 512 * MIB
    finally:
        aquifer_torch.set_limit(limit, 0)


@of("process")
def the_memory_fraction_is_a_limit():
    before, _ = aquifer_torch.limit(0)
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        for fraction in (1.0, 0.0, 0.123456789):
            torch.cuda.set_per_process_memory_fraction(fraction)
            assert torch.cuda.get_per_process_memory_fraction() == fraction
        torch.cuda.set_per_process_memory_fraction(0.01)
        assert aquifer_torch.limit(0)[0] <= total * 0.011
        torch.cuda.empty_cache()
        with raises(torch.OutOfMemoryError):
            torch.empty(int(total * 0.02), dtype=torch.uint8, device="cuda")
        torch.empty(int(total * 0.005), dtype=torch.uint8, device="cuda")
        for wrong in (-0.1, 1.1):
            with raises((ValueError, RuntimeError)):
                torch.cuda.set_per_process_memory_fraction(wrong)
    finally:
        aquifer_torch.set_limit(before, 0)


@of("process")
def a_block_recorded_on_a_stream_is_not_reused_before_that_stream_is_done():
    side = torch.cuda.Stream()
    for shift in (0, 4096):
        x = torch.full((MIB,), 3, dtype=torch.uint8, device="cuda")
        part = x[shift : shift + 4096]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            copy = part.clone()
            # Of a view it is the whole block that counts.
            part.record_stream(side)
        address = x.data_ptr()
        del x, part
        y = torch.full((MIB,), 9, dtype=torch.uint8, device="cuda")
        assert y.data_ptr() != address or side.query()
        torch.cuda.synchronize()
        assert (copy == 3).all().item()


@of("process")
def blocks_that_wait_for_a_stream_are_waited_for_before_memory_is_refused():
    before, _ = aquifer_torch.limit(0)
    rest()
    aquifer_torch.set_limit(aquifer_torch.limit(0)[1] + 640 * MIB, 0)
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            y = torch.zeros(40 * MIB, device="cuda")
        for _ in range(40):
            x = torch.ones(40 * MIB, device="cuda")
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y += x
            x.record_stream(stream)
            del x
        torch.cuda.synchronize()
        assert (y == 40).all().item()
    finally:
        aquifer_torch.set_limit(before, 0)


@of("process")
def a_block_that_was_freed_on_its_own_stream_is_reused_at_once():
    torch.cuda.synchronize()
    x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(20_000_000)
    address = x.data_ptr()
    del x
    assert torch.empty(MIB, dtype=torch.uint8, device="cuda").data_ptr() == address


@of("process")
def what_is_recorded_may_be_anybodys_memory():
    pinned = torch.empty(16, pin_memory=True)
    torch.empty(16, device="cuda").record_stream(torch.cuda.current_stream())
    assert pinned.is_pinned()


@of("process")
def without_the_cache_memory_is_the_drivers_and_both_kinds_are_freed():
    cached = torch.full((MIB,), 1, dtype=torch.uint8, device="cuda")
    before = live()
    torch.cuda.caching_allocator_enable(False)
    try:
        free, _ = torch.cuda.mem_get_info()
        direct = torch.full((64 * MIB,), 2, dtype=torch.uint8, device="cuda")
        assert live() == before and torch.cuda.mem_get_info()[0] <= free - 64 * MIB
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = direct.clone()
        direct.record_stream(side)
        with raises(torch.OutOfMemoryError, "Tried to allocate"):
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        assert (cached == 1).all().item()
        del cached
    finally:
        torch.cuda.caching_allocator_enable(True)
    assert live() == before - MIB
    again = torch.full((MIB,), 3, dtype=torch.uint8, device="cuda")
    assert live() == before
    assert (direct == 2).all().item() and (copy == 2).all().item() and (again == 3).all().item()
    free, _ = torch.cuda.mem_get_info()
    del direct, copy
    assert torch.cuda.mem_get_info()[0] >= free + 128 * MIB and live() == before


@of("process")
def empty_cache_gives_memory_back_to_the_driver():
    x = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    assert after >= before + 200 * MIB, (before, after)


@of("process")
def raw_memory_is_served_on_any_stream_and_what_is_not_ours_is_refused():
    side = torch.cuda.Stream()
    for stream in (None, side, side.cuda_stream):
        before = live()
        memory = torch.cuda.caching_allocator_alloc(MIB, stream=stream)
        assert memory and live() == before + MIB
        torch.cuda.caching_allocator_delete(memory)
        assert live() == before
    with raises(RuntimeError, "AQ_ERROR_FOREIGN_BLOCK"):
        torch.cuda.caching_allocator_delete(0x1234000)
    memory = torch.cuda.caching_allocator_alloc(MIB)
    torch.cuda.caching_allocator_delete(memory)
    with raises(RuntimeError, "AQ_ERROR"):
        torch.cuda.caching_allocator_delete(memory)


@of("process")
def random_blocks_keep_their_bytes_while_the_cache_is_emptied():
    pick, held, total = random.Random(123), [], 0
    for n in range(10_000):
        while total >= 100 * MIB or (held and pick.random() < 0.48):
            value, x = held.pop(pick.randrange(len(held)))
            assert (x == value).all().item(), value
            total -= x.nbytes
        held.append((n, torch.full((pick.randint(MIB >> 1, 5 * MIB),), n, dtype=torch.int32, device="cuda")))
        total += held[-1][1].nbytes
        if pick.random() < 0.05:
            torch.cuda.empty_cache()
    assert all((x == value).all().item() for value, x in held)


@of("process")
def an_observer_is_told_before_an_out_of_memory_error_is_raised():
    told = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *facts: told.append(facts))
    with raises(torch.OutOfMemoryError):
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
    device, asked, total, free = told[0]
    assert (len(told), device, asked) == (1, 0, 1 << 42)
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory


@of("process")
def an_expanded_matrix_takes_no_more_memory_to_multiply_than_one_that_is_not():
    def peak(work):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    a, b = torch.rand(1, 512, 512, device="cuda"), torch.rand(24, 512, 1, device="cuda")
    torch.matmul(a, b)
    expanded = a.expand(24, 512, 512)
    taken = [peak(lambda: torch.matmul(a, b)), peak(lambda: torch.matmul(expanded, b)), peak(lambda: torch.bmm(expanded, b))]
    # A copy of the expanded matrix takes 24 MiB. A peak may be too high by 1 MiB for each stream.
    assert max(taken) - min(taken) < 12 * MIB, taken


@of("process")
def statistics_of_pytorch_are_aquifers():
    x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    theirs, ours = torch.cuda.memory_stats(), aquifer_torch.statistics(0)
    for name in ("allocated_bytes.all.current", "requested_bytes.all.current", "reserved_bytes.all.current",
                 "allocated_bytes.all.peak", "reserved_bytes.all.peak", "allocation.all.current", "num_ooms"):  # fmt: skip
        assert theirs[name] == ours[name], name
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated() >= MIB
    assert "allocated" in torch.cuda.memory_summary().lower()
    assert 0 < torch.cuda.get_per_process_memory_fraction() <= 1
    shot = aquifer_torch.snapshot()
    assert shot["format"] == "aquifer-snapshot" and shot["devices"][0]["stats"]["blocks"] >= 1
    del x


@of("process")
def peaks_are_counted_from_their_reset():
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()
    before = torch.cuda.memory_allocated()
    x = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    del x
    assert torch.cuda.max_memory_allocated() == before + 8 * MIB


@of("process")
def streams_whose_peaks_alternate_report_the_peak_of_both_together():
    streams = [torch.cuda.Stream() for _ in range(2)]
    rest()
    torch.cuda.reset_peak_memory_stats()
    stats = torch.cuda.memory_stats()
    before = [stats[f"{name}_bytes.all.current"] for name in ("allocated", "requested")]
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                held = [torch.empty(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]
                del held
    stats = torch.cuda.memory_stats()
    for name, was in zip(("allocated", "requested"), before):
        told = stats[f"{name}_bytes.all.peak"] - was
        # At most 1 MiB too much for each of these streams, and for the default one.
        assert 128 * MIB <= told <= 131 * MIB, (name, told)
    assert torch.cuda.max_memory_allocated() == stats["allocated_bytes.all.peak"]


@of("process")
def threads_and_streams_keep_their_bytes_apart():
    wrong = []

    def work(seed):
        pick, stream, kept = random.Random(seed), torch.cuda.Stream(), {}
        with torch.cuda.stream(stream):
            for n in range(400):
                size = pick.randint(1, 1 << pick.randint(4, 21))
                value = pick.randint(0, 255)
                kept[n] = (torch.full((size,), value, dtype=torch.uint8, device="cuda"), value)
                if len(kept) > 20:
                    tensor, value = kept.pop(pick.choice(list(kept)))
                    if not (tensor == value).all().item():
                        wrong.append(seed)

    together([threading.Thread(target=work, args=(seed,)) for seed in range(6)])
    assert not wrong


@of("process")
def threads_that_end_leave_no_memory_in_use():
    rest()
    before, held = live(), torch.cuda.memory_reserved()

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.full((4 * MIB,), 1, dtype=torch.uint8, device="cuda").clone()

    for _ in range(40):
        together([threading.Thread(target=work) for _ in range(5)])
    rest()
    assert live() == before and torch.cuda.memory_reserved() <= held + 4 * MIB, (held, torch.cuda.memory_reserved())


@of("process")
def gradients_are_the_same_as_on_the_cpu():
    torch.manual_seed(1)
    layer = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Tanh(), torch.nn.Linear(500, 7)).double()
    x = torch.randn(64, 300, dtype=torch.double)
    layer(x).square().sum().backward()
    wanted = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer.cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        layer(x.cuda()).square().sum().backward()
    torch.cuda.synchronize()
    for p, want in zip(layer.parameters(), wanted):
        torch.testing.assert_close(p.grad.cpu(), want)


@of("process")
def cudnns_benchmark_mode_may_ask_for_the_largest_block():
    torch.backends.cudnn.benchmark = True
    try:
        conv = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
        assert conv(torch.randn(4, 16, 32, 32, device="cuda")).shape == (4, 32, 32, 32)
    finally:
        torch.backends.cudnn.benchmark = False


@of("process")
def pinned_memory_and_copies_work_beside_it():
    host = torch.arange(MIB, dtype=torch.int32).pin_memory()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        there = host.cuda(non_blocking=True)
        back = torch.empty_like(host).pin_memory()
        back.copy_(there, non_blocking=True)
    side.synchronize()
    assert torch.equal(host, back)


@of("refused")
def what_pytorch_refuses_for_pluggable_allocators_says_so_and_where():
    x = torch.ones(4, device="cuda")
    refused = {
        "sharing with another process": lambda: x.untyped_storage()._share_cuda_(),
    }
    for name, call in refused.items():
        try:
            call()
            print(f"    not refused any more: {name}")
        except RuntimeError as error:
            assert "CUDAPluggableAllocator" in str(error) or "not yet support" in str(error), (name, error)
            where = re.search(r"Exception raised from (\w+) at (\S+)", str(error))
            print(f"    {name}: {' at '.join(where.groups()) if where else str(error).splitlines()[0]}")


@of("process")
def it_stays_the_allocator_of_the_process():
    with raises(RuntimeError, "already initialized"):
        torch.cuda.memory.change_current_allocator(
            torch.cuda.memory.CUDAPluggableAllocator(aquifer_torch._library.path, "aq_torch_alloc", "aq_torch_free")
        )
    with raises(aquifer_torch.AlreadyInitialised):
        aquifer_torch.install()


@of("process")
def a_collected_cycle_gives_its_memory_back():
    before = live()

    class Node:
        pass

    a, b = Node(), Node()
    a.other, b.other, a.x = b, a, torch.empty(MIB, dtype=torch.uint8, device="cuda")
    del a, b
    gc.collect()
    assert live() == before


# ---- torch.compile ----------------------------------------------------------------------------------------------------------


@of("compile")
def compiled_code_gives_what_eager_code_gives():
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)).cuda()
    x = torch.randn(32, 128, device="cuda")
    compiled = torch.compile(model)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    model.zero_grad()
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# ---- without the companion -----------------------------------------------------------------------------------------------


@of("plain")
def pytorchs_own_class_serves_streams_and_uses():
    x = torch.full((MIB,), 5, dtype=torch.uint8, device="cuda")
    assert live() == MIB
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        y = x.clone()
        x.record_stream(side)
    del x
    z = torch.full((MIB,), 6, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert (y == 5).all().item() and (z == 6).all().item()
    del y, z
    rest()
    assert aquifer_torch.statistics(0)["aquifer.physical"] <= 4 * MIB
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert aquifer_torch.limit(0)[0] <= torch.cuda.get_device_properties(0).total_memory * 0.51


# ---- what PyTorch's viewer shows ----------------------------------------------------------------------------------------------


@of("viewer")
def pytorchs_viewer_opens_what_was_kept():
    from torch.cuda import _memory_viz

    kept = torch.ones(3 * MIB, dtype=torch.uint8, device="cuda")
    del_me = torch.ones(5 * MIB, dtype=torch.uint8, device="cuda")
    del del_me
    path = pathlib.Path(tempfile.mkdtemp()) / "memory.pickle"
    for _ in range(2):
        aquifer_torch.dump_snapshot(path)
        shot = pickle.loads(path.read_bytes())
    text = _memory_viz.trace(shot)
    assert "5.0MiB" in text and "free completed" in text, text[:2000]
    assert "segments:" in _memory_viz.segsum(shot)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<html" in plot(shot) or "<script" in plot(shot)
    blocks = [block for segment in shot["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"]
    assert kept.data_ptr() in [block["address"] for block in blocks if block["requested_size"] == 3 * MIB], blocks


# ---- refusals of the package ------------------------------------------------------------------------------------------------


@of("late")
def after_the_first_use_of_cuda_memory_of_both_allocators_is_valid_and_freed():
    side = torch.cuda.Stream()
    earlier = torch.full((256 * MIB,), 5, dtype=torch.uint8, device="cuda")
    raw = torch.cuda.caching_allocator_alloc(MIB)
    graph, x = torch.cuda.CUDAGraph(), torch.ones(MIB, device="cuda")
    with torch.cuda.graph(graph):
        doubled = x * 2
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.full((MIB,), 6, dtype=torch.uint8, device="cuda")
    with raises(aquifer_torch.AlreadyInitialised, "companion=False"):
        aquifer_torch.install(companion=False)
    with raises(aquifer_torch.AlreadyInitialised, "capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        aquifer_torch.install(limit=0.5)
    aquifer_torch.install(limit=0.5)
    assert torch.cuda.get_allocator_backend() == "pluggable" and live() == 0
    before = torch.cuda.memory_allocated()
    later = torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")
    assert live() == later.nbytes == torch.cuda.memory_allocated() - before and before > earlier.nbytes
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        torch.cuda._sleep(50_000_000)
        copies = [earlier.clone(), later.clone(), pooled.clone()]
    for tensor in (earlier, later, pooled):
        tensor.record_stream(side)
    graph.replay()
    torch.cuda.caching_allocator_delete(raw)
    with raises(RuntimeError):
        torch.cuda.caching_allocator_delete(0x1234000)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    del earlier, later, pooled, pool
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free + 318 * MIB
    assert [int(copy.min()) for copy in copies] == [5, 7, 6] == [int(copy.max()) for copy in copies]
    assert float(doubled.sum()) == 2 * MIB
    del doubled, graph
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        again = x + 1
    del again, copies
    torch.cuda.synchronize()
    assert live() == 0


@of("late")
def a_compiler_that_is_missing_is_named():
    from aquifer_torch import companion

    os.environ["CXX"] = "/nowhere/c++"
    with raises(aquifer_torch.CompanionError, "/nowhere/c++"):
        companion.build()
    del os.environ["CXX"]
    os.environ["AQUIFER_CACHE"] = tempfile.mkdtemp()
    broken = pathlib.Path(os.environ["AQUIFER_CACHE"]) / "broken.cpp"
    broken.write_text("int main( {")
    with raises(aquifer_torch.CompanionError, "did not compile", "broken.cpp"):
        companion.build(broken)


# ---- what a pair costs ------------------------------------------------------------------------------------------------------

ROWS = {
    "256 B": ([256], 1),
    "1 MiB": ([MIB], 1),
    "64 MiB": ([64 * MIB], 1),
    "random to 1 MiB, 64 out": ([random.Random(5).randint(1, MIB) for _ in range(997)], 64),
    "random to 64 MiB, 64 out": ([random.Random(6).randint(1, 64 * MIB) for _ in range(997)], 64),
}


def pairs():
    """ns a pair, the least of five rounds."""
    from aquifer_torch import companion

    torch.zeros(1, device="cuda")
    call = ctypes.CDLL(str(companion.build(HERE / "pair.cpp"))).pair_ns
    call.restype = ctypes.c_double
    found = {}
    for name, (sizes, held) in ROWS.items():
        array = (ctypes.c_size_t * len(sizes))(*sizes)
        times = [call(array, ctypes.c_size_t(len(sizes)), ctypes.c_size_t(held), ctypes.c_size_t(100_000)) for _ in range(5)]
        found[name] = min(times)
    print(json.dumps(found))


# ---- what pinned memory costs -----------------------------------------------------------------------------------------------

PINNED_ROWS = ("8 GiB ready, s", "9 tensors of 1 GiB + 1 B, GiB", "a pair of 1 MiB, ns", "random to 4 MiB, 64 out, ns")


def available():
    """Bytes of host memory that are free by the kernel's count."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def pinned_costs():
    """The figures of PINNED_ROWS as JSON."""
    torch.zeros(1, device="cuda")
    torch.empty(1, pin_memory=True)
    # The host's memory is touched once before, since a virtual machine gets it then.
    torch.ones(12 << 30, dtype=torch.uint8)
    start = time.perf_counter()
    large = torch.empty(8 << 30, dtype=torch.uint8, pin_memory=True)
    found = {PINNED_ROWS[0]: time.perf_counter() - start}
    del large
    torch._C._host_emptyCache()
    before = available()
    held = [torch.empty((1 << 30) + 1, dtype=torch.uint8, pin_memory=True) for _ in range(9)]
    for x in held:
        x[:: 1 << 12] = 1
    found[PINNED_ROWS[1]] = (before - available()) / (1 << 30)
    del held
    torch._C._host_emptyCache()
    sizes = [random.Random(7).randint(1, 4 * MIB) for _ in range(997)]
    for name, lengths, kept in ((PINNED_ROWS[2], [MIB], 1), (PINNED_ROWS[3], sizes, 64)):
        best = float("inf")
        for _ in range(5):
            slots = [None] * kept
            start = time.perf_counter_ns()
            for turn in range(20_000):
                slots[turn % kept] = None
                slots[turn % kept] = torch.empty(lengths[turn % len(lengths)], dtype=torch.uint8, pin_memory=True)
            best = min(best, (time.perf_counter_ns() - start) / 20_000)
        found[name] = best
    print(json.dumps(found))


# ---- the runner -------------------------------------------------------------------------------------------------------------

INSTALLED = {name: {} for name in ("process", "refused", "graphs", "replays", "pools", "compile", "trees", "history", "shared", "sleep", "everything_exit")}
INSTALLED["plain"] = {"companion": False}
INSTALLED["viewer"] = {"history": 10_000}
# How long a group may take.
SECONDS = {"replays": 420, "shared": 900, "sleep": 420, "sleep_beside": 420}
# Errors of this group say where they come from.
WHERE = {"TORCH_SHOW_CPP_STACKTRACES": "1", "TORCH_DISABLE_ADDR2LINE": "1"}


def one(group):
    if group.startswith("pinned_costs"):
        if group.partition(":")[2] == "aquifer":
            aquifer_torch.install_pinned(pinned_limit=32 << 30)
        return pinned_costs() or 0
    if group.startswith("pairs"):
        which = group.partition(":")[2]
        if which != "native":
            aquifer_torch.install(companion=which == "aquifer", limit=0.9)
        return pairs() or 0
    if group in INSTALLED:
        aquifer_torch.install(limit=0.9, **INSTALLED[group])
    failed = 0
    for test in GROUPS[group]:
        try:
            test()
            print(f"  ok      {test.__name__}", flush=True)
        except Exception:
            failed += 1
            print(f"  FAILED  {test.__name__}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


def table(name, variants, rows, form):
    """Runs a measurement in a process of its own for each variant, and prints its rows. Returns which ones failed."""
    found, failed = {}, []
    for variant in variants:
        ran = subprocess.run([sys.executable, __file__, "--one", f"{name}:{variant}"], capture_output=True, text=True)
        found[variant] = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 and ran.stdout else {}
        if ran.returncode:
            failed.append(f"{name}:{variant}")
            print(ran.stderr[-2000:])
    print(f"| {name} | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for row in rows:
        print(f"| {row} | " + " | ".join(form(figures.get(row, float("nan"))) for figures in found.values()) + " |")
    return failed


def main():
    wanted = [name for name in sys.argv[1:] if not name.startswith("-")] or [*GROUPS, "pairs", "pinned_costs"]
    if not torch.cuda.is_available():
        skip("PyTorch sees no CUDA device")
    failed = []
    for group in wanted:
        if group == "pairs":
            failed += table(group, ("native", "aquifer", "plain"), ROWS, "{:.0f}".format)
            continue
        if group == "pinned_costs":
            failed += table(group, ("native", "aquifer"), PINNED_ROWS, "{:.3g}".format)
            continue
        print(f"{group}:", flush=True)
        environment = os.environ | (WHERE if group == "refused" else {})
        ran = subprocess.run([sys.executable, __file__, "--one", group], env=environment, timeout=SECONDS.get(group, 240))
        if ran.returncode:
            failed.append(group)
            print(f"  {group} ended with {ran.returncode}")
    print(f"NOT SO: {failed}" if failed else "all of it holds")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        import torch
    except ImportError:
        skip("no PyTorch")
    import aquifer_torch
    import graphs  # noqa: F401
    import history  # noqa: F401
    import pinned  # noqa: F401
    import pools  # noqa: F401
    import shared  # noqa: F401
    import sleeping  # noqa: F401
    import trees  # noqa: F401

    sys.exit(one(sys.argv[2]) if sys.argv[1:2] == ["--one"] else main())
