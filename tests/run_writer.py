"""A loop that records without a model, for tests of `treadle.runs`: deterministic, with groups in flight over steps.

`python -m tests.run_writer DIR SEED RUNS` records it once without a break, RUNS times under many kills, and compares.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from treadle.batch import Batch
from treadle.runs.config import RunConfig
from treadle.runs.directory import RunDirectory
from treadle.runs.metrics import read_rows, without_times
from treadle.runs.progress import Progress
from treadle.runs.recorder import Recorder
from treadle.types import Ended, Group, Kind, Mean, Prompt, Provenance, Reward, Sample, Statistics, Trajectory

CONFIG = "algorithm:\n  group_size: 3\nsteps: 7\n"
STEPS, AHEAD, PER_STEP = 7, 4, 2


def prompt(index: int) -> Prompt:
    return Prompt(f"data:{index % 5}", index, ({"role": "user", "content": f"question {index}"},), (5, 6), answer=index)


def trajectory(index: int, number: int = 0, response: str | None = None, reward: Reward | None = None) -> Trajectory:
    """`[5, 6]`, then 1 to 4 sampled tokens; numbers follow from the arguments."""
    sampled = (index + number) % 4 + 1
    text = f"answer {index}.{number}" if response is None else response
    return Trajectory(
        prompt=prompt(index),
        token_T=np.array([5, 6, *range(10, 10 + sampled)]),
        provenance_T=np.array([Provenance.PROMPT] * 2 + [Provenance.SAMPLED] * sampled, np.uint8),
        logprob_T=np.array([np.nan] * 2 + [-(index + 1) / 7] * sampled, np.float32),
        version_T=np.array([-1] * 2 + [index // PER_STEP] * sampled, np.int32),
        turn_ends=(1 + sampled,),
        ended=Ended.TRUNCATED if sampled == 4 else Ended.TERMINATED,
        messages=(*prompt(index).messages, {"role": "assistant", "content": text}),
        reward=Reward(float((index + number) % 2), parts={"right": 0.5}) if reward is None else reward,
    )


def group(index: int, kinds: Sequence[Kind] = (Kind.TRAIN,) * 3, failed: Sequence[int] = ()) -> Group:
    samples = tuple(
        Sample(f"{index}.{n}", kind, (trajectory(index, n),), failure="the judge is down" if n in failed else None)
        for n, kind in enumerate(kinds)
    )
    return Group(index, prompt(index), samples, index // PER_STEP)


def batch_of(groups: Sequence[Group]) -> Batch:
    batch = Batch.pack(groups)
    return batch.replace(old_logprob_T=batch.sampling_logprob_T - 0.5, advantage_T=batch.reward_N[batch.row_T].float())


def statistics(groups: Sequence[Group]) -> Statistics:
    rewards = [s.reward.value for g in groups for s in g.usable if s.reward is not None]
    return {"reward/mean": Mean(sum(rewards), len(rewards)), "reward/nothing": Mean(0.0, 0.0)}


def issue(recorder: Recorder, index: int, step: int) -> None:
    recorder.issued(prompt(index), [(s.id, s.kind) for s in group(index).samples], step)


def record(path: Path, on_step: Callable[[int], None] = lambda _: None) -> None:
    """The run: `AHEAD` groups in flight at any time, some filtered, some samples failed, evaluations, checkpoints."""
    config = RunConfig(dir=str(path), checkpoint_every=2)
    with (
        RunDirectory.open(path, CONFIG) as directory,
        Recorder(directory, config, STEPS, Progress()) as recorder,
    ):
        found = recorder.restore()
        state = {"step": 0, "next": 0, "flying": []} if found is None else found[1]
        step, coming, flying = state["step"], state["next"], list(state["flying"])
        assert found is None or (found[0] / "weights").read_text() == f"weights of step {step}"
        for index in flying:
            issue(recorder, index, step + 1)
        while step < STEPS:
            step += 1
            groups: list[Group] = []
            while len(groups) < PER_STEP:
                while len(flying) < AHEAD:
                    issue(recorder, coming, step)
                    flying, coming = [*flying, coming], coming + 1
                done = group(flying[0], failed=(1,) if flying[0] % 4 == 2 else ())
                flying = flying[1:]
                if done.index % 5 == 3:
                    recorder.filtered(done, step, "rewards are equal")
                else:
                    groups.append(done)
            recorder.trained(step, groups, batch_of(groups), statistics(groups), {"generate": time.time() % 1})
            if step % 3 == 0:
                judged = {"greedy": [evaluation(step, n) for n in range(2)]}
                recorder.evaluated(step, judged, {"evaluation/greedy": Mean(step, 10)})
            on_step(step)
            if step == STEPS or recorder.checkpoint_due(step):
                with recorder.checkpoint(step, {"step": step, "next": coming, "flying": flying}) as folder:
                    (folder / "weights").write_text(f"weights of step {step}")
        recorder.finish({"reward": 0.5, "data_ended": False})


def evaluation(step: int, index: int) -> Group:
    sample = Sample(f"evaluation/{step}/greedy/{index}.0", Kind.EVALUATION, (trajectory(index),))
    return Group(index, prompt(index), (sample,))


def content(path: Path) -> dict[str, object]:
    """All that two runs of `record` have in common, whatever happened to them on the way."""
    run = RunDirectory.existing(path)
    db = sqlite3.connect(run.ledger)
    columns = "sample, group_index, prompt, kind, state, step, why, reward"
    books = db.execute(f"SELECT {columns} FROM samples ORDER BY sample").fetchall()
    children = db.execute("SELECT * FROM trajectories ORDER BY sample, number").fetchall()
    db.close()
    return {
        "metrics": [without_times(row) for row in read_rows(run.metrics)],
        "evaluations": run.evaluations.read_bytes(),
        "samples": {p.name: p.read_bytes() for p in sorted(run.samples.iterdir())},
        "books": books,
        "children": children,
        "summary": run.read_summary(),
        "checkpoints": sorted(p.name for p in run.checkpoints.iterdir()),
    }


def attempt(path: Path, killer: Callable[[], None]) -> bool:
    """One process that records; False if it was killed."""
    child = os.fork()
    if child == 0:
        killer()
        record(path)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0


def at_event(number: int) -> Callable[[], None]:
    """Kill at the n-th time that Python opens, renames, makes, truncates or removes a file."""
    left = [number]

    def hook(event: str, _: object) -> None:
        if event.startswith(("open", "os.", "sqlite3.", "shutil.")):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(hook)


def after(seconds: float) -> Callable[[], None]:
    def start() -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    return start


def main(path: Path, seed: int, runs: int) -> None:
    # Children are forked before any thread exists.
    torch.set_num_threads(1)
    for heavy in ("pandas", "pyarrow.parquet", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        importlib.import_module(heavy)  # else every child would spend its short life on this
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert attempt(path / "whole", lambda: None)
    expected, dice, kills = content(path / "whole"), random.Random(seed), 0
    for run in range(runs):
        for _ in range(100):
            killer = at_event(dice.randint(1, 110)) if dice.random() < 0.7 else after(dice.uniform(0.01, 0.5))
            if attempt(path / str(run), killer):
                break
            kills += 1
        else:
            raise AssertionError("killed so early each time that the run never ended")
        found = content(path / str(run))
        for what, value in expected.items():
            assert found[what] == value, f"seed {seed}, run {run}: {what} differ"
    print(f"killed {kills} times")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
