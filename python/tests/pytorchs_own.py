"""Runs PyTorch's own tests under its native allocator and under aquifer, and compares them test by test.

    AQUIFER_LIB=... python python/tests/pytorchs_own.py PYTORCH/test [FILE ...]

    -k PATTERN       only tests whose CLASS.TEST has it (a regular expression)
    --workers N      processes for each allocator at a time, 6 unless set
    --seconds S      for all of it: what has not run then is counted as such
    --json FILE      writes every outcome there
    --show FILE      prints the table of such a file and ends; needs neither PyTorch nor a GPU

No installed PyTorch has these files: take the folder `test` from the sources of the installed version, or of one near it. A test
that needs what only the other version has fails under both. FILE is `test_cuda.py`, `inductor/test_cudagraph_trees.py`,
`test_multiprocessing.py` (its CUDA tests) and `test_dataloader.py` (what it pins) unless named.

Tests run in several processes at once, both allocators beside each other on one device. Those that fail are run again one by one,
alone on the device, under both. Those that then fail under aquifer only run once more, each in a new process. The last outcome counts. Needs `expecttest`.
Exit: 0 if at least 95 % of what passes natively passes here, those below that do not apply left out.
"""

import argparse
import ast
import collections
import importlib
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ALLOCATORS = ("native", "aquifer")
FILES = {
    "test_cuda.py": ".",
    "inductor/test_cudagraph_trees.py": ".",
    "test_multiprocessing.py": "(?i)cuda",
    "test_dataloader.py": "(?i)pin|cuda",
}
# Seconds for one test.
PATIENCE = 100
NOT_RUN = ["not run", "", 0]

# The first that matches CLASS.TEST says why it does not apply.
NOT = [
    (r"TestCuda\.test_graph_two_successive$", "sizes of the native allocator's segments"),
    (r"TestCuda\.test_cuda_graph_allocator_propagates_stream$", "free memory is in no segment"),
    (r"CudaGraphTreeTests\.test_single_stream_use$", "free memory is in no segment"),
    (r"TestBlockStateAbsorption\.test_allocate_in_thread_to_pool$", "free memory is in no segment"),
    (r"TestMemPool\.test_mempool_(emptycache_multithread|no_split)$", "free memory is in no segment"),
    (r"TestMemPool\.test_snapshot_include_traces$", "free memory is in no segment"),
    (r"TestMemPool\.test_graph_capture_reclaim_", "a setting of the native allocator: ours reuses such a block after the capture"),
    (r"TestCudaAllocator\.test_allocator_memory_fraction_setting$", "a setting of the native allocator"),
    (r"TestCudaAllocator\.test_allocator_backend$", "asks a child process for another allocator"),
]  # fmt: skip


def reason(name):
    """Why a test, as CLASS.TEST, does not apply; None if it does."""
    return next((why for pattern, why in NOT if re.match(pattern, name)), None)


# ---- in a process that runs tests ----------------------------------------------------------------------------------------


class Absent:
    """Stands for a flag, a decorator or a context of another version of PyTorch: false, and without effect."""

    def __bool__(self):
        return False

    def __call__(self, *arguments):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def stand_in(path):
    """Gives PyTorch's modules what a test file of another version imports from them at its top, so that the rest of it runs."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            module = importlib.import_module(node.module)
            for each in node.names:
                if not hasattr(module, each.name):
                    try:
                        importlib.import_module(f"{node.module}.{each.name}")
                    except ImportError:
                        setattr(module, each.name, Absent())


def cases(module):
    """The tests of a module by CLASS.TEST. Its own `load_tests` insists on being the program that runs."""
    found = {}
    for each in list(vars(module).values()):
        if isinstance(each, type) and issubclass(each, unittest.TestCase) and each.__module__ == module.__name__:
            for name in unittest.defaultTestLoader.getTestCaseNames(each):
                found[f"{each.__name__}.{name}"] = (each, name)
    return found


class Outcome(unittest.TestResult):
    """Of one test. Subtests count as one."""

    def __init__(self):
        super().__init__()
        self.kind, self.said = "passed", ""

    def set(self, kind, said):
        if self.kind in ("passed", "skipped"):
            self.kind, self.said = kind, said

    def addError(self, test, error):
        self.set("failed", self._exc_info_to_string(error, test))

    addFailure = addError

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.addError(test, error)

    def addSkip(self, test, why):
        self.set("skipped", why)

    def addExpectedFailure(self, test, error):
        self.set("passed", "")

    def addUnexpectedSuccess(self, test):
        self.set("failed", "unexpected success")


def work(path, answers):
    """Imports a file of tests, writes their names, then runs each that a line of standard input names."""
    sys.path[:0] = [str(path.parent), str(path.parent.parent)]
    answers = os.fdopen(answers, "w", buffering=1)
    sys.argv = [str(path)]
    from torch.testing._internal import common_utils

    getattr(common_utils, "parse_cmd_line_args", lambda: None)()
    stand_in(path)
    module = importlib.import_module(path.stem)
    tests = cases(module)
    answers.write(json.dumps({"names": list(tests)}) + "\n")
    import torch

    for line in sys.stdin:
        made, name = tests[line.strip()]
        outcome, begun = Outcome(), time.monotonic()
        unittest.TestSuite([made(name)]).run(outcome)
        answers.write(json.dumps([outcome.kind, outcome.said[-3000:], time.monotonic() - begun]) + "\n")
        if outcome.kind == "failed":
            try:
                torch.cuda.synchronize()
            except Exception:
                # The device is lost to this process.
                break


# ---- in the process that compares ----------------------------------------------------------------------------------------


class Worker:
    """A process that runs tests of one file under one allocator."""

    def __init__(self, allocator, path):
        self.allocator, self.path = allocator, path
        answers, theirs = os.pipe()
        command = [sys.executable]
        if allocator == "aquifer":
            command += ["-m", "aquifer_torch", "--limit", "0.9"]
        command += [str(HERE / "pytorchs_own.py"), "--work", str(path), str(theirs)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
        # Its output would be pages: what went wrong comes with the answer.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[theirs], env=environment, text=True, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.answers = os.fdopen(answers)
        # It imports first, and answers with its tests.
        self.test, self.begun = None, time.monotonic()

    def run(self, test):
        self.test, self.begun = test, time.monotonic()
        try:
            self.process.stdin.write(test + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def answer(self):
        """What it has written, or why nothing comes any more."""
        line = self.answers.readline()
        if line:
            return json.loads(line)
        code = self.process.wait()
        return ["crashed", f"the process ended with {code}", time.monotonic() - self.begun]

    def stop(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process.stdin.close()
        self.answers.close()


def run(path, queues, count, until, pattern="."):
    """Runs the tests of each allocator's queue on `count` workers each; a queue of None is all tests of the file that match.
    Returns the outcomes by (allocator, test)."""
    found, workers = {}, []
    for allocator, queue in queues.items():
        wanted = count if queue is None else min(count, len(queue))
        workers += [Worker(allocator, path) for _ in range(wanted)]
    while workers and time.monotonic() < until:
        ready, _, _ = select.select([worker.answers for worker in workers], [], [], 1)
        for worker in list(workers):
            if worker.answers in ready:
                said = worker.answer()
                if worker.test is not None:
                    found[worker.allocator, worker.test] = said
                    worker.test = None
                elif "names" not in said:
                    print(f"{path.name} cannot be imported under {worker.allocator}", flush=True)
                    queues[worker.allocator] = collections.deque()
                elif queues[worker.allocator] is None:
                    queues[worker.allocator] = collections.deque(name for name in said["names"] if re.search(pattern, name))
            elif time.monotonic() - worker.begun > PATIENCE:
                if worker.test is not None:
                    found[worker.allocator, worker.test] = ["timed out", "", time.monotonic() - worker.begun]
                    worker.test = None
                worker.stop()
            else:
                continue
            queue = queues[worker.allocator]
            if not queue:
                worker.stop()
                workers.remove(worker)
            elif worker.process.poll() is not None:
                worker.stop()
                workers[workers.index(worker)] = Worker(worker.allocator, path)
            else:
                worker.run(queue.popleft())
    for worker in workers:
        worker.stop()
        if worker.test is not None:
            queues[worker.allocator].append(worker.test)
    for allocator, queue in queues.items():
        if queue is None:
            print(f"{path.name}: no time is left for it", flush=True)
        for test in queue or ():
            found[allocator, test] = NOT_RUN
    return found


def compare(folder, file, pattern, count, until):
    """Outcomes of a file, as {test: {allocator: [kind, message, seconds]}}."""
    path = folder / file
    found = run(path, dict.fromkeys(ALLOCATORS), count, until, pattern)
    names = sorted({test for _, test in found})
    good = ("passed", "skipped")
    again = [name for name in names if any(found.get((each, name), NOT_RUN)[0] not in good for each in ALLOCATORS)]
    print(f"{file}: {len(names)} tests; {len(again)} are run again, each alone", flush=True)
    for allocator in ALLOCATORS:
        alone = run(path, {allocator: collections.deque(again)}, 1, until)
        found.update({which: outcome for which, outcome in alone.items() if outcome is not NOT_RUN})
    # A test that fails may leave a stream capturing: what differs still runs once more in a new process, behind no other.
    for name in again:
        kinds = [found.get((each, name), NOT_RUN)[0] for each in ALLOCATORS]
        if kinds[0] == "passed" and kinds[1] not in ("passed", "not run") and reason(name) is None:
            found.update(run(path, {"aquifer": collections.deque([name])}, 1, until))
    return {name: {each: found.get((each, name), NOT_RUN) for each in ALLOCATORS} for name in names}


def verdict(name, outcomes):
    native, ours = (outcomes[each][0] for each in ALLOCATORS)
    if "not run" in (native, ours):
        return "not run"
    if native == "skipped":
        return "skipped natively"
    if native != "passed":
        return "fails natively"
    if ours == "passed":
        return "passes in both"
    return "fails here" if reason(name) is None else "does not apply"


def show(found):
    """Prints what differs and the table. Returns whether enough passes."""
    columns = ("passes in both", "fails here", "does not apply", "fails natively", "skipped natively", "not run")
    sums = {file: collections.Counter(verdict(*each) for each in tests.items()) for file, tests in found.items()}
    for file, tests in found.items():
        for name, outcomes in tests.items():
            why = verdict(name, outcomes)
            kind, said, _ = outcomes["aquifer"]
            # PyTorch writes advice behind an error.
            last = (re.findall(r"(?m)^[\w.]+(?:Error|Exception): .*", said) or said.strip().splitlines() or [""])[-1][:160]
            if why == "fails here":
                print(f"fails here       {name}: {kind}: {last}")
            elif why == "does not apply":
                print(f"does not apply   {name}: {reason(name)}: {last}")
            elif why == "passes in both" and reason(name) is not None:
                print(f"applies after all {name}: {reason(name)}")
    print(f"| file | {' | '.join(columns)} | of what passes natively |\n|---|{'---|' * (len(columns) + 1)}")
    total = collections.Counter()
    for counts in sums.values():
        total += counts
    for file, counts in {**sums, "all": total}.items():
        natively = sum(counts[column] for column in columns[:3])
        part = f"{100 * counts[columns[0]] / natively:.1f} %" if natively else "-"
        print(f"| {file} | " + " | ".join(str(counts[column]) for column in columns) + f" | {part} |")
    applicable = total["passes in both"] + total["fails here"]
    return applicable > 0 and total["passes in both"] >= 0.95 * applicable


def main(arguments):
    if arguments[:1] == ["--work"]:
        return work(pathlib.Path(arguments[1]), int(arguments[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("-k", dest="pattern")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--show", type=pathlib.Path)
    asked = parser.parse_args(arguments)
    if asked.show:
        return 0 if show(json.loads(asked.show.read_text())) else 1
    if asked.folder is None:
        parser.error("the folder `test` of PyTorch's sources, or --show FILE")
    found, until = {}, time.monotonic() + asked.seconds
    for file in asked.files or FILES:
        found[file] = compare(asked.folder.resolve(), file, asked.pattern or FILES.get(file, "."), asked.workers, until)
        if asked.json:
            asked.json.write_text(json.dumps(found))
    return 0 if show(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
