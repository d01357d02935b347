"""Halves of one's own, as a notebook or a file holds them: what joins, under which names, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import treadle
from tests.runs import books, settings
from treadle.algorithms.base import Algorithm, AlgorithmConfig
from treadle.algorithms.critic import Critic
from treadle.algorithms.gspo import GSPO
from treadle.algorithms.policy_gradient import Estimator, Objective, PolicyGradientConfig, Surrogate
from treadle.algorithms.rloo import RLOO, RLOOConfig
from treadle.batch import Batch
from treadle.config import key
from treadle.config.plugins import config_class, plugin_class
from treadle.errors import ConfigError


class Half(Objective):
    """An objective without a configuration of its own."""

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        return Surrogate(-logprob_T * batch.advantage_T)


class Other(Estimator):
    """An estimator without a configuration of its own."""

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantage_T=batch.reward_N.float()[batch.row_T])


class Anchored(Objective):
    uses = before_loss = frozenset({"reference"})
    needs = frozenset({"logprob", "entropy", "sum_p2"})
    two_pass = True
    skips_no_signal = False

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        return Half.surrogate(self, batch, logprob_T, old_T)  # type: ignore[arg-type]


def whole(name: str) -> Algorithm:
    return plugin_class(name, "treadle.algorithms")()


@pytest.mark.parametrize(
    "name",
    ["{m}:Half", "{m}:Half+rloo", "rloo+{m}:Half", "{m}:Half+{m}:Other", "gspo+{m}:Other", "{m}:Other", "gspo + rloo"],
)
def test_halves_join_whether_or_not_they_have_keys(name: str) -> None:
    asked = name.format(m=__name__)
    made = whole(asked)
    assert made.config.name == asked.replace(" ", "")
    assert isinstance(made.config, config_class(asked, "treadle.algorithms"))


def test_what_either_half_declares_holds_for_the_whole() -> None:
    made = Anchored.joined(Critic)()
    assert made.uses == {"reference", "critic"}
    assert made.trains == ("policy", "critic")
    assert made.before_advantages == {"critic"}
    assert made.before_loss == {"reference"}
    assert made.needs == {"logprob", "entropy", "sum_p2"}
    assert made.two_pass
    assert not made.skips_no_signal


def test_keys_of_one_name_and_two_types_are_refused() -> None:
    class OneConfig(PolicyGradientConfig):
        depth: int = key("a number", default=1)

    class TwoConfig(PolicyGradientConfig):
        depth: str = key("a word", default="a")

    one = type("One", (Half,), {"Config": OneConfig})
    two = type("Two", (Other,), {"Config": TwoConfig})
    with pytest.raises(ConfigError, match=r"One and Two both have a key 'depth', of different types"):
        assert one.joined(two).Config is None


def test_a_configuration_that_lacks_keys_is_refused_where_it_is_given() -> None:
    with pytest.raises(ConfigError, match=r"reads a GSPO\+RLOOConfig, and was given a RLOOConfig"):
        GSPO.joined(RLOO)(RLOOConfig())

    class Both(GSPO, Critic):
        pass

    with pytest.raises(ConfigError, match=r"the configuration of .*Both lacks the keys of Critic"):
        Both()
    with pytest.raises(ConfigError, match="reads a GSPOConfig, and was given a AlgorithmConfig"):
        GSPO(AlgorithmConfig())


def test_half_an_algorithm_is_refused_before_anything_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, tiny_model)
    with pytest.raises(ConfigError, match=r"GSPO is half an algorithm; give GSPO.joined\(\)\(\)"):
        treadle.train(config, algorithm=GSPO())
    assert not (tmp_path / "run").exists()


def test_a_joined_algorithm_from_python_is_known_by_its_halves(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, tiny_model, steps=1)
    made = GSPO.joined(RLOO)
    treadle.train(config, algorithm=made(made.Config(group_size=4)))
    assert books(tmp_path / "run") == {"trained": 8}
    assert "name: gspo+rloo" in (tmp_path / "run" / "config.yaml").read_text()
