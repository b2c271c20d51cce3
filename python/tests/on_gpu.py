"""What must hold of PyTorch over aquifer, on a GPU.

    AQUIFER_LIB=... python python/tests/on_gpu.py [GROUP ...]

Each group is a process of its own, since a process has one allocator. A test is a function of its group; its name is the
property. `README.md` says which of PyTorch's own tests it stands for. Exit: 0 if all hold. Without a GPU: skipped, and an error
under AQUIFER_REQUIRE_GPU=1.
"""

import contextlib
import ctypes
import gc
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
MIB = 1 << 20
GROUPS = {}


def of(group):
    def enter(test):
        GROUPS.setdefault(group, []).append(test)
        return test

    return enter


@contextlib.contextmanager
def raises(kind, *words):
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in: {error}"
        return
    raise AssertionError(f"nothing was raised; expected {kind}")


def live():
    return aquifer_torch.statistics(0)["aquifer.requested"]


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
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
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

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


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


@of("process")
def what_pytorch_refuses_for_pluggable_allocators_says_so():
    x = torch.ones(4, device="cuda")
    refused = {
        "memory_snapshot": lambda: torch.cuda.memory_snapshot(),
        "_record_memory_history": lambda: torch.cuda.memory._record_memory_history(max_entries=10),
        "the out-of-memory observer": lambda: torch._C._cuda_attach_out_of_memory_observer(lambda *a: None),
        "reset_accumulated_memory_stats": lambda: torch.cuda.reset_accumulated_memory_stats(),
        "sharing with another process": lambda: x.untyped_storage()._share_cuda_(),
    }
    for name, call in refused.items():
        try:
            call()
            print(f"    not refused any more: {name}")
        except RuntimeError as error:
            assert "CUDAPluggableAllocator" in str(error) or "not yet support" in str(error), (name, error)


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


# ---- graphs -----------------------------------------------------------------------------------------------------------------


def graphed(pool=None, stream=None):
    x = torch.zeros(MIB, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            (x * 2 + 1).relu().sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        y = x * 2
        y = y + 1
        out = y.relu() * 3
    return graph, x, out


@of("graphs")
def a_graph_replays_against_other_traffic_with_no_wrong_byte():
    graph, x, out = graphed()
    pick, kept = random.Random(2), []
    for n in range(2000):
        x.fill_(n % 100)
        noise = torch.full((pick.randint(1, 4 * MIB),), -1.0, device="cuda")
        kept.append(noise)
        graph.replay()
        del kept[: -pick.randint(1, 8)]
        if n % 50 == 0:
            assert (out == (n % 100 * 2 + 1) * 3).all().item(), n


@of("graphs")
def graphs_may_share_a_pool():
    first, x, out = graphed()
    second, z, end = graphed(pool=first.pool())
    for value in (2.0, 5.0):
        x.fill_(value)
        first.replay()
        assert (out == (value * 2 + 1) * 3).all().item()
        z.fill_(value)
        second.replay()
        assert (end == (value * 2 + 1) * 3).all().item()


@of("graphs")
def a_graphs_memory_comes_back_when_it_is_gone():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph, x, out = graphed()
    graph.replay()
    del graph, x, out
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # What remains are the random generator's own two tensors.
    assert torch.cuda.memory_reserved() <= before + 8 * MIB, (before, torch.cuda.memory_reserved())


@of("graphs")
def frees_and_other_threads_go_on_during_a_capture():
    outside = [torch.full((MIB,), 4.0, device="cuda") for _ in range(8)]
    stop, wrong = threading.Event(), []

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                x = torch.full((1 << random.randint(4, 20),), 1.0, device="cuda")
                stream.synchronize() if random.random() < 0.1 else None
                del x

    thread = threading.Thread(target=work)
    thread.start()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(MIB, device="cuda")
    try:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = x + 1
            del outside[:4]
            z = y * 2
            del y
            w = z + 1
    finally:
        stop.set()
        thread.join()
    for _ in range(100):
        x.fill_(1)
        noise = torch.full((MIB,), 7.0, device="cuda")
        graph.replay()
        del noise
    torch.cuda.synchronize()
    assert (w == 5).all().item() and not wrong
    assert all((t == 4).all().item() for t in outside)


@of("graphs")
def graphed_callables_train_as_without():
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).cuda()
    import copy

    twin = copy.deepcopy(plain)
    graph = torch.cuda.make_graphed_callables(twin, (torch.randn(16, 64, device="cuda"),))
    x = torch.randn(16, 64, device="cuda")
    for _ in range(5):
        for model in (plain, graph):
            model.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
        for a, b in zip(plain.parameters(), twin.parameters()):
            torch.testing.assert_close(a.grad, b.grad)


@of("graphs")
def a_mem_pool_of_the_process_is_a_pool_of_aquifers():
    pool = torch.cuda.MemPool()
    before = live()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(MIB, device="cuda")
    assert live() >= before + 4 * MIB
    assert x.sum().item() == MIB
    del x, pool
    torch.cuda.synchronize()


def temporaries(t, value):
    return (t.clone() + value) + (t.clone() + value)


@of("graphs")
def graphs_that_follow_each_other_give_what_eager_code_gives():
    for share in ("apart", "pool()", "graph_pool_handle()"):
        first, second, stream = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        a = torch.ones(1000, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            handle = (torch.cuda.graph_pool_handle(),) if share == "graph_pool_handle()" else ()
            first.capture_begin(*handle)
            b = a.clone()
            for _ in range(5):
                b = temporaries(b, 1)
            first.capture_end()
            second.capture_begin(*((first.pool(),) if share == "pool()" else handle))
            for _ in range(5):
                b = temporaries(b, 1)
            second.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        c = a.clone()
        for graph in (first, second):
            c = temporaries(temporaries(c, 3), 3)
            graph.replay()
        c = temporaries(temporaries(c, 3), 3)
        assert b.sum().item() == 1000 * 3070, share
        assert c.sum().item() == 1000 * 442, share
        del a, b, c, first, second
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@of("graphs")
def a_result_outlives_its_graph_and_a_graph_can_be_captured_anew():
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        a = torch.full((1000,), 1.0, device="cuda")
        graph.capture_begin()
        b = a
        for _ in range(10):
            b = b + 1
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    assert b.sum().item() == 11000
    graph.reset()
    torch.cuda.empty_cache()
    noise = [torch.full((1000,), -1.0, device="cuda") for _ in range(50)]
    assert b.sum().item() == 11000
    with torch.cuda.stream(stream):
        graph.capture_begin()
        b.fill_(2.0)
        for _ in range(10):
            b = b + 2
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    assert b.sum().item() == 22000
    del noise


@of("graphs")
def what_does_not_fit_in_a_capture_is_pytorchs_own_error_and_the_next_capture_works():
    with raises(torch.OutOfMemoryError, "out of memory"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(2**40, device="cuda")
    torch.cuda.synchronize()
    graph, x, out = graphed()
    x.fill_(1)
    graph.replay()
    assert (out == 9).all().item()


@of("graphs")
def recorded_uses_before_and_within_a_capture_do_not_break_it():
    busy, a = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    before, first, second = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(before):
        busy.record_stream(before)
        torch.cuda._sleep(50_000_000)
        busy.fill_(1.0)
    del busy
    with torch.cuda.stream(first):
        graph.capture_begin()
        b = a.clone()
        second.wait_stream(first)
        with torch.cuda.stream(second):
            b.fill_(1.0)
            b.record_stream(second)
            del b
        first.wait_stream(second)
        graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    torch.zeros(3, device="cuda")
    torch.cuda.synchronize()


@of("graphs")
def many_captures_take_no_more_memory_than_a_few():
    a, b = torch.rand(1024, 512, device="cuda"), torch.rand(512, 64, device="cuda")
    torch.mm(a, b)
    before, _ = torch.cuda.mem_get_info()
    for _ in range(100):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mm(a, b)
        graph.replay()
    after, _ = torch.cuda.mem_get_info()
    assert after > before - 100e6, (before, after)


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


@of("trees")
def graph_trees_are_refused_by_pytorch():
    compiled = torch.compile(lambda x: (x * 2).relu() + 1, mode="reduce-overhead")
    x = torch.randn(64, device="cuda")
    try:
        for _ in range(4):
            compiled(x)
        print("    not refused any more: reduce-overhead")
    except Exception as error:
        print(f"    {type(error).__name__}: {str(error).splitlines()[0]}")
        assert "support" in str(error), error
    # What a capture that was broken off leaves behind is PyTorch's own affair.
    print("  ok      graph_trees_are_refused_by_pytorch", flush=True)
    os._exit(0)


# ---- a MemPool under PyTorch's own allocator --------------------------------------------------------------------------------


@of("mem_pool")
def a_mem_pools_tensors_are_in_aquifers_memory_and_others_are_not():
    pool = aquifer_torch.mem_pool(limit=2048 * MIB)
    outside = torch.ones(MIB, device="cuda")
    assert live() == 0
    with torch.cuda.use_mem_pool(pool):
        inside = torch.full((8 * MIB,), 2.0, device="cuda")
    assert live() >= 32 * MIB
    held = live()
    another = torch.ones(8 * MIB, device="cuda")
    assert live() == held and another.sum().item() == 8 * MIB
    assert (inside == 2).all().item() and outside.sum().item() == MIB
    with torch.cuda.use_mem_pool(pool), raises(torch.OutOfMemoryError):
        torch.empty(4096 * MIB, dtype=torch.uint8, device="cuda")
    del inside
    with torch.cuda.use_mem_pool(pool):
        again = torch.zeros(8 * MIB, device="cuda")
    assert live() == held and again.sum().item() == 0
    del again
    torch.cuda.synchronize()
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    assert live() == 0, live()


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
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert aquifer_torch.statistics(0)["aquifer.physical"] <= 4 * MIB
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert aquifer_torch.limit(0)[0] <= torch.cuda.get_device_properties(0).total_memory * 0.51


# ---- refusals of the package ------------------------------------------------------------------------------------------------


@of("late")
def it_does_not_come_after_the_first_use_of_cuda():
    torch.zeros(1, device="cuda")
    with raises(aquifer_torch.AlreadyInitialised, "before"):
        aquifer_torch.install()


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


# ---- the runner -------------------------------------------------------------------------------------------------------------

INSTALLED = {"process": {}, "graphs": {}, "compile": {}, "trees": {}, "plain": {"companion": False}}


def one(group):
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


def main():
    wanted = [name for name in sys.argv[1:] if not name.startswith("-")] or [*GROUPS, "pairs"]
    if not torch.cuda.is_available():
        print("skipped: PyTorch sees no CUDA device")
        return 1 if os.environ.get("AQUIFER_REQUIRE_GPU") == "1" else 0
    failed = []
    for group in wanted:
        if group == "pairs":
            rows = {}
            for which in ("native", "aquifer", "plain"):
                ran = subprocess.run([sys.executable, __file__, "--one", f"pairs:{which}"], capture_output=True, text=True)
                rows[which] = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 and ran.stdout else {}
                if ran.returncode:
                    failed.append(f"pairs:{which}")
                    print(ran.stderr[-2000:])
            print("| ns a pair | " + " | ".join(rows) + " |\n|---|" + "---|" * len(rows))
            for name in ROWS:
                print(f"| {name} | " + " | ".join(f"{row.get(name, float('nan')):.0f}" for row in rows.values()) + " |")
            continue
        print(f"{group}:", flush=True)
        ran = subprocess.run([sys.executable, __file__, "--one", group], timeout=240)
        if ran.returncode:
            failed.append(group)
            print(f"  {group} ended with {ran.returncode}")
    print(f"NOT SO: {failed}" if failed else "all of it holds")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        import torch
    except ImportError:
        print("skipped: no PyTorch")
        sys.exit(1 if os.environ.get("AQUIFER_REQUIRE_GPU") == "1" else 0)
    import aquifer_torch

    sys.exit(one(sys.argv[2]) if sys.argv[1:2] == ["--one"] else main())
