"""Generates tokens for requests of many lengths on four streams: caches that grow, and tensors that other streams use."""

import random

from common import Run, start

arguments, torch = start("serve_mixed")
F = torch.nn.functional

LAYERS, WIDTH, HEADS, WORDS, GROW, AT_ONCE = 4, 2048, 16, 16000, 64, 96
SIZE = WIDTH // HEADS

generator, on_device = torch.Generator().manual_seed(41), torch.Generator("cuda").manual_seed(43)


def weight(*shape):
    return (torch.randn(*shape, generator=on_device, device="cuda") * shape[0] ** -0.5).to(torch.bfloat16)


words = weight(WORDS, WIDTH) * 100
layers = [
    (weight(WIDTH, 3 * WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, 4 * WIDTH), weight(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
]
streams = [torch.cuda.Stream() for _ in range(3)]
sampler = torch.cuda.Stream()
shapes, run = random.Random(42), Run(arguments, torch)


class Request:
    """A prompt, its cache, and how far it has come. Lives on one of three streams; its tokens are drawn on the fourth."""

    def __init__(self, number):
        self.stream, self.left = streams[number % 3], shapes.randint(4, 32)
        length = int(128 * 2 ** shapes.uniform(0, 5))
        prompt = torch.randint(WORDS, (length,), generator=generator)
        self.length, self.room = 0, 0
        self.keys, self.values = [None] * LAYERS, [None] * LAYERS
        with torch.cuda.stream(self.stream):
            self.tokens = prompt.cuda()
            self.hidden = None

    def grow(self, count):
        """Makes room in the caches: new ones, larger by a part, and the old ones are freed."""
        if self.length + count <= self.room:
            return
        self.room = (self.length + count + GROW - 1) // GROW * GROW
        for caches in (self.keys, self.values):
            for n, old in enumerate(caches):
                caches[n] = torch.zeros(HEADS, self.room, SIZE, device="cuda", dtype=torch.bfloat16)
                if old is not None:
                    caches[n][:, : self.length] = old[:, : self.length]

    def forward(self):
        """One pass over the tokens that have not been seen; the last state is left in `hidden`."""
        with torch.cuda.stream(self.stream):
            # The tokens may have been drawn by the sampler, whose memory they are.
            self.stream.wait_stream(sampler)
            self.tokens.record_stream(self.stream)
            count = self.tokens.shape[0]
            self.grow(count)
            x = words[self.tokens]
            start, end = self.length, self.length + count
            for n, (qkv, out, up, down) in enumerate(layers):
                q, k, v = (F.rms_norm(x, (WIDTH,)) @ qkv).view(count, 3, HEADS, SIZE).permute(1, 2, 0, 3)
                self.keys[n][:, start:end] = k
                self.values[n][:, start:end] = v
                scores = (q @ self.keys[n][:, :end].transpose(1, 2)) * SIZE**-0.5
                if count > 1:
                    later = torch.full((count, end), float("-inf"), device="cuda", dtype=scores.dtype)
                    scores = scores + later.triu(start + 1)
                x = x + (scores.softmax(-1) @ self.values[n][:, :end]).transpose(0, 1).reshape(count, WIDTH) @ out
                x = x + F.silu(F.rms_norm(x, (WIDTH,)) @ up) @ down
            self.hidden, self.length = F.rms_norm(x[-1], (WIDTH,)).clone(), end

    def draw(self):
        """Draws the next token on the sampler's stream, from what this request's stream has made."""
        with torch.cuda.stream(sampler):
            sampler.wait_stream(self.stream)
            self.hidden.record_stream(sampler)
            self.tokens = (words @ self.hidden).argmax().view(1)
            self.hidden = None
            self.left -= 1


active, made = [], 0


def step():
    global made
    # As many come as may, so that the memory in use goes up and down.
    for _ in range(min(shapes.randint(0, 24), AT_ONCE - len(active))):
        active.append(Request(made))
        made += 1
    for request in active:
        request.forward()
    for request in active:
        request.draw()
    here = torch.cuda.current_stream()
    here.wait_stream(sampler)
    for request in active:
        request.tokens.record_stream(here)
    drawn = torch.cat([request.tokens for request in active]) if active else torch.zeros(1, device="cuda")
    active[:] = [request for request in active if request.left > 0]
    return drawn


for _ in range(arguments.steps or 30):
    run.step(step)
run.report()
