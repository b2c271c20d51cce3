"""Pinned memory of PyTorch in aquifer's pool."""

import gc
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

import aquifer_torch
import torch
from groups import MIB, of, raises

# Spins for about 50 ms, so that copies behind it are still queued when the host goes on.
SPIN = 100_000_000


def requested():
    return aquifer_torch.pinned_statistics(0)["requested"]


def drained():
    """Requested bytes when nothing is pending any more."""
    gc.collect()
    torch.cuda.synchronize()
    return requested()


@of("pinned")
def installing_before_cuda_is_used_leaves_cuda_unused_by_pytorch():
    aquifer_torch.install_pinned(pinned_limit=8192 * MIB, limit=4096 * MIB)
    assert not torch.cuda.is_initialized()


@of("pinned")
def pinned_tensors_are_in_aquifers_memory_and_return_to_it():
    before = drained()
    x = torch.arange(3 * MIB, dtype=torch.int64).pin_memory()
    assert x.is_pinned() and requested() == before + 24 * MIB
    y = torch.empty(1000, pin_memory=True)
    assert y.is_pinned() and requested() == before + 24 * MIB + 4000
    assert int(x[-1]) == 3 * MIB - 1
    del x, y
    assert drained() == before


@of("pinned")
def empty_pinned_tensors_take_nothing():
    before = drained()
    x = torch.empty(0, pin_memory=True)
    assert x.numel() == 0 and requested() == before


@of("pinned")
def a_block_is_as_large_as_its_request_and_not_a_power_of_two():
    before = aquifer_torch.pinned_limit()[1]
    held = [torch.empty(64 * MIB + 1, dtype=torch.uint8, pin_memory=True) for _ in range(9)]
    grown = aquifer_torch.pinned_limit()[1] - before
    assert grown <= 1.03 * 9 * 64 * MIB + 32 * MIB, grown / MIB
    assert all(x.is_pinned() for x in held)


@of("pinned")
def memory_is_not_reused_before_a_queued_copy_from_it_has_ended():
    side = torch.cuda.Stream()
    for round in range(20):
        target = torch.zeros(MIB, device="cuda", dtype=torch.int32)
        torch.cuda.synchronize()
        source = torch.full((MIB,), round + 1, dtype=torch.int32).pin_memory()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            target.copy_(source, non_blocking=True)
        del source
        others = [torch.full((MIB,), -1, dtype=torch.int32).pin_memory() for _ in range(4)]
        side.synchronize()
        assert bool((target == round + 1).all()), f"round {round}: {target[0].item()}"
        del others


@of("pinned")
def memory_is_not_reused_before_a_queued_copy_to_it_has_ended():
    source = torch.arange(MIB, device="cuda", dtype=torch.int32)
    torch.cuda.synchronize()
    for _ in range(20):
        torch.cuda._sleep(SPIN)
        source.to("cpu", non_blocking=True)  # dropped at once
        other = torch.full((MIB,), -1, dtype=torch.int32).pin_memory()
        torch.cuda.synchronize()
        assert bool((other == -1).all())


@of("pinned")
def copies_on_many_streams_and_threads_keep_their_bytes():
    faults = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(60):
                length = int(torch.randint(1, 300_000, (1,), generator=generator))
                value = seed * 1000 + turn
                host = torch.full((length,), value, dtype=torch.int32).pin_memory()
                device = host.to("cuda", non_blocking=True)
                del host
                back = torch.empty(length, dtype=torch.int32, pin_memory=True)
                back.copy_(device, non_blocking=True)
                stream.synchronize()
                if not bool((back == value).all()):
                    faults.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults


@of("pinned")
def a_data_loader_with_workers_yields_its_data_in_aquifers_memory():
    data = torch.utils.data.TensorDataset(torch.arange(4096).repeat(64, 1).T.contiguous())
    loader = torch.utils.data.DataLoader(data, batch_size=64, num_workers=8, pin_memory=True)
    before = drained()
    seen = 0
    for (batch,) in loader:
        assert batch.is_pinned() and requested() > before
        on_device = batch.to("cuda", non_blocking=True)
        assert int(on_device[0, 0]) == seen and bool((on_device[:, 0] == on_device[:, -1]).all())
        seen += len(batch)
    assert seen == 4096
    del batch, on_device, loader
    assert drained() == before, (before, requested())


class Failing(torch.utils.data.Dataset):
    """Batches of 4 MiB. The worker that is asked for `bad` ends without a word, or runs out of memory."""

    def __init__(self, bad, dies):
        self.bad, self.dies = bad, dies

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.bad:
            if self.dies:
                os._exit(9)
            torch.empty(1 << 50, dtype=torch.uint8)
        return torch.full((MIB,), float(index))


@of("pinned")
def a_loader_whose_worker_fails_raises_and_its_pinned_memory_comes_back():
    before = drained()
    for dies, words in ((False, "allocate"), (True, "exited unexpectedly")):
        loader = torch.utils.data.DataLoader(Failing(20, dies), batch_size=1, num_workers=8, pin_memory=True)
        with raises(RuntimeError, words):
            for batch in loader:
                batch.to("cuda", non_blocking=True)
        del loader, batch
        assert drained() == before, (dies, before, requested())


@of("pinned")
def a_loader_whose_batches_do_not_fit_raises_and_the_next_loader_works():
    before, (limit, used) = drained(), aquifer_torch.pinned_limit()
    torch._C._host_emptyCache()
    aquifer_torch.set_pinned_limit(aquifer_torch.pinned_limit()[1] + 2 * MIB)
    try:
        with raises(RuntimeError, "pinned memory"):
            for batch in torch.utils.data.DataLoader(Failing(-1, False), batch_size=1, num_workers=2, pin_memory=True):
                pass
    finally:
        aquifer_torch.set_pinned_limit(limit)
    count = 0
    for batch in torch.utils.data.DataLoader(Failing(-1, False), batch_size=1, num_workers=2, pin_memory=True):
        assert batch.is_pinned() and float(batch[0, 0]) == count
        count += 1
    del batch
    assert count == 64 and drained() == before, (before, requested())


@of("pinned")
def statistics_of_pytorch_count_requests_and_held_memory():
    gc.collect()
    stats = torch.cuda.host_memory_stats()
    before = stats["active_bytes.current"]
    x = torch.empty(5 * MIB + 3, dtype=torch.uint8, pin_memory=True)
    stats = torch.cuda.host_memory_stats()
    assert stats["active_bytes.current"] == before + 5 * MIB + 3
    assert stats["active_bytes.peak"] >= stats["active_bytes.current"]
    assert stats["allocated_bytes.current"] >= stats["active_bytes.current"]
    torch.cuda.reset_peak_host_memory_stats()
    assert torch.cuda.host_memory_stats()["active_bytes.peak"] == before + 5 * MIB + 3
    torch.cuda.reset_accumulated_host_memory_stats()
    del x
    stats = torch.cuda.host_memory_stats()
    assert stats["active_bytes.current"] == before and stats["active_bytes.freed"] == 5 * MIB + 3


@of("pinned")
def emptying_the_cache_returns_free_memory_to_the_kernel():
    torch.empty(512 * MIB, dtype=torch.uint8, pin_memory=True)
    assert drained() >= 0
    held = aquifer_torch.pinned_limit()[1]
    torch._C._host_emptyCache()
    assert aquifer_torch.pinned_limit()[1] <= held - 512 * MIB


@of("pinned")
def a_request_above_the_limit_is_pytorchs_error_and_the_next_one_fits():
    limit, used = aquifer_torch.pinned_limit()
    with raises(torch.OutOfMemoryError, "pinned memory"):
        torch.empty(limit + MIB, dtype=torch.uint8, pin_memory=True)
    assert torch.empty(MIB, dtype=torch.uint8, pin_memory=True).is_pinned()
    aquifer_torch.set_pinned_limit(used + 64 * MIB)
    try:
        with raises(torch.OutOfMemoryError, "pinned memory"):
            torch.empty(used + 512 * MIB, dtype=torch.uint8, pin_memory=True)
    finally:
        aquifer_torch.set_pinned_limit(limit)
    assert torch.empty(512 * MIB, dtype=torch.uint8, pin_memory=True).is_pinned()


@of("pinned")
def pinned_memory_of_a_captured_graph_stays_in_place_until_the_graph_is_gone():
    before = drained()
    target = torch.zeros(MIB, device="cuda", dtype=torch.int32)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = torch.empty(MIB, dtype=torch.int32, pin_memory=True)
        inside.fill_(7)
        target.copy_(inside, non_blocking=True)
    address = inside.data_ptr()
    del inside
    others = [torch.full((MIB,), -1, dtype=torch.int32).pin_memory() for _ in range(8)]
    assert all(other.data_ptr() != address for other in others)
    for _ in range(3):
        target.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert bool((target == 7).all())
    del graph, others
    gc.collect()
    torch.cuda.synchronize()
    torch.empty(1, pin_memory=True)  # polls what waited for the end of a capture
    assert drained() == before, (before, requested())


@of("pinned")
def a_freed_block_that_no_stream_has_used_serves_its_graphs_pool_again():
    before = drained()
    pool = torch.cuda.graph_pool_handle()
    graphs, addresses = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool, capture_error_mode="thread_local"):
            for _ in range(2):
                unused = torch.zeros(1000).pin_memory()
                addresses.append(unused.data_ptr())
                del unused
            other = torch.zeros(1001).pin_memory()
            assert other.data_ptr() != addresses[0]
            del other
    assert len(set(addresses)) == 1, addresses
    outside = torch.zeros(1000).pin_memory()
    assert outside.data_ptr() != addresses[0]
    del graphs, outside
    gc.collect()
    torch.cuda.synchronize()
    assert drained() == before, (before, requested())


@of("pinned")
def memory_that_a_capturing_stream_uses_is_not_reused_before_the_capture_ends():
    before = drained()
    target = torch.zeros(MIB, device="cuda", dtype=torch.int32)
    source = torch.full((MIB,), 3, dtype=torch.int32).pin_memory()
    address = source.data_ptr()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(source, non_blocking=True)
        del source
        during = torch.empty(MIB, dtype=torch.int32, pin_memory=True)
        assert during.data_ptr() != address
    del graph, during
    torch.empty(1, pin_memory=True)
    assert drained() == before, (before, requested())


@of("pinned")
def pinned_empty_allocates_next_to_the_device_it_names():
    x = aquifer_torch.pinned_empty((4, 5), dtype=torch.float64, device=0)
    assert x.shape == (4, 5) and x.dtype == torch.float64 and x.is_pinned()
    assert aquifer_torch.pinned_empty(7).is_pinned()


@of("pinned")
def a_forked_child_reads_its_parents_memory_and_ends():
    x = torch.full((MIB,), 5, dtype=torch.int32).pin_memory()
    child = os.fork()
    if child == 0:
        os._exit(0 if x[::1024].tolist() == [5] * 1024 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((x.to("cuda", non_blocking=True) == 5).all())


@of("pinned")
def after_uninstalling_live_blocks_are_valid_and_new_ones_are_pytorchs():
    before = drained()
    ours = torch.full((MIB,), 9, dtype=torch.int32).pin_memory()
    aquifer_torch.uninstall_pinned()
    theirs = torch.full((MIB,), 8, dtype=torch.int32).pin_memory()
    assert theirs.is_pinned() and requested() == before + 4 * MIB
    target = ours.to("cuda", non_blocking=True)
    also = theirs.to("cuda", non_blocking=True)
    del ours, theirs
    assert bool((target == 9).all()) and bool((also == 8).all())
    assert drained() == before
    aquifer_torch.install_pinned()
    again = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    assert requested() == before + MIB
    del again


@of("pinned_exit")
def an_interpreter_that_ends_with_pinned_memory_alive_ends_well():
    aquifer_torch.install_pinned(pinned_limit=1024 * MIB)
    global held
    held = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(SPIN)
    target.copy_(held, non_blocking=True)


@of("everything_exit")
def an_interpreter_that_ends_with_everything_alive_ends_well():
    global held
    aquifer_torch.install_pinned(pinned_limit=1024 * MIB)
    host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    side = torch.cuda.Stream()
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.MemPool()
    with torch.cuda.graph(graph):
        inside = torch.ones(MIB, device="cuda") * 2
    with torch.cuda.use_mem_pool(pool):
        apart = torch.empty(MIB, device="cuda")
    step = torch.compile(lambda x: (x @ x).relu(), mode="reduce-overhead")
    for _ in range(3):
        result = step(inside[: 1 << 16].view(256, 256).clone())
    torch.cuda.memory._record_memory_history()
    threads = [threading.Thread(target=lambda: torch.empty(MIB, device="cuda")) for _ in range(4)]
    [thread.start() for thread in threads]
    with torch.cuda.stream(side):
        target = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(SPIN)
        target.copy_(host, non_blocking=True)
        graph.replay()
    held = [host, side, graph, inside, pool, apart, step, result, target, threads]


# ---- an unchanged program ------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch
assert __name__ == "__main__" and sys.argv[1:] == ["--flag", "value"], sys.argv
import beside
x = torch.ones(1 << 20, device="cuda")
y = torch.ones(1 << 20).pin_memory().to("cuda", non_blocking=True)
import aquifer_torch
assert torch.cuda.get_allocator_backend() == "pluggable"
assert aquifer_torch.statistics(0)["aquifer.live"] >= 8 << 20
assert aquifer_torch.pinned_statistics(0)["allocations"] >= 1
print("done", float((x + y).sum()))
"""


@of("launcher")
def an_unchanged_program_runs_on_it_as_a_file_and_as_a_module():
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "program.py"
        program.write_text(PROGRAM)
        (program.parent / "beside.py").write_text("")
        package = pathlib.Path(aquifer_torch.__file__).resolve().parent.parent
        environment = os.environ | {"PYTHONPATH": str(package)}
        start = [sys.executable, "-m", "aquifer_torch", "--limit", "0.5"]
        for rest, place in (([str(program)], None), (["-m", "program"], folder)):
            command = [*start, *rest, "--flag", "value"]
            ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=place, timeout=200)
            assert ran.returncode == 0 and f"done {2 * (1 << 20)}.0" in ran.stdout, ran.stdout + ran.stderr


STARTS = """
import subprocess, sys, torch.multiprocessing as mp
def work(rank, flags):
    import sys, runpy
    sys.argv = ["program", *flags]
    runpy.run_module("program", run_name="__main__")
if __name__ == "__main__":
    import torch
    mp.spawn(work, args=(sys.argv[1:],), nprocs=2)
    subprocess.run([sys.executable, "-m", "program", *sys.argv[1:]], check=True)
    assert not torch.cuda.is_initialized()
    print("started")
"""


@of("launcher")
def the_processes_that_an_unchanged_program_starts_run_on_it_too():
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("program", PROGRAM), ("beside", ""), ("starts", STARTS)):
            pathlib.Path(folder, f"{name}.py").write_text(text)
        package = pathlib.Path(aquifer_torch.__file__).resolve().parent.parent
        environment = os.environ | {"PYTHONPATH": str(package)}
        command = [sys.executable, "-m", "aquifer_torch", "--limit", "0.2", "-m", "starts", "--flag", "value"]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=200)
        assert ran.returncode == 0 and ran.stdout.count("done") == 3 and "started" in ran.stdout, ran.stdout + ran.stderr
