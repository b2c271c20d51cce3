"""Completes the package with files from elsewhere in the project. The rest is in pyproject.toml.

ci/wheel puts the library, the command line, companions and licences next to the sources before it
builds, and names the platform. Without them the wheel is for any platform.
"""

import pathlib
import shutil

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
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
        return ("py3", "none", super().get_tag()[2] if HAS_LIBRARY else "any")

    def egg2dist(self, egginfo_path, distinfo_path):
        super().egg2dist(egginfo_path, distinfo_path)
        # Where PEP 770 has tools look for what is in a wheel.
        if HAS_LIBRARY:
            sboms = pathlib.Path(distinfo_path) / "sboms"
            sboms.mkdir()
            shutil.copyfile(HERE / "bom.cdx.json", sboms / "aquifer.cdx.json")


class WithLibrary(Distribution):
    def has_ext_modules(self):
        return HAS_LIBRARY


setup(cmdclass={"build_py": WithHeader, "bdist_wheel": ForPlatform}, distclass=WithLibrary)
