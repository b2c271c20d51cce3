"""What must hold of aquifer_ray, on several nodes of Ray on one machine whose devices are names in ledgers.

    AQUIFER_LIB=... python python/tests/ray_on_sim.py

Needs Ray and NumPy: ci/ray installs them.
"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
# Of the nodes' processes, which inherit it.
os.environ["PYTHONPATH"] = str(HERE.parent)
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.experimental.rdt import register_tensor_transport  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy  # noqa: E402

import aquifer_ray  # noqa: E402
from aquifer_ray import MIB, Memory, needs  # noqa: E402
from aquifer_ray.transport import HandleTransport  # noqa: E402
from aquifer_torch.ledger import Member, figures  # noqa: E402

STORE = 80 << 20
PATIENCE = 30.0


def wait_for(reached, what):
    begun = time.monotonic()
    while not reached():
        if time.monotonic() - begun > PATIENCE:
            raise AssertionError(f"not within {PATIENCE} s: {what()}")
        time.sleep(0.01)


def on(node_id):
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


@ray.remote
class Holder:
    """An actor that leases, and keeps what it has."""

    def __init__(self):
        self.leases = []

    def lease(self, size=None, **terms):
        self.leases.append(aquifer_ray.lease(size, **terms))
        return self.leases[-1].memory.name

    def release(self):
        self.leases.pop().release()

    def process(self):
        return os.getpid()


@ray.remote(num_cpus=0.25)
def lease_and_look(seed, folder, size):
    """Leases, sees that no more is claimed than there is, and is killed now and then."""
    drawn = random.Random(seed)
    with aquifer_ray.lease(wait=PATIENCE) as lease:
        assert lease.size == size, lease.size
        seen = figures(lease.memory.name, folder)
        assert size <= seen["claimed"] <= seen["capacity"], seen
        assert any(member["process"] == os.getpid() and member["claimed"] == size for member in seen["members"]), seen
        time.sleep(drawn.random() * 0.05)
        # A task that is killed is started again, in another process.
        if drawn.random() < 0.3 and not os.path.exists(f"{folder}/killed-{seed}"):
            open(f"{folder}/killed-{seed}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return lease.memory.name


class SimTensor:
    """Memory of the process's simulated device, which is host memory."""

    def __init__(self, size):
        import ctypes

        import aquifer_torch

        self.library = aquifer_torch.Library()
        memory = ctypes.c_void_p()
        self.library.aq_torch_malloc(size, 0, None, ctypes.byref(memory))
        self.address, self.size, self.device = memory.value, size, "cuda"

    def __del__(self):
        self.library.aq_torch_free(self.address, 0, -1, None)

    def write(self, content):
        import ctypes

        ctypes.memmove(self.address, content, len(content))
        return self

    def read(self):
        import ctypes

        return ctypes.string_at(self.address, self.size)


class SimTensors:
    """What TorchTensors does, for the above."""

    device_type = "cuda"

    @staticmethod
    def describe(tensor):
        return tensor.address, tensor.size, (tensor.size,), "u1"

    @staticmethod
    def device():
        return 0

    @staticmethod
    def copy(address, size, shape, dtype, target):
        import ctypes

        return SimTensor(size).write(ctypes.string_at(address, size))


class SimTransport(HandleTransport):
    tensors = SimTensors


# Before the actors that use it.
register_tensor_transport("AQUIFER", ["cuda"], SimTransport, SimTensor)


@ray.remote(num_cpus=0)
class Peer:
    """An actor with a simulated device, that sends and receives."""

    def __init__(self):
        import aquifer_torch

        self.library = aquifer_torch.setup(driver=1, sim_memory=64 * MIB)

    @ray.method(tensor_transport="AQUIFER")
    def send(self, contents):
        return [SimTensor(len(content)).write(content) for content in contents]

    def receive(self, tensors):
        return [tensor.read() for tensor in tensors]

    def live(self):
        return self.library.stats(0)["live"]

    def process(self):
        return os.getpid()


class Clustered(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        at = tempfile.TemporaryDirectory()
        cls.addClassCleanup(at.cleanup)
        cls.folder = os.path.join(at.name, "ledgers")
        # A node that is killed is found dead after three seconds.
        checks = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 10}
        head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False, "_system_config": checks}
        cls.cluster = Cluster(initialize_head=True, head_node_args=head)
        cls.addClassCleanup(cls.cluster.shutdown)
        pair = cls.cluster.add_node(num_cpus=4, object_store_memory=STORE, resources={"aquifer_gpu_mem": 200}, labels={"aquifer-gpus": "2"})
        one = cls.cluster.add_node(num_cpus=4, object_store_memory=STORE, resources={"aquifer_gpu_mem": 300, "aquifer_pinned_mem": 64})
        ray.init(address=cls.cluster.address, log_to_driver=False)
        cls.addClassCleanup(ray.shutdown)
        cls.pair, cls.one = pair.node_id, one.node_id
        memories = {
            cls.pair: [cls.memory("left", 100), cls.memory("right", 100)],
            cls.one: [cls.memory("whole", 300), Memory("host", 64 * MIB, aquifer_ray.PINNED_MEMORY, cls.folder)],
        }
        aquifer_ray.start(memories)

    @classmethod
    def memory(cls, name, units):
        return Memory(name, units * MIB, folder=cls.folder)

    def claimed(self, name):
        return figures(name, self.folder)["claimed"] // MIB

    def tearDown(self):
        """The accounts of Ray and of the ledgers agree at the end: nothing is in use in either."""

        def unused():
            return all(account.assigned == account.leased == 0 for account in aquifer_ray.accounts())

        wait_for(unused, aquifer_ray.accounts)

    def holder(self, size, node_id=None, **options):
        strategy = {"scheduling_strategy": on(node_id)} if node_id else {}
        return Holder.options(num_cpus=0, **needs(size * MIB), **strategy, **options).remote()

    def test_tasks_lease_what_ray_assigns_and_some_are_killed(self):
        tasks = []
        for seed in range(24):
            size = random.Random(-seed).choice([20, 40, 70]) * MIB
            tasks.append(lease_and_look.options(max_retries=5, **needs(size)).remote(seed, self.folder, size))
        self.assertEqual(len(ray.get(tasks, timeout=60)), 24)
        self.assertGreater(sum(name.startswith("killed-") for name in os.listdir(self.folder)), 2)

    def test_a_lease_ends_with_a_killed_process_at_once(self):
        holder = self.holder(80, self.pair)
        name = ray.get(holder.lease.remote())
        self.assertEqual(self.claimed(name), 80)
        accounts = {account.node_id: account for account in aquifer_ray.accounts()}
        self.assertEqual(accounts[self.pair].leased, 80 * MIB)
        self.assertTrue(accounts[self.pair].agrees)
        process = ray.get(holder.process.remote())
        os.kill(process, signal.SIGKILL)
        killed = time.monotonic()
        wait_for(lambda: self.claimed(name) == 0, lambda: figures(name, self.folder))
        self.assertLess(time.monotonic() - killed, 5)

    def test_pinned_memory_is_leased_beside_a_device(self):
        holder = Holder.options(num_cpus=0, **needs(10 * MIB, pinned=40 * MIB)).remote()
        names = [ray.get(holder.lease.remote(resource=resource)) for resource in needs(1, 1)["resources"]]
        self.assertEqual((names, self.claimed("whole"), self.claimed("host")), (["whole", "host"], 10, 40))
        accounts = {account.resource: account for account in aquifer_ray.accounts() if account.node_id == self.one}
        self.assertEqual(accounts[aquifer_ray.PINNED_MEMORY].leased, 40 * MIB)

    def test_a_worker_that_dies_while_it_waits_delays_others_briefly(self):
        holders = [self.holder(60, self.pair) for _ in range(2)]
        ray.get([holder.lease.remote() for holder in holders])
        first, second = self.holder(50, self.pair), self.holder(30, self.pair)
        process = ray.get(first.process.remote())
        waiting = first.lease.remote()
        self.assertEqual(ray.wait([waiting], timeout=0.5)[0], [])
        os.kill(process, signal.SIGKILL)
        begun = time.monotonic()
        # Each device has room for 30, and one of them is kept for the dead worker.
        third = self.holder(30, self.pair)
        names = ray.get([second.lease.remote(), third.lease.remote()], timeout=PATIENCE)
        self.assertEqual(set(names), {"left", "right"})
        self.assertLess(time.monotonic() - begun, 15)

    def test_an_actor_that_leaks_gives_all_back_at_its_end(self):
        holder = self.holder(90, self.one)
        for _ in range(9):
            ray.get(holder.lease.remote(10 * MIB))
        self.assertEqual(self.claimed("whole"), 90)
        with self.assertRaises(aquifer_ray.NotAssigned):
            ray.get(holder.lease.remote(1))
        ray.get(holder.release.remote())
        self.assertEqual(self.claimed("whole"), 80)
        ray.get(holder.lease.remote(wait=0))
        ray.kill(holder)
        wait_for(lambda: self.claimed("whole") == 0, lambda: figures("whole", self.folder))

    def test_a_task_that_leaks_is_found_by_the_next_lease_of_its_worker(self):
        @ray.remote(num_cpus=4, scheduling_strategy=on(self.pair), **needs(50 * MIB))
        def leak():
            import warnings

            import aquifer_ray.leases as kept

            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                kept.leaked = aquifer_ray.lease()
            return os.getpid(), [str(warning.message) for warning in heard]

        @ray.remote(num_cpus=4, scheduling_strategy=on(self.pair))
        def end():
            import aquifer_ray.leases as kept

            kept.leaked.release()
            return os.getpid()

        first, nothing = ray.get(leak.remote())
        again, heard = ray.get(leak.remote())
        self.assertEqual((again, nothing, len(heard)), (first, [], 1), "both ran in one worker")
        self.assertIn("after its task had ended", heard[0])
        self.assertEqual(self.claimed("left") + self.claimed("right"), 50)
        self.assertEqual(ray.get(end.remote()), first)

    def test_only_what_ray_has_assigned_is_leased(self):
        @ray.remote(num_cpus=0)
        def attempt(size):
            try:
                return aquifer_ray.lease(size, wait=1).size
            except Exception as error:
                return type(error).__name__, str(error)

        self.assertEqual(ray.get(attempt.remote(1))[0], "NotAssigned")
        self.assertEqual(ray.get(attempt.remote(None))[0], "NotAssigned")
        declared = attempt.options(**needs(8 * MIB))
        self.assertEqual(ray.get(declared.remote(8 * MIB + 1))[0], "NotAssigned")
        self.assertEqual(ray.get(declared.remote(None)), 8 * MIB)
        # Ray counts the bytes of a node: those of one device are fewer.
        large = attempt.options(scheduling_strategy=on(self.pair), **needs(150 * MIB))
        name, text = ray.get(large.remote(None))
        self.assertEqual(name, "NoMemory")
        self.assertIn("150 MiB do not fit in memories of 100, 100 MiB", text)

    def test_a_lease_that_fits_on_no_device_waits_for_one(self):
        holders = [self.holder(60, self.pair) for _ in range(3)]
        self.assertEqual({ray.get(holder.lease.remote()) for holder in holders[:2]}, {"left", "right"})
        with self.assertRaises(aquifer_ray.LeaseRefused) as refused:
            ray.get(holders[2].lease.remote(wait=0.3))
        self.assertRegex(str(refused.exception), "left: 40 of 100 MiB can be leased\n.*holds 60 MiB, 60 guaranteed")
        waiting = holders[2].lease.remote()
        self.assertEqual(ray.wait([waiting], timeout=0.3)[0], [])
        ray.get(holders[1].release.remote())
        self.assertIn(ray.get(waiting, timeout=PATIENCE), ("left", "right"))

    def test_a_model_gets_a_device_for_each_of_its_bundles(self):
        group = aquifer_ray.placement_group([60 * MIB, 70 * MIB])
        ray.get(group.ready(), timeout=PATIENCE)
        holders = []
        for number, size in enumerate((60, 70)):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            options = {"scheduling_strategy": strategy, "max_restarts": 1, "max_task_retries": 1}
            holders.append(Holder.options(num_cpus=0, **needs(size * MIB), **options).remote())
        names = ray.get([holder.lease.remote() for holder in holders])
        self.assertEqual(set(names), {"left", "right"})
        # A second lease in a bundle is on its device, too.
        ray.get(holders[0].release.remote())
        self.assertEqual([ray.get(holders[0].lease.remote(30 * MIB)) for _ in range(2)], [names[0]] * 2)
        # A bundle that starts again is where it was.
        os.kill(ray.get(holders[1].process.remote()), signal.SIGKILL)
        wait_for(lambda: self.claimed(names[1]) == 0, lambda: figures(names[1], self.folder))
        self.assertEqual(ray.get(holders[1].lease.remote(), timeout=PATIENCE), names[1])
        aquifer_ray.remove_placement_group(group)
        with self.assertRaisesRegex(aquifer_ray.NoMemory, "no node has a label aquifer-gpus=3 or more"):
            aquifer_ray.placement_group([MIB] * 3)

    def test_the_death_of_the_nodes_actor_ends_no_lease(self):
        holder, later = self.holder(50, self.one), self.holder(50, self.one)
        ray.get(holder.lease.remote())
        actor = aquifer_ray.node_actor(self.one)
        os.kill(ray._private.state.actors(actor._actor_id.hex())["Pid"], signal.SIGKILL)
        self.assertEqual(self.claimed("whole"), 50)
        self.assertEqual(ray.get(later.lease.remote(), timeout=PATIENCE), "whole")
        self.assertEqual(self.claimed("whole"), 100)

    def test_processes_beside_ray_are_never_overrun(self):
        with Member("left", 100 * MIB, folder=self.folder, guarantee=50 * MIB) as beside:
            beside.claim(100 * MIB)
            holders = [self.holder(60, self.pair) for _ in range(2)]
            # What is borrowed on one device is asked back only when the other is full.
            self.assertEqual(ray.get(holders[0].lease.remote()), "right")
            with self.assertRaises(aquifer_ray.LeaseRefused):
                ray.get(holders[1].lease.remote(wait=0.3))
            waiting = holders[1].lease.remote(50 * MIB)
            wait_for(lambda: beside.owed == 50 * MIB, lambda: beside.owed)
            beside.release(50 * MIB)
            self.assertEqual(ray.get(waiting, timeout=PATIENCE), "left")
            self.assertEqual(self.claimed("left"), 100)

    def test_the_leases_of_a_node_that_dies_end_with_it(self):
        node = self.cluster.add_node(num_cpus=1, object_store_memory=STORE, resources={"aquifer_gpu_mem": 400})
        aquifer_ray.start({node.node_id: [self.memory("lost", 400)]})
        holder = self.holder(350)
        self.assertEqual(ray.get(holder.lease.remote(), timeout=PATIENCE), "lost")
        self.assertEqual(self.claimed("lost"), 350)
        self.cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: self.claimed("lost") == 0, lambda: figures("lost", self.folder))
        wait_for(lambda: ray.cluster_resources()["aquifer_gpu_mem"] == 500, ray.cluster_resources)

    def test_tensors_go_from_actor_to_actor_by_their_handles(self):
        sender, receiver = (Peer.options(scheduling_strategy=on(self.pair)).remote() for _ in range(2))
        contents = [bytes([seed]) * size for seed, size in ((1, 3 * MIB + 7), (2, 4096), (3, 5))]
        sent = sender.send.remote(contents)
        for _ in range(2):
            self.assertEqual(ray.get(receiver.receive.remote(sent), timeout=PATIENCE), contents)
        self.assertGreater(ray.get(sender.live.remote()), 3 * MIB)
        # What was received is the receiver's own, and what was sent is freed with Ray's last reference.
        del sent
        wait_for(lambda: ray.get([sender.live.remote(), receiver.live.remote()]) == [0, 0], lambda: ray.get(sender.live.remote()))
        far = Peer.options(scheduling_strategy=on(self.one)).remote()
        with self.assertRaisesRegex(Exception, "sends tensors within a node"):
            ray.get(far.receive.remote(sender.send.remote(contents)), timeout=PATIENCE)

    def test_arrays_arrive_in_pinned_memory(self):
        import numpy

        @ray.remote(num_cpus=0)
        def receive(array, expected):
            import ctypes

            import aquifer_torch
            from aquifer_torch.ledger import library

            is_pinned = ctypes.c_int(-1)
            # AQ_ERROR_FOREIGN_BLOCK for what is not of the pool.
            library().aq_pinned_is_pinned(array.ctypes.data, ctypes.byref(is_pinned))
            live = aquifer_torch.Library().pinned_stats(0)["live"]
            assert (array == expected).all() and array.dtype == expected.dtype, array
            size = array.nbytes
            del array
            return is_pinned.value >= 0, live >= size

        for array in (numpy.arange(1 << 18, dtype="float64").reshape(512, -1)[::2], numpy.zeros((0, 3), "int8")):
            sent = ray.put(aquifer_ray.arrives_pinned(array))
            self.assertEqual(ray.get(receive.remote(sent, array)), (True, True))
        with self.assertRaises(TypeError):
            aquifer_ray.arrives_pinned(numpy.array([object()]))


if __name__ == "__main__":
    unittest.main()
