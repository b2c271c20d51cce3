"""Registered pools, by the functions that PyTorch would call: a part of on_sim.py."""

import ctypes
import gc
import threading
import time
from unittest import mock

import aquifer_torch
from aquifer_torch import registered
from aquifer_torch.registered import Functions, RegisteredMemPool

MIB = 1 << 20
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
REGISTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p))
UNREGISTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class RegisteredTests:
    def open(self, register=None, unregister=None, size=4 * MIB):
        pool = RegisteredMemPool(self.library, size, register, unregister)
        allocate, free = ALLOCATE(pool.functions[0]), FREE(pool.functions[1])
        return pool, lambda size: allocate(size, 0, None), lambda memory: free(memory, 0, 0, None)

    def held(self):
        return self.library.stats(0)["physical"] // MIB

    def test_functions_of_c_are_called_once_for_each_chunk(self):
        for exported in (False, True):
            with self.subTest(exported=exported):
                self.functions_of_c(exported)

    def functions_of_c(self, exported):
        calls, before = [], self.held()

        @REGISTER
        def register(context, memory, size, handle):
            handle[0] = memory + 1
            calls.append((context, memory, size))
            return 0

        @UNREGISTER
        def unregister(context, handle):
            calls.append((context, handle - 1))
            return 0

        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (register, unregister)]
        pool, allocate, free = self.open(Functions(*addresses, 77, exported))
        parts = [allocate(MIB), allocate(3 * MIB), allocate(9 * MIB)]
        (small, _), (large, _) = chunks = sorted(pool.chunks, key=lambda chunk: chunk[1])
        self.assertEqual([size for _, size in chunks], [4 * MIB, 10 * MIB])
        self.assertEqual(calls, [(77, small, 4 * MIB), (77, large, 10 * MIB)])
        self.assertEqual([self.library.aq_registered_has(at) for at in (small - 1, *parts, large + 10 * MIB)], [0, 1, 1, 1, 0])
        self.assertEqual((parts[1], parts[2], self.held()), (parts[0] + MIB, large, before + 14))
        for part in parts:
            free(part)
        self.assertEqual(calls[2:], [(77, small), (77, large)])
        self.assertEqual((pool.chunks, self.held()), ([], before))

    def test_python_registers_when_told_and_unregisters_by_itself(self):
        calls, before = [], self.held()
        pool, allocate, free = self.open(lambda address, size: calls.append((address, size)) or "handle", calls.append)
        parts = [allocate(MIB), allocate(MIB)]
        self.assertEqual(calls, [])
        for _ in range(2):
            pool.register()
            self.assertEqual(calls, pool.chunks)

        def free_all():
            for part in parts:
                free(part)

        thread = threading.Thread(target=free_all)
        thread.start()
        thread.join()
        until = time.monotonic() + 10
        while pool.chunks and time.monotonic() < until:
            time.sleep(0.001)
        self.assertEqual((calls[1:], pool.chunks, self.held()), (["handle"], [], before))

    def test_a_chunk_that_python_cannot_unregister_stays(self):
        failing = True

        def unregister(_):
            if failing:
                raise OSError("busy")

        pool, allocate, free = self.open(lambda address, size: 1, unregister)
        free(allocate(MIB))
        # It was never registered, so it goes as soon as Python looks.
        pool.register()
        self.assertEqual(pool.chunks, [])
        part = allocate(MIB)
        pool.register()
        # The pending call reports what is raised.
        with mock.patch("sys.excepthook"):
            free(part)
            with self.assertRaisesRegex(OSError, "busy"):
                pool.register()
        self.assertEqual(len(pool.chunks), 1)
        failing = False
        number = pool._number
        del pool
        gc.collect()
        self.assertNotIn(number, registered._deferred)

    def test_a_pool_that_is_gone_allocates_nothing_and_its_number_is_free_after_the_last_part(self):
        before = self.held()
        pool, allocate, free = self.open()
        part = allocate(MIB)
        others = [RegisteredMemPool(self.library, MIB) for _ in range(15)]
        del pool
        gc.collect()
        self.assertIsNone(allocate(MIB))
        with self.assertRaisesRegex(aquifer_torch.AquiferError, "AQ_ERROR_CAPACITY.*16"):
            RegisteredMemPool(self.library, MIB)
        free(part)
        others.append(RegisteredMemPool(self.library, MIB))
        self.assertEqual(self.held(), before)

