"""Tensors between processes, by torch.multiprocessing: part of on_gpu.py.

    AQUIFER_LIB=... python python/tests/shared.py --train native|aquifer     # the losses of two processes, as on_gpu.py compares them
"""

import collections
import contextlib
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import torch
import torch.multiprocessing as mp

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import aquifer_torch  # noqa: E402
from groups import MIB, live, of, raises  # noqa: E402

PATIENCE = 100


def run(work, settings, *arguments):
    """What each of the processes begins with: as a program's own processes, they install aquifer themselves."""
    if settings:
        aquifer_torch.install(**settings)
    work(*arguments)


@contextlib.contextmanager
def started(work, *arguments, method="spawn", aquifer=True):
    """A process that runs `work`, with a queue to it and one from it. It has ended at the end."""
    context = mp.get_context(method)
    to, back = context.Queue(), context.Queue()
    settings = {"limit": 0.3} if aquifer else {}
    process = context.Process(target=run, args=(work, settings, to, back, *arguments))
    process.start()
    try:
        yield process, to, back
        process.join(PATIENCE)
        assert process.exitcode is not None, "it has not ended"
    finally:
        process.kill()
        process.join()


def settle():
    """Frees what PyTorch has kept for other processes, and they have released."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    gc.collect()


def comes_down_to(bytes_):
    """Whether the live bytes fall to this. A process that drops a tensor says so a little later."""
    for _ in range(200):
        settle()
        if live() <= bytes_:
            return True
        time.sleep(0.02)
    return False


def descriptors():
    """How many of each kind are open: sockets, pipes, and each file."""
    kinds = collections.Counter()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[os.readlink(entry.path).split(":[")[0]] += 1
    return kinds


# ---- What the other process does ------------------------------------------------------------------------------------------------


def messages(queue):
    """What comes until None comes. Holds none of it."""
    while True:
        came = [queue.get(timeout=PATIENCE)]
        if came[0] is None:
            return
        yield came.pop()


def doubles_and_answers(to, back):
    """Doubles each tensor in place, answers with its sum and with a tensor of its own, until None comes."""
    for x in messages(to):
        x *= 2
        torch.cuda.synchronize()
        back.put(x.sum().item())
        own = torch.full((1000,), x.flatten()[0].item(), device="cuda")
        back.put(own)
        del x
        # PyTorch requires that the sender keeps its tensor until the other side has dropped it.
        to.get(timeout=PATIENCE)
        back.put(own.sum().item())
        del own


def keeps(to, back):
    """Holds the tensors it gets, and answers each question by their sums."""
    held = []
    for asked in messages(to):
        if isinstance(asked, torch.Tensor):
            held.append(asked)
        back.put([x.double().sum().item() for x in held])
        del asked
    held.clear()
    gc.collect()
    torch.cuda.synchronize()


def sees_one_storage(to, back):
    parts = [to.get(timeout=PATIENCE) for _ in range(4)]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    parts[0].fill_(-1)
    torch.cuda.synchronize()
    back.put((len(storages), [part.sum().item() for part in parts]))


def sends_and_ends(to, back):
    x = torch.arange(3 * MIB, device="cuda")
    torch.cuda.synchronize()
    back.put(x)
    to.get(timeout=PATIENCE)
    # As a process that crashes: nothing of it is tidied up.
    os._exit(0)


def counts_descriptors(to, back):
    before, n = None, 0
    for x in messages(to):
        assert x.sum().item() == x.numel() * (n % 7), n
        del x
        if n == 20:
            before = descriptors()
        back.put(n)
        n += 1
    back.put((before, descriptors()))


# ---- The properties -------------------------------------------------------------------------------------------------------------


@of("shared")
def what_rays_transport_maps_is_copied_to_the_bit():
    """The part of aquifer_ray's transport that needs a GPU, within one process."""
    import ctypes

    from aquifer_ray.torch_tensors import TorchTensors
    from aquifer_torch.ledger import library

    before = live()
    whole = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    for sent in (whole, whole[5:1003], whole.to(torch.bfloat16).reshape(256, -1), whole > 7, whole[3]):
        address, size, shape, dtype = TorchTensors.describe(sent)
        handle, offset, mapped = ctypes.create_string_buffer(32), ctypes.c_size_t(), ctypes.c_void_p()
        library().aq_torch_share(address, handle, ctypes.byref(offset))
        library().aq_torch_receive(TorchTensors.device(), handle, 32, ctypes.byref(mapped))
        came = TorchTensors.copy(mapped.value + offset.value, size, shape, dtype, None)
        target = torch.empty_like(came)
        assert TorchTensors.copy(mapped.value + offset.value, size, shape, dtype, target) is target
        library().aq_torch_close(mapped)
        assert came.dtype == sent.dtype and came.shape == sent.shape
        assert torch.equal(came, sent) and torch.equal(target, sent), sent.dtype
    with raises(ValueError, "contiguous"):
        TorchTensors.describe(whole.reshape(1024, -1).t())
    del whole, sent, came, target
    assert comes_down_to(before)


@of("shared")
def tensors_go_both_ways_between_spawned_processes_and_their_memory_comes_back():
    for method in ("spawn", "forkserver"):
        settle()
        before = live()
        with started(doubles_and_answers, method=method) as (_, to, back):
            for value in (1, 2, 3):
                x = torch.full((3 * MIB,), float(value), device="cuda")
                to.put(x)
                assert back.get(timeout=PATIENCE) == 2 * value * x.numel()
                assert (x == 2 * value).all().item(), "what the other has written"
                theirs = back.get(timeout=PATIENCE)
                assert theirs.shape == (1000,) and (theirs == 2 * value).all().item()
                theirs += 1
                torch.cuda.synchronize()
                to.put("go on")
                assert back.get(timeout=PATIENCE) == 1000 * (2 * value + 1)
                del x, theirs
                assert comes_down_to(before), (method, before, live())
            to.put(None)


@of("shared")
def slices_and_views_of_one_storage_are_one_storage_there():
    x = torch.arange(4 * MIB, dtype=torch.float64, device="cuda")
    with started(sees_one_storage) as (_, to, back):
        for part in (x[1000:2000], x, x.view(4, MIB)[2], x[::2]):
            to.put(part)
        count, sums = back.get(timeout=PATIENCE)
    assert count == 1
    expected = torch.arange(4 * MIB, dtype=torch.float64)
    expected[1000:2000] = -1
    parts = (expected[1000:2000], expected, expected.view(4, MIB)[2], expected[::2])
    assert sums == [part.sum().item() for part in parts]
    assert torch.equal(x.cpu(), expected)


@of("shared")
def small_tensors_of_one_handle_and_tensors_of_a_mem_pool_arrive():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.full((5 * MIB,), 0.5, device="cuda")
    small = [torch.full((n + 1,), float(n), device="cuda") for n in range(50)]
    with started(keeps) as (_, to, back):
        sums = []
        for x in (inside, *small):
            to.put(x)
            sums.append(x.double().sum().item())
            assert back.get(timeout=PATIENCE) == sums
        to.put(None)


@of("shared")
def shared_bytes_stay_in_place_while_the_memory_around_them_is_compacted():
    limit, _ = aquifer_torch.limit(0)
    settle()
    torch.cuda.empty_cache()
    aquifer_torch.set_limit(aquifer_torch.statistics(0)["aquifer.physical"] + 512 * MIB, 0)
    try:
        parts = [torch.full((30 * MIB,), n, dtype=torch.uint8, device="cuda") for n in range(15)]
        kept = parts[7]
        with started(keeps) as (_, to, back):
            to.put(kept)
            assert back.get(timeout=PATIENCE) == [7.0 * kept.numel()]
            moved = aquifer_torch.statistics(0)["aquifer.moves"]
            for n in range(0, 15, 2):
                parts[n] = None
            torch.cuda.synchronize()
            whole = torch.full((220 * MIB,), 0xFF, dtype=torch.uint8, device="cuda")
            assert aquifer_torch.statistics(0)["aquifer.moves"] > moved, "handles have moved"
            torch.cuda.empty_cache()
            to.put("what do you see?")
            assert back.get(timeout=PATIENCE) == [7.0 * kept.numel()]
            assert [x.min().item() for x in (kept, whole)] == [x.max().item() for x in (kept, whole)] == [7, 0xFF]
            del whole
            to.put(None)
    finally:
        aquifer_torch.set_limit(limit, 0)


@of("shared")
def a_receiver_that_is_killed_gives_its_memory_back_and_the_sender_goes_on():
    x = torch.ones(4 * MIB, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    with started(keeps) as (process, to, back):
        to.put(x)
        assert back.get(timeout=PATIENCE) == [x.numel()]
        assert torch.cuda.mem_get_info()[0] < before, "its context"
        os.kill(process.pid, signal.SIGKILL)
        process.join(PATIENCE)
    for _ in range(100):
        if torch.cuda.mem_get_info()[0] >= before - 16 * MIB:
            break
        time.sleep(0.05)
    assert torch.cuda.mem_get_info()[0] >= before - 16 * MIB
    x += 1
    with started(keeps) as (_, to, back):
        to.put(x)
        assert back.get(timeout=PATIENCE) == [2 * x.numel()]
        to.put(None)
    assert x.sum().item() == 2 * x.numel()


@of("shared")
def what_was_received_outlives_its_sender_and_what_was_not_is_an_error():
    with started(sends_and_ends) as (process, to, back):
        x = back.get(timeout=PATIENCE)
        to.put("end")
        process.join(PATIENCE)
        assert torch.equal(x.cpu(), torch.arange(3 * MIB)), "the device keeps it"
        del x
    with started(sends_and_ends) as (process, to, back):
        to.put("end")
        process.join(PATIENCE)
        with raises(Exception):
            back.get(timeout=5)
    assert torch.ones(1000, device="cuda").sum().item() == 1000


@of("shared")
def a_thousand_tensors_leave_no_descriptor_open():
    settle()
    before, at = live(), None
    with started(counts_descriptors) as (_, to, back):
        for n in range(1000):
            x = torch.full((1000 + n * 1000,), float(n % 7), device="cuda")
            to.put(x)
            assert back.get(timeout=PATIENCE) == n
            del x
            if n == 20:
                at = descriptors()
        to.put(None)
        theirs = back.get(timeout=PATIENCE)
    for then, now in ((at, descriptors()), theirs):
        assert now.total() <= then.total() + 8, now - then
    assert comes_down_to(before), (before, live())


@of("shared")
def what_another_process_has_released_serves_before_memory_is_refused():
    limit, _ = aquifer_torch.limit(0)
    settle()
    torch.cuda.empty_cache()
    aquifer_torch.set_limit(aquifer_torch.statistics(0)["aquifer.physical"] + 256 * MIB, 0)
    try:
        with started(keeps) as (process, to, back):
            x = torch.ones(200 * MIB, dtype=torch.uint8, device="cuda")
            to.put(x)
            back.get(timeout=PATIENCE)
            # PyTorch keeps it, since the other holds it.
            del x
            with raises(torch.OutOfMemoryError):
                torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
            to.put(None)
            process.join(PATIENCE)
            y = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
            del y
    finally:
        aquifer_torch.set_limit(limit, 0)


@of("shared")
def a_process_without_aquifer_is_told_so():
    with started(names_its_error, aquifer=False) as (_, to, back):
        to.put(torch.ones(1000, device="cuda"))
        assert "future version" in back.get(timeout=PATIENCE)


def names_its_error(to, back):
    try:
        to.get(timeout=PATIENCE)
        back.put("no error")
    except Exception as error:
        back.put(str(error))


# ---- Two processes that train the same parameters, one step each in turn -----------------------------------------------------------


def steps(rank, weights, turns, count):
    """Returns the losses of this process's steps, as exact texts."""
    torch.manual_seed(rank)
    losses = []
    for _ in range(count):
        assert turns[rank].acquire(timeout=PATIENCE)
        x, y = torch.randn(256, 512, device="cuda"), torch.randn(256, 64, device="cuda")
        loss = torch.nn.functional.mse_loss(torch.relu(x @ weights[0]) @ weights[1], y)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients):
                weight -= 0.05 * gradient
        losses.append(loss.item().hex())
        torch.cuda.synchronize()
        turns[1 - rank].release()
    return losses


def second(to, back, turns, count):
    weights = [to.get(timeout=PATIENCE).requires_grad_() for _ in range(2)]
    back.put(steps(1, weights, turns, count))


def train(count=200):
    torch.manual_seed(7)
    shapes = ((512, 1024), (1024, 64))
    weights = [(torch.randn(shape, device="cuda") / 32).requires_grad_() for shape in shapes]
    context = mp.get_context("spawn")
    turns = [context.Semaphore(1), context.Semaphore(0)]
    native = torch.cuda.get_allocator_backend() == "native"
    with started(second, turns, count, aquifer=not native) as (_, to, back):
        for weight in weights:
            to.put(weight.detach())
        losses = [steps(0, weights, turns, count), back.get(timeout=PATIENCE)]
    return losses


@of("shared")
def two_processes_that_share_parameters_train_as_under_the_native_allocator():
    def losses(allocator):
        command = [sys.executable, __file__, "--train", allocator]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return json.loads(ran.stdout.splitlines()[-1])

    ours, native = losses("aquifer"), losses("native")
    assert len(ours[0]) == len(ours[1]) == 200
    assert ours == native
    assert float.fromhex(ours[1][-1]) < float.fromhex(ours[0][0])


if __name__ == "__main__":
    if sys.argv[1:2] != ["--train"] or sys.argv[2:] not in (["native"], ["aquifer"]):
        sys.exit(__doc__)
    if sys.argv[2] == "aquifer":
        aquifer_torch.install(limit=0.4)
    print(json.dumps(train()))
