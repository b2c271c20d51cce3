"""What Triton 3.6 asks of its allocator, as triton/runtime/_allocation.py declares it."""

from contextvars import ContextVar
from types import SimpleNamespace

allocator = ContextVar("allocator")
set_allocator = allocator.set
runtime = SimpleNamespace(driver=SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
