"""What must hold of aquifer_torch.registered_pool() on a GPU, below PyTorch's own allocator and under install().

    AQUIFER_LIB=... python python/tests/registered_on_gpu.py [native|installed|nixl]

Needs PyTorch and a GPU, and NIXL for its part. Prints `skipped: ...` where one is missing.
"""

import ctypes
import gc
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

PYTHON = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PYTHON), str(PYTHON / "examples")]
import aquifer_torch  # noqa: E402
from aquifer_torch.registered import Functions  # noqa: E402
from registered_on_sim import REGISTER, UNREGISTER  # noqa: E402
from skip import skip  # noqa: E402

MIB = 1 << 20
# Bytes of a transfer over NIXL whose rate is measured: of fewer, the start takes most of the time.
TRANSFER = 512 * MIB


def rest():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def ended(pool, what):
    """Waits until the pool has no chunk: Python's registrations end between two instructions."""
    until = time.monotonic() + 10
    while pool.chunks and time.monotonic() < until:
        rest()
        time.sleep(0.001)
    assert not pool.chunks, (what, pool.chunks)


def is_inside(pool, tensor):
    begin, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    return any(at <= begin and begin + size <= at + whole for at, whole in pool.chunks)


def nccl_registers_each_chunk_once_and_unregisters_it():
    real, calls = aquifer_torch.nccl(), []
    register, unregister = REGISTER(real.register), UNREGISTER(real.unregister)
    counted = (
        REGISTER(lambda context, memory, size, handle: calls.append((memory, size)) or register(context, memory, size, handle)),
        UNREGISTER(lambda context, handle: calls.append(handle) or unregister(context, handle)),
    )
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in counted]
    for functions in (Functions(*addresses, real.context, real.exported), real):
        rest()
        before, logged = torch.cuda.mem_get_info()[0], len(registered_by_log())
        pool = aquifer_torch.registered_pool(128 * MIB, register=functions)
        tensors = []
        for sizes in ((32, 64, 200, 1), (8,)):
            with pool:
                tensors += [torch.full((size * MIB // 4,), 2.0, device="cuda") for size in sizes]
        chunks = pool.chunks
        assert len(chunks) == 2 and all(is_inside(pool, tensor) for tensor in tensors), chunks
        for tensor in tensors:
            dist.all_reduce(tensor)
            assert bool((tensor == 2).all())
        assert functions is real or sorted(calls) == chunks, (calls, chunks)
        assert sorted(registered_by_log()[logged:]) == chunks, registered_by_log()
        del tensor, tensors, pool.pool
        ended(pool, "NCCL's")
        assert functions is real or len(calls) == 2 * len(chunks), calls
        assert torch.cuda.mem_get_info()[0] >= before - 100 * MIB, (before, torch.cuda.mem_get_info())


def registered_by_log():
    """The addresses and bytes in NCCL's log."""
    text = pathlib.Path(os.environ["NCCL_DEBUG_FILE"]).read_text()
    return [(int(at, 16), int(size)) for at, size in re.findall(r"register comm \S+ buffer (\S+) size (\d+)", text)]


def tensors_of_threads_are_right_and_python_registers_and_unregisters():
    registered, wrong = {}, []
    pool = aquifer_torch.registered_pool(64 * MIB, lambda address, size: registered.setdefault(address, size) and address, registered.pop)

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(50):
                with pool:
                    tensor = torch.full(((turn % 7 + 1) * MIB,), number, device="cuda")
                if not bool((tensor == number).all()) or not is_inside(pool, tensor):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    pool.register()
    assert not wrong and sorted(registered.items()) == sorted(pool.chunks), (wrong, registered, pool.chunks)
    del pool.pool
    ended(pool, "Python's")
    assert not registered, registered


def a_graph_reduces_in_registered_memory():
    pool = aquifer_torch.registered_pool(64 * MIB, register=aquifer_torch.nccl())
    start = torch.ones(4 * MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.pool.id):
        doubled = start * 2
        dist.all_reduce(doubled)
    for value in (1.0, 5.0):
        start.fill_(value)
        graph.replay()
        assert bool((doubled == 2 * value).all()) and is_inside(pool, doubled)
    torch.cuda.synchronize()
    del doubled, graph, pool.pool
    ended(pool, "a graph's")


def one(mode):
    if mode == "installed":
        aquifer_torch.install()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29561")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda:0"))
    # NCCL takes memory of its own at first.
    dist.all_reduce(torch.ones(64 * MIB, device="cuda"))
    failed = 0
    tests = (nccl_registers_each_chunk_once_and_unregisters_it, tensors_of_threads_are_right_and_python_registers_and_unregisters, a_graph_reduces_in_registered_memory)
    for test in tests:
        try:
            test()
            print(f"  {mode}: {test.__name__}: ok", flush=True)
        except Exception as error:
            failed += 1
            print(f"  {mode}: {test.__name__}: NOT SO: {error!r}", flush=True)
    dist.destroy_process_group()
    return failed


def serve(connection):
    """The other process: a tensor of a registered pool and one of cudaMalloc, to be written to."""
    import nixl_on_gpu
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("server", nixl_agent_config(backends=["UCX"]))
    pool = aquifer_torch.registered_pool(2 * TRANSFER, register=agent)
    with pool:
        ours = torch.zeros(TRANSFER, dtype=torch.uint8, device="cuda")
    plain = torch.zeros_like(ours)
    agent.register_memory([plain])
    torch.cuda.synchronize()
    connection.send((agent.get_agent_metadata(), *map(nixl_on_gpu.location, (ours, plain))))
    connection.recv()
    expected = nixl_on_gpu.content(torch, 2, TRANSFER)
    connection.send(all(torch.equal(found, expected) for found in (ours, plain)))


def nixl():
    """Writes between two processes run as fast as to memory of cudaMalloc."""
    try:
        import nixl_on_gpu
        from nixl_cu13._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        print(f"  nixl: skipped: {error}")
        return 0
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    agent = nixl_agent("client", nixl_agent_config(backends=["UCX"]))
    pool = aquifer_torch.registered_pool(2 * TRANSFER, register=agent)
    with pool:
        source = nixl_on_gpu.content(torch, 2, TRANSFER).clone()
    torch.cuda.synchronize()
    assert here.poll(60), "the other process has no agent"
    metadata, *targets = here.recv()
    peer = agent.add_remote_agent(metadata)
    # In turns, so that both see the same device.
    rates = [[nixl_on_gpu.rate(agent, "WRITE", source, target, peer) for target in targets] for _ in range(16)]
    ours, plain = map(max, zip(*rates))
    here.send("done")
    right = here.poll(60) and here.recv() and ours > 0.8 * plain
    print(f"  nixl: writes at {ours:.0f} GB/s to a registered pool, {plain:.0f} to cudaMalloc: {'ok' if right else 'NOT SO'}")
    return 0 if right else 1


try:
    import torch
    import torch.distributed as dist
except ImportError:
    if __name__ == "__main__":
        skip("no PyTorch")

if __name__ == "__main__":
    if not torch.cuda.is_available():
        skip("PyTorch sees no CUDA device")
    if sys.argv[1:2] == ["--one"]:
        sys.exit(nixl() if sys.argv[2] == "nixl" else one(sys.argv[2]))
    codes = []
    for mode in sys.argv[1:] or ("native", "installed", "nixl"):
        with tempfile.TemporaryDirectory() as at:
            told = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "REG", "NCCL_DEBUG_FILE": f"{at}/nccl.log", "NCCL_NVLS_ENABLE": "0"}
            codes.append(subprocess.run([sys.executable, __file__, "--one", mode], env=os.environ | told, timeout=240).returncode)
    print("NOT SO" if any(codes) else "all of it holds")
    sys.exit(1 if any(codes) else 0)
