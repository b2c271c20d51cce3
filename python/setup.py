"""Completes the package with files from elsewhere in the project; everything else is in pyproject.toml.

ci/wheel puts the library and the command line beside the sources before it builds. Then the wheel is one for a platform.
"""

import pathlib
import shutil

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).resolve().parent
# By the oldest C library that ci/wheel builds for.
PLATFORM = "manylinux_2_28_x86_64"
HAS_LIBRARY = (HERE / "aquifer_torch/libaquifer_ffi.so").is_file()


class WithHeader(build_py):
    def run(self):
        super().run()
        header = HERE.parent / "allocators/ffi/include/aquifer.h"
        if header.is_file():
            shutil.copyfile(header, pathlib.Path(self.build_lib) / "aquifer_torch" / "aquifer.h")


class ForPlatform(bdist_wheel):
    def get_tag(self):
        # The library is called by ctypes, so any version of Python will do.
        return ("py3", "none", PLATFORM if HAS_LIBRARY else "any")


class WithLibrary(Distribution):
    def has_ext_modules(self):
        return HAS_LIBRARY


setup(cmdclass={"build_py": WithHeader, "bdist_wheel": ForPlatform}, distclass=WithLibrary)
