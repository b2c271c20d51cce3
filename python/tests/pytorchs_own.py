"""Runs PyTorch's own CUDA tests over aquifer, all of them that apply to a pluggable allocator.

    AQUIFER_LIB=... python python/tests/pytorchs_own.py PYTORCH/test/test_cuda.py          runs them, on a GPU
    python python/tests/pytorchs_own.py --list PYTORCH/test/test_cuda.py                   lists them; needs neither PyTorch nor a GPU

No installed PyTorch has that file: take it from the sources of the version that is installed. What those tests assert of an
allocator `on_gpu.py` holds too, in its own words, and needs no such file.
"""

import ast
import importlib.util
import pathlib
import re
import sys
import unittest

# The first that matches CLASS.TEST says why it does not apply.
NOT = [
    (r"TestCudaMallocAsync\.test_(max_split_expandable|garbage_collect_expandable|allocator_settings|cachingAllocator_raw_alloc)",
     "settings of the native allocator"),
    (r"TestCudaMallocAsync\.test_raises_oom_max_split_size_mb_setting_True", "settings of the native allocator"),
    (r"TestCuda\.test_(memory_stats|cublas_workspace_explicit_allocation)$", "accumulated bytes are not counted"),
    (r"TestCuda\.test_(graph_memory_stats_and_use_result_after_destroy_graph|graph_two_successive|memory_stats_of_multiple_generators_and_graphs)",
     "sizes and counts of the native allocator's segments"),
    (r"TestCuda\.test_graph_(concurrent_replay|three_successive)", "expects the wrong results of a race between graphs of one pool"),
    (r"TestCuda\.test_record_stream$", "expects the very block as soon as its use is done: ours records no event for a free, and looks when memory is wanted"),
    (r"TestBlockStateAbsorption\.", "looks at the segments of the native allocator"),
    (r"TestMemPool\.test_graph_capture_reclaim", "a setting of the native allocator: ours reuses such a block after the capture"),
    (r"TestMemPool\.test_(mempool_with_allocator|mempool_empty_cache_inactive|tensor_delete_after_allocator_delete)",
     "an allocator for a part, which needs the native one underneath: there on_gpu.py's `mem_pool` stands for them"),
    (r"TestMemPool\.test_(mempool_limited_memory_with_allocator|deleted_mempool_not_used_on_oom)",
     "an allocator for a part, which needs the native one underneath: there on_gpu.py's `mem_pool` stands for them"),
    (r"TestMemPool\.test_(mempool_empty_cache|mempool_emptycache_multithread|nested_mempool|mempool_ctx_multithread)$",
     "looks at a snapshot; on_gpu.py's `pools` asserts the rest of it"),
    (r"TestMemPool\.test_mempool_(no_split|expandable)", "segments of the native allocator"),
]  # fmt: skip


def reason(name):
    """Why a test, as CLASS.TEST, does not apply; None if it does."""
    return next((why for pattern, why in NOT if re.match(pattern, name)), None)


def written(path):
    """CLASS.TEST of every test in a file, in its order."""
    classes = (node for node in ast.parse(pathlib.Path(path).read_text()).body if isinstance(node, ast.ClassDef))
    for each in classes:
        for node in each.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                yield f"{each.name}.{node.name}"


def applying(module):
    """The tests of a module that apply. Its own `load_tests` insists on being the program that runs."""
    for each in vars(module).values():
        if isinstance(each, type) and issubclass(each, unittest.TestCase) and each.__module__ == module.__name__:
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(each):
                if reason(f"{each.__name__}.{test.id().split('.')[-1]}") is None:
                    yield test


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "--list":
        for name in written(arguments[1]):
            why = reason(name)
            print(f"applies  {name}" if why is None else f"not      {name}: {why}")
        return 0
    if len(arguments) != 1:
        print(__doc__)
        return 2
    path = pathlib.Path(arguments[0]).resolve()
    sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent), str(path.parent)]
    import aquifer_torch

    # Before the file is loaded, which asks for the device.
    aquifer_torch.install(limit=0.9)
    spec = importlib.util.spec_from_file_location("test_cuda", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_cuda"] = module
    spec.loader.exec_module(module)
    suite = unittest.TestSuite(applying(module))
    return 0 if unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
