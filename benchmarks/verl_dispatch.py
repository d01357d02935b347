"""A batch to workers and back by verl's `DataProto`, for `dispatch.py`. Runs in an environment of its own
(`make bench-dispatch` makes it).

The batch comes padded as verl has it: prompts to the left of a column, answers to the right of it, what exists for
sampled tokens alone as wide as the longest answer allowed. Padding it is not timed. Then, as verl's single controller
does: `DataProto.from_dict`, `chunk`, an object for each worker, `DataProto.concat` of what comes back.
"""

from __future__ import annotations

import time
from typing import Any

import ray
import torch
from verl import DataProto  # pyright: ignore[reportMissingImports]

from benchmarks.turns import Job, Turns

WHOLE = ("token_T", "mask_T")
"""Fields that prompts have, too; that a token is a prompt's is told by its column."""


def padded(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Fields of the batch as rectangles."""
    offset_N1, prompt, answer = batch["offset_N1"], batch["prompt"], batch["answer"]
    rows, length = len(offset_N1) - 1, offset_N1.diff()
    row_T = torch.repeat_interleave(torch.arange(rows), length)
    sampled_T = batch["provenance_T"].bool()
    prompts = torch.zeros(rows, dtype=torch.int64).index_add(0, row_T, (~sampled_T).long())
    column_T = torch.arange(len(row_T)) - offset_N1[row_T] - prompts[row_T] + prompt
    found = {"attention_mask": torch.zeros(rows, prompt + answer, dtype=torch.bool)}
    found["attention_mask"][row_T, column_T] = True
    for name, value in batch.items():
        if name in ("provenance_T", "offset_N1") or not isinstance(value, torch.Tensor):
            continue
        if not name.endswith("_T"):
            found[name] = value
        elif name in WHOLE:
            found[name] = value.new_zeros(rows, prompt + answer)
            found[name][row_T, column_T] = value
        else:
            found[name] = value.new_zeros(rows, answer)
            found[name][row_T[sampled_T], column_T[sampled_T] - prompt] = value[sampled_T]
    return found


@ray.remote(num_cpus=0.25)
class Echo:
    def __init__(self, results: list[str]) -> None:
        self.results = results

    def look(self, data: Any) -> Any:
        return DataProto.from_dict({name: data.batch[name] for name in self.results})


def main() -> None:
    turns = Turns()
    torch.set_num_threads(1)
    job = Job.given()
    given = torch.load(job.data)
    rectangles = padded(given)
    ray.init(include_dashboard=False, log_to_driver=False)
    workers: list[Any] = [Echo.remote(job.options["results"]) for _ in range(given["ranks"])]
    size = sum(value.nbytes for value in rectangles.values())
    while True:
        begin = time.perf_counter()
        parts = DataProto.from_dict(dict(rectangles)).chunk(len(workers))
        calls = [worker.look.remote(ray.put(part)) for worker, part in zip(workers, parts, strict=True)]
        whole = DataProto.concat(ray.get(calls))
        seconds = time.perf_counter() - begin
        for name in job.options["results"]:
            assert torch.equal(whole.batch[name], rectangles[name]) or rectangles[name].isnan().any(), name
        del parts, calls, whole
        turns.done({"dispatch": seconds, "padded_bytes": size})


if __name__ == "__main__":
    main()
