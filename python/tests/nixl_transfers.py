"""What the tests of NIXL in host memory and on a GPU have in common."""

import time

PATIENCE = 60.0


def transfer(agent, direction, local, remote, peer):
    """Performs a transfer between descriptors, and returns its seconds. AssertionError if it fails."""
    handle = agent.initialize_xfer(direction, local, remote, peer, b"done")
    begun, state = time.monotonic(), agent.transfer(handle)
    while state not in ("DONE", "ERR"):
        if time.monotonic() - begun > PATIENCE:
            raise AssertionError(f"not within {PATIENCE} s: {state}")
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    if state == "ERR":
        raise AssertionError("the transfer has failed")
    return time.monotonic() - begun
