"""Puts the header that the companion is compiled against into the package; all else is in pyproject.toml."""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class WithHeader(build_py):
    def run(self):
        super().run()
        here = pathlib.Path(__file__).resolve().parent
        to = pathlib.Path(self.build_lib) / "aquifer_torch" / "aquifer.h"
        shutil.copyfile(here.parent / "allocators/ffi/include/aquifer.h", to)


setup(cmdclass={"build_py": WithHeader})
