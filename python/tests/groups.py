"""Groups of tests on a GPU: each is a process of its own, since a process has one allocator."""

import contextlib

import aquifer_torch

MIB = 1 << 20
GROUPS = {}


def of(*groups):
    """Enters a test in each of the groups."""

    def enter(test):
        for group in groups:
            GROUPS.setdefault(group, []).append(test)
        return test

    return enter


@contextlib.contextmanager
def raises(kind, *words):
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in: {error}"
        return
    raise AssertionError(f"nothing was raised; expected {kind}")


def live():
    return aquifer_torch.statistics(0)["aquifer.requested"]


def rest():
    """Waits for the device, and gives what is cached back to it."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def together(threads):
    """Starts these threads, and waits for them."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
