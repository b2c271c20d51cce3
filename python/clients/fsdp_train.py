"""Trains a model that is sharded over several devices (FSDP2): layers are gathered on a second stream, one ahead of their use.

    python -m torch.distributed.run --standalone --nproc-per-node 2 python/clients/fsdp_train.py
"""

from common import Run, start

arguments, torch = start("fsdp_train")
import torch.distributed as dist  # noqa: E402  (CUDA's allocator is chosen above)
from trained import Model, loader  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
rank, ranks = dist.get_rank(), dist.get_world_size()
model = Model().cuda()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
run, steps = Run(arguments, torch), arguments.steps or 60
batches = iter(loader(steps, 4, rank, ranks))


def step():
    x, y = (part.cuda(non_blocking=True) for part in next(batches))
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses = [torch.empty_like(loss) for _ in range(ranks)]
    dist.all_gather(losses, loss.detach())
    return torch.stack(losses)


for _ in range(steps):
    run.step(step)
if rank == 0:
    run.report()
dist.destroy_process_group()
