"""What must hold of elastic memory on one GPU, alone and between two processes that share it. Prints a table.

    AQUIFER_LIB=... python python/tests/elastic_on_gpu.py

Exit: 0 if all holds. Without PyTorch or a GPU: skipped, and an error under AQUIFER_REQUIRE_GPU=1.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]
from skip import skip  # noqa: E402

PAGE, GIB = 2 << 20, 1 << 30
# Pages whose arrival is measured, and the most seconds that the 99th percentile may take.
ROUNDS, ARRIVAL = 1000, 0.005
# The most seconds until a killed process's memory is there.
AFTER_KILL = 2.0
# Pages whose bytes are checked.
WRITTEN = 64


class Worker:
    """A process with a cache of as many pages as the device has."""

    def __init__(self, folder):
        import aquifer_torch
        import torch

        self.torch, self.aquifer = torch, aquifer_torch
        aquifer_torch.setup(shared=0, ledger_folder=folder)
        self.pages = torch.cuda.get_device_properties(0).total_memory // PAGE
        self.cache = aquifer_torch.elastic((self.pages, PAGE), "uint8", page_size=PAGE)
        # Loads the kernels and allocates their results before the device is full.
        self.cache.commit(range(0, WRITTEN))
        self.write()
        assert self.right()
        self.cache.release(range(0, WRITTEN))

    def write(self):
        for page in range(WRITTEN):
            self.cache[page].fill_(page)
        self.torch.cuda.synchronize()

    def right(self):
        rows = self.cache[0:WRITTEN]
        return rows.amin(1).tolist() == rows.amax(1).tolist() == list(range(WRITTEN))

    def grow(self, first):
        """Commits pages from the first on until no more fit. Returns the one behind the last."""
        step = 512
        while step := min(step, self.pages - first):
            try:
                self.cache.commit(range(first, first + step))
                first += step
            except self.aquifer.AquiferError as error:
                assert error.name == "AQ_ERROR_OUT_OF_MEMORY", error
                step //= 2
        return first

    def idle(self, first, last):
        self.cache.idle(range(first, last))

    def arrivals(self):
        """Commits pages one by one. Returns the seconds that each took."""
        taken = []
        for page in range(ROUNDS):
            start = time.perf_counter()
            self.cache.commit(page)
            taken.append(time.perf_counter() - start)
        return taken

    def alone(self):
        """What holds within one process."""
        torch, aquifer_torch = self.torch, self.aquifer
        cache = aquifer_torch.elastic((1 << 20, 8, 128), torch.bfloat16, page_size=PAGE)
        whole, rows = cache.tensor, PAGE // (8 * 128 * 2)
        assert (whole.shape, whole.dtype, whole.data_ptr()) == ((1 << 20, 8, 128), torch.bfloat16, cache.address)
        values, side = torch.randn(4 * rows, 8, 128, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
        for _ in range(20):
            cache.commit(range(0, 4 * rows))
            cache[0 : 4 * rows].copy_(values)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                copy = cache[0 : 4 * rows].clone()
                cache.idle(range(0, 2 * rows))
            # Of these one page is its own again, and the other may be given away meanwhile.
            cache.commit(range(0, rows))
            cache[0:rows].zero_()
            aquifer_torch.trim()
            torch.cuda.synchronize()
            assert torch.equal(copy, values), "a page was reused under queued work"
            assert torch.equal(cache[2 * rows : 4 * rows], values[2 * rows :]), "values are gone"
        try:
            cache[0 : 3 * rows + 1]
            raise AssertionError("a released page was not refused")
        except aquifer_torch.Uncommitted as refused:
            assert f"{PAGE} bytes at offset {PAGE} are not committed" in str(refused), refused
        kv = aquifer_torch.KvPages(64 * PAGE, torch.uint8, num_layers=4)
        kv.map_to_kv_tensors([5 * PAGE])
        for tensor in kv.tensors:
            assert tensor.view(2, 32, PAGE)[:, 5].fill_(2).amin().item() == 2
        # A tensor keeps its addresses beyond what made it.
        cache.close()
        assert whole[0:rows].fill_(3).amin().item() == 3
        used = aquifer_torch.limit()[1]
        del cache, whole
        aquifer_torch.trim()
        assert aquifer_torch.limit()[1] < used

    def stale(self):
        """Returns what an access to a released page does."""
        self.cache.commit(range(0, 2))
        self.torch.cuda.synchronize()
        self.cache.release(range(1, 2))
        time.sleep(0.1)
        self.aquifer.trim()
        try:
            self.cache.tensor[1].fill_(1)
            self.torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return "nothing"


class Process:
    """A worker in a process of its own. Its methods are the worker's."""

    def __init__(self, folder):
        # One device, and so one ledger.
        environment, pipe = {"CUDA_VISIBLE_DEVICES": "0", **os.environ}, subprocess.PIPE
        command = [sys.executable, __file__, "--work", folder]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def __getattr__(self, call):
        def ask(*arguments):
            self.process.stdin.write(json.dumps([call, *arguments]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            assert answer, f"a worker has ended in {call}{arguments}"
            return json.loads(answer)

        return ask

    def kill(self):
        self.process.kill()
        self.process.wait()


def work(folder):
    worker = Worker(folder)
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, call)(*arguments)), flush=True)


def trade(one, other, ledger, free, rows):
    """Two processes with alternating load. Adds what is found to the rows of the table."""

    def grow(process, first):
        start = time.perf_counter()
        end = process.grow(first)
        seconds, found = time.perf_counter() - start, ledger()
        taken, held, room = ((end - first) * PAGE, found["claimed"], found["capacity"] - found["unaccounted"])
        told = f"{taken / GIB:.1f} GiB in {seconds:.2f} s; both hold {held / GIB:.1f} of {room / GIB:.1f} GiB"
        rows.append(("taken until no more fits", told))
        assert held > 0.98 * room, found
        return end

    end = grow(one, 0)
    one.write()
    assert other.grow(0) < 64, "live pages were taken"
    for _ in range(3):
        one.idle(end // 4, end)
        share = grow(other, 0)
        assert share > 0.7 * end, (share, end)
        other.write()
        assert other.right() and one.right(), "values are gone"
        other.idle(0, share)
        end = grow(one, end // 4)
    one.idle(WRITTEN, end)
    taken = sorted(other.arrivals())
    late = taken[ROUNDS * 99 // 100]
    told = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in (("p50", taken[ROUNDS // 2]), ("p99", late), ("max", taken[-1])))
    rows.append((f"a 2 MiB page that the other has idle, of {ROUNDS}", f"{told} ms"))
    assert one.right(), "values are gone"
    end = one.grow(WRITTEN)
    before = ledger()["claimed"]
    one.kill()
    left, start, seconds = ledger(), time.perf_counter(), 0.0
    assert left["claimed"] <= before - end * PAGE and len(left["members"]) == 1, "a dead process has a claim"
    while free() < 0.9 * end * PAGE and seconds < 5 * AFTER_KILL:
        seconds = time.perf_counter() - start
    rows.append(("nine tenths of a killed process's memory", f"after {seconds:.2f} s"))
    assert other.grow(ROUNDS) - ROUNDS > 0.9 * end, "the other does not get it"
    assert late <= ARRIVAL, f"the 99th percentile is {1e3 * late:.2f} ms"
    assert seconds <= AFTER_KILL, f"{seconds:.2f} s after the kill"


def main():
    try:
        import torch
    except ImportError as error:
        skip(str(error))
    if not torch.cuda.is_available():
        skip("PyTorch sees no CUDA device")
    from aquifer_torch.ledger import figures, names

    rows, processes = [], []
    with tempfile.TemporaryDirectory() as at:
        folder = os.path.join(at, "ledgers")
        try:
            # The context of this process, which looks at the free memory, comes before the first measurement.
            torch.cuda.mem_get_info(0)
            processes += [Process(folder) for _ in range(3)]
            processes[0].alone()
            rows.append(("an access to a released page", processes[0].stale()))
            assert "illegal memory access" in rows[-1][1], rows
            processes[0].kill()
            # Until the driver has its memory, and the ledger has seen that.
            time.sleep(1)
            trade(*processes[1:], lambda: figures(names(folder)[0], folder), lambda: torch.cuda.mem_get_info(0)[0], rows)
        finally:
            for process in processes:
                process.kill()
            for name, found in rows:
                print(f"{name:<44}  {found}")
    print("elastic_on_gpu: all holds")


if __name__ == "__main__":
    work(sys.argv[2]) if sys.argv[1:2] == ["--work"] else main()
