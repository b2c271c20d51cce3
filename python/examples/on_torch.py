"""aquifer as PyTorch's allocator: for the process, or with --pool for a part of it above PyTorch's own.

AQUIFER_LIB=libaquifer_ffi.so python python/examples/on_torch.py [--pool]
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from skip import skip
try:
    import torch
except ImportError:
    skip("no PyTorch")
import aquifer_torch

if not torch.cuda.is_available():
    skip("PyTorch sees no CUDA device")


def train():
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(20):
        x = torch.randn(64 + 16 * step, 1024, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


if "--pool" in sys.argv:
    pool = aquifer_torch.mem_pool(limit=1 << 30)
    with torch.cuda.use_mem_pool(pool):
        loss = train()
else:
    aquifer_torch.install(limit=0.5)
    loss = train()
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print("a TiB is refused, as PyTorch's own error:\n" + "\n".join(f"    {line}" for line in str(error).splitlines()[:6]))
found = aquifer_torch.statistics()
print(f"loss {loss:.6f}; {found['allocation.all.allocated']} allocations, at most {found['reserved_bytes.all.peak']} bytes held")
