"""What must hold of aquifer_torch.nixl for CUDA tensors, between two processes on one GPU.

    python python/tests/nixl_on_gpu.py

Needs PyTorch, NIXL and a GPU. Prints `skipped: ...` where one is missing, and fails with AQUIFER_REQUIRE_GPU=1.
"""

import multiprocessing
import os
import pathlib
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
MIB = 1 << 20
PATIENCE = 60.0
SIZE = 64 * MIB


def missing():
    try:
        import nixl_cu13  # noqa: F401
        import torch
    except ImportError as error:
        return str(error)
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA device"


def start(name):
    """Returns torch on aquifer, and an agent."""
    import aquifer_torch
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    aquifer_torch.install()
    import torch

    return torch, nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def content(torch, seed):
    return (torch.arange(SIZE // 8, device="cuda", dtype=torch.int64) * 7919 + seed).view(torch.uint8)


def location(tensor):
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.get_device()


def serve(connection):
    """The other process: it has a tensor to be read and one to be written, and sees what was written."""
    from aquifer_torch.nixl import Registration

    torch, agent = start("server")
    whole = torch.empty(2 * SIZE + 1000 * 512, device="cuda", dtype=torch.uint8)
    # Parts of one block, which is registered as a whole.
    source, target = whole[512 : 512 + SIZE], whole[1024 + SIZE : 1024 + 2 * SIZE]
    source.copy_(content(torch, 1))
    target.zero_()
    torch.cuda.synchronize()
    registration = Registration(agent, source, target)
    connection.send((agent.get_agent_metadata(), location(source), location(target)))
    connection.recv()
    connection.send(bool((target == content(torch, 2)).all()))
    registration.release()
    agent = None


def transfer(agent, direction, local, remote, peer):
    handle = agent.initialize_xfer(direction, agent.get_xfer_descs([location(local)], "VRAM"), agent.get_xfer_descs([remote], "VRAM"), peer, b"done")
    begun, state = time.monotonic(), agent.transfer(handle)
    while state not in ("DONE", "ERR"):
        if time.monotonic() - begun > PATIENCE:
            raise AssertionError(f"not within {PATIENCE} s: {state}")
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    if state == "ERR":
        raise AssertionError("the transfer has failed")
    return SIZE / (time.monotonic() - begun) / 1e9


class Tensors(unittest.TestCase):
    def test_two_processes_read_and_write_each_others_tensors(self):
        from aquifer_torch.nixl import Registration, block_of

        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
        process.start()
        self.addCleanup(process.join)
        self.addCleanup(process.terminate)
        torch, agent = start("client")
        read, written = torch.zeros(SIZE, device="cuda", dtype=torch.uint8), content(torch, 2)
        # One registration of a block serves all tensors in it.
        self.assertEqual(block_of(read.data_ptr() + 4096), block_of(read.data_ptr()))
        registration = Registration(agent, read, written)
        torch.cuda.synchronize()
        self.assertTrue(ours.poll(PATIENCE), "the other process has no agent")
        metadata, source, target = ours.recv()
        peer = agent.add_remote_agent(metadata)
        rates = [transfer(agent, "READ", read, source, peer) for _ in range(4)]
        self.assertTrue(bool((read == content(torch, 1)).all()))
        wrote = [transfer(agent, "WRITE", written, target, peer) for _ in range(4)]
        ours.send("done")
        self.assertTrue(ours.poll(PATIENCE) and ours.recv(), "what was written is not what is there")
        registration.release()
        print(f"NIXL reads tensors at {max(rates):.1f} GB/s, writes {max(wrote):.1f}", file=sys.stderr)


if __name__ == "__main__":
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        sys.exit(1 if os.environ.get("AQUIFER_REQUIRE_GPU") == "1" else 0)
    unittest.main()
