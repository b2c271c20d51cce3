"""Groups of tests on a GPU: each is a process of its own, since a process has one allocator."""

import contextlib

import aquifer_torch

MIB = 1 << 20
GROUPS = {}


def of(group):
    """Enters a test in a group."""

    def enter(test):
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
