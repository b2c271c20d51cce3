"""Group `trees`: CUDA graph trees, which `torch.compile(mode="reduce-overhead")` captures and replays."""

import gc

import aquifer_torch
import torch
import torch._dynamo
from groups import live, of, rest


def compiled(function, mode="reduce-overhead"):
    return torch.compile(function, mode=mode)


def fresh():
    """Ends all graphs of earlier tests, with the checks of PyTorch's own tests on."""
    torch._dynamo.reset()
    gc.collect()
    import torch._inductor.config as config

    config.triton.slow_path_cudagraph_asserts = True
    config.triton.fast_path_cudagraph_asserts = True


def replayed():
    """How many graphs have been captured on this device."""
    from torch._inductor.cudagraph_trees import get_container

    manager = get_container(torch.cuda.current_device()).tree_manager
    return 0 if manager is None else manager.new_graph_id().id


class Layers(torch.nn.Module):
    def __init__(self, width=256, depth=4):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        return x


def trained(mode, steps=12):
    """The losses of a training loop, whose forward and backward passes are graphs of one tree."""
    fresh()
    torch.manual_seed(3)
    model = Layers().cuda()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = compiled(lambda x, y: torch.nn.functional.mse_loss(model(x), y), mode)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(64, 256, device="cuda"), torch.randn(64, 256, device="cuda")
        loss = step(x, y)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


@of("trees")
def training_in_graphs_gives_the_losses_of_training_without_to_the_bit():
    without = trained("default")
    within = trained("reduce-overhead")
    assert replayed() >= 2, "the forward and the backward pass were not captured"
    assert within == without, (within, without)


@of("trees")
def results_of_one_graph_stay_while_the_next_is_captured_and_replayed_behind_it():
    fresh()
    first = compiled(lambda x: (x * 2, x + 1))
    second = compiled(lambda x: (x @ x).relu())
    third = compiled(lambda x: x.sin() + x.cos())
    x = torch.randn(512, 512, device="cuda")
    for n in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        a, b = first(x)
        # Three paths through the tree: a graph behind the first, one behind that, and one with a result dead.
        if n % 3 == 0:
            c = second(a)
            assert torch.equal(b, x + 1)
            torch.testing.assert_close(c, (a @ a).relu())
        elif n % 3 == 1:
            c = second(b)
            d = third(c)
            assert torch.equal(a, x * 2)
            torch.testing.assert_close(d, c.sin() + c.cos())
        else:
            del a
            d = third(b)
            assert torch.equal(b, x + 1)
            torch.testing.assert_close(d, b.sin() + b.cos())
    assert replayed() > 3


@of("trees")
def new_shapes_are_captured_behind_replayed_graphs_and_old_ones_still_replay():
    fresh()
    body = torch.compile(lambda x: (x.exp() * 3, x.sum()), mode="reduce-overhead", dynamic=False)
    tail = torch.compile(lambda x: x - x.mean(), mode="reduce-overhead", dynamic=False)
    torch._dynamo.config.cache_size_limit = 64
    for n in range(30):
        torch.compiler.cudagraph_mark_step_begin()
        size = 64 * (1 + n // 4)
        x = torch.randn(size, size, device="cuda")
        y, total = body(x)
        z = tail(y)
        torch.testing.assert_close(y, x.exp() * 3)
        torch.testing.assert_close(total, x.sum(), rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(z, y - y.mean())


@of("trees")
def decoding_token_by_token_gives_the_same_tokens():
    def decode(mode):
        fresh()
        torch.manual_seed(5)
        model, head = Layers(128, 3).cuda().eval(), torch.nn.Linear(128, 97).cuda()
        table = torch.randn(97, 128, device="cuda")
        step = compiled(lambda h: head(model(h)), mode)
        tokens, token = [], torch.zeros(1, dtype=torch.long, device="cuda")
        with torch.inference_mode():
            for _ in range(40):
                torch.compiler.cudagraph_mark_step_begin()
                token = step(table[token]).argmax(-1).clone()
                tokens.append(token.item())
        return tokens

    assert decode("reduce-overhead") == decode("default")


@of("trees")
def graphs_take_bounded_memory_and_give_it_back():
    fresh()
    rest()
    before = aquifer_torch.statistics(0)["aquifer.physical"]
    held = []
    for _ in range(3):
        step = compiled(lambda x: (x @ x).relu() @ x)
        for _ in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            step(torch.randn(1024, 1024, device="cuda"))
        torch.cuda.synchronize()
        held.append(aquifer_torch.statistics(0)["aquifer.physical"])
        del step
        fresh()
        rest()
    after = aquifer_torch.statistics(0)["aquifer.physical"]
    assert max(held) - before < 128 << 20, held
    assert after - before < 48 << 20, (before, held, after)
    assert live() < 64 << 20


@of("trees")
def a_pools_state_is_brought_back_by_pytorchs_own_calls():
    pool = torch.cuda.graph_pool_handle()
    device = torch.cuda.current_device()
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        y = x + 1
        z = y * 2
    addresses = {y.data_ptr(), z.data_ptr()}
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, addresses)
    assert not torch._C._cuda_checkPoolLiveAllocations(device, pool, {y.data_ptr()})
    state = torch._C._cuda_getCheckpointState(device, pool)
    segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == tuple(pool)]
    assert {b["address"] for s in segments for b in s["blocks"]} == addresses
    del y, z
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, set())
    torch._C._cuda_setCheckpointPoolState(device, state, [], [])
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, addresses)
    # The blocks that live there again belong to the caller.
    for address in addresses:
        torch._C._cuda_cudaCachingAllocator_raw_delete(address)
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, set())
    graph.replay()
    torch.cuda.synchronize()
