"""Three servers share the simulated GPUs of two nodes of Ray, which places them by bytes. One is killed, and its neighbour has
its memory: the server of examples/shared_gpu.rs, as an actor. Ray and two nodes are started here, on this machine."""

import ctypes
import os
import pathlib
import signal
import sys
import tempfile
import time

PACKAGES = str(pathlib.Path(__file__).resolve().parent.parent)
sys.path.insert(0, PACKAGES)
# Of the processes that Ray starts.
os.environ["PYTHONPATH"] = PACKAGES
from skip import skip  # noqa: E402

try:
    import ray
    from ray.cluster_utils import Cluster
except ImportError:
    skip("Ray is not installed")

import aquifer_ray  # noqa: E402
import aquifer_torch  # noqa: E402
from aquifer_ray import MIB, Memory, needs  # noqa: E402
from aquifer_torch.ledger import figures  # noqa: E402

CAPACITY, STORE, PATIENCE = 96 * MIB, 80 << 20, 60


@ray.remote(num_cpus=0)
class Server:
    """Its sequences grow as far as there is memory, then it drops the oldest."""

    def __init__(self):
        # What Ray has assigned is guaranteed to this process, and the rest of the device is there to borrow.
        self.library = aquifer_ray.share(driver=1, sim_memory=CAPACITY)
        self.sequences = []

    def serve(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            block = ctypes.c_void_p()
            try:
                self.library.aq_torch_malloc(4 * MIB, 0, None, block)
                self.sequences.append(block)
            except aquifer_torch.AquiferError as error:
                if error.name != "AQ_ERROR_OUT_OF_MEMORY":
                    raise
                for oldest in self.sequences[:4]:
                    self.library.aq_torch_free(oldest, 0, -1, None)
                del self.sequences[:4]
            time.sleep(0.001)

    def whereabouts(self):
        return ray.get_runtime_context().get_node_id(), os.getpid()


def wait_for(folder, reached):
    """Waits until the ledger of a node shows what `reached` tests."""
    begun = time.monotonic()
    while True:
        shown = figures("simulated-0", folder)
        if shown["claimed"] > CAPACITY:
            sys.exit(f"more is claimed than there is: {shown}")
        if reached(shown):
            return shown
        if time.monotonic() - begun > PATIENCE:
            sys.exit(f"not within {PATIENCE} s: {shown}")
        time.sleep(0.001)


def run(cluster, at):
    memories = {}
    for name in ("first", "second"):
        node = cluster.add_node(num_cpus=2, object_store_memory=STORE, resources={aquifer_ray.GPU_MEMORY: CAPACITY // MIB})
        memories[node.node_id] = [Memory("simulated-0", CAPACITY, folder=f"{at}/{name}")]
    ray.init(address=cluster.address, log_to_driver=False)
    aquifer_ray.start(memories)
    servers = [Server.options(**needs(size * MIB)).remote() for size in (56, 70, 40)]
    by_node = {}
    for server in servers:
        node_id, process = ray.get(server.whereabouts.remote())
        by_node.setdefault(node_id, []).append((server, process))
        server.serve.remote(PATIENCE)
    # 56 and 70 MiB are more than one node has, and 40 go with 56.
    (shared,) = (node_id for node_id, found in by_node.items() if len(found) == 2)
    folder, ((_, first), (other, second)) = memories[shared][0].folder, by_node[shared]

    def full(shown):
        return len(shown["members"]) == 2 and min(member["claimed"] for member in shown["members"]) >= 16 * MIB and shown["free"] < 8 * MIB

    for member in wait_for(folder, full)["members"]:
        print(f"process {member['process']} holds {member['claimed'] / MIB:.0f} MiB, {member['guarantee'] / MIB:.0f} guaranteed")
    os.kill(first, signal.SIGKILL)
    died = time.monotonic()
    wait_for(folder, lambda shown: [member["process"] for member in shown["members"]] == [second])
    gone = time.monotonic()
    held = wait_for(folder, lambda shown: shown["claimed"] >= 88 * MIB)["claimed"]
    now = time.monotonic()
    print(f"process {first} is killed; its claim is gone {(gone - died) * 1e3:.0f} ms later,")
    print(f"and {(now - died) * 1e3:.0f} ms later process {second} holds {held / MIB:.0f} MiB")


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False})
try:
    with tempfile.TemporaryDirectory() as at:
        run(cluster, at)
finally:
    ray.shutdown()
    cluster.shutdown()
