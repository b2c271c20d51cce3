"""The model and the data of the programs that train from a data loader."""

import torch

WIDTH, LAYERS, BATCH = 2049, 12, 208


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide, self.narrow = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        x = x.mean(1)
        for layer in self.layers:
            x = layer(x)
        return x


class Data(torch.utils.data.Dataset):
    """Samples that depend on their index alone."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(5, WIDTH, generator=drawn), torch.randn(WIDTH, generator=drawn)


def loader(steps, workers, rank=0, ranks=1):
    """Batches of this rank in pinned memory: 8.5 MB of input each, just above a power of two."""
    data = Data(steps * BATCH * ranks)
    mine = range(rank, len(data), ranks)
    return torch.utils.data.DataLoader(data, BATCH, sampler=mine, num_workers=workers, pin_memory=True, prefetch_factor=4)
