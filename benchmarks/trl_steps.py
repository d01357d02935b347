"""Steps of TRL's GRPO trainer for `vs_trl.py`. Runs in an environment of its own (`make bench-trl` makes it).

Options of a job: `precision` (float32 · autocast: float32 weights, bfloat16 products · bfloat16), `micro` (samples of
one forward and backward pass, 0: all), `continuous` (transformers' continuous batching), `checkpointing` (recompute
activations), `compile` (torch.compile).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.turns import LEARNING_RATE, REWARDS, ROOT, Job, Turns


class Timed(GRPOTrainer):
    """With the seconds that generation, rewards included, took in the latest step."""

    generation = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        begin = time.perf_counter()
        found = super()._generate_and_score_completions(inputs)
        self.generation = time.perf_counter() - begin
        return found


class InTurns(TrainerCallback):
    """Waits for its turn after each step."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.trainer: Timed | None = None
        self._begin = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        assert self.trainer is not None
        assert logs is not None
        generation, whole = self.trainer.generation, time.perf_counter() - self._begin
        self._turns.done(
            {
                "generation": generation,
                "training": whole - generation,
                "tokens": logs["completions/mean_length"],
                "with_signal": 1.0,
            }
        )
        self._begin = time.perf_counter()


def settings(job: Job) -> dict[str, Any]:
    """The arguments of `GRPOConfig`: what treadle does by default, and the options that make TRL fast or slow."""
    options = {"precision": "float32", "micro": 0, "continuous": False, "checkpointing": False, "compile": False}
    if unknown := job.options.keys() - options.keys():
        raise SystemExit(f"no such options: {sorted(unknown)}; allowed: {sorted(options)}")
    options |= job.options
    micro = options["micro"] or job.samples
    return {
        "output_dir": str(ROOT / "runs" / "benchmarks" / "trl"),
        "use_cpu": True,
        "bf16": options["precision"] == "autocast",
        "fp16": False,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": job.samples // micro,
        "num_generations": job.group,
        "max_completion_length": job.tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "num_iterations": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_steps": 1_000_000,
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": options["checkpointing"],
        "use_transformers_continuous_batching": options["continuous"],
        "torch_compile": options["compile"],
    }


def main() -> None:
    turns, job = Turns(), Job.given()
    arguments = settings(job)
    rows = [json.loads(line) for line in Path(job.data).read_text().splitlines()]
    chats = [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in rows]
    dtype = torch.bfloat16 if job.options.get("precision") == "bfloat16" else torch.float32
    score = REWARDS[job.reward]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [score(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]

    in_turns = InTurns(turns)
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype),
        reward_funcs=reward,
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(job.model, padding_side="left"),
        callbacks=[in_turns],
    )
    in_turns.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
