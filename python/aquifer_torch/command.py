"""The command line of aquifer, which a wheel brings along."""

import os
import pathlib
import sys

from .errors import LibraryNotFound


def main() -> None:
    """Runs the program `aquifer` with the arguments of this process, in its place."""
    program = pathlib.Path(__file__).resolve().parent / "bin" / "aquifer"
    if not program.is_file():
        raise LibraryNotFound(f"{program} is missing: this installation has no command line. Build a wheel by ci/wheel")
    os.execv(program, [str(program), *sys.argv[1:]])
