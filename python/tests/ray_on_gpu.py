"""What must hold of aquifer_ray's transport of CUDA tensors, between two actors on one GPU.

    python python/tests/ray_on_gpu.py

Needs PyTorch, Ray and a GPU. Prints `skipped: ...` where one is missing, and fails with AQUIFER_REQUIRE_GPU=1.
"""

import os
import pathlib
import sys
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]
from skip import skip  # noqa: E402

# Of the actors' processes, which inherit it.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
PATIENCE = 60.0


def missing():
    try:
        import ray  # noqa: F401
        import torch
    except ImportError as error:
        return str(error)
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA device"


def peer_class(ray, transport):
    """Returns the class of the actors."""

    @ray.remote(num_gpus=0.4)
    class Peer:
        """An actor on the device, whose PyTorch has its memory from aquifer."""

        def __init__(self):
            import aquifer_torch

            aquifer_torch.install()
            import torch

            self.torch, self.kept = torch, []
            torch.zeros(1, device="cuda")

        def made(self, seed):
            whole = (self.torch.arange(3 << 20, device="cuda", dtype=self.torch.int64) * 7919 + seed).float()
            # Another type, a part of a block, and one without bytes.
            return [whole.reshape(3, -1), whole[1000:5000].bfloat16(), whole[:0]]

        @ray.method(tensor_transport=transport)
        def send(self, seed):
            return self.made(seed)

        @ray.method(tensor_transport=transport)
        def send_columns(self):
            return [self.torch.zeros(8, 8, device="cuda").t()[1:]]

        def receive(self, tensors, seed):
            expected = self.made(seed)
            return [bool(self.torch.equal(one, other)) and one.dtype == other.dtype for one, other in zip(tensors, expected)]

        def live(self):
            import aquifer_torch

            self.torch.cuda.synchronize()
            return aquifer_torch.statistics()["allocated_bytes.all.current"]

    return Peer


class Tensors(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import aquifer_ray
        import ray

        ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
        cls.addClassCleanup(ray.shutdown)
        peer = peer_class(ray, aquifer_ray.register_transport())
        # Of all tests: an actor keeps its part of the GPU as long as anything refers to it.
        cls.ray, cls.sender, cls.receiver = ray, peer.remote(), peer.remote()

    def test_tensors_arrive_as_they_were_and_leave_nothing_behind(self):
        sender, receiver = self.sender, self.receiver
        before = self.ray.get([sender.live.remote(), receiver.live.remote()], timeout=PATIENCE)
        begun = time.monotonic()
        for seed in range(10):
            sent = sender.send.remote(seed)
            self.assertEqual(self.ray.get(receiver.receive.remote(sent, seed), timeout=PATIENCE), [True] * 3)
            del sent
        took = time.monotonic() - begun
        while self.ray.get([sender.live.remote(), receiver.live.remote()], timeout=PATIENCE) != before:
            self.assertLess(time.monotonic() - begun, PATIENCE, "memory of sent tensors stays")
            time.sleep(0.05)
        print(f"{took / 10 * 1e3:.0f} ms to send three tensors of 12 MiB, to copy and to compare them", file=sys.stderr)

    def test_a_tensor_with_gaps_is_refused(self):
        sender, receiver = self.sender, self.receiver
        with self.assertRaises(Exception) as refused:
            self.ray.get(receiver.receive.remote(sender.send_columns.remote(), 0), timeout=PATIENCE)
        self.assertIn("contiguous", str(refused.exception))


if __name__ == "__main__":
    reason = missing()
    if reason:
        skip(reason)
    unittest.main()
