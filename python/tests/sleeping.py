"""Sleep: memory of tensors and graphs goes back to the device, and returns with its contents at its addresses.

Group `sleep` is under install(), group `sleep_beside` beside PyTorch's own allocator.
"""

import gc
import os
import pathlib
import subprocess
import sys
import threading
import time

import aquifer_torch
import torch
from groups import MIB, of, raises, rest

saver = aquifer_torch.torch_memory_saver
GIB = 1 << 30
# Spins for about 50 ms, so that work behind it is still queued when the host goes on.
SPIN = 100_000_000


def used():
    """Bytes of the device that are not free, as the driver says."""
    rest()
    free, total = torch.cuda.mem_get_info()
    return total - free


def counting(size, start=0):
    return torch.arange(start, start + size // 8, dtype=torch.int64, device="cuda")


def holds(x, start=0):
    return bool((x == torch.arange(start, start + x.numel(), dtype=torch.int64, device="cuda")).all())


def ended():
    """Ends a test: nothing is paused, and nothing of it is left."""
    saver.resume()
    gc.collect()
    rest()


class Block(torch.nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.mixed, self.joined = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.back = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        q, k, v = self.mixed(self.norms[0](x)).chunk(3, -1)
        x = x + self.joined((q @ k.transpose(1, 2) / 16).softmax(-1) @ v)
        return x + self.back(torch.nn.functional.gelu(self.wide(self.norms[1](x))))


def losses(sleeps, steps=8):
    """The losses of a training loop, and the bytes that the driver says went back in each pause."""
    torch.manual_seed(11)
    with saver.region("weights", enable_cpu_backup=True):
        model = torch.nn.Sequential(*(Block() for _ in range(8))).cuda()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found, back = [], []
    for step in range(steps):
        x = torch.randn(8, 128, 512, device="cuda")
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        with saver.region("optimiser", enable_cpu_backup=True):
            optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        found.append(loss.item())
        del loss, x
        if sleeps:
            before = used()
            said = saver.pause()
            back.append((before - used(), said))
            saver.resume()
    return found, back


@of("sleep", "sleep_beside")
def training_that_sleeps_between_its_steps_has_the_same_losses_to_the_bit():
    plain, _ = losses(False)
    ended()
    slept, back = losses(True)
    assert plain == slept, (plain, slept)
    # 25 million parameters with two moments each. cuBLAS' workspaces go as well.
    assert all(said >= 280 * MIB and driver >= said - 16 * MIB for driver, said in back), back
    print(f"          {back[-1][0] / MIB:.0f} MiB went back in each of {len(back)} pauses")
    ended()


@of("sleep", "sleep_beside")
def the_driver_has_the_memory_back_while_asleep():
    with saver.region("big", enable_cpu_backup=True):
        x = counting(GIB)
    with saver.region("dropped"):
        y = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    elsewhere = counting(64 * MIB, 5)
    addresses, before = (x.data_ptr(), y.data_ptr()), used()
    for _ in range(3):
        assert saver.pause() >= 2 * GIB
        assert before - used() >= 2 * GIB, (before, used())
        assert saver.held() == 0 and holds(elsewhere, 5)
        assert saver.resume() >= 2 * GIB
        assert abs(used() - before) <= 128 * MIB, (before, used())
        assert (x.data_ptr(), y.data_ptr()) == addresses and holds(x)
        y.fill_(3)
        assert int(y[::4096].sum()) == 3 * GIB // 4096
    saver.pause("dropped")
    assert holds(x), "the other tag is awake"
    del x, y, elsewhere
    ended()


@of("sleep", "sleep_beside")
def a_wake_that_does_not_fit_is_refused_whole():
    limit, _ = aquifer_torch.limit(0)
    tensors = {}
    for n, tag in enumerate(("first", "second")):
        with saver.region(tag, enable_cpu_backup=True):
            tensors[tag] = counting(512 * MIB, n)
    saver.pause()
    _, held = aquifer_torch.limit(0)
    before = used()
    try:
        # Room for one of them.
        aquifer_torch.set_limit(held + 700 * MIB, 0)
        for _ in range(3):
            with raises(aquifer_torch.AquiferError, "AQ_ERROR_OUT_OF_MEMORY"):
                saver.resume()
            assert all(saver.is_paused(tag) for tag in tensors)
            assert abs(used() - before) <= 4 * MIB and aquifer_torch.limit(0)[1] == held
    finally:
        aquifer_torch.set_limit(limit, 0)
    saver.resume()
    assert all(holds(x, n) for n, x in enumerate(tensors.values()))
    tensors.clear()
    ended()


def resident():
    """Bytes of host memory that this process has."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@of("sleep", "sleep_beside")
def contents_are_on_the_host_while_asleep_and_host_memory_is_given_back():
    places = {
        "pinned": {"enable_cpu_backup": True, "cpu_backup_backend": "pinned"},
        "pageable": {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
        "disk": {"enable_disk_backup": True},
    }
    for place, kept in places.items():
        with saver.region(place, **kept):
            xs = [counting(8 * MIB, n) for n in range(64)]
            half = torch.randn(3, 5, 7, device="cuda").bfloat16()
        expected = half.cpu()
        assert saver.get_cpu_backup(half) is None
        before = resident()
        for retains in (False, True, False):
            saver.retain_cpu_backup = retains
            saver.pause(place)
            asleep = resident() - before
            assert torch.equal(saver.get_cpu_backup(half, zero_copy=True), expected)
            assert torch.equal(saver.get_cpu_backup(xs[7][5:]), torch.arange(12, 7 + MIB))
            saver.resume(place)
            awake = resident() - before
            print(f"          512 MiB on {place}, {retains=}: {asleep / MIB:.0f} MiB of the host asleep, {awake / MIB:.0f} awake")
            assert asleep <= 128 * MIB if place == "disk" else asleep >= 384 * MIB, (place, asleep)
            assert retains or awake <= 128 * MIB, (place, awake)
            retained = saver.get_cpu_backup(half)
            assert torch.equal(retained, expected) if retains else retained is None
            assert all(holds(x, n) for n, x in enumerate(xs)) and torch.equal(half.cpu(), expected)
        del xs, half, retained
        ended()


@of("sleep", "sleep_beside")
def work_that_is_queued_on_any_stream_is_done_before_the_memory_goes():
    side = torch.cuda.Stream()
    with saver.region("busy", enable_cpu_backup=True):
        x = torch.zeros(16 * MIB, dtype=torch.int64, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        # No allocator is told of this.
        x.add_(7)
    saver.pause()
    assert side.query()
    saver.resume()
    assert int(x.min()) == int(x.max()) == 7
    del x
    ended()


@of("sleep", "sleep_beside")
def tensors_are_freed_while_asleep_and_after_it():
    side, before = torch.cuda.Stream(), used()
    with saver.region("freed", enable_cpu_backup=True):
        xs = [counting(100 * MIB, n) for n in range(4)]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = xs[0].sum()
        xs[0].record_stream(side)
    saver.pause()
    del xs[:2]
    torch.cuda.empty_cache()
    saver.resume()
    assert holds(xs[0], 2) and holds(xs[1], 3)
    with saver.region("freed", enable_cpu_backup=True):
        again = [counting(100 * MIB, n) for n in (8, 9)]
    assert holds(again[0], 8) and holds(again[1], 9) and holds(xs[1], 3)
    assert int(total) == (100 * MIB // 8) * (100 * MIB // 8 - 1) // 2
    del xs, again, total
    ended()
    if aquifer_torch._installed:
        # A MemPool keeps its segments.
        assert used() - before <= 128 * MIB, (before, used())


@of("sleep", "sleep_beside")
def regions_are_nested_and_belong_to_their_thread():
    made = []
    with saver.region("outer", enable_cpu_backup=True):
        first = counting(40 * MIB)
        with raises(KeyError):
            with saver.region("inner", enable_cpu_backup=True):
                inner = counting(40 * MIB)
                raise KeyError("left")
        with saver.disable():
            nowhere = counting(40 * MIB)
        thread = threading.Thread(target=lambda: made.append(counting(40 * MIB)))
        thread.start()
        thread.join()
        last = counting(40 * MIB)
        with raises(RuntimeError, "is open"):
            saver.pause("outer")
    saver.pause("outer")
    assert holds(inner) and holds(nowhere) and holds(made[0])
    with raises(aquifer_torch.Asleep, "is paused"):
        with saver.region("outer", enable_cpu_backup=True):
            raise AssertionError("entered")
    assert saver.pause("outer") == 0 and saver.resume("unknown") == 0
    saver.resume("outer")
    assert saver.resume("outer") == 0 and holds(first) and holds(last)
    del first, inner, nowhere, last, made
    ended()


@of("sleep", "sleep_beside")
def a_process_may_end_while_asleep():
    install = "aquifer_torch.install(limit=0.5)" if aquifer_torch._installed else "aquifer_torch.setup(limit=0.5)"
    program = (
        f"import torch, aquifer_torch\n{install}\nsaver = aquifer_torch.torch_memory_saver\n"
        "with saver.region(enable_cpu_backup=True):\n"
        "    x = torch.ones(1 << 28, device='cuda')\n"
        "assert saver.pause() >= 1 << 30\nprint('asleep')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(aquifer_torch.__file__).resolve().parent.parent)}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, env=environment)
    assert (ran.returncode, ran.stdout) == (0, "asleep\n"), (ran.returncode, ran.stdout, ran.stderr)
    assert "aquifer:" not in ran.stderr, ran.stderr


# ---- graphs ---------------------------------------------------------------------------------------------------------------


@of("sleep")
def a_graph_is_replayed_after_its_memory_was_away():
    torch.manual_seed(5)
    layer = torch.nn.Linear(2048, 2048, device="cuda")
    with saver.region("inputs", enable_cpu_backup=True):
        x = torch.randn(4096, 2048, device="cuda")
    other, first = torch.randn_like(x), x.clone()
    graph, expected = torch.cuda.CUDAGraph(), []
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        with saver.cuda_graph(graph, tag="graphs", enable_cpu_backup=True):
            hidden = layer(x).relu()
            out = layer(hidden + hidden.flip(0)).square()
    for values in (first, other):
        x.copy_(values)
        graph.replay()
        expected.append(out.clone())
    with torch.no_grad():
        eager = layer((h := layer(other).relu()) + h.flip(0)).square()
    torch.testing.assert_close(out, eager)
    del eager, h
    before, held = used(), saver.held("graphs")
    assert held >= 2 * x.numel() * 4, held
    for n in range(3):
        assert saver.pause() >= held + x.numel() * 4
        assert before - used() >= held, (before, used())
        noise = torch.full((256 * MIB,), -1, dtype=torch.int8, device="cuda")
        saver.resume()
        assert torch.equal(out, expected[(n + 1) % 2]), "what is alive keeps its contents"
        assert torch.equal(x, first if n % 2 else other)
        x.copy_(other if n % 2 else first)
        graph.replay()
        assert torch.equal(out, expected[n % 2]), n
        assert int(noise.max()) == -1
        del noise
    with raises(aquifer_torch.AquiferError, "AQ_ERROR_BAD_ARGUMENT"):
        with saver.cuda_graph(torch.cuda.CUDAGraph(), pool=graph.pool(), tag="another"):
            raise AssertionError("entered")
    saver.pause("graphs")
    del graph, out, hidden, x, expected, first, other
    ended()


@of("sleep")
def graphs_of_one_tag_share_a_pool_and_random_numbers_go_on():
    x = torch.ones(MIB, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with saver.cuda_graph(graph, pool=pool, tag="shared"):
            outs.append(torch.nn.functional.dropout(x * (len(outs) + 1), 0.5))

    def drawn(sleeps):
        torch.manual_seed(9)
        found = []
        for _ in range(4):
            for graph, out in zip(graphs, outs):
                graph.replay()
                found.append(out.clone())
            if sleeps:
                saver.pause("shared")
                # A graph that is no region's uses the state of the same generator.
                plain.replay()
                saver.resume("shared")
            else:
                plain.replay()
        return found

    plain = torch.cuda.CUDAGraph()
    with torch.cuda.graph(plain):
        other = torch.rand(1000, device="cuda")
    first, second = drawn(False), drawn(True)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(first[0], first[2])
    del graphs, outs, plain, other, first, second, graph
    ended()


@of("sleep")
def nothing_is_paused_while_a_graph_is_captured():
    with saver.region("awake", enable_cpu_backup=True):
        x = counting(MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with raises(aquifer_torch.AquiferError, "AQ_ERROR_CAPTURING"):
            saver.pause()
    graph.replay()
    assert holds(y, 1) and not saver.is_paused("awake")
    del graph, x, y
    ended()


# ---- the rest of PyTorch --------------------------------------------------------------------------------------------------


@of("sleep")
def tensors_of_regions_are_in_pytorchs_statistics_and_snapshots():
    before = torch.cuda.memory_allocated()
    with saver.region("seen"):
        x = torch.zeros(30 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == before + 30 * MIB
    found = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"] if block["address"] == x.data_ptr()]
    assert len(found) == 1 and found[0]["requested_size"] == 30 * MIB, found
    del x
    ended()
    assert torch.cuda.memory_allocated() == before


@of("sleep_beside")
def graphs_that_can_be_paused_need_install():
    with raises(RuntimeError, "install()"):
        with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="graphs"):
            raise AssertionError("entered")


@of("sleep")
def contents_go_at_the_speed_of_the_link_to_pinned_memory():
    size = 4 * GIB
    with saver.region("moved", enable_cpu_backup=True):
        x = counting(size)
    rows = []
    saver.retain_cpu_backup = True
    for pinned in (False, True):
        if pinned:
            aquifer_torch.install_pinned(pinned_limit=8 * GIB)
        for n in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            saver.pause("moved")
            between = time.perf_counter()
            saver.resume("moved")
            rows.append((pinned, n, size / GIB / (between - began), size / GIB / (time.perf_counter() - between)))
    assert holds(x)
    for pinned, n, down, up in rows:
        print(f"          {'pinned' if pinned else 'pageable':8} {'again' if n else 'first':5} pause {down:.1f} GiB/s, resume {up:.1f} GiB/s")
    del x
    saver.retain_cpu_backup = False
    ended()
    aquifer_torch.uninstall_pinned()
