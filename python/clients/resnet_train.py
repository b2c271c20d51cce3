"""Trains a ResNet-50 under autocast: image sizes that vary, batches copied by a side stream while the last step runs."""

import random

from common import Run, start

arguments, torch = start("resnet_train")
F, nn = torch.nn.functional, torch.nn

BATCH, LARGEST, CLASSES = 40, 256, 1000


class Block(nn.Module):
    def __init__(self, wide, narrow, stride):
        super().__init__()
        out = 4 * narrow

        def conv(a, b, size, stride=1):
            return nn.Sequential(nn.Conv2d(a, b, size, stride, size // 2, bias=False), nn.BatchNorm2d(b))

        self.way = nn.Sequential(
            conv(wide, narrow, 1), nn.ReLU(inplace=True),
            conv(narrow, narrow, 3, stride), nn.ReLU(inplace=True),
            conv(narrow, out, 1),
        )  # fmt: skip
        self.past = conv(wide, out, 1, stride) if stride > 1 or wide != out else nn.Identity()

    def forward(self, x):
        return F.relu(self.way(x) + self.past(x), inplace=True)


class ResNet50(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        blocks, wide = [], 64
        for narrow, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for n in range(count):
                blocks.append(Block(wide, narrow, stride if n == 0 else 1))
                wide = 4 * narrow
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(wide, CLASSES)

    def forward(self, x):
        # The mean in place of the largest of a window, whose gradient adds up in any order.
        x = F.avg_pool2d(self.stem(x), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


model = ResNet50().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
run, shapes, side = Run(arguments, torch), random.Random(31), torch.cuda.Stream()
generator = torch.Generator().manual_seed(32)
pixels = torch.randint(256, (BATCH * 3 * LARGEST * LARGEST,), generator=generator, dtype=torch.uint8).pin_memory()
labels = torch.randint(CLASSES, (4096,), generator=generator).pin_memory()


def fetch():
    """A batch of some size, under way on the side stream."""
    count, size = shapes.randint(BATCH // 2, BATCH), shapes.randint(8, LARGEST // 16) * 16
    at = shapes.randint(0, 4096 - count)
    with torch.cuda.stream(side):
        images = pixels[: count * 3 * size * size].cuda(non_blocking=True).view(count, 3, size, size)
        images = images.float().div_(127.5).sub_(1.0)
        return images, labels[at : at + count].cuda(non_blocking=True)


coming = fetch()


def step():
    global coming
    here = torch.cuda.current_stream()
    here.wait_stream(side)
    images, classes = coming
    for tensor in coming:
        tensor.record_stream(here)
    coming = fetch()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(images), classes)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


for _ in range(arguments.steps or 30):
    run.step(step)
run.report()
