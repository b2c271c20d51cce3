"""A data loader of PyTorch whose workers write batches straight into pinned memory, from which they are copied to the device
while the next ones are made. Without a GPU the device is simulated, and without PyTorch a plain loop stands for the loader.

AQUIFER_LIB=libaquifer_ffi.so python python/examples/on_loader.py
"""

import array
import ctypes
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
try:
    import torch
except ImportError:
    torch = None
import aquifer_torch
from aquifer_torch.host import PinnedBlock

BATCHES, ROWS, WIDTH = 24, 64, 1024
SIZE = 4 * ROWS * WIDTH  # bytes of a batch of float32
WORKERS, AHEAD = 2, 2  # each worker makes two batches ahead
# Those that the workers may be writing, the one of the batch at hand, and the one that is being copied.
SLOTS = WORKERS * AHEAD + 2


class Batches:
    """What a loader calls in its workers: one item is a whole batch, made in its slot. Only the slot's number is sent back."""

    def __init__(self, slots):
        self.slots = slots

    def __getitem__(self, item):
        slot, batch = item
        for row in range(ROWS):
            # Your decoding and augmentation. torch.frombuffer(slot, dtype=torch.float32) is a tensor over the same bytes.
            self.slots[slot][row * WIDTH : (row + 1) * WIDTH] = array.array("f", [batch + row]) * WIDTH
        return slot, os.getpid()


library = aquifer_torch.setup(driver="cuda-or-sim", sim_memory=64 << 20)
runtime = library.runtime()
# Made before the workers are forked: parent and workers have the same pinned pages, and nothing else is passed between them.
blocks = [PinnedBlock(SIZE) for _ in range(SLOTS)]
slots = [memoryview((ctypes.c_ubyte * SIZE).from_address(block.address)).cast("B").cast("f") for block in blocks]

batches, order = Batches(slots), [(batch % SLOTS, batch) for batch in range(BATCHES)]
if torch is None:
    loader = map(batches.__getitem__, order)
else:
    # `batch_size=None`: the loader neither collates nor copies what an item returns.
    loader = torch.utils.data.DataLoader(
        batches, batch_size=None, sampler=order, num_workers=WORKERS, prefetch_factor=AHEAD, multiprocessing_context="fork"
    )

on_device = ctypes.c_uint64()
library.aq_alloc(runtime, 0, BATCHES * SIZE, None, on_device)
pending, makers = None, set()


def finish(ticket):
    if ticket is not None:
        library.aq_ticket_wait(ticket)
        library.aq_ticket_free(ticket)


for at, (slot, maker) in enumerate(loader):
    ticket = ctypes.c_uint64()
    # This accepts any host memory, so it passes through slots of its own. With a CUDA tensor x.copy_(torch.frombuffer(...),
    # non_blocking=True) reads this slot itself, which is free after an event behind the copy.
    library.aq_upload_begin(runtime, 0, on_device, at * SIZE, blocks[slot].address, SIZE, None, ticket)
    # The copy of the batch before ends here, so its slot is free when the loader is asked again.
    finish(pending)
    pending = ticket
    makers.add(maker)
finish(pending)

back = (ctypes.c_float * (BATCHES * ROWS * WIDTH))()
library.aq_download(runtime, 0, on_device, 0, back, BATCHES * SIZE, None)
library.aq_free(runtime, 0, on_device)
for batch in range(BATCHES):
    for row in range(ROWS):
        start = (batch * ROWS + row) * WIDTH
        assert back[start] == back[start + WIDTH - 1] == batch + row, (batch, row)
how = "a plain loop, without PyTorch" if torch is None else f"{len(makers)} workers of PyTorch {torch.__version__}"
where = "a simulated device" if library.facts(0).simulated else "the GPU"
print(f"{BATCHES} batches of {SIZE >> 10} KiB by {how}, through {SLOTS} pinned slots to {where}: all are right")
