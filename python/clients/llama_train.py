"""Trains a Llama-style model: 16 layers in bfloat16, AdamW, checkpointed layers, batches and lengths that vary."""

import random

from common import Run, start

arguments, torch = start("llama_train")
F, nn = torch.nn.functional, torch.nn
from torch.utils.checkpoint import checkpoint  # noqa: E402  (CUDA's allocator is chosen above)

LAYERS, WIDTH, HEADS, INNER, WORDS, LONGEST = 16, 1024, 16, 2816, 32000, 2048


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = Norm(), Norm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x, cos, sin, mask):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Spelt out: each kernel here gives the same bits every time.
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5) + mask
        mixed = (scores.float().softmax(-1).type_as(v) @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.out(mixed)
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)
        angles = torch.arange(LONGEST)[:, None] * 10000.0 ** (-torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, words):
        length = words.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        mask = torch.full((length, length), float("-inf"), device=words.device, dtype=cos.dtype).triu(1)
        x = self.words(words)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, mask, use_reentrant=False)
        return self.head(self.norm(x))


model = Model().bfloat16().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
run, shapes = Run(arguments, torch), random.Random(21)
generator = torch.Generator().manual_seed(22)


def step():
    batch, length = shapes.randint(2, 6), shapes.randint(4, 16) * 64
    words = torch.randint(WORDS, (batch, length + 1), generator=generator).cuda()
    logits = model(words[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


for _ in range(arguments.steps or 30):
    run.step(step)
run.report()
