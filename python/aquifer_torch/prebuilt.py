"""Finds the C++ companions that ci/companions compiled beforehand, and that the wheel has.

A companion belongs to the sources of this package, and to the class layouts of a version of
PyTorch. The file's name has a hash of both, so one that does not belong here is not found.
"""

from __future__ import annotations

import hashlib
import pathlib
import re

from .errors import CompanionError

_HERE = pathlib.Path(__file__).resolve().parent
FOLDER = _HERE / "companions"
SOURCES = (_HERE / "companion.cpp", _HERE / "pinned.cpp")

# PyTorch's libraries that the companions call, as the linker names them.
LIBRARIES = ("torch_cuda", "c10_cuda", "torch_cpu", "c10")

# Headers of PyTorch with the classes that the sources derive from or pass by value. Some versions
# lack some of them.
LAYOUTS = (
    "ATen/core/CachingHostAllocator.h",
    "c10/core/Allocator.h",
    "c10/core/CachingDeviceAllocator.h",
    "c10/core/Device.h",
    "c10/core/Stream.h",
    "c10/cuda/CUDACachingAllocator.h",
    "c10/cuda/CUDAStream.h",
    "c10/util/Exception.h",
    "c10/util/UniqueVoidPtr.h",
    "torch/csrc/cuda/CUDAPluggableAllocator.h",
)


def standard(torch_version: str) -> str:
    """Returns the compiler's name for the C++ that PyTorch's headers need: C++20 since 2.14."""
    major, minor = map(int, torch_version.split(".")[:2])
    return "c++20" if (major, minor) >= (2, 14) else "c++17"


def header_folder() -> pathlib.Path:
    """Returns the folder of aquifer.h: this package where it is installed, else the project's.

    CompanionError, where it is in neither.
    """
    for place in (_HERE, _HERE.parent.parent / "allocators" / "ffi" / "include"):
        if (place / "aquifer.h").is_file():
            return place
    raise CompanionError(f"aquifer.h is neither in {_HERE} nor in the project around it (allocators/ffi/include)")


def texts(source: pathlib.Path) -> list[str]:
    """Returns the text of a source, of the headers beside it, and of aquifer.h."""
    beside = sorted(path for path in source.parent.glob("*.h") if path.name != "aquifer.h")
    return [path.read_text() for path in (source, *beside, header_folder() / "aquifer.h")]


def _digest(parts: list[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:12]


def prefix(source: pathlib.Path, torch_version: str, cuda_version: str) -> str:
    """Returns how a companion's name begins: with the versions and a hash of this package's sources.

    `torch_version` is such as "2.11.0+cu130", `cuda_version` such as "13.0".
    """
    torch = ".".join(torch_version.split(".")[:2])
    cuda = cuda_version.split(".")[0]
    sources = _digest([text.encode() for text in texts(source)])
    return f"{source.stem}-torch{torch}-cuda{cuda}-{sources}-"


def file_name(source: pathlib.Path, torch_version: str, cuda_version: str, include: pathlib.Path) -> str:
    """Returns the name of a source's companion for the PyTorch that has its headers in `include`.

    Patch releases of PyTorch share a companion as long as their class layouts are equal.
    """
    headers = [include / name for name in LAYOUTS]
    layouts = _digest([path.read_bytes() if path.is_file() else b"" for path in headers])
    return f"{prefix(source, torch_version, cuda_version)}{layouts}.so"


def versions(folder: pathlib.Path | None = None) -> list[str]:
    """Returns what a folder has companions for, such as "2.11 (CUDA 13)"."""
    pattern = re.compile(r"companion-torch(\d+)\.(\d+)-cuda(\d+)-\w+-\w+\.so")
    found = [pattern.fullmatch(path.name) for path in (folder or FOLDER).glob("*.so")]
    keys = sorted({tuple(map(int, match.groups())) for match in found if match})
    return [f"{major}.{minor} (CUDA {cuda})" for major, minor, cuda in keys]


def find(source: pathlib.Path, torch_version: str, cuda_version: str, include: pathlib.Path) -> pathlib.Path | None:
    """Returns the companion of a source for this version of PyTorch, or None where the package has none."""
    path = FOLDER / file_name(source, torch_version, cuda_version, include)
    return path if path.is_file() else None
