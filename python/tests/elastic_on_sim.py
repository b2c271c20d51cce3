"""Tests of elastic memory on a simulated device, without PyTorch: on_sim.py runs them in its process."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import aquifer_torch
from aquifer_torch import library as binding
from aquifer_torch.ledger import figures

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
MIB, PAGE = 1 << 20, 2 << 20

# Does to pages what each line says, and answers with those that are committed and idle then, or with the refusal.
WORKER = """
import sys, aquifer_torch
PAGE = 2 << 20
aquifer_torch.setup(driver="sim", sim_memory=32 * PAGE, shared=0, ledger_folder=sys.argv[1])
cache = aquifer_torch.elastic(32 * PAGE, "uint8", page_size=PAGE)
for line in sys.stdin:
    call, first, last = line.split()
    try:
        getattr(cache, call)(range(int(first) * PAGE, int(last) * PAGE))
        print(sum(map(len, cache.committed)) // PAGE, cache.idle_bytes // PAGE, flush=True)
    except aquifer_torch.AquiferError as error:
        print(error.name, flush=True)
"""


class PageAllocator:
    """A stand-in for kvcached's: page numbers, and the two functions of kvcached.vmm_ops that it calls with their offsets."""

    def __init__(self, operations, pages, page_size):
        self.operations, self.page_size = operations, page_size
        self.free, self.used = list(range(pages)), []

    def alloc_page(self):
        page = self.free.pop(0)
        if not self.operations.map_to_kv_tensors([page * self.page_size]):
            raise RuntimeError("Failed to map pages to KV tensors")
        self.used.append(page)
        return page

    def free_pages(self, pages):
        if not self.operations.unmap_from_kv_tensors([page * self.page_size for page in pages]):
            raise RuntimeError("Failed to unmap pages from KV tensors")
        self.free = sorted(self.free + pages)
        self.used = [page for page in self.used if page not in pages]


class ElasticTests:
    """For a TestCase with `library` and `malloc`, in a process with one runtime of 200 MiB."""

    def tearDown(self):
        gc.collect()
        self.library.trim(0, 0)
        self.assertEqual(aquifer_torch.limit(0)[1], 0)
        super().tearDown()

    def no_memory(self):
        return self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_OUT_OF_MEMORY")

    def test_rows_are_committed_in_whole_pages_and_refused_where_one_is_missing(self):
        # A row has two pages.
        cache = aquifer_torch.elastic((300, 4, PAGE // 8), "float32", 0)
        self.assertEqual((cache.page_size, cache.nbytes), (PAGE, 600 * PAGE))
        for rows in (range(0, 3), 5, slice(-1, None)):
            cache.commit(rows)
        self.assertEqual(cache.committed, [range(0, 3), range(5, 6), range(299, 300)])
        self.library.aq_sim_touch(self.library.runtime(), 0, None, cache.address, 6 * PAGE, binding.WRITE)
        cache.check(slice(0, 3))
        with self.assertRaisesRegex(aquifer_torch.Uncommitted, rf"slice\(2, 6.* {4 * PAGE} bytes at offset {6 * PAGE}"):
            cache[2:6]
        cache.release(range(1, 3))
        self.assertEqual((cache.committed[0], cache.idle_bytes), (range(0, 1), 0))
        cache.close()
        cache.close()
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_CLOSED"):
            cache.commit(0)
        # All rows are in one page.
        cache = aquifer_torch.elastic(10, "float64")
        cache.commit(3)
        cache.idle(range(0, 9))
        self.assertEqual((cache.committed, cache.idle_bytes), ([range(0, 10)], 0))
        cache.idle(slice(None))
        self.assertEqual((cache.committed, cache.idle_bytes), ([], PAGE))

    def test_idle_pages_serve_other_requests_and_a_lowered_limit(self):
        cache = aquifer_torch.elastic(100 * PAGE, "uint8")
        cache.commit(range(0, 90 * PAGE))
        with self.no_memory():
            self.malloc(60 * MIB)
        cache.idle(range(10 * PAGE, 90 * PAGE))
        self.library.aq_torch_free(self.malloc(60 * MIB), 0, -1, None)
        self.assertGreaterEqual(cache.idle_bytes, 50 * PAGE)
        try:
            aquifer_torch.set_limit(40 * MIB)
            aquifer_torch.trim(40 * MIB)
            self.assertLessEqual(aquifer_torch.limit()[1], 40 * MIB)
            with self.no_memory():
                cache.commit(range(0, 21 * PAGE))
            self.assertEqual(cache.committed, [range(0, 10 * PAGE)], "nothing has changed")
            cache.commit(range(0, 20 * PAGE))
        finally:
            aquifer_torch.set_limit(200 * MIB)

    def test_invalid_shapes_types_and_rows_are_refused(self):
        for shape in ((), 0, (3, 0), (-1,)):
            with self.assertRaisesRegex(ValueError, "at least one element"):
                aquifer_torch.elastic(shape)
        for dtype in ("float", "int4", "7", ""):
            with self.assertRaisesRegex(ValueError, "a torch.dtype, or the name of one"):
                aquifer_torch.elastic(1, dtype)
        cache = aquifer_torch.elastic(8, "int8")
        for rows in (range(0, 8, 2), range(0, 9), range(-1, 2), -1, 8, slice(None, None, -1)):
            with self.assertRaisesRegex(ValueError, "consecutive rows, of the 8"):
                cache.commit(rows)

    def test_kvcacheds_calls_map_a_page_of_each_part_of_each_layer(self):
        kv = aquifer_torch.KvPages(32 * PAGE, "float16", num_layers=3)
        pages, items = PageAllocator(kv, 16, PAGE), PAGE // 2
        self.assertEqual([pages.alloc_page() for _ in range(4)], [0, 1, 2, 3])
        for layer in kv.layers:
            self.assertEqual(layer.committed, [range(0, 4 * items), range(16 * items, 20 * items)])
        pages.free_pages([1, 2])
        self.assertEqual([layer.idle_bytes for layer in kv.layers], [4 * PAGE] * 3)
        self.assertTrue(kv.map_to_kv_tensors([0, PAGE]), "a mapped page stays")
        # 16 pages of 12 MiB do not fit beside the block: what was mapped by the refused call is not.
        block, before = self.malloc(30 * MIB), [layer.committed for layer in kv.layers]
        with self.no_memory():
            kv.map_to_kv_tensors([page * PAGE for page in range(15, -1, -1)])
        self.assertEqual([layer.committed for layer in kv.layers], before)
        self.library.aq_torch_free(block, 0, -1, None)
        for call in (kv.map_to_kv_tensors, kv.unmap_from_kv_tensors):
            for offset in (1, -PAGE, 16 * PAGE):
                with self.assertRaisesRegex(ValueError, f"offset {offset}"):
                    call([0, offset])
        with self.assertRaisesRegex(ValueError, "a multiple of 2 pages"):
            aquifer_torch.KvPages(3 * PAGE, "float16", 1)
        with self.assertRaisesRegex(ValueError, "the device's granularity"):
            aquifer_torch.KvPages(2 * MIB, "float16", 1, page_size=MIB)
        del kv, pages, layer, call
        kv = aquifer_torch.KvPages(8 * PAGE, "uint8", 1, num_kv_buffers=1, keep=False)
        kv.map_to_kv_tensors([0, PAGE])
        kv.unmap_from_kv_tensors([0])
        self.assertEqual((kv.layers[0].committed, kv.layers[0].idle_bytes), ([range(PAGE, 2 * PAGE)], 0))


class TwoProcesses:
    """Processes that share a simulated device of 32 pages by a ledger, for a TestCase."""

    def start(self, folder):
        environment, pipe = {**os.environ, "PYTHONPATH": str(PACKAGE)}, subprocess.PIPE
        command = [sys.executable, "-c", WORKER, folder]
        worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.addCleanup(worker.communicate)
        self.addCleanup(worker.kill)
        return worker

    def ask(self, worker, call, first, last):
        worker.stdin.write(f"{call} {first} {last}\n")
        worker.stdin.flush()
        return worker.stdout.readline().strip()

    def test_idle_pages_go_to_the_process_that_wants_them_and_a_killed_ones_at_its_next_claim(self):
        at = tempfile.TemporaryDirectory()
        self.addCleanup(at.cleanup)
        folder = os.path.join(at.name, "ledgers")
        one, other = self.start(folder), self.start(folder)
        self.assertEqual(self.ask(one, "commit", 0, 32), "32 0")
        self.assertEqual(self.ask(other, "commit", 0, 1), "AQ_ERROR_OUT_OF_MEMORY")
        for _ in range(5):
            self.assertEqual(self.ask(one, "idle", 8, 32), "8 24")
            self.assertEqual(self.ask(other, "commit", 0, 20), "20 0")
            self.assertEqual(self.ask(one, "commit", 8, 32), "AQ_ERROR_OUT_OF_MEMORY")
            self.assertEqual(self.ask(one, "commit", 8, 12), "12 0", "no more than was wanted had gone")
            self.assertEqual(figures("simulated-0", folder)["claimed"], 32 * PAGE)
            self.assertEqual(self.ask(other, "idle", 0, 20), "0 20")
            self.assertEqual(self.ask(one, "commit", 8, 32), "32 0")
            self.assertEqual(figures("simulated-0", folder)["claimed"], 32 * PAGE)
        one.send_signal(signal.SIGKILL)
        one.wait()
        self.assertEqual(self.ask(other, "commit", 0, 32), "32 0")
        self.assertEqual(len(figures("simulated-0", folder)["members"]), 1)
