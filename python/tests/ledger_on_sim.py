"""What must hold of aquifer_torch.ledger: memberships, refusals, waits, and processes that are killed."""

import gc
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

from aquifer_torch import AquiferError
from aquifer_torch.ledger import ClaimRefused, GuaranteeRefused, Member, figures, names

PACKAGE = pathlib.Path(__file__).resolve().parent.parent

CLAIMS_AND_STAYS = """
import sys, time
from aquifer_torch.ledger import Member
member = Member("memory", 100, folder=sys.argv[1])
member.claim(80)
print("claimed", flush=True)
time.sleep(60)
"""


RUNTIME_THAT_SHARES = """
import ctypes, sys
import aquifer_torch
from aquifer_torch.ledger import figures
library = aquifer_torch.setup(driver=1, sim_memory=96 << 20, shared=40 << 20, shared_priority=2, ledger_folder=sys.argv[1])
memory = ctypes.c_void_p()
library.aq_torch_malloc(60 << 20, 0, None, ctypes.byref(memory))
member, = figures("simulated-0", sys.argv[1])["members"]
print(member["claimed"] >= 60 << 20, member["guarantee"] >> 20, member["priority"])
"""


class LedgerTests:
    def setUp(self):
        at = tempfile.TemporaryDirectory()
        self.addCleanup(at.cleanup)
        self.folder = os.path.join(at.name, "ledgers")

    def tearDown(self):
        pass

    def join(self, **terms):
        return Member("memory", 100, folder=self.folder, **terms)

    def test_members_see_each_others_claims(self):
        self.assertEqual(names(self.folder), [])
        with self.join(guarantee=60, priority=-3) as one, self.join() as two:
            one.claim(50)
            two.claim(20)
            two.release(5)
            self.assertEqual((one.claimed, one.limit, one.room, two.room), (50, 100, 35, 35))
            seen = figures("memory", self.folder)
            self.assertEqual((seen["capacity"], seen["claimed"], seen["free"]), (100, 65, 35))
            first = seen["members"][0]
            found = (first["process"], first["claimed"], first["guarantee"], first["priority"])
            self.assertEqual(found, (os.getpid(), 50, 60, -3))
        self.assertEqual(figures("memory", self.folder)["members"], [])
        self.assertEqual(names(self.folder), ["memory"])

    def test_a_membership_ends_with_its_last_reference(self):
        member = self.join()
        member.claim(10)
        del member
        gc.collect()
        self.assertEqual(figures("memory", self.folder)["members"], [])

    def test_refusals_are_typed_and_survive_pickling(self):
        one, two = self.join(guarantee=70), self.join(limit=30)
        with self.assertRaises(GuaranteeRefused) as refused:
            self.join(guarantee=31)
        self.assertIn("guaranteed to other processes", str(refused.exception))
        one.claim(90)
        with self.assertRaises(ClaimRefused) as refused:
            two.claim(11)
        self.assertFalse(refused.exception.is_final)
        again = pickle.loads(pickle.dumps(refused.exception))
        self.assertEqual((type(again), str(again)), (ClaimRefused, str(refused.exception)))
        with self.assertRaises(ClaimRefused) as refused:
            two.claim(31, wait=60)
        self.assertTrue(refused.exception.is_final)
        with self.assertRaisesRegex(AquiferError, "AQ_ERROR_BAD_ARGUMENT"):
            two.release(1)
        with self.assertRaisesRegex(AquiferError, "AQ_ERROR_SYSTEM"):
            figures("absent", self.folder)
        two.leave()
        two.leave()
        with self.assertRaisesRegex(AquiferError, "AQ_ERROR_CLOSED"):
            two.claim(1)

    def test_a_claim_waits_until_others_give_back_what_they_owe(self):
        holder, other = self.join(guarantee=60), self.join()
        holder.claim(100)

        def give_back():
            while not holder.owed:
                time.sleep(0.001)
            holder.release(holder.owed)

        thread = threading.Thread(target=give_back)
        thread.start()
        other.claim(40, wait=60)
        thread.join()
        self.assertEqual((holder.claimed, other.claimed), (60, 40))

    def test_use_by_others_is_taken_from_the_capacity(self):
        member = self.join()
        member.claim(20)
        member.measure(50)
        self.assertEqual((member.room, figures("memory", self.folder)["unaccounted"]), (50, 30))

    def test_a_runtime_that_shares_claims_what_it_takes(self):
        command = [sys.executable, "-c", RUNTIME_THAT_SHARES, self.folder]
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        self.assertEqual(ran.stdout, "True 40 2\n")
        self.assertEqual(figures("simulated-0", self.folder)["members"], [])

    def test_limits_of_administrators_count_beside_its_own(self):
        with mock.patch.dict(os.environ, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="1=60"):
            for limit, expected in [(0, 60), (90, 60), (30, 30)]:
                with Member("GPU-1", 100, folder=self.folder, limit=limit) as member:
                    self.assertEqual(member.limit, expected)
                    with self.assertRaises(ClaimRefused) as refused:
                        member.claim(expected + 1, wait=60)
                    self.assertTrue(refused.exception.is_final)
            with self.join() as other:
                self.assertEqual(other.limit, 100)

    def test_a_killed_process_has_no_claim(self):
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
        command = [sys.executable, "-c", CLAIMS_AND_STAYS, self.folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
            self.assertEqual(child.stdout.readline(), b"claimed\n")
            member = self.join()
            with self.assertRaises(ClaimRefused):
                member.claim(21)
            child.send_signal(signal.SIGKILL)
            child.wait()
        member.claim(100)
        self.assertEqual(len(figures("memory", self.folder)["members"]), 1)
