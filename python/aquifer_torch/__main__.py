"""Runs an unchanged program with its CUDA tensors and its pinned memory in aquifer's pools.

    python -m aquifer_torch [--limit LIMIT] [--slack PERCENT] [--pinned-limit BYTES] [--no-pinned] SCRIPT [ARGUMENT ...]
    python -m aquifer_torch [...] -m MODULE [ARGUMENT ...]

The program sees its own arguments, `__main__` and search path, as under plain `python`. The Python processes that it starts
run on aquifer as well. A process installs it at its first use of CUDA, unless the program has installed it until then.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from typing import Any

from . import launch
from .library import SLACK, Library


def limit(text: str) -> int | float:
    """A part of the memory if there is a point in it, otherwise bytes."""
    asked = float(text) if "." in text else int(text)
    if asked <= 0 or (isinstance(asked, float) and asked > 1):
        raise argparse.ArgumentTypeError(f"{text}: bytes, or a part of the memory above 0 and up to 1.0")
    return asked


def slack(text: str) -> int:
    """Per cent of the peak of live bytes."""
    asked = int(text)
    if asked not in SLACK:
        raise argparse.ArgumentTypeError(f"{text}: per cent of the peak of live bytes, from 1 to {SLACK[-1]}")
    return asked


def arguments(module: str, description: str) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Reads the command line of `python -m MODULE`. Returns it, and its settings as launch.with_children() takes them."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description.splitlines()[0])
    parser.add_argument("--limit", type=limit, help="of each device: bytes, or a part of its memory such as 0.9")
    more = "what each device may hold beyond the peak of its live bytes, in per cent of it: 17 by default; 6 packs tightly"
    parser.add_argument("--slack", type=slack, metavar="PERCENT", help=more)
    parser.add_argument("--pinned-limit", type=int, metavar="BYTES", help="of all pinned memory")
    parser.add_argument("--no-pinned", action="store_true", help="leave pinned memory to the frameworks")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", help="a file, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    asked = parser.parse_args()
    # Whether there is one: better now than at the first use of CUDA.
    Library()
    names = ("limit", "slack", "pinned_limit")
    return asked, {**{name: getattr(asked, name) for name in names}, "pinned": not asked.no_pinned}


def main() -> None:
    asked, settings = arguments("aquifer_torch", __doc__ or "")
    launch.with_children(settings)
    launch.at_first_use(settings)
    sys.argv = [asked.program, *asked.arguments]
    if asked.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(asked.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(asked.program))
        runpy.run_path(asked.program, run_name="__main__")


if __name__ == "__main__":
    main()
