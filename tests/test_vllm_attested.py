"""Publishes to real vLLM engines: sound ones pass, sabotaged ones are caught at that publish, by name or symptom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_help import Apart, make_model
from treadle.errors import WeightSyncError
from treadle.rollout.replicas import Loaded
from treadle.rollout.vllm.replica import VllmReplica
from treadle.weights.place import new_place
from treadle.weights.transports import mailbox

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """A trainer and two engines."""
    apart = Apart(
        make_model(tmp_path_factory.mktemp("model")),
        extension="tests.sabotage.Sabotaged",
        replicas=2,
        weights={"bucket_mb": 1, "timeout": 15.0},
    )
    apart.run(apart.publish)
    yield apart
    apart.close()


def replica(pair: Apart, slot: str = "0") -> VllmReplica:
    found = pair.pool._members[slot].replica
    assert isinstance(found, VllmReplica)
    return found


@pytest.fixture
def caught(pair: Apart) -> Iterator[Callable[[str], None]]:
    """A check that a publish of new weights raises, what it says matching; then a sound one passes again."""

    def check(match: str) -> None:
        pair.learn()
        with pytest.raises(WeightSyncError, match=match):
            pair.run(pair.publish)

    yield check
    pair.run(pair.publish)


IN_THE_ENGINE = {
    "skipped model.layers.1.self_attn.k_proj.weight": r"model\.layers\.1\.self_attn\.qkv_proj' did not get all",
    "skipped model.layers.0.mlp.down_proj.weight": r"mlp\.down_proj' did not get all",
    "skipped model.norm.weight": r"'model\.norm' did not get all",
    "skipped model.embed_tokens.weight": r"'model\.embed_tokens' did not get all",
    "the tied head was left old": r"'lm_head' computes with other weights",
    "model.layers.1.mlp.gate_up_proj": r"'model\.layers\.1\.mlp\.gate_up_proj' computes with other",
    "model.layers.0.self_attn.qkv_proj": r"'model\.layers\.0\.self_attn\.qkv_proj' computes with other",
    "a norm was left old": r"'model\.layers\.1\.input_layernorm\.weight' arrived, but the engine holds other",
    "the embedding was left old": r"'model\.embed_tokens\.weight' arrived, but the engine holds other",
    "nothing was loaded": "on a probe",
}
ON_THE_WAY_TO_THE_LAYERS = {
    "cast to bfloat16 and back": "computes with other|holds other",
    "one layer scaled": r"mlp\.down_proj' computes with other",
    "a square matrix transposed": r"self_attn\.o_proj' computes with other",
    "rows permuted": r"mlp\.gate_up_proj' computes with other",
    "gate and up swapped": r"mlp\.gate_up_proj' computes with other",
    "two layers swapped": r"qkv_proj' computes with other",
    "a tensor of zeros": r"qkv_proj' computes with other",
    "half a tensor": r"gate_up_proj' computes with other",
    "noise below the tolerance": r"gate_up_proj' computes with other",
}


@pytest.mark.parametrize("kind", [*IN_THE_ENGINE, *ON_THE_WAY_TO_THE_LAYERS])
@pytest.mark.parametrize("slot", ["0", "1"])
def test_a_load_that_went_wrong_in_one_engine_is_caught(
    kind: str, slot: str, pair: Apart, caught: Callable[[str], None]
) -> None:
    """A stream is watched before it is changed here, as it would be by a loader with a mistake."""
    pair.run(lambda: replica(pair, slot)._call("sabotage", kind))
    caught((IN_THE_ENGINE | ON_THE_WAY_TO_THE_LAYERS)[kind])


def _flip(path: Path, note: dict[str, Any]) -> None:
    with Path(note["segment"]).open("r+b") as file:
        file.seek(note["tensors"][2][3] + 1)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def _truncate(path: Path, note: dict[str, Any]) -> None:
    note["tensors"] = note["tensors"][:-1]


def _rename(path: Path, note: dict[str, Any]) -> None:
    note["tensors"][0][0] = "model.layers.7.mlp.up_proj.weight"


def _swap(path: Path, note: dict[str, Any]) -> None:
    one, other = [t for t in note["tensors"] if "layernorm" in t[0]][:2]
    one[3], other[3] = other[3], one[3]


def _reshape(path: Path, note: dict[str, Any]) -> None:
    (tensor,) = [t for t in note["tensors"] if "layers.0.mlp.down_proj" in t[0]]
    tensor[2] = tensor[2][::-1]


ON_THE_WIRE: dict[str, tuple[Callable[[Path, dict[str, Any]], None], str]] = {
    "a bit flipped": (_flip, "differs from the trainer's"),
    "a bucket truncated": (_truncate, "was published, but rollout engine .* does not hold it"),
    "a tensor renamed": (_rename, "was published, but|was not published"),
    "two tensors swapped": (_swap, "differs from the trainer's"),
    "a tensor of another shape": (_reshape, r"down_proj\.weight' in .* differs"),
}


@pytest.mark.parametrize("kind", ON_THE_WIRE)
def test_what_changes_on_the_wire_is_caught(
    kind: str, caught: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, match = ON_THE_WIRE[kind]
    write = mailbox.write

    def changed(path: Path, note: dict[str, Any]) -> None:
        if path.name == "000000.json":
            change(path, note)
        write(path, note)

    monkeypatch.setattr(mailbox, "write", changed)
    caught(match)
    monkeypatch.undo()


def test_a_bucket_that_is_lost_is_caught(caught: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    write = mailbox.write

    def fewer(path: Path, note: dict[str, Any]) -> None:
        write(path, {"buckets": 0} if path.name == "end.json" else note)

    monkeypatch.setattr(mailbox, "write", fewer)
    caught("buckets of weights were sent|does not hold it")
    monkeypatch.undo()


@pytest.mark.parametrize("slot", ["0", "1"])
def test_a_prefix_cache_that_outlived_the_load_is_caught(
    slot: str, pair: Apart, caught: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replica(pair, slot)
    load = one.load

    async def keeps_cache(version: int) -> Any:
        salt = one._salt

        async def kept(*_: Any) -> bool:
            return True

        with monkeypatch.context() as patch:
            patch.setattr(one._engine, "reset_prefix_cache", kept)
            loaded = await load(version)
        one._salt = salt
        return loaded

    async def pause(keep_cache: bool) -> None:
        await one._safely(one._engine.pause_generation(mode="keep", clear_cache=False))

    monkeypatch.setattr(one, "load", keeps_cache)
    monkeypatch.setattr(one, "pause", pause)
    caught("differ by .* nats on a probe")
    monkeypatch.undo()


@pytest.mark.parametrize("stamp", ["the old version", "another version"])
def test_a_wrong_stamp_is_caught(
    stamp: str, pair: Apart, caught: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = replica(pair, "1")._engine
    update = engine.update_weight_version

    async def other(version: str) -> None:
        if stamp == "another version":
            await update(str(int(version) + 5))

    monkeypatch.setattr(engine, "update_weight_version", other)
    caught("the probe's tokens of 1-2 carry")
    monkeypatch.undo()


def test_engines_at_two_versions_are_caught(
    pair: Apart, caught: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine got everything, and says that it has the new version, but goes on with the old one."""
    one = replica(pair, "1")

    async def stamped(version: int) -> Loaded:
        manifests = await one.received()
        await one._engine.update_weight_version(str(version))
        return Loaded(manifests)

    monkeypatch.setattr(one, "load", stamped)
    caught("version .* did not reach 1-2: .* on a probe|of 1-2 .* on a probe")
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("kind", "match"),
    {
        "old weights exported": "on a probe",
        "weights cast twice": "on a probe",
        "an adapter not merged": "on a probe",
        "a tensor not exported": "did not get all",
    }.items(),
)
def test_a_trainer_that_sends_other_weights_than_it_has_is_caught(
    kind: str, match: str, pair: Apart, caught: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = pair.trainer
    export = trainer.export
    old = [(name, tensor.clone()) for name, tensor in export()]

    def other() -> Any:
        if kind == "old weights exported":
            return iter(old)
        if kind == "weights cast twice":
            return ((name, t.bfloat16().float()) for name, t in export())
        if kind == "a tensor not exported":
            return ((name, t) for name, t in export() if "layers.1.mlp.up_proj" not in name)
        return export()

    monkeypatch.setattr(trainer, "export", other)
    handles = []
    if kind == "an adapter not merged":  # what a LoRA layer adds to the model's own weights
        layer = trainer.model.model.layers[0].mlp.up_proj
        down, up = torch.randn(4, 64) * 0.1, torch.randn(128, 4) * 0.1
        handles.append(layer.register_forward_hook(lambda _, args, out: out + args[0] @ down.T @ up.T))
    try:
        caught(match)
    finally:
        for handle in handles:
            handle.remove()
    monkeypatch.undo()


def test_a_swap_during_sleep_is_refused(pair: Apart, caught: Callable[[str], None]) -> None:
    pair.run(pair.pool.sleep)
    try:
        caught("sleep; wake them before they load")
    finally:
        pair.run(pair.pool.wake)


def test_two_hundred_sound_publishes_raise_no_alarm(pair: Apart) -> None:
    gaps = []
    for number in range(200):
        pair.learn(size=0.5 ** (number % 24) * 0.02)  # to below what float32 resolves
        gaps.append(pair.run(pair.publish)["publish/probe_gap"].value)
    assert max(gaps) < 1e-4
    assert len(set(gaps)) > 1


@pytest.mark.parametrize("transport", ["shared_memory", "files", "broadcast"])
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("delta", [False, True])
def test_every_transport_brings_the_same_weights(
    transport: str, staged: bool, delta: bool, pair: Apart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = pair.pool.weights.model_copy(update={"transport": transport, "staged": staged, "delta": delta})
    monkeypatch.setattr(pair.pool, "weights", weights)
    monkeypatch.setattr(pair.pool, "place", new_place(weights, tmp_path))
    unchanged = []
    for _ in range(3):
        with torch.no_grad():
            pair.trainer.model.model.norm.weight.add_(0.01)
        found = pair.run(pair.publish)
        assert found["publish/probe_gap"].value < 1e-4
        unchanged.append(found.get("publish/unchanged"))
    if delta:
        assert unchanged[-1] is not None
        assert 0.99 < unchanged[-1].value < 1
        assert found["publish/megabytes"].value < 0.01
    pair.run(pair.policy.close)
    pair.publisher._holding = ()  # the next sender is another one


def test_a_delta_on_the_wrong_base_is_caught(pair: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = pair.pool.weights.model_copy(update={"delta": True})
    monkeypatch.setattr(pair.pool, "weights", weights)
    pair.run(pair.publish)
    worker: Any = pair.policy._worker
    with torch.no_grad():
        pair.trainer.model.model.norm.weight.add_(0.01)
        worker._shipper._encoder._last["model.norm.weight"].add_(0.01)  # believed to be there already
    with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' in rollout engine .* differs"):
        pair.run(pair.publish)
    monkeypatch.undo()
    pair.run(pair.publish)
