"""The packed batch: pack, select, concat, compact, expand, mini-batches."""

from __future__ import annotations

import asyncio
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import annotated, assert_same, batches, flat, group, groups, quick, rewarded, trajectory
from treadle.agents.single_turn import SingleTurn
from treadle.batch import Batch, Counts
from treadle.errors import RewardError
from treadle.types import (
    Completion,
    Ended,
    Group,
    Kind,
    Prompt,
    Request,
    Reward,
    Sample,
    SamplingParams,
    TokenRequest,
)


def test_the_example_of_the_docstring() -> None:
    batch = Batch.pack([group(7, [trajectory("ppss", 1.0), trajectory("pps", 0.0)])])
    assert batch.offset_N1.tolist() == [0, 4, 7]
    assert batch.mask_T.tolist() == [False, False, True, True, False, False, True]
    assert batch.reward_N.tolist() == [1, 0]
    assert batch.reward_T.tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert batch.group_N.tolist() == [7, 7]
    assert batch.sample_N.tolist() == [0, 1]
    assert batch.row_T.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.count() == Counts(tokens=3, sequences=2)
    assert batch.reward_N.dtype == torch.float64
    assert batch.reward_T.dtype == torch.float32


@quick
@given(groups())
def test_pack_lays_the_usable_rows_end_to_end(packed: list[Group]) -> None:
    batch = Batch.pack(packed)
    rows = [(g, s, t) for g in packed for s in g.usable for t in s.trajectories]
    numbers = {identity: i for i, identity in enumerate(dict.fromkeys(s.id for _, s, _ in rows))}
    assert len(batch) == len(rows)
    assert batch.token_T.tolist() == [x for *_, t in rows for x in t.token_T.tolist()]
    assert batch.group_N.tolist() == [g.index for g, *_ in rows]
    assert batch.sample_N.tolist() == [numbers[s.id] for _, s, _ in rows]
    assert batch.baseline_N.tolist() == [s.kind is Kind.BASELINE for _, s, _ in rows]
    assert batch.truncated_N.tolist() == [t.ended is Ended.TRUNCATED for *_, t in rows]
    assert batch.trained_N.tolist() == [0 if s.kind is Kind.BASELINE else t.sampled_tokens for _, s, t in rows]
    assert batch.count().tokens == int(batch.mask_T.sum())
    assert batch.count().sequences == sum(n > 0 for n in batch.trained_N.tolist())
    assert batch.extras_T["routing"].shape == (len(batch.token_T), 2)
    assert batch.extras_N["level"].tolist() == [float(len(t.token_T)) for *_, t in rows]
    for row, (*_, t) in enumerate(rows):
        assert t.reward is not None
        placed = batch.reward_T[batch.row_T == row]
        assert placed.sum().item() == pytest.approx(t.reward.value if t.turn_ends else 0.0)


@quick
@given(batches(), st.data())
def test_select_moves_every_field_of_a_row(batch: Batch, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=6))
    part = batch.select(rows)
    assert part.count() == batch.count(), "denominators stay those of the whole"
    assert part.length_N.tolist() == [int(batch.length_N[r]) for r in rows]
    for name, whole in flat(batch).items():
        if name == "offset_N1":
            continue
        per_token = name.partition(".")[0].endswith("_T")
        pieces = [whole[batch.row_T == r] if per_token else whole[r : r + 1] for r in rows]
        expected = torch.cat(pieces) if pieces else whole[:0]
        torch.testing.assert_close(flat(part)[name], expected, rtol=0, atol=0, equal_nan=True)


@quick
@given(batches(), st.data())
def test_a_batch_cut_and_laid_together_is_the_batch(batch: Batch, data: st.DataObject) -> None:
    batch = annotated(batch)
    order = data.draw(st.permutations(range(len(batch))))
    cut = data.draw(st.integers(0, len(batch)))
    parts = [batch.select(order[:cut]), batch.select(order[cut:])]
    whole = Batch.concat(parts)
    assert whole.count() == batch.count()
    assert_same(whole.select(torch.tensor(order).argsort()), batch)


@quick
@given(batches())
def test_compact_holds_trained_tokens_and_all_rows(batch: Batch) -> None:
    batch = annotated(batch)
    compact = batch.compact()
    assert len(compact) == len(batch)
    assert compact.length_N.tolist() == batch.trained_N.tolist()
    assert bool(compact.mask_T.all())
    assert compact.count() == batch.count()
    whole, kept = flat(batch), flat(compact)
    assert whole.keys() == kept.keys()
    for name in whole:
        if name.partition(".")[0].endswith("_T"):
            assert torch.equal(kept[name], whole[name][batch.mask_T])
            assert bool(kept[name].isfinite().all()), f"{name}: a NaN of a masked position arrived"
    assert_same(compact.compact(), compact)


@quick
@given(batches())
def test_what_is_masked_does_not_matter(batch: Batch) -> None:
    batch = annotated(batch)
    poisoned = batch.replace(
        **{
            name: value.masked_fill(~batch.mask_T, 1e30)
            for name, value in flat(batch).items()
            if name.endswith("_T") and value.is_floating_point()
        }
    )
    assert_same(batch.compact(), poisoned.compact())


@quick
@given(batches(), st.data())
def test_expanded_lays_back_what_was_added(batch: Batch, data: st.DataObject) -> None:
    compact = batch.compact()
    tokens = len(compact.token_T)
    narrowed_T = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)), dtype=torch.bool)
    added_T = torch.arange(float(tokens)) + 1
    whole = batch.expanded(
        compact.replace(
            mask_T=narrowed_T,
            signal_N=torch.zeros_like(batch.signal_N),
            advantage_T=added_T,
            extras_T={**compact.extras_T, "mine": added_T.long()},
        )
    )
    assert not bool(whole.signal_N.any())
    assert whole.advantage_T is not None
    assert torch.equal(whole.advantage_T[batch.mask_T], added_T)
    assert bool(whole.advantage_T[~batch.mask_T].isnan().all())
    assert whole.extras_T["mine"][~batch.mask_T].tolist() == [0] * int((~batch.mask_T).sum())
    assert torch.equal(whole.extras_T["routing"], batch.extras_T["routing"])
    assert torch.equal(whole.compact().advantage_T, added_T[narrowed_T])  # type: ignore[arg-type]
    assert whole.count().tokens == int(narrowed_T.sum())
    assert torch.equal(whole.reward_T, batch.reward_T)


def test_a_minibatch_counts_again_when_tokens_are_deselected() -> None:
    [part] = rewarded([1, 0], [1]).minibatches()
    assert part.counts == Counts(tokens=6, sequences=3)
    compact = part.compact()
    narrowed = part.expanded(compact.replace(mask_T=torch.tensor([True, False, False, False, True, True])))
    assert narrowed.counts == Counts(tokens=3, sequences=2)
    assert part.expanded(compact).counts == part.counts


@quick
@given(groups(), st.integers(1, 5))
def test_minibatches_part_the_batch_by_whole_groups(packed: list[Group], count: int) -> None:
    batch = Batch.pack(packed, count)
    parts = batch.minibatches()
    assert 1 <= len(parts) <= count
    owners = [set(p.group_N.tolist()) for p in parts]
    assert sum(map(len, owners)) == len(set().union(*owners)), "a group is in one mini-batch"
    bundles = [set(p.bundle_N.tolist()) for p in parts]
    assert sum(map(len, bundles)) == len(set().union(*bundles)), "a bundle is in one mini-batch"
    assert sum(p.count().tokens for p in parts) == batch.count().tokens
    assert sum(p.count().sequences for p in parts) == batch.count().sequences
    for part in parts:
        assert part.counts == part.replace(counts=None).count()
        if len(part):
            assert part.select([0]).count() == part.counts
    assert sorted(x for p in parts for x in p.token_T.tolist()) == sorted(batch.token_T.tolist())


def test_bundles_are_numbered_apart_by_group_and_alone_by_default() -> None:
    pair = [trajectory("ps", 1.0, bundle=0), trajectory("ps", 0.0, bundle=0), trajectory("ps", 0.0)]
    bundles = Batch.pack([group(0, pair), group(1, pair)]).bundle_N.tolist()
    assert bundles[0] == bundles[1]
    assert bundles[3] == bundles[4]
    assert len(set(bundles)) == 4


def test_trajectories_of_a_sample_share_its_number() -> None:
    batch = Batch.pack([group(0, [[trajectory("ps", 1.0), trajectory("pss", 1.0)], trajectory("ps", 0.0)])])
    assert batch.sample_N.tolist() == [0, 0, 1]
    assert batch.reward_N.tolist() == [1, 1, 0]


def test_rewards_by_turn_lie_on_the_last_sampled_token_of_each_turn() -> None:
    batch = Batch.pack([group(0, [trajectory("psseespe", Reward(0.75, turns=(0.5, 0.25)))])])
    assert batch.reward_N.tolist() == [0.75]
    assert batch.reward_T.tolist() == [0, 0, 0.5, 0, 0, 0.25, 0, 0]
    assert batch.compact().reward_T.tolist() == [0, 0.5, 0.25]


@pytest.mark.parametrize("turns", [(1.0,), (0.5, 0.25, 0.25)])
def test_rewards_for_another_number_of_turns_are_refused(turns: tuple[float, ...]) -> None:
    with pytest.raises(RewardError, match=rf"test:1 has {len(turns)} turns, its trajectory 2"):
        Batch.pack([group(0, [trajectory("pses", Reward(1.0, turns=turns))])])


def test_what_was_not_scored_is_not_a_number() -> None:
    batch = Batch.pack([group(0, [trajectory("ps", None), trajectory("ps", 1.0)])])
    assert math.isnan(batch.reward_N[0])
    assert batch.reward_N[1] == 1.0


def test_failed_samples_are_nowhere() -> None:
    failed = Sample("0.1", Kind.TRAIN, (trajectory("psss", 5.0),), failure="timed out")
    batch = Batch.pack([group(0, [trajectory("ps", 1.0), failed, trajectory("ps", 0.0)])])
    assert batch.reward_N.tolist() == [1, 0]
    assert batch.count() == Counts(tokens=2, sequences=2)
    with pytest.raises(ValueError, match="every sample of every group failed"):
        Batch.pack([group(0, [failed])])


def test_parts_must_have_the_same_fields() -> None:
    batch = rewarded([1, 0])
    one, other = batch.select([0]), batch.select([1])
    with pytest.raises(ValueError, match="value_T"):
        Batch.concat([one, other.replace(value_T=torch.zeros(3))])
    with pytest.raises(ValueError, match="extras_N"):
        Batch.concat([one.replace(extras_N={"a": torch.zeros(1)}), other])


def test_an_extra_is_on_every_trajectory_or_on_none() -> None:
    one, other = trajectory("ps", 1.0), trajectory("ps", 1.0, extras_N={"level": np.array(1.0)})
    with pytest.raises(ValueError, match="level"):
        Batch.pack([group(0, [one, other])])
    with pytest.raises(ValueError, match="level"):
        Batch.pack([group(0, [other, one])])


def test_sums_over_rows_have_gradient_and_skip_empty_rows() -> None:
    batch = Batch.pack([group(0, [trajectory("pss", 1.0), trajectory("p", 1.0), trajectory("ps", 1.0)])]).compact()
    term_T = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    sum_N = batch.sum_N(term_T)
    assert sum_N.tolist() == [3, 0, 4]
    (sum_N * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert term_T.grad is not None
    assert term_T.grad.tolist() == [1, 1, 100]


def test_rows_without_an_advantage_have_no_signal() -> None:
    greedy = Sample("0.3", Kind.BASELINE, (trajectory("pss", 0.0),))
    batch = Batch.pack([group(0, [trajectory("pss", 1.0), trajectory("pss", 0.0), trajectory("p", 0.0), greedy])])
    assert batch.signal_N.tolist() == [True, True, True, False]
    advantage_T = batch.expand(torch.tensor([0.0, 2.0, 0.0, 0.0]))
    assert batch.replace(advantage_T=advantage_T).mark_signal().signal_N.tolist() == [True, False, False, False]


def test_who_judges_a_trajectory_cannot_rewrite_it() -> None:
    extras = {"extras_T": {"routing": np.ones((3, 2))}, "extras_N": {"level": np.array([1.0])}}
    judged = trajectory("pss", 1.0, **extras)  # type: ignore[arg-type]
    arrays = (judged.token_T, judged.provenance_T, judged.logprob_T, judged.version_T)
    for array in (*arrays, judged.extras_T["routing"], judged.extras_N["level"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    copy = pickle.loads(pickle.dumps(judged))  # as it goes to a reward's process
    assert copy.token_T.tolist() == [100, 101, 102]
    batch = Batch.pack([group(0, [judged])])
    batch.token_T[0] = 7  # a batch has memory of its own
    assert judged.token_T.tolist() == [100, 101, 102]


def test_the_messages_of_a_sample_are_its_own() -> None:
    class Rollout:
        async def generate(self, request: TokenRequest) -> Completion:
            return Completion(np.array([8]), np.array([-0.1], np.float32), np.array([0], np.int32), "stop")

    class Decoder:
        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            return "5"

    prompt = Prompt("test:1", 0, ({"role": "user", "content": "2 + 3?"},), (1,))
    agent: Any = SingleTurn(Decoder(), SamplingParams(), seed=0)
    [judged] = asyncio.run(agent(Request(prompt), "0.0", Rollout()))
    judged.messages[0]["content"] = "1 + 1?"
    assert prompt.messages[0]["content"] == "2 + 3?"
