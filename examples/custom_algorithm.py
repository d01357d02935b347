"""An algorithm of one's own: REINFORCE with the group's mean as baseline. `python examples/custom_algorithm.py`."""

import treadle
from treadle.algorithms.advantages import group_relative


class Reinforce(treadle.Algorithm):
    def advantages(self, batch: treadle.Batch) -> treadle.Batch:
        advantage_N = group_relative(batch.reward_N, batch.group_N, batch.sample_N, scale="none")
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])

    def loss(self, batch: treadle.Batch, outputs: treadle.Outputs) -> treadle.Loss:
        assert batch.advantage_T is not None
        assert outputs.logprob_T is not None
        return treadle.Loss([treadle.Term(-batch.advantage_T * outputs.logprob_T)])


def share_of_b(trajectory: treadle.Trajectory) -> float:
    return trajectory.response.count("b") / max(1, len(trajectory.response))


if __name__ == "__main__":
    treadle.train("examples/smoke.yaml", overrides=["run.dir=runs/b"], algorithm=Reinforce(), reward=share_of_b)
