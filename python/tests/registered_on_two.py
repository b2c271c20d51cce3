"""Collectives over registered memory, beside memory that is not registered: one table, with one rank or more.

    AQUIFER_LIB=... NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 python/tests/registered_on_two.py [installed]
"""

import os
import pathlib
import sys
import time

PYTHON = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PYTHON), str(PYTHON / "examples")]
from skip import skip  # noqa: E402

if "LOCAL_RANK" not in os.environ:
    skip("not started by torchrun")
# NVLink multicast stays off.
os.environ["NCCL_NVLS_ENABLE"] = "0"
try:
    import torch
except ImportError:
    skip("no PyTorch")
import torch.distributed as dist  # noqa: E402

import aquifer_torch  # noqa: E402

MIB = 1 << 20
if not torch.cuda.is_available():
    skip("PyTorch sees no CUDA device")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
if "installed" in sys.argv[1:]:
    aquifer_torch.install()
dist.init_process_group("nccl", device_id=device)
rank, ranks = dist.get_rank(), dist.get_world_size()
pool = aquifer_torch.registered_pool(64 * MIB, register=aquifer_torch.nccl())


def rate(collective, size):
    """The best rate of a collective in GB/s of `size` bytes, of five."""
    best = 0.0
    for _ in range(6):
        torch.cuda.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(5):
            collective()
        torch.cuda.synchronize()
        best = max(best, 5 * size / (time.perf_counter() - begun) / 1e9)
    return best


def buffers(size):
    """A part of this rank, and room for those of all: the sum of their bytes is `size`."""
    whole = torch.full((size // 4 // ranks * ranks,), float(rank), device=device)
    return whole, torch.full((len(whole) // ranks,), float(rank), device=device)


# All ranks grow at once, with collectives under way.
held = []
for step in range(1, 9):
    with pool:
        held.append(torch.full((step * 24 * MIB // 4,), float(rank), device=device))
    dist.all_reduce(held[-1])
assert all(bool((part == sum(range(ranks))).all()) for part in held)
count = len(pool.chunks)
print(f"rank {rank} of {ranks}: grew to {count} chunks under way, sums are right", flush=True)
del held

if rank == 0:
    print("| MiB | all-reduce registered, not: GB/s | all-gather registered, not: GB/s |\n|---|---|---|")
for mib in (1, 4, 16, 64, 256, 1024):
    with pool:
        registered = buffers(mib * MIB)
    rates = []
    for of in (registered, buffers(mib * MIB)):
        whole, part = of
        rates.append(rate(lambda: dist.all_reduce(whole), mib * MIB))
        rates.append(rate(lambda: dist.all_gather_into_tensor(whole, part), mib * MIB))
        expected = torch.arange(ranks, device=device, dtype=torch.float32).repeat_interleave(len(part))
        assert bool((whole == expected).all()), f"rank {rank}: {mib} MiB are not right"
    if rank == 0:
        print(f"| {mib} | {rates[0]:.1f}, {rates[2]:.1f} | {rates[1]:.1f}, {rates[3]:.1f} |", flush=True)
    del of, registered, whole, part
torch.cuda.synchronize()
del pool.pool
torch.cuda.empty_cache()
assert not pool.chunks, pool.chunks
dist.destroy_process_group()
