"""torch.cuda.MemPool: over aquifer beneath PyTorch's own allocator, and under aquifer as the allocator of the process."""

import gc
import threading

import aquifer_torch
import torch
from groups import MIB, live, of, raises, rest, together


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


@of("mem_pool")
def a_mem_pool_counts_who_uses_it():
    pool = aquifer_torch.mem_pool()
    assert pool.use_count() == 1
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(MIB, device="cuda")
        assert pool.use_count() == 2
    assert pool.use_count() == 1 and x.sum().item() == MIB


@of("mem_pool")
def tensors_outlive_their_pool_and_go_back_at_empty_cache():
    rest()
    before = live()

    def made():
        pool = aquifer_torch.mem_pool()
        with torch.cuda.use_mem_pool(pool):
            return torch.arange(2 * MIB, device="cuda")

    x = made()
    gc.collect()
    assert live() > before and x[-1].item() == 2 * MIB - 1
    del x
    rest()
    assert live() == before, (before, live())


@of("mem_pool")
def a_pool_for_emergencies_is_drawn_from_when_memory_is_out_and_another_is_not():
    gc.collect()
    rest()
    fraction = torch.cuda.get_per_process_memory_fraction()
    total = torch.cuda.get_device_properties(0).total_memory
    other, spare = aquifer_torch.mem_pool(), aquifer_torch.mem_pool(use_on_oom=True)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 81 * MIB) / total)
    try:
        held = []
        for pool in (other, spare):
            with torch.cuda.use_mem_pool(pool):
                held.append(torch.empty(40 * MIB, dtype=torch.uint8, device="cuda"))
        address = held[1].data_ptr()
        with raises(torch.OutOfMemoryError):
            torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        held.clear()
        first = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        assert first.data_ptr() == address
        with raises(torch.OutOfMemoryError):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        del first
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction)


# ---- torch.cuda.MemPool() where aquifer is the allocator of the process -------------------------------------------------------


@of("pools")
def pools_of_several_threads_have_numbers_of_their_own():
    numbers, pools = [], []

    def make():
        pools.append(torch.cuda.MemPool())
        numbers.append(pools[-1].id)

    together([threading.Thread(target=make) for _ in range(4)])
    assert len(set(numbers)) == 4
    first, second = torch.cuda.graph_pool_handle(), torch.cuda.MemPool()
    assert (first[0] == 0) == (second.id[0] == 0) and second.id[1] > first[1]


@of("pools")
def a_pool_counts_who_uses_it():
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1
    with torch.cuda.use_mem_pool(pool):
        assert pool.use_count() == 2
    assert pool.use_count() == 1


@of("pools")
def pools_are_used_within_each_other_and_all_memory_comes_back():
    torch.cuda.synchronize()
    before = live()
    pools, made = [torch.cuda.MemPool() for _ in range(3)], []

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
    assert [sum(len(segment["blocks"]) for segment in pool.snapshot()) for pool in pools] == [2, 2, 1]
    made.clear()
    pools.clear()
    gc.collect()
    assert live() == before, (before, live())


@of("pools")
def free_memory_of_a_pool_for_emergencies_serves_when_there_is_no_other_and_goes_back_to_it():
    gc.collect()
    rest()
    limit, _ = aquifer_torch.limit(0)
    other, spare = torch.cuda.MemPool(), torch.cuda.MemPool(use_on_oom=True)
    aquifer_torch.set_limit(aquifer_torch.statistics(0)["aquifer.physical"] + 84 * MIB, 0)
    try:
        held = []
        for pool in (other, spare):
            with torch.cuda.use_mem_pool(pool):
                held.append(torch.empty(40 * MIB, dtype=torch.uint8, device="cuda"))
        address = held[1].data_ptr()
        with raises(torch.OutOfMemoryError):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        held.clear()
        first = torch.full((30 * MIB,), 3, dtype=torch.uint8, device="cuda")
        assert first.data_ptr() == address
        with raises(torch.OutOfMemoryError):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        # A request of a pool's own work finds its own pool alone.
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()), raises(torch.OutOfMemoryError):
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
def pools_may_be_emptied_by_several_threads_that_use_them():
    failed = []

    def work(pool, value):
        try:
            with torch.cuda.use_mem_pool(pool):
                for _ in range(20):
                    x = torch.full((1000 * value,), float(value), device="cuda")
                    assert x.sum().item() == 1000 * value * value
                    del x
                    torch.cuda.empty_cache()
        except BaseException as error:
            failed.append(error)

    together([threading.Thread(target=work, args=(torch.cuda.MemPool(), n + 1)) for n in range(4)])
    assert not failed, failed


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
