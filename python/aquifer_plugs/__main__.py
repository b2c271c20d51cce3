"""Runs an unchanged program whose frameworks have their memory from aquifer: CuPy, numba, PyTorch, RMM, Triton and Warp.

    python -m aquifer_plugs [--limit LIMIT] [--slack PERCENT] [--pinned-limit BYTES] [--no-pinned] SCRIPT [ARGUMENT ...]
    python -m aquifer_plugs [...] -m MODULE [ARGUMENT ...]

The process becomes one of plain `python` with the program. In it, and in the Python processes that it starts, a framework gets
its plug when it is imported; one that is not costs nothing. Python's -I, -E and -S, which leave that out, are refused.
"""

from __future__ import annotations

import os
import subprocess
import sys

from aquifer_torch import launch
from aquifer_torch.__main__ import arguments

from . import MODULES


def main() -> None:
    asked, settings = arguments("aquifer_plugs", __doc__ or "")
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit("python -m aquifer_plugs: not with Python's -I, -E or -S, under which no sitecustomize is found by PYTHONPATH")
    # numba imports it by itself.
    os.environ.setdefault("NUMBA_CUDA_MEMORY_MANAGER", "aquifer_plugs.numba")
    launch.with_children({**settings, "streams_retired": False, "plugs": list(MODULES)})
    # As the standard library starts another Python: with the options of this one.
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    program = ["-m", asked.program] if asked.module else [asked.program]
    os.execv(sys.executable, [sys.executable, *options, *program, *asked.arguments])


if __name__ == "__main__":
    main()
