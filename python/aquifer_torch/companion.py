"""Builds the C++ companion against the PyTorch that is installed, once, and loads it."""

import ctypes
import hashlib
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile

from .errors import AlreadyInitialised, CompanionError

_HERE = pathlib.Path(__file__).resolve().parent


def _header() -> pathlib.Path:
    """The directory of aquifer.h: this package's own where it has been installed, else the project's."""
    for place in (_HERE, _HERE.parent.parent / "allocators" / "ffi" / "include"):
        if (place / "aquifer.h").is_file():
            return place
    raise CompanionError(f"aquifer.h is neither in {_HERE} nor in the project around it (allocators/ffi/include)")


def _cuda_includes() -> list:
    """Directories that may hold cuda_runtime.h: of the toolkit, or of the packages that PyTorch came with."""
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


def _cxx_library() -> list:
    """The C++ library that PyTorch has loaded: where a compiler would link another one, statically, texts could not be made."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = {line.split(maxsplit=5)[5].strip() for line in maps if "/libstdc++.so" in line}
    return sorted(found)[:1]


def _cache() -> pathlib.Path:
    home = os.environ.get("AQUIFER_CACHE") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(home) / "aquifer_torch"


def _only_ours(path: pathlib.Path) -> bool:
    """Whether this user alone can have written it: whoever may write a library decides what this process runs."""
    found = path.lstat()
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022


def _own_folder(folder: pathlib.Path) -> None:
    """Makes a folder that only this user writes to, or refuses one of somebody else's."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _only_ours(folder) and folder.lstat().st_uid == os.geteuid() and not folder.is_symlink():
            folder.chmod(0o700)
    except OSError as error:
        raise CompanionError(f"{folder} cannot be written ({error}); name another place by AQUIFER_CACHE") from error
    if not _only_ours(folder):
        raise CompanionError(f"{folder} belongs to another user or is a link, so nothing is loaded from it; name another place by AQUIFER_CACHE")


def build(source=_HERE / "companion.cpp") -> pathlib.Path:
    """A source against this PyTorch, the companion as a rule: out of the cache, or compiled now, which takes some seconds.

    The compiler is $CXX, or c++ or g++. The cache is $AQUIFER_CACHE/aquifer_torch, or in ~/.cache; what it holds is named
    by a hash of the sources, the compiler and PyTorch's version, so nothing stale is ever loaded. Only what this user alone
    can have written is loaded; a folder of another user's is refused.
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
    if not any((place / "cuda_runtime_api.h").is_file() for place in includes):
        looked = ", ".join(map(str, includes)) or "nowhere"
        raise CompanionError(f"cuda_runtime_api.h was not found (looked in: {looked}); set CUDA_HOME")
    root, source, header = pathlib.Path(torch.__file__).parent, pathlib.Path(source), _header()
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [f"-I{header}", f"-isystem{root / 'include'}"] + [f"-isystem{place}" for place in includes]
    libraries = _cxx_library() + [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch_cuda", "-lc10_cuda", "-ltorch_cpu", "-lc10", "-ldl"]
    name = hashlib.sha256()
    for part in (torch.__version__, str(command), source.read_text(), (header / "aquifer.h").read_text()):
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


def load(source=_HERE / "companion.cpp") -> ctypes.CDLL:
    """Builds a source as build() does, and loads it."""
    made = build(source)
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise CompanionError(f"{made} could not be loaded: {error}") from error


def load_pinned() -> ctypes.CDLL:
    """Builds and loads the allocator of pinned memory."""
    return load(_HERE / "pinned.cpp")


def install(library: str) -> None:
    """Makes the library at this path PyTorch's allocator."""
    companion = load()
    text = ctypes.create_string_buffer(4096)
    answer = companion.aquifer_companion_install(library.encode(), text, ctypes.c_size_t(len(text)))
    if answer:
        said = text.value.decode(errors="replace")
        raise AlreadyInitialised(f"install() comes before PyTorch's first use of CUDA: {said}") if answer == 1 else CompanionError(said)
