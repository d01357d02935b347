"""Faults of the catalogue that were found and mended."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from tests.batches import group, trajectory
from tests.oracle_help import made
from treadle.algorithms.base import Algorithm
from treadle.batch import Batch
from treadle.config.plugins import plugin_class
from treadle.errors import TrainingError
from treadle.types import Ended, Kind, Sample


def advantages(algorithm: Algorithm, batch: Batch) -> list[float]:
    done = algorithm.estimate(batch)
    assert done.advantage_T is not None
    return done.advantage_T[done.mask_T].tolist()


def noted(batch: Batch, old: float, sum_p2: float) -> Batch:
    old_T = torch.full((len(batch.token_T),), old)
    return batch.replace(old_logprob_T=old_T, extras_T={"old_sum_p2_T": torch.full_like(old_T, sum_p2)})


@pytest.mark.parametrize("name", ["gdpo", "pass_at_k"])
@pytest.mark.parametrize("keys", [{"kl_coefficient": 0.1, "kl_in": "reward"}, {"overlong_share": 0.5}])
def test_what_cannot_be_charged_is_refused(name: str, keys: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"cannot be charged: (gdpo|pass_at_k) looks at"):
        made(name, **keys)


def test_a_sample_of_two_trajectories_is_not_two_answers_to_compare() -> None:
    """The tokens that only it has keep the last baseline that two samples had a part in."""
    long = trajectory("psss", 1.0)
    twice = noted(Batch.pack([group(0, [[long, long], trajectory("ps", 0.0)])]), -1.0, 0.3)
    once = noted(Batch.pack([group(0, [long, trajectory("ps", 0.0)])]), -1.0, 0.3)
    whole = made("optimal_token")
    assert advantages(whole, once) == pytest.approx([0.5, 0.5, 0.5, -0.5])
    assert advantages(whole, twice) == pytest.approx([0.5] * 6 + [-0.5])


def test_an_overlong_penalty_without_a_limit_says_so() -> None:
    batch = Batch.pack([group(0, [trajectory("ps", 1.0), trajectory("p", 0.0), trajectory("ps", 0.0)])])
    with pytest.raises(TrainingError, match=r"set DAPO\(\)\.max_tokens"):
        made("dapo").estimate(batch)
    whole = made("dapo")
    whole.max_tokens = 4
    assert all(torch.tensor(advantages(whole, batch)).isfinite())


def test_the_greedy_answer_pays_for_its_length_too() -> None:
    greedy = Sample("0.1", Kind.BASELINE, (trajectory("pssss", 1.0),))
    whole = made("remax", overlong_share=0.5)
    whole.max_tokens = 4
    assert advantages(whole, Batch.pack([group(0, [trajectory("pssss", 1.0), greedy])])) == [0, 0, 0, 0]


def test_weights_have_the_mean_of_what_is_trained() -> None:
    rows = [trajectory("ps", 1.0), trajectory("ps", 0.0), trajectory("ps", 0.0, Ended.TRUNCATED)]
    batch = Batch.pack([group(0, rows)])
    ratio_T = torch.tensor([1, 0.5, 1, 0.5, 1, 1.9])
    batch = batch.replace(old_logprob_T=batch.sampling_logprob_T + ratio_T.log())
    done = made("rloo", truncated="reject", correction={"weight": "token", "normalize": True}).estimate(batch)
    assert done.weight_T is not None
    assert done.weight_T[done.mask_T].tolist() == pytest.approx([1, 1])


def test_a_joined_configuration_is_called_what_was_asked_for() -> None:
    with pytest.raises(ValidationError, match="rloo compares the samples"):
        plugin_class("rloo", "treadle.algorithms").Config(group_size=1)
    assert plugin_class("gspo+rloo", "treadle.algorithms").Config().name == "gspo+rloo"
    assert plugin_class("sapo", "treadle.algorithms").Config().name == "sapo"


def test_a_checkpoint_of_before_coefficients_were_kept_can_be_resumed() -> None:
    whole = made("grpo", kl_coefficient=0.3)
    whole.restore({})
    assert whole.state() == {"kl_coefficient": 0.3}
