"""Loads the C++ companions for the installed PyTorch.

The wheel has some that were compiled beforehand. Where none of them fits, the sources are compiled
once and the result is stored.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings

from . import prebuilt
from .errors import AlreadyInitialised, CompanionError

_HERE = pathlib.Path(__file__).resolve().parent
# The headers that tell whether CUDA's are complete, and the Python packages that have them. PyTorch
# depends on the first only.
_CUDA_HEADERS = {
    "cuda_runtime_api.h": "nvidia-cuda-runtime (CUDA 13) or nvidia-cuda-runtime-cu12",
    "crt/host_config.h": "nvidia-cuda-crt (CUDA 13) or nvidia-cuda-nvcc-cu12",
}


def _cuda_includes() -> list[pathlib.Path]:
    """Returns the folders that may hold cuda_runtime_api.h: of the toolkit, and of Python packages."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(str(pathlib.Path(nvcc).resolve().parent.parent))
    homes.append("/usr/local/cuda")
    places = [pathlib.Path(home) / "include" for home in homes if home]
    for path in sys.path:
        nvidia = pathlib.Path(path) / "nvidia"
        if nvidia.is_dir():
            places += sorted(nvidia.glob("*/include"))
    return [place for place in dict.fromkeys(places) if place.is_dir()]


def _cxx_library() -> list[str]:
    """Returns the C++ library that PyTorch has loaded. With another one, strings would break."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = {line.split(maxsplit=5)[5].strip() for line in maps if "/libstdc++.so" in line}
    return sorted(found)[:1]


def _cache() -> pathlib.Path:
    home = os.environ.get("AQUIFER_CACHE") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(home) / "aquifer_torch"


def _only_ours(path: pathlib.Path) -> bool:
    """Whether only this user can write the file. A library that others can write would run their code here."""
    found = path.lstat()
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022


def _own_folder(folder: pathlib.Path) -> None:
    """Makes a folder that only this user can write to. CompanionError, where it belongs to another user."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _only_ours(folder) and folder.lstat().st_uid == os.geteuid() and not folder.is_symlink():
            folder.chmod(0o700)
    except OSError as error:
        raise CompanionError(f"{folder} cannot be written ({error}); name another place by AQUIFER_CACHE") from error
    if not _only_ours(folder):
        raise CompanionError(f"{folder} belongs to another user or is a link, so nothing is loaded from it; name another place by AQUIFER_CACHE")


def build(source: str | pathlib.Path = _HERE / "companion.cpp") -> pathlib.Path:
    """Returns a source compiled against this PyTorch: from the cache, or compiled now (seconds).

    The compiler is $CXX, or c++ or g++. The cache is $AQUIFER_CACHE/aquifer_torch, or in ~/.cache.
    A file's name has a hash of the sources, the compiler and PyTorch's version, so a stale file is
    never loaded. Nor is one that another user can write.

    CompanionError, with the command and the compiler's output.
    """
    import torch

    if torch.version.cuda is None:
        raise CompanionError(f"PyTorch {torch.__version__} is built without CUDA")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler or not shutil.which(compiler):
        raise CompanionError(
            f"no C++ compiler: {compiler or 'neither c++ nor g++'} is not on the path. Install one or name it by CXX, or use "
            "install(companion=False), which does without graphs, statistics of PyTorch's own and torch.OutOfMemoryError"
        )
    includes = _cuda_includes()
    for needed, package in _CUDA_HEADERS.items():
        if not any((place / needed).is_file() for place in includes):
            looked = ", ".join(map(str, includes)) or "nowhere"
            raise CompanionError(f"{needed} was not found (looked in: {looked}); set CUDA_HOME, or install {package}")
    root, source, header = pathlib.Path(torch.__file__).parent, pathlib.Path(source), prebuilt.header_folder()
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    command = [compiler, f"-std={prebuilt.standard(torch.__version__)}", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [f"-I{header}", f"-isystem{root / 'include'}"] + [f"-isystem{place}" for place in includes]
    libraries = _cxx_library() + [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *(f"-l{name}" for name in prebuilt.LIBRARIES), "-ldl"]
    name = hashlib.sha256()
    for part in (torch.__version__, str(command), *prebuilt.texts(source)):
        name.update(part.encode() + b"\0")
    made = _cache() / f"{source.stem}-{name.hexdigest()[:16]}.so"
    _own_folder(made.parent)
    if made.is_file() and _only_ours(made):
        return made
    try:
        # Under a name of its own, then moved: two processes may build at once, and neither loads half a file.
        handle, own = tempfile.mkstemp(dir=made.parent, suffix=".so")
        os.close(handle)
    except OSError as error:
        raise CompanionError(f"{made.parent} cannot be written ({error}); name another place by AQUIFER_CACHE") from error
    command += [str(source), "-o", own] + libraries
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if ran.returncode:
            raise CompanionError(f"{source.name} did not compile", " ".join(command), ran.stderr[-6000:])
        os.chmod(own, 0o700)
        os.replace(own, made)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompanionError(f"the compiler could not be run: {error}", " ".join(command)) from error
    finally:
        pathlib.Path(own).unlink(missing_ok=True)
    return made


def _load_prebuilt(source: pathlib.Path) -> tuple[ctypes.CDLL | None, str]:
    """Returns the wheel's companion for this PyTorch, loaded, or None and the reason."""
    import torch

    version, cuda = torch.__version__, torch.version.cuda
    if cuda is None or not torch._C._GLIBCXX_USE_CXX11_ABI:
        return None, f"PyTorch {version} is built without CUDA or with the old ABI of C++"
    made = prebuilt.find(source, version, cuda, pathlib.Path(torch.__file__).parent / "include")
    if made is None:
        known = ", ".join(prebuilt.versions()) or "none"
        return None, f"no prebuilt companion fits PyTorch {version} with CUDA {cuda} (prebuilt: {known})"
    try:
        return ctypes.CDLL(str(made)), ""
    except OSError as error:
        reason = f"the prebuilt {made.name} does not load with PyTorch {version} ({error})"
        warnings.warn(f"{reason}; {source.name} is compiled instead", RuntimeWarning, stacklevel=4)
        return None, reason


def load(source: str | pathlib.Path = _HERE / "companion.cpp") -> ctypes.CDLL:
    """Returns a source's companion, loaded: the wheel's own, else one that build() compiles.

    A RuntimeWarning reports one of the wheel that does not load. CompanionError, where none can be
    compiled either.
    """
    source = pathlib.Path(source)
    loaded, reason = _load_prebuilt(source)
    if loaded is not None:
        return loaded
    try:
        made = build(source)
    except CompanionError as error:
        failed = CompanionError(f"{reason}, and it cannot be compiled: {error}")
        failed.command, failed.output = error.command, error.output
        raise failed from error
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise CompanionError(f"{made} could not be loaded: {error}") from error


def load_pinned() -> ctypes.CDLL:
    """Returns the companion that allocates pinned memory, loaded as load() does."""
    return load(_HERE / "pinned.cpp")


def install(companion: ctypes.CDLL, library: str) -> None:
    """Makes the library at this path PyTorch's allocator, by a companion that load() returned.

    AlreadyInitialised, where another allocator than PyTorch's native one is in use; CompanionError.
    """
    text = ctypes.create_string_buffer(4096)
    answer = companion.aquifer_companion_install(library.encode(), text, ctypes.c_size_t(len(text)))
    if answer:
        said = text.value.decode(errors="replace")
        raise AlreadyInitialised(said) if answer == 1 else CompanionError(said)
