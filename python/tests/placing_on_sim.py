"""What must hold of the placement of aquifer_ray on the memories of a node, without Ray."""

import asyncio
import random

from aquifer_ray import GPU_MEMORY, MIB, PINNED_MEMORY, Memory, NoMemory, labels, needs, resources
from aquifer_ray.node import Node
from aquifer_ray.placing import POLICIES, Request, Room, could_ever, place, serve


def empty(*capacities):
    return [Room(capacity, capacity, capacity) for capacity in capacities]


class PlacingTests:
    def test_policies_choose_as_their_names_say(self):
        rooms = [Room(100, 40, 40), Room(200, 70, 70), Room(50, 45, 45)]
        request = Request([40], [0, 1, 2])
        found = {policy: place(request, rooms, policy) for policy in POLICIES}
        self.assertEqual(found, {"most_free": [1], "best_fit": [0], "least_loaded": [2]})

    def test_what_is_free_comes_before_what_others_must_give_back(self):
        rooms = [Room(100, 10, 90), Room(100, 60, 60)]
        self.assertEqual(place(Request([50], [0, 1]), rooms, "most_free"), [1])
        self.assertEqual(place(Request([70], [0, 1]), rooms, "most_free"), [0])
        self.assertIsNone(place(Request([91], [0, 1]), rooms, "most_free"))

    def test_parts_of_a_group_lie_on_different_memories_or_nowhere(self):
        self.assertEqual(place(Request([50, 90], [0, 1]), empty(100, 60), "most_free"), [1, 0])
        self.assertIsNone(place(Request([10, 10], [0]), empty(100), "most_free"))
        self.assertIsNone(place(Request([70, 70], [0, 1]), empty(100, 60), "most_free"))
        self.assertFalse(could_ever(Request([10, 10, 10], [0, 1]), [100, 100]))

    def test_a_large_request_is_not_starved_by_small_ones_that_keep_coming(self):
        drawn = random.Random(5)
        for policy in POLICIES:
            capacities, held, waiting = [100, 100], [], []
            large = Request([90], [0, 1], arrival=9.5)
            first = 10
            for now in range(200):
                waiting.append(Request([drawn.randint(10, 30)], [0, 1], arrival=now))
                if now == 10:
                    waiting.append(large)
                held = [(until, number, size) for until, number, size in held if until > now]
                rooms = empty(*capacities)
                for _, number, size in held:
                    rooms[number].take(size)
                for request, memories in serve(waiting, rooms, policy):
                    waiting = [other for other in waiting if other is not request]
                    held += [(now + 20, number, size) for number, size in zip(memories, request.sizes)]
                self.assertTrue(all(room.admissible >= 0 for room in rooms), "more is promised than there is")
                if any(request.arrival < large.arrival for request in waiting):
                    first = max(first, now + 1)
                if now >= 10 and not any(request is large for request in waiting):
                    break
            # What lies on the memory that it waits for ends within 20 steps, once no earlier request waits.
            self.assertLessEqual(now - first, 20, policy)

    def test_higher_priorities_and_earlier_requests_come_first(self):
        requests = [Request([60], [0], arrival=1), Request([60], [0], arrival=0), Request([60], [0], 1, arrival=2)]
        for first in (2, 0, 1):
            served = serve(requests, empty(100), "most_free")
            self.assertEqual([request.arrival for request, _ in served], [first])
            requests = [request for request in requests if request is not served[0][0]]

    def test_a_request_that_waits_keeps_no_memory_that_it_cannot_have(self):
        rooms = empty(100, 50)
        rooms[0].take(50)
        served = serve([Request([60], [0], arrival=0), Request([40], [0, 1], arrival=1)], rooms, "best_fit")
        self.assertEqual(served[0][1], [1])

    def test_resources_are_whole_mib_and_large_enough(self):
        memories = [Memory("GPU-0123456789abcdef0123456789abcdef", 3 * MIB + 1), Memory("b", MIB), Memory("p", 9 * MIB, PINNED_MEMORY)]
        self.assertEqual(resources(memories), {GPU_MEMORY: 4, PINNED_MEMORY: 9})
        self.assertEqual(labels(memories), {"aquifer-gpus": "2"})
        self.assertEqual(needs(MIB + 1, 1), {"resources": {GPU_MEMORY: 2, PINNED_MEMORY: 1}})
        self.assertEqual(memories[0].visible, "GPU-01234567-89ab-cdef-0123-456789abcdef")
        self.assertIsNone(memories[1].visible)

    def test_a_node_that_declares_more_than_it_has_is_refused(self):
        memories = [Memory("less", 399 * MIB)]
        with self.assertRaisesRegex(NoMemory, "declares 400 MiB of aquifer_gpu_mem to Ray, and has 399"):
            Node(memories, {GPU_MEMORY: 400.0}, "most_free")
        with self.assertRaisesRegex(ValueError, "policy 'worst' is none of"):
            Node(memories, {}, "worst")

    def test_a_promise_that_no_worker_claims_lapses(self):
        from aquifer_ray import node

        async def scenario():
            actor = Node([Memory("memory", 100 * MIB, folder=self.folder)], {}, "most_free")
            first = await actor.place(60 * MIB, GPU_MEMORY, 0, 0, 0.0)
            with self.assertRaises(TimeoutError):
                await actor.place(60 * MIB, GPU_MEMORY, 0.05, 0, 0.0)
            second = await actor.place(60 * MIB, GPU_MEMORY, 5, 0, 0.0)
            self.assertNotEqual(first, second)
            await actor.claimed(second.number)
            self.assertEqual((await actor.figures())[0]["promised"], 0)

        before, node.HOLD = node.HOLD, 0.3
        try:
            asyncio.run(scenario())
        finally:
            node.HOLD = before
