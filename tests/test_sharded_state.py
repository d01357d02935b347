"""Sharded engines in and out: weights that are read, exported, saved, loaded, moved."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine_help import ppo
from tests.spmd import Ranks
from tests.test_invariance import ragged
from tests.test_sharded import (
    ARCHITECTURES,
    WORLDS,
    architectures,
    assert_close,
    engine_of,
    full,
    learn,
    rows_here,
    together_of,
    weights_of,
)
from treadle.engines.torch import checkpoint
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.mesh import make_mesh
from treadle.engines.torch.model import load_model, load_sharded
from treadle.engines.torch.optimizer import Optimizer
from treadle.errors import ModelError, RunError

__all__ = ["architectures"]
KEYS: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01, "max_skipped_steps": 9}


def trained(engine: TorchEngine) -> Optimizer:
    assert engine.optimizer is not None
    return engine.optimizer


# ---------------------------------------------------------------------- loading


def loaded(path: str, shard: int | None, dtype: str, head: Any) -> Any:
    """What was read by which rank, and what the engine then holds."""
    mesh = make_mesh(dist.get_world_size(), shard)
    model = load_sharded(path, dtype, mesh)
    read = not next(model.parameters()).is_meta
    engine = engine_of(path, shard, head, dtype=dtype)
    tied = engine.model.get_input_embeddings().weight is engine.model.get_output_embeddings().weight
    buffers = {name: buffer.clone() for name, buffer in engine.network.root.named_buffers()}
    return read, tied, {n: full(p) for n, p in engine.network.root.named_parameters()}, buffers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_ranks_get_what_rank_0_reads(ranks: Ranks, architectures: dict[str, str], name: str, dtype: str) -> None:
    whole = load_model(architectures[name], dtype)
    weights = {f"model.{n}": p.detach().float() for n, p in whole.named_parameters()}
    buffers = {f"model.{n}": b for n, b in whole.named_buffers()}
    assert any("inv_freq" in n for n in buffers)
    for rank, (read, tied, found, others) in enumerate(ranks.run(4, loaded, architectures[name], 2, dtype, "lm")):
        assert read == (rank == 0)
        assert tied == (name == "llama")
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[n], w) for n, w in weights.items())
        assert others.keys() == buffers.keys()
        assert all(torch.equal(others[n], b) for n, b in buffers.items())


def unloadable(path: str, only: int | None) -> list[str]:
    """Messages of two tries, the second where one rank alone cannot see the model."""
    said = []
    for there in (path, "nowhere/at/all" if dist.get_rank() == only else path):
        mesh = make_mesh(2, 2)
        try:
            load_sharded(there, "float32", mesh)
        except ModelError as error:
            said.append(str(error))
    return said


def test_a_model_that_one_rank_cannot_load_is_refused_by_all(
    ranks: Ranks, architectures: dict[str, str], tmp_path: Path
) -> None:
    path = shutil.copytree(architectures["llama"], tmp_path / "model")
    for said in ranks.run(2, unloadable, str(path), 1):
        assert len(said) == 1
        assert "no model directory 'nowhere/at/all'" in said[0]
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:-100])  # which rank 0 alone reads
    for said in ranks.run(2, unloadable, str(path), None):
        assert [f"model '{path}': its weights or" in text for text in said] == [True, True]


# ---------------------------------------------------------------------- exporting


def exported(path: str, shard: int | None, dtype: str, steps: int) -> Any:
    engine = engine_of(path, shard, dtype=dtype)
    learn(engine, steps)
    largest, tensors = 0, {}
    for name, tensor in engine.export():
        largest = max(largest, tensor.numel())
        tensors[name] = tensor.clone()
    return tensors, {f"{n}": t.dtype for n, t in tensors.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_export_is_that_of_an_engine_alone(ranks: Ranks, architectures: dict[str, str], name: str, dtype: str) -> None:
    for steps in (0, 1):
        alone, dtypes = exported(architectures[name], None, dtype, steps)
        for world in WORLDS[: 1 if steps else 3]:
            (found, kinds), *others = ranks.run(world[0], exported, architectures[name], world[1], dtype, steps)
            assert all(not tensors for tensors, _ in others)
            assert list(found) == list(alone)
            assert kinds == dtypes
            if steps == 0:
                assert all(torch.equal(found[n], t) for n, t in alone.items())
            else:
                assert_close(found, alone, 1e-5 if dtype == "float32" else 1e-2)
                assert not all(
                    torch.equal(t, exported(architectures[name], None, dtype, 0)[0][n]) for n, t in found.items()
                )


# ---------------------------------------------------------------------- checkpoints


def spoilt(engine: TorchEngine) -> None:
    """A step that is skipped, so that counters differ from each other."""
    batch = rows_here(ragged())
    assert batch.advantage_T is not None
    engine.step(batch.replace(advantage_T=batch.advantage_T * torch.nan), ppo())


def begin(path: str, shard: int | None, head: Any, to: str | None, dtype: str = "float32") -> Any:
    """Two steps and one that is skipped, saved; then two more."""
    engine = engine_of(path, shard, head, dtype=dtype, **KEYS)
    learn(engine, 2)
    if head == "lm":
        spoilt(engine)
    if to is not None:
        engine.save(Path(to))
    return learn(engine, 2), weights_of(engine)


def go_on(path: str, shard: int | None, head: Any, at: str, dtype: str = "float32") -> Any:
    engine = engine_of(path, shard, head, dtype=dtype, **KEYS)
    learn(engine, 1)  # another state, to be overwritten
    engine.load(Path(at))
    return learn(engine, 2), weights_of(engine), trained(engine).counters()


@pytest.mark.slow
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("writer", [(0, None), (1, 1), (4, 2), (4, 4)])
def test_training_goes_on_from_any_layout_in_any_other(
    ranks: Ranks, architectures: dict[str, str], tmp_path: Path, head: str, writer: tuple[int, int | None]
) -> None:
    path = architectures["qwen2"]
    expected = begin(path, None, head, None)

    def run(count: int, *args: Any) -> list[Any]:
        return [args[0](*args[1:])] if count == 0 else ranks.run(count, *args)

    run(writer[0], begin, path, writer[1], head, str(tmp_path / "state"))
    written = {f.name for f in (tmp_path / "state").iterdir()}
    sharded = {".metadata", "state.json", *(f"__{rank}_0.distcp" for rank in range(writer[0]))}
    assert written == (sharded if writer[0] else {"state.json", "state.safetensors"})
    for count, shard in ((0, None), (1, 1), (2, 2), (4, 2)):
        told = run(count, go_on, path, shard, head, str(tmp_path / "state"))
        for ours, theirs in zip(together_of([x for x, *_ in told]), together_of([expected[0]]), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        for _, weights, counters in told:
            assert_close(weights, expected[1])
            skipped = int(head == "lm")
            assert counters == {"taken": 4 + skipped, "skipped": skipped, "skipped_in_a_row": 0}
        if (count, shard) == writer:  # to the bit
            again = run(count, go_on, path, shard, head, str(tmp_path / "state"))
            assert all(torch.equal(again[0][1][n], w) for n, w in told[0][1].items())


def resume(path: str, shard: int | None, to: str) -> Any:
    first, second = engine_of(path, shard, **KEYS), engine_of(path, shard, **KEYS)
    learn(first, 2)
    first.save(Path(to))
    batch = rows_here(ragged())
    old_T = second.quantities(batch, {"logprob"})["logprob_T"]
    second.load(Path(to))
    seen_T = [engine.quantities(batch, {"logprob"})["logprob_T"][batch.mask_T] for engine in (first, second)]
    same = torch.equal(*seen_T) and (len(batch) == 0 or not torch.equal(old_T[batch.mask_T], seen_T[1]))
    return same and learn(first, 2) == learn(second, 2), weights_of(first), weights_of(second)


def test_resuming_in_the_same_layout_is_bit_exact(ranks: Ranks, architectures: dict[str, str], tmp_path: Path) -> None:
    for same, first, second in ranks.run(4, resume, architectures["llama"], 2, str(tmp_path / "state")):
        assert same
        assert all(torch.equal(second[n], w) for n, w in first.items())


def test_bfloat16_checkpoints_hold_masters(ranks: Ranks, architectures: dict[str, str], tmp_path: Path) -> None:
    path = architectures["qwen3"]
    begin(path, None, "lm", str(tmp_path / "alone"), "bfloat16")
    ranks.run(2, begin, path, 2, "lm", str(tmp_path / "spread"), "bfloat16")

    def masters(at: Path) -> dict[str, Tensor]:
        engine = engine_of(path, dtype="bfloat16", **KEYS)
        engine.load(at)
        return dict(trained(engine).tensors())

    assert_close(masters(tmp_path / "spread"), masters(tmp_path / "alone"), 2e-3)
    assert not any(torch.equal(t, t.bfloat16().float()) for n, t in masters(tmp_path / "spread").items() if "mlp" in n)


def write_meanwhile(path: str, shard: int | None, home: str) -> Any:
    engine = engine_of(path, shard, **KEYS)
    learn(engine, 2)
    engine.save(Path(home) / "before")
    gone_on = Event()
    plain = checkpoint.write

    def slow(*args: Any) -> None:  # the disk waits until training has gone on
        assert gone_on.wait(30)
        plain(*args)

    checkpoint.write = slow
    try:
        waits = [engine.save_async(Path(home) / name) for name in ("first", "second")]
        learn(engine, 1)
        gone_on.set()
        for wait in waits:
            wait()
    finally:
        checkpoint.write = plain
    found = []
    for name in ("before", "first", "second"):
        engine.load(Path(home) / name)
        found.append({n: full(t) for n, t in engine._state().items()} | {"counters": str(trained(engine).counters())})
    return found


@pytest.mark.parametrize("world", [(0, None), (2, 2), (4, 2)])
def test_what_is_written_in_the_background_is_the_state_of_then(
    ranks: Ranks, architectures: dict[str, str], tmp_path: Path, world: tuple[int, int | None]
) -> None:
    call = (write_meanwhile, architectures["llama"], world[1], str(tmp_path))
    for before, *others in ranks.run(world[0], *call) if world[0] else [write_meanwhile(*call[1:])]:
        for other in others:
            assert other.keys() == before.keys()
            assert other.pop("counters") == before["counters"]
            assert all(torch.equal(t, before[n]) for n, t in other.items())


def refused(path: str, shard: int | None, at: str, head: Any = "lm") -> str:
    engine = engine_of(path, shard, head)
    learn(engine, 1)
    before = weights_of(engine)
    try:
        engine.load(Path(at))
    except RunError as error:
        return f"{error} {all(torch.equal(w, before[n]) for n, w in weights_of(engine).items())}"
    return "loaded"


def test_damaged_and_foreign_checkpoints_are_named_by_all(
    ranks: Ranks, architectures: dict[str, str], tmp_path: Path
) -> None:
    path = architectures["llama"]
    ranks.run(2, begin, path, 2, "lm", str(tmp_path / "good"))

    def damaged(name: str, change: Any) -> str:
        file = Path(shutil.copytree(tmp_path / "good", tmp_path / f"without {name}")) / name
        content = change(file.read_bytes())
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        return str(file.parent)

    def said(at: str, match: str, head: str = "lm", untouched: bool = True) -> None:
        for told in [*ranks.run(2, refused, path, 2, at, head), refused(path, None, at, head)]:
            assert match in told, told
            assert told.endswith("True") or not untouched

    said(damaged("state.json", lambda _: None), "state.json is missing")
    said(damaged("__1_0.distcp", lambda _: None), "__1_0.distcp is missing or damaged")
    said(damaged(".metadata", lambda _: None), ".metadata is missing or damaged")
    said(str(tmp_path / "good"), ".metadata does not fit this model: 'exp_avg/value_head.bias'", "value")
    shutil.rmtree(tmp_path / "without __1_0.distcp")
    said(damaged("__1_0.distcp", lambda content: content[:-10]), "__1_0.distcp is missing or damaged")
    shutil.rmtree(tmp_path / "without .metadata")
    said(damaged(".metadata", lambda content: content[:-10]), ".metadata is missing or damaged")
    said(
        damaged("__0_0.distcp", lambda content: bytes(len(content))),
        "without __0_0.distcp is damaged: UnpicklingError",
        untouched=False,
    )


def unwritable(path: str, to: str) -> str:
    engine = engine_of(path)
    try:
        engine.save(Path(to))
    except (OSError, RuntimeError) as error:
        return str(error)
    return "written"


def test_a_directory_that_is_there_already_is_refused_by_all(
    ranks: Ranks, architectures: dict[str, str], tmp_path: Path
) -> None:
    assert all("File exists" in said for said in ranks.run(2, unwritable, architectures["llama"], str(tmp_path)))


def full_disk(to: str) -> str:
    tensors = {"x": torch.zeros(4)}
    try:
        checkpoint.write(Path(to), tensors, dist.group.WORLD)
    except RunError as error:
        return str(error)
    return "written"


def test_what_cannot_be_written_is_told_by_all(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for said in ranks.run(2, full_disk, str(tmp_path / "file")):
        assert f"checkpoint {tmp_path / 'file'} cannot be written: FileExistsError" in said


# ---------------------------------------------------------------------- moving


def moved(path: str, keys: dict[str, Any]) -> Any:
    """On a CPU nothing has to move, and training is not to notice."""
    engine, still = engine_of(path, 2, **keys), engine_of(path, 2, **keys)
    told = []
    for _ in range(2):
        told.append(learn(engine, 1) == learn(still, 1))
        engine.offload()
        devices = {p.device.type for p in engine.network.root.parameters()}
        engine.onload()
        assert devices == {"cpu"}
    frozen = engine_of(path, 2, trainable=False)
    before = frozen.quantities(rows_here(ragged()), {"logprob"})["logprob_T"]
    frozen.offload()
    frozen.onload()
    after = frozen.quantities(rows_here(ragged()), {"logprob"})["logprob_T"]
    engine.close()
    engine.close()
    return told, torch.equal(before.nan_to_num(), after.nan_to_num())


@pytest.mark.parametrize("keys", [{}, {"dtype": "bfloat16"}, {"cpu_offload": True}])
def test_offload_and_onload_change_nothing(ranks: Ranks, architectures: dict[str, str], keys: dict[str, Any]) -> None:
    assert ranks.run(4, moved, architectures["llama"], keys) == [([True, True], True)] * 4
