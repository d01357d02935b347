"""The native library: compiled once (`make native`), then found by what it was compiled from and for.

python -m treadle.native.library
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from treadle.errors import ConfigError

_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADERS = sorted(_SOURCE.parent.glob("*.h"))
_DIRECTORY = Path(__file__).with_name("build")
_FLAGS = ["-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-fopenmp"]


def path() -> Path:
    """Where the library of this source, this PyTorch and this processor belongs."""
    cpu = Path("/proc/cpuinfo")
    able = (
        next((x for x in cpu.read_text().splitlines() if x.startswith(("flags", "Features"))), "")
        if cpu.exists()
        else ""
    )
    read = [path.read_text() for path in (_SOURCE, *_HEADERS)]
    made_of = "\n".join([*read, *_FLAGS, torch.__version__, platform.machine(), able])
    return _DIRECTORY / f"kernels-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"


def built() -> bool:
    return path().exists()


def build() -> Path:
    """Compile, unless it is there; raises `ConfigError` with what the compiler said."""
    target = path()
    if target.exists():
        return target
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise ConfigError(
            "the native kernels need a C++ compiler (g++ or clang++ on the PATH); without them use "
            "rollout.kernels=torch"
        )
    home = Path(torch.__file__).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{os.getpid()}")  # renamed when whole: another process may be compiling too
    includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    command = [compiler, *_FLAGS, *includes, str(_SOURCE), *libraries, "-o", str(aside)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300])
        raise ConfigError(f"the native kernels do not compile with {compiler}: {said}")
    aside.replace(target)
    return target


@functools.cache
def load() -> None:
    """Register `torch.ops.treadle`; raises `ConfigError` if the library has not been built."""
    if not built():
        raise ConfigError(
            "rollout.kernels=native, but the native kernels have not been built for this machine and PyTorch; run "
            "`make native`, or use rollout.kernels=auto"
        )
    torch.ops.load_library(path())


if __name__ == "__main__":
    print(build())
