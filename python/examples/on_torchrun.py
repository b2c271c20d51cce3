"""Sums over all ranks in aquifer's memory, each rank on a GPU of its own, and compares the sums to the bit.

AQUIFER_LIB=libaquifer_ffi.so torchrun --nproc-per-node 2 python/examples/on_torchrun.py
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from skip import skip

if "LOCAL_RANK" not in os.environ:
    skip("not started by torchrun")
# A rank sees its own device only. PyTorch reads the variable when it first uses CUDA.
visible = os.environ.get("CUDA_VISIBLE_DEVICES")
devices = visible.split(",") if visible else [str(n) for n in range(int(os.environ["LOCAL_WORLD_SIZE"]))]
os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(os.environ["LOCAL_RANK"])]
try:
    import torch
except ImportError:
    skip("no PyTorch")
import torch.distributed as dist

import aquifer_torch

if not torch.cuda.is_available():
    skip("PyTorch sees no CUDA device")
aquifer_torch.install(limit=0.5)
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
rank, ranks = dist.get_rank(), dist.get_world_size()
for step in range(1, 101):
    # Lengths change, so memory of one step serves the next one, across NCCL's own stream.
    part = torch.full((step << 16,), float(rank + step), device="cuda")
    dist.all_reduce(part)
    expected = float(sum(other + step for other in range(ranks)))
    assert bool((part == expected).all()), f"rank {rank}, step {step}: {part[0].item()} instead of {expected}"
found = aquifer_torch.statistics()
print(f"rank {rank} of {ranks}: 100 sums are right; at most {found['reserved_bytes.all.peak']} bytes held", flush=True)
dist.destroy_process_group()
