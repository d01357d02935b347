"""Steps of treadle for `vs_trl.py` and `growth.py`, as a user runs them: `treadle.train`, settings of the engines left
as they are."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import treadle
from benchmarks.turns import LEARNING_RATE, REWARDS, ROOT, Job, Turns, status_bytes
from treadle.algorithms.grpo import GRPO, GRPOConfig
from treadle.batch import Batch
from treadle.runs.metrics import read_rows
from treadle.types import Prompt, Request

STAGES = ("generate", "observe", "update", "publish")


class InTurns(GRPO):
    """GRPO that waits for its turn after each step. Bytes are counted from what is resident before the first one, CPU
    seconds from one hook to the next: those of training have the recording of the step in them."""

    def __init__(self, config: GRPOConfig, turns: Turns, run: Path) -> None:
        super().__init__(config)
        self._turns = turns
        self._metrics = run / "metrics.jsonl"
        self._resident: int | None = None
        self._generation_bytes = 0
        self._begin = self._middle = time.process_time()

    def requests(self, prompt: Prompt) -> list[Request]:
        if self._resident is None:
            self._resident = status_bytes("self", "VmRSS")
            self._turns.peak()
        return super().requests(prompt)

    def estimate(self, batch: Batch, version: int = 0) -> Batch:
        self._generation_bytes = self._turns.peak()
        self._middle = time.process_time()
        return super().estimate(batch, version)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        row = read_rows(self._metrics)[-1]
        generation, *training = (row[f"time/{stage}"] for stage in STAGES)
        end, training_bytes = time.process_time(), self._turns.peak()
        assert self._resident is not None
        self._turns.done(
            {
                "generation": generation,
                "training": sum(training),
                "generation_cpu": self._middle - self._begin,
                "training_cpu": end - self._middle,
                "generation_bytes": self._generation_bytes - self._resident,
                "training_bytes": training_bytes - self._resident,
                "tokens": metrics["response/tokens"],
                "with_signal": metrics["response/with_signal"],
            }
        )
        self._begin = time.process_time()


def main() -> None:
    turns, job = Turns(), Job.given()
    run = Path(job.options.get("run.dir", ROOT / "runs" / "benchmarks" / "steps"))
    shutil.rmtree(run, ignore_errors=True)
    score = REWARDS[job.reward]

    def reward(trajectory: treadle.Trajectory) -> float:
        return score(trajectory.response, str(trajectory.prompt.answer))

    config = {
        "model": job.model,
        "steps": 1_000_000,
        "prompts_per_step": job.prompts,
        "run": {"dir": str(run), "checkpoint_every": 0},
        "data": {"train": {"name": "jsonl", "path": job.data}},
        "sampling": {"max_tokens": job.tokens},
        "trainer": {"learning_rate": LEARNING_RATE},
    }
    overrides = [f"{key}={value}" for key, value in job.options.items()]
    treadle.train(
        config, overrides=overrides, algorithm=InTurns(GRPOConfig(group_size=job.group), turns, run), reward=reward
    )


if __name__ == "__main__":
    main()
