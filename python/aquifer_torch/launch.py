"""Installs aquifer in a program that knows nothing of it, and in the Python processes that it starts.

`python -m aquifer_torch` calls `with_children` and runs the program. Nothing is loaded and no context is made in a process that
does not use CUDA: the allocators are installed as PyTorch initialises CUDA (torch.cuda._lazy_init calls torch._C._cuda_init, and
nothing else does).
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

# The settings of the processes that a program starts, as JSON. `startup/sitecustomize.py` reads it.
VARIABLE = "AQUIFER_TORCH"
# The folder that they find first on their path.
STARTUP = str(pathlib.Path(__file__).resolve().parent / "startup")


def with_children(settings: dict[str, Any]) -> None:
    """Lets every Python process that this one starts call at_first_use() with these settings, and those that they start.

    They find `startup/sitecustomize.py` first on PYTHONPATH, which runs another `sitecustomize` after itself. Not so in a process
    that is started with another environment, or with -I, -E or -S.

    `limit`, `slack`, `streams_retired` and `pinned_limit`, as of install() and install_pinned(), and `pinned`, whether pinned
    memory is served; `plugs`, the modules that aquifer_plugs acts on once they are imported.
    """
    os.environ[VARIABLE] = json.dumps(settings)
    path = os.environ.get("PYTHONPATH")
    if STARTUP not in (path or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = STARTUP + (os.pathsep + path if path else "")


def at_first_use(settings: dict[str, Any]) -> None:
    """Installs aquifer in this process just before PyTorch initialises CUDA, unless the program has installed it until then.

    PyTorch is imported already. What install() and install_pinned() raise, the program's first use of CUDA raises.
    """
    import torch

    initialise = getattr(torch._C, "_cuda_init", None)
    if initialise is None:
        # A PyTorch without CUDA.
        return

    pins = settings.get("pinned", True)

    def initialise_and_pin(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        torch.cuda.init()
        return tensor.pin_memory(*args, **kwargs)

    def install_and_initialise() -> None:
        import aquifer_torch

        if not aquifer_torch._installed:
            # After the program's own setup() they are the program's.
            names = ("limit", "slack", "streams_retired") if aquifer_torch._library is None else ()
            aquifer_torch.install(**{name: settings[name] for name in names if settings.get(name) is not None})
        if pins and not aquifer_torch._pins():
            aquifer_torch.install_pinned(pinned_limit=settings.get("pinned_limit"))
        # Only now: after a failure the next use must not get another allocator.
        torch._C._cuda_init = initialise
        if torch.Tensor.__dict__.get("pin_memory") is initialise_and_pin:
            del torch.Tensor.pin_memory
        initialise()

    torch._C._cuda_init = install_and_initialise
    if pins:
        # It initialises CUDA without _cuda_init(), after it has chosen its allocator. The method is that of a base class.
        torch.Tensor.pin_memory = initialise_and_pin
