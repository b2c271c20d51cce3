"""CUDA graphs over aquifer's memory, and a million replays of one."""

import gc
import random
import threading
import time

import torch
from groups import MIB, live, of, raises, rest


def graphed(pool=None, stream=None):
    x = torch.zeros(MIB, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            (x * 2 + 1).relu().sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        y = x * 2
        y = y + 1
        out = y.relu() * 3
    return graph, x, out


@of("graphs")
def a_graph_replays_against_other_traffic_with_no_wrong_byte():
    graph, x, out = graphed()
    pick, kept = random.Random(2), []
    for n in range(2000):
        x.fill_(n % 100)
        noise = torch.full((pick.randint(1, 4 * MIB),), -1.0, device="cuda")
        kept.append(noise)
        graph.replay()
        del kept[: -pick.randint(1, 8)]
        if n % 50 == 0:
            assert (out == (n % 100 * 2 + 1) * 3).all().item(), n


@of("graphs")
def graphs_may_share_a_pool():
    first, x, out = graphed()
    second, z, end = graphed(pool=first.pool())
    for value in (2.0, 5.0):
        x.fill_(value)
        first.replay()
        assert (out == (value * 2 + 1) * 3).all().item()
        z.fill_(value)
        second.replay()
        assert (end == (value * 2 + 1) * 3).all().item()


@of("graphs")
def a_graphs_memory_comes_back_when_it_is_gone():
    rest()
    before = torch.cuda.memory_reserved()
    graph, x, out = graphed()
    graph.replay()
    del graph, x, out
    gc.collect()
    rest()
    # What remains are the random generator's own two tensors.
    assert torch.cuda.memory_reserved() <= before + 8 * MIB, (before, torch.cuda.memory_reserved())


@of("graphs")
def frees_and_other_threads_go_on_during_a_capture():
    outside = [torch.full((MIB,), 4.0, device="cuda") for _ in range(8)]
    stop, wrong = threading.Event(), []

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                x = torch.full((1 << random.randint(4, 20),), 1.0, device="cuda")
                stream.synchronize() if random.random() < 0.1 else None
                del x

    thread = threading.Thread(target=work)
    thread.start()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(MIB, device="cuda")
    try:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = x + 1
            del outside[:4]
            z = y * 2
            del y
            w = z + 1
    finally:
        stop.set()
        thread.join()
    for _ in range(100):
        x.fill_(1)
        noise = torch.full((MIB,), 7.0, device="cuda")
        graph.replay()
        del noise
    torch.cuda.synchronize()
    assert (w == 5).all().item() and not wrong
    assert all((t == 4).all().item() for t in outside)


@of("graphs")
def graphed_callables_train_as_without():
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).cuda()
    import copy

    twin = copy.deepcopy(plain)
    graph = torch.cuda.make_graphed_callables(twin, (torch.randn(16, 64, device="cuda"),))
    x = torch.randn(16, 64, device="cuda")
    for _ in range(5):
        for model in (plain, graph):
            model.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
        for a, b in zip(plain.parameters(), twin.parameters()):
            torch.testing.assert_close(a.grad, b.grad)


@of("graphs")
def a_mem_pool_of_the_process_is_a_pool_of_aquifers():
    pool = torch.cuda.MemPool()
    before = live()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(MIB, device="cuda")
    assert live() >= before + 4 * MIB
    assert x.sum().item() == MIB
    del x, pool
    torch.cuda.synchronize()


def temporaries(t, value):
    return (t.clone() + value) + (t.clone() + value)


@of("graphs")
def graphs_that_follow_each_other_give_what_eager_code_gives():
    for share in ("apart", "pool()", "graph_pool_handle()"):
        first, second, stream = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        a = torch.ones(1000, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            handle = (torch.cuda.graph_pool_handle(),) if share == "graph_pool_handle()" else ()
            first.capture_begin(*handle)
            b = a.clone()
            for _ in range(5):
                b = temporaries(b, 1)
            first.capture_end()
            second.capture_begin(*((first.pool(),) if share == "pool()" else handle))
            for _ in range(5):
                b = temporaries(b, 1)
            second.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        c = a.clone()
        for graph in (first, second):
            c = temporaries(temporaries(c, 3), 3)
            graph.replay()
        c = temporaries(temporaries(c, 3), 3)
        assert b.sum().item() == 1000 * 3070, share
        assert c.sum().item() == 1000 * 442, share
        del a, b, c, first, second
        rest()


@of("graphs")
def a_result_outlives_its_graph_and_a_graph_can_be_captured_anew():
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        a = torch.full((1000,), 1.0, device="cuda")
        graph.capture_begin()
        b = a
        for _ in range(10):
            b = b + 1
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    assert b.sum().item() == 11000
    graph.reset()
    torch.cuda.empty_cache()
    noise = [torch.full((1000,), -1.0, device="cuda") for _ in range(50)]
    assert b.sum().item() == 11000
    with torch.cuda.stream(stream):
        graph.capture_begin()
        b.fill_(2.0)
        for _ in range(10):
            b = b + 2
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    assert b.sum().item() == 22000
    del noise


@of("graphs")
def what_does_not_fit_in_a_capture_is_pytorchs_own_error_and_the_next_capture_works():
    with raises(torch.OutOfMemoryError, "out of memory"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(2**40, device="cuda")
    torch.cuda.synchronize()
    graph, x, out = graphed()
    x.fill_(1)
    graph.replay()
    assert (out == 9).all().item()


@of("graphs")
def recorded_uses_before_and_within_a_capture_do_not_break_it():
    busy, a = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    before, first, second = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(before):
        busy.record_stream(before)
        torch.cuda._sleep(50_000_000)
        busy.fill_(1.0)
    del busy
    with torch.cuda.stream(first):
        graph.capture_begin()
        b = a.clone()
        second.wait_stream(first)
        with torch.cuda.stream(second):
            b.fill_(1.0)
            b.record_stream(second)
            del b
        first.wait_stream(second)
        graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    torch.zeros(3, device="cuda")
    torch.cuda.synchronize()


@of("graphs")
def many_captures_take_no_more_memory_than_a_few():
    a, b = torch.rand(1024, 512, device="cuda"), torch.rand(512, 64, device="cuda")
    torch.mm(a, b)
    before, _ = torch.cuda.mem_get_info()
    for _ in range(100):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mm(a, b)
        graph.replay()
    after, _ = torch.cuda.mem_get_info()
    assert after > before - 100e6, (before, after)


@of("graphs")
def a_block_of_a_forked_stream_is_not_reused_before_the_join():
    for streams in (1, 3):
        graph, first = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        others = [torch.cuda.Stream() for _ in range(streams)]
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            graph.capture_begin()
            source = torch.ones(8, device="cuda")
            copies = []
            for n, other in enumerate(others):
                other.wait_stream(first)
                with torch.cuda.stream(other):
                    copies.append(source + n)
                    source.record_stream(other)
            address = source.data_ptr()
            del source
            between = torch.full((8,), -1.0, device="cuda")
            assert between.data_ptr() != address
            for other in others:
                first.wait_stream(other)
            total = sum(copies)
            graph.capture_end()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert (total == streams + sum(range(streams))).all().item()
        assert (between == -1).all().item()
        del graph, total, copies, between


@of("graphs")
def other_threads_may_allocate_and_free_while_a_stream_captures():
    for mode in ("thread_local", "relaxed"):
        failed = []

        def pair():
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(1024))
            except BaseException as error:
                failed.append(error)

        graph, x = torch.cuda.CUDAGraph(), torch.ones(2000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            y = x + x + x
            thread = threading.Thread(target=pair)
            thread.start()
            thread.join()
        graph.replay()
        assert (y == 3).all().item() and not failed, (mode, failed)


@of("graphs")
def a_graph_that_is_kept_can_be_instantiated_again_and_captured_anew():
    graph, x = torch.cuda.CUDAGraph(keep_graph=True), torch.zeros(2000, device="cuda")
    for step in (1.0, 2.0):
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            x += step
        for replays in (1, 2):
            graph.instantiate()
            for _ in range(replays):
                graph.replay()
        assert (x == 3 * step).all().item()
        graph.reset()
        x = torch.zeros(2000, device="cuda")


@of("graphs")
def optimisers_and_scaled_gradients_train_in_a_graph_as_without():
    for make in (torch.optim.SGD, torch.optim.AdamW):
        torch.manual_seed(6)
        start, grads = torch.randn(64, 64, device="cuda"), [torch.randn(64, 64, device="cuda") for _ in range(5)]
        settings = {} if make is torch.optim.SGD else {"capturable": True}
        plain, graphed = (torch.nn.Parameter(start.clone()) for _ in range(2))
        eager, captured = make([plain], lr=0.1, **settings), make([graphed], lr=0.1, **settings)
        graphed.grad = grads[0].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            captured.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.step()
        for n, grad in enumerate(grads):
            plain.grad = grad
            eager.step()
            if n:
                graphed.grad.copy_(grad)
                graph.replay()
        torch.testing.assert_close(graphed, plain)

    scaler = torch.amp.GradScaler(device="cuda", init_scale=4.0, growth_interval=1000)
    weight = torch.ones(100, device="cuda", requires_grad=True)
    optimiser, x = torch.optim.SGD([weight], lr=0.1), torch.ones(100, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        scaler.scale((weight.half() * x).sum()).backward()
    torch.cuda.current_stream().wait_stream(side)
    optimiser.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, stream=side):
        scaler.scale((weight.half() * x).sum()).backward()
    # The scale is halved after each step that overflowed in half precision, and the graph reads it.
    for value, scale, grad in ((5.0, 4.0, 20.0), (20000.0, 2.0, float("inf")), (5.0, 2.0, 10.0)):
        x.fill_(value)
        graph.replay()
        assert (weight.grad == grad).all().item(), (value, weight.grad[:3])
        scaler.step(optimiser)
        scaler.update()
        assert scaler.get_scale() == scale, value


# ---- a million replays --------------------------------------------------------------------------------------------------------

REPLAYS, LOOK_EVERY, ELEMENTS = 1_000_000, 10_000, 1 << 16


class Traffic(threading.Thread):
    """Blocks of other work, on a stream of its own: filled, seen to hold what they were filled with, every byte, and freed."""

    def __init__(self):
        super().__init__(daemon=True)
        self.stop, self.error, self.blocks, self.bytes, self.wrong = threading.Event(), None, 0, 0, 0

    def run(self):
        try:
            pick, stream, kept = random.Random(8), torch.cuda.Stream(), []
            with torch.cuda.stream(stream):
                wrong = torch.zeros((), dtype=torch.int64, device="cuda")
                while not self.stop.is_set():
                    size, value = pick.randint(1, 1 << pick.randint(4, 21)), pick.randint(1, 255)
                    kept.append((torch.full((size,), value, dtype=torch.uint8, device="cuda"), value))
                    self.blocks, self.bytes = self.blocks + 1, self.bytes + size
                    if len(kept) > 32:
                        block, value = kept.pop(pick.randrange(len(kept)))
                        wrong += (block != value).sum()
                        del block
                    if self.blocks % 256 == 0:
                        stream.synchronize()
                    if self.blocks % 20_000 == 0:
                        torch.cuda.empty_cache()
                for block, value in kept:
                    wrong += (block != value).sum()
                self.wrong = wrong.item()
        except BaseException as error:
            self.error = error


@of("replays")
def a_graph_replays_a_million_times_beside_other_traffic_with_no_wrong_byte():
    x = torch.zeros(ELEMENTS, dtype=torch.int32, device="cuda")
    wrong, count = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))

    def work():
        # Each of these lies where others of the graph, freed by then, have been: every launch writes what is free in it.
        doubled = x * 2
        copy = doubled.clone()
        del doubled
        more = copy + 1
        del copy
        out = more * 3
        del more
        # Every launch looks at every byte itself.
        wrong.add_((out != x * 6 + 3).sum())
        count.add_(1)
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    wrong.zero_(), count.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    # Ordinary blocks that no code touches until the end.
    outside = [torch.full((MIB,), n, dtype=torch.uint8, device="cuda") for n in range(16)]
    traffic = Traffic()
    traffic.start()
    begun = time.monotonic()
    try:
        for n in range(REPLAYS // LOOK_EVERY):
            x.fill_(n)
            for _ in range(LOOK_EVERY):
                graph.replay()
            assert (out == n * 6 + 3).all().item(), n
            assert wrong.item() == 0 and count.item() == (n + 1) * LOOK_EVERY, (n, wrong.item(), count.item())
            assert traffic.error is None, traffic.error
        took = time.monotonic() - begun
    finally:
        traffic.stop.set()
        traffic.join()
    assert traffic.error is None, traffic.error
    assert traffic.wrong == 0 and traffic.blocks > 1000, (traffic.wrong, traffic.blocks)
    assert all((block == n).all().item() for n, block in enumerate(outside))
    print(
        f"    {REPLAYS} replays in {took:.1f} s, {took / REPLAYS * 1e6:.1f} us each, beside {traffic.blocks} other blocks of "
        f"{traffic.bytes / 2**30:.1f} GiB together; no wrong byte"
    )
