"""Trains in CUDA graph trees (`reduce-overhead`) from a data loader with eight workers, whose batches arrive by pinned memory."""

from common import Run, start

arguments, torch = start("loader_train")
from trained import Model, loader  # noqa: E402  (CUDA's allocator is chosen above)

model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
compiled = torch.compile(model, mode="reduce-overhead")
run, steps = Run(arguments, torch), arguments.steps or 60
batches = iter(loader(steps, workers=8))


def step():
    x, y = (part.cuda(non_blocking=True) for part in next(batches))
    loss = torch.nn.functional.mse_loss(compiled(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for _ in range(steps):
    run.step(step)
run.report()
