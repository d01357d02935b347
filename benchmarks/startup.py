"""How long things take to start: `python -m benchmarks.startup`, medians of 7 processes each (the last of 3).

Wall seconds and CPU seconds; where other programs run, the CPU seconds are what to go by. Needs `make models/tiny`.
Python's compiled files are made first, as `make install` and the first start make them.
"""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
SMOKE = "examples/smoke.yaml"
LIMITS = {
    "import treadle": 0.15,
    "treadle --help": 0.3,
    "treadle explain": 0.3,
    "treadle explain algorithm.clip_low": 0.3,
    "treadle schema": 0.3,
    f"treadle train {SMOKE} algorithm.group_sise=4": 0.3,
}
FIRST_TOKEN = 8.0
REWARD = """
import os


async def reward(trajectory):
    os._exit(0)  # answers have one token here: it has been sampled
"""


def measure(command: list[str], tries: int, **variables: str) -> tuple[float, float]:
    """Median wall and CPU seconds of a process and its children."""
    walls, cpus = [], []
    for _ in range(tries):
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, _, used = os.wait4(process.pid, 0)
        walls.append(time.perf_counter() - begin)
        cpus.append(used.ru_utime + used.ru_stime)
    return median(walls), median(cpus)


def first_token(tries: int) -> tuple[float, float]:
    """From the command of the smoke run to its first sampled token."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "first.py").write_text(REWARD)
        overrides = ["reward=first:reward", "sampling.max_tokens=1", f"run.dir={folder}/run"]
        command = [sys.executable, "-m", "treadle", "train", SMOKE, *overrides]
        return measure(command, tries, PYTHONPATH=folder)


def main() -> None:
    compileall.compile_dir(str(ROOT / "treadle"), quiet=1)
    print(f"{'':50}{'wall s':>8}{'CPU s':>8}{'limit':>8}")
    for name, limit in LIMITS.items():
        program, *arguments = name.split()
        start = ["-c", name] if program == "import" else ["-m", program, *arguments]
        wall, cpu = measure([sys.executable, *start], 7)
        print(f"{name:50}{wall:8.3f}{cpu:8.3f}{limit:8.2f}")
    wall, cpu = first_token(3)
    print(f"{'smoke run to its first token':50}{wall:8.2f}{cpu:8.2f}{FIRST_TOKEN:8.2f}")


if __name__ == "__main__":
    main()
