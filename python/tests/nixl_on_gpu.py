"""What must hold of aquifer_torch.nixl for CUDA tensors, between two processes on one GPU.

    python python/tests/nixl_on_gpu.py

Needs PyTorch, NIXL and a GPU. Prints `skipped: ...` where one is missing, and fails with AQUIFER_REQUIRE_GPU=1.
"""

import multiprocessing
import pathlib
import sys
import unittest

PYTHON = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PYTHON), str(PYTHON / "examples")]
from nixl_transfers import PATIENCE, transfer  # noqa: E402
from skip import skip  # noqa: E402

MIB = 1 << 20
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


def content(torch, seed, size=SIZE):
    return (torch.arange(size // 8, device="cuda", dtype=torch.int64) * 7919 + seed).view(torch.uint8)


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


def rate(agent, direction, local, remote, peer):
    """Performs a transfer between a tensor and the location of another, and returns its GB/s."""
    descriptors = (agent.get_xfer_descs([at], "VRAM") for at in (location(local), remote))
    return remote[1] / transfer(agent, direction, *descriptors, peer) / 1e9


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
        rates = [rate(agent, "READ", read, source, peer) for _ in range(4)]
        self.assertTrue(bool((read == content(torch, 1)).all()))
        wrote = [rate(agent, "WRITE", written, target, peer) for _ in range(4)]
        ours.send("done")
        self.assertTrue(ours.poll(PATIENCE) and ours.recv(), "what was written is not what is there")
        registration.release()
        print(f"NIXL reads tensors at {max(rates):.1f} GB/s, writes {max(wrote):.1f}", file=sys.stderr)


if __name__ == "__main__":
    reason = missing()
    if reason:
        skip(reason)
    unittest.main()
