"""torch.cuda.MemPool: over aquifer beneath PyTorch's own allocator, and under aquifer as the allocator of the process."""

import contextlib
import ctypes
import functools
import gc
import itertools
import pathlib
import threading

import aquifer_torch
import torch
from aquifer_torch import companion
from groups import MIB, live, of, raises, rest, together


@functools.lru_cache(None)
def counted():
    """Returns an allocator of counted.cpp, and a function that returns how often it has given memory and got it back."""
    path = str(companion.build(pathlib.Path(__file__).with_name("counted.cpp")))
    library, made = ctypes.CDLL(path), torch.cuda.memory.CUDAPluggableAllocator(path, "counted_alloc", "counted_free")
    return made, lambda: [ctypes.c_long.in_dll(library, f"counted_{name}").value for name in ("given", "returned")]


def own_pool(**settings):
    """A MemPool with an allocator of its own."""
    return torch.cuda.MemPool(counted()[0].allocator(), **settings)


KINDS = (torch.cuda.MemPool, own_pool)


def beside():
    """What the limit and PyTorch count as held beyond aquifer's own memory: bytes."""
    own = aquifer_torch.statistics(0)["aquifer.physical"]
    return aquifer_torch.limit(0)[1] - own, torch.cuda.memory_reserved() - own


def addresses(pool):
    return [b["address"] for segment in pool.snapshot() for b in segment["blocks"] if b["state"] == "active_allocated"]


# ---- a MemPool under PyTorch's own allocator ----------------------------------------------------------------------------------


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


# ---- torch.cuda.MemPool() where aquifer is the allocator of the process -------------------------------------------------------


@of("pools")
def a_pool_counts_who_uses_it():
    for pool in [kind() for kind in KINDS]:
        assert pool.use_count() == 1
        with torch.cuda.use_mem_pool(pool):
            assert pool.use_count() == 2
        assert pool.use_count() == 1


@of("pools")
def pools_of_all_kinds_are_used_within_each_other_and_all_memory_comes_back():
    rest()
    before = torch.cuda.memory_allocated(), beside()
    for kinds in itertools.product(KINDS, repeat=3):
        pools, made = [kind() for kind in kinds], []

        def take():
            made.append((len(made), torch.full((5 * MIB,), float(len(made)), device="cuda")))

        with torch.cuda.use_mem_pool(pools[0]):
            take()
            with torch.cuda.use_mem_pool(pools[1]):
                take()
                with torch.cuda.use_mem_pool(pools[2]):
                    take()
                take()
            take()
        assert all((x == value).all().item() for value, x in made)
        # The innermost serves, until it ends.
        served = [[made[n][1].data_ptr() for n in which] for which in ((0, 4), (1, 3), (2,))]
        assert [sorted(addresses(pool)) for pool in pools] == [sorted(at) for at in served]
        made.clear()
        pools.clear()
        gc.collect()
        rest()
        assert (torch.cuda.memory_allocated(), beside()) == before, kinds


def serves_in_emergencies(kind):
    gc.collect()
    rest()
    limit, used = aquifer_torch.limit(0)
    other, spare = kind(), kind(use_on_oom=True)
    aquifer_torch.set_limit(used + 84 * MIB, 0)
    try:
        held = []
        for pool in (other, spare):
            with torch.cuda.use_mem_pool(pool):
                held.append(torch.empty(40 * MIB, dtype=torch.uint8, device="cuda"))
        address = held[1].data_ptr()
        with raises(torch.OutOfMemoryError, "" if kind is torch.cuda.MemPool else "MemPools with an allocator of their own hold 80.00 MiB"):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        held.clear()
        first = torch.full((30 * MIB,), 3, dtype=torch.uint8, device="cuda")
        assert first.data_ptr() == address
        with raises(torch.OutOfMemoryError):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        # A request of a pool's own work finds its own pool alone.
        with torch.cuda.use_mem_pool(kind()), raises(torch.OutOfMemoryError):
            torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        assert (first.cpu() == 3).all().item()
        del first
        with torch.cuda.use_mem_pool(spare):
            again = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        assert again.data_ptr() == address
        del again, spare, pool
        gc.collect()
        torch.cuda.synchronize()
        assert not torch.zeros(40 * MIB, dtype=torch.uint8, device="cuda").cpu().any(), "the pool is gone"
    finally:
        aquifer_torch.set_limit(limit, 0)


@of("pools")
def free_memory_of_a_pool_for_emergencies_serves_when_there_is_no_other_and_goes_back_to_it():
    for kind in KINDS:
        serves_in_emergencies(kind)


@of("pools")
def pools_may_be_emptied_by_several_threads_that_use_them_beside_one_without_a_pool():
    failed, own = [], [own_pool(), own_pool()]

    def work(value, pool):
        try:
            with torch.cuda.use_mem_pool(pool) if pool else contextlib.nullcontext():
                for _ in range(20):
                    x = torch.full((1000 * value,), float(value), device="cuda")
                    assert [x.data_ptr() in addresses(each) for each in own] == [each is pool for each in own]
                    # With temporaries.
                    assert ((-x).sort().values + x).abs().sum().item() == 0
                    del x
                    torch.cuda.empty_cache()
        except BaseException as error:
            failed.append(error)

    pools = [torch.cuda.MemPool(), torch.cuda.MemPool(), *own, None]
    together([threading.Thread(target=work, args=each) for each in enumerate(pools, 1)])
    assert not failed, failed


@of("pools")
def a_pools_own_allocator_is_called_once_a_segment_and_gets_each_back_after_the_last_tensor():
    rest()
    (given, returned), before = counted()[1](), beside()
    pool = own_pool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.full((3 * MIB,), 1.0, device="cuda")
        y = torch.full((100,), 2.0, device="cuda")
        at = x.data_ptr()
        del x
        x = torch.full((3 * MIB,), 3.0, device="cuda")
    assert x.data_ptr() == at and counted()[1]() == [given + 2, returned]
    assert beside() == (before[0] + 14 * MIB, before[1] + 14 * MIB)
    assert sorted(addresses(pool)) == sorted((at, y.data_ptr()))
    del pool
    gc.collect()
    assert (x == 3).all().item() and (y == 2).all().item() and counted()[1]() == [given + 2, returned]
    del x, y
    rest()
    assert counted()[1]() == [given + 2, returned + 2] and beside() == before


@of("pools")
def a_block_of_an_own_allocators_pool_is_not_reused_before_a_recorded_stream_is_done():
    pool, side = own_pool(), torch.cuda.Stream()
    with torch.cuda.use_mem_pool(pool):
        x = torch.zeros(MIB, device="cuda")
    at = x.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)
        copy = x + 1
    x.record_stream(side)
    del x
    with torch.cuda.use_mem_pool(pool):
        y = torch.full((MIB,), 7.0, device="cuda")
    assert y.data_ptr() != at and not side.query()
    side.synchronize()
    assert (copy == 1).all().item()
    del y
    rest()
    with torch.cuda.use_mem_pool(pool):
        assert torch.empty(MIB, device="cuda").data_ptr() == at


@of("pools")
def snapshots_history_and_statistics_have_the_memory_of_an_own_allocators_pool():
    rest()
    torch.cuda.memory._record_memory_history(max_entries=1000)
    torch.cuda.reset_peak_memory_stats()
    before, pool = torch.cuda.memory_stats(), own_pool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    y, at = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda"), x.data_ptr()
    after, state = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
    for name, grown in (("allocated_bytes", 10 * MIB), ("allocation", 2), ("segment", 1)):
        assert after[f"{name}.all.current"] - before[f"{name}.all.current"] == grown, name
    assert after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"] >= 10 * MIB
    blocks = {block["address"]: (segment["is_expandable"], block) for segment in state["segments"] for block in segment["blocks"]}
    assert (blocks[at][0], blocks[y.data_ptr()][0]) == (False, True)
    assert any(frame["filename"].endswith("pools.py") for frame in blocks[at][1]["frames"])
    del x
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    assert [e["action"] for e in trace if e.get("addr") == at] == ["segment_alloc", "alloc", "free_requested", "free_completed"]
    times = [e["time_us"] for e in trace]
    assert times == sorted(times)


@of("pools")
def graphs_are_captured_into_an_own_allocators_pool_and_beside_it():
    (given, returned), pool, side = counted()[1](), own_pool(), torch.cuda.Stream()
    x, graphs = torch.ones(MIB, device="cuda"), [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    torch.cuda.synchronize()
    with torch.cuda.graph(graphs[0], pool=pool.id):
        out = x * 2 + 1
    assert counted()[1]()[0] > given and out.data_ptr() in addresses(pool)
    # A block of it that is freed while another stream of a capture uses it.
    with torch.cuda.graph(graphs[1]):
        with torch.cuda.use_mem_pool(pool):
            part = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            product = part * 2
        part.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        del part
    rest()
    for value in (4, 5):
        x.fill_(value)
        for graph in graphs:
            graph.replay()
        assert (out == 2 * value + 1).all().item() and (product == 2 * value + 2).all().item()
    del out, product, graph, graphs, pool
    gc.collect()
    rest()
    given, returned = (now - then for now, then in zip(counted()[1](), (given, returned)))
    assert given == returned > 0


@of("pools")
def a_pool_with_its_own_allocator_serves_its_device_alone():
    if torch.cuda.device_count() < 2:
        return print("    skipped: one device")
    pool = own_pool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(MIB, device="cuda:1")
    assert addresses(pool) == [] and x.sum().item() == MIB


@of("pools")
def a_thread_may_allocate_for_a_graphs_pool_beside_one_that_does_not():
    pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool):
        out = x + 1
    device, failed = torch.cuda.current_device(), []

    def work(within):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                if within:
                    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
                try:
                    for _ in range(10):
                        a, b = (torch.ones(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2))
                        assert (a + b == 2).all().item()
                        del a, b
                finally:
                    if within:
                        torch._C._cuda_endAllocateToPool(device, pool)
                        torch._C._cuda_releasePool(device, pool)
        except BaseException as error:
            failed.append(error)

    together([threading.Thread(target=work, args=(within,)) for within in (True, False)])
    assert not failed, failed
    graph.replay()
    assert (out == 2).all().item()
