"""`Batch`: trajectories packed end to end, the form that trains. No padding exists anywhere.

Suffixes: N trajectories · N1 is N + 1 · T tokens of all trajectories laid end to end. A field's suffix is what
`select`, `concat` and `compact` go by, so a field or an extra of either kind moves with its rows by itself.

Two views of the same rows:

- *full*: every token, as the model reads it;
- *compact* (`batch.compact()`): trained tokens only. Algorithms see nothing else, so a prompt, a tool's answer or a
  NaN at a masked position cannot reach an advantage, a loss, a metric or a mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from treadle.errors import RewardError
from treadle.types import Ended, Group, Kind, Provenance, Reward, Trajectory, Unit, merge

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Counts:
    """Denominators of a whole mini-batch. They stay with every part that is cut from it."""

    tokens: int  # trained tokens
    sequences: int  # trajectories with at least one trained token


@dataclass(frozen=True, slots=True)
class Batch:
    """Two trajectories, `[5, 6 | 7, 8]` with reward 1 and `[5, 6 | 2]` with reward 0, sampled after `|`::

        token_T  [5, 6, 7, 8, 5, 6, 2]      offset_N1 [0, 4, 7]
        mask_T   [0, 0, 1, 1, 0, 0, 1]      reward_N  [1, 0]     group_N [0, 0]    sample_N [0, 1]
        reward_T [0, 0, 0, 1, 0, 0, 0]      logprob at position t is that of token t, given all before it

    Optional fields are None until a pass has filled them; unset positions of a filled one are NaN.
    """

    # what was generated
    token_T: Tensor  # int64
    provenance_T: Tensor  # uint8
    sampling_logprob_T: Tensor  # float32, NaN where not sampled
    version_T: Tensor  # int32, -1 where not sampled
    offset_N1: Tensor  # int64
    # who it belongs to
    group_N: Tensor  # int64, by identity: members need not be adjacent
    sample_N: Tensor  # int64; trajectories of one sample share it, baselines count samples
    bundle_N: Tensor  # int64; rows with one bundle are never parted
    baseline_N: Tensor  # bool; enters baselines, is not trained
    truncated_N: Tensor  # bool
    temperature_N: Tensor  # float32
    # what it earned
    reward_N: Tensor  # float64, NaN where nothing scored it
    reward_T: Tensor  # float32, the same reward placed at last sampled tokens (of the turn, or of the trajectory)
    # what trains
    mask_T: Tensor  # bool, trained tokens
    signal_N: Tensor  # bool, rows whose objective can be other than zero
    minibatch_N: Tensor  # int64, the optimizer step a row belongs to
    counts: Counts | None = None  # of the mini-batch this was cut from; None: this is the whole
    # what passes over the models found
    old_logprob_T: Tensor | None = None  # at the weights the step starts with
    reference_logprob_T: Tensor | None = None
    value_T: Tensor | None = None  # of the state in which the token was chosen
    bootstrap_N: Tensor | None = None  # value of the state after the last token; used where truncated
    # what the algorithm made of it
    advantage_T: Tensor | None = None
    return_T: Tensor | None = None
    weight_T: Tensor | None = None  # importance correction
    reward_parts_N: Mapping[str, Tensor] = field(default_factory=dict)  # float64, by name
    extras_T: Mapping[str, Tensor] = field(default_factory=dict)
    extras_N: Mapping[str, Tensor] = field(default_factory=dict)

    # ------------------------------------------------------------------ sizes

    def __len__(self) -> int:
        return len(self.offset_N1) - 1

    @property
    def length_N(self) -> Tensor:
        return self.offset_N1.diff()

    @property
    def row_T(self) -> Tensor:
        """The trajectory that each token belongs to, int64."""
        import torch

        return torch.repeat_interleave(torch.arange(len(self), device=self.offset_N1.device), self.length_N)

    @property
    def trained_N(self) -> Tensor:
        """Trained tokens per trajectory, int64. A trajectory with none counts in no denominator."""
        return self.count_N(self.mask_T)

    def count(self) -> Counts:
        """The denominators: those this part carries, or its own."""
        if self.counts is not None:
            return self.counts
        import numpy as np

        mask_T, offset_N1 = self.mask_T.cpu().numpy(), self.offset_N1.cpu().numpy()
        starts = offset_N1[:-1][np.diff(offset_N1) > 0]  # an empty row ends where it starts
        some = np.logical_or.reduceat(mask_T, starts) if len(starts) else mask_T[:0]
        return Counts(int(np.count_nonzero(mask_T)), int(np.count_nonzero(some)))

    def sum_N(self, term_T: Tensor) -> Tensor:
        """Sum a [T] tensor over each trajectory, with gradient; [N]."""
        return term_T.new_zeros(len(self)).index_add(0, self.row_T, term_T)

    def count_N(self, which_T: Tensor) -> Tensor:
        """How many tokens of each trajectory a bool tensor marks, int64."""
        import torch

        return torch.nn.functional.pad(which_T.cumsum(0), (1, 0))[self.offset_N1].diff()

    # ------------------------------------------------------------------ moving rows

    def replace(self, **changes: Any) -> Batch:
        return dataclasses.replace(self, **changes)

    def select(self, rows: Tensor | Sequence[int]) -> Batch:
        """These rows in this order, the denominators of the whole kept."""
        import torch

        rows_M = torch.as_tensor(rows, dtype=torch.int64)
        lengths = self.length_N[rows_M]
        offset_N1 = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        changes = _each(self, _taking(self, rows_M), lambda x: x[rows_M])
        return self.replace(**changes, offset_N1=offset_N1, counts=self.count())

    def compact(self) -> Batch:
        """Trained tokens only. Rows stay, the one without a trained token becomes empty."""
        import torch

        trained_N, kept_T = self.trained_N, self.mask_T.nonzero()[:, 0]
        offset_N1 = torch.cat([trained_N.new_zeros(1), trained_N.cumsum(0)])
        changes = _each(self, lambda x: x[kept_T], lambda x: x)
        return self.replace(**changes, offset_N1=offset_N1)

    def expand(self, term_T: Tensor) -> Tensor:
        """A tensor of `compact()` laid back on the full tokens; NaN (or 0 for integers) elsewhere."""
        fill = float("nan") if term_T.is_floating_point() else 0
        whole = term_T.new_full((len(self.token_T), *term_T.shape[1:]), fill)
        whole[self.mask_T] = term_T
        return whole

    def expanded(self, compact: Batch) -> Batch:
        """This batch with what an algorithm added to its compact view.

        A narrowed mask narrows this one's, and a mini-batch counts again: what was deselected is in no denominator.
        Extras are added, never changed.
        """
        import torch

        names = ("advantage_T", "return_T", "weight_T")
        added = {n: self.expand(v) for n in names if (v := getattr(compact, n)) is not None}
        extras = {n: self.expand(v) for n, v in compact.extras_T.items() if n not in self.extras_T}
        mask_T = torch.zeros_like(self.mask_T)
        mask_T[self.mask_T] = compact.mask_T
        whole = self.replace(
            **added,
            mask_T=mask_T,
            signal_N=compact.signal_N,
            extras_T={**self.extras_T, **extras},
            extras_N=compact.extras_N,
            counts=None,
        )
        if self.counts is None:
            return whole
        return whole.replace(counts=self.counts if bool(compact.mask_T.all()) else whole.count())

    def annotated(self, found: Mapping[str, Tensor]) -> Batch:
        """With what a pass found: fields by their name, anything else as an extra that its suffix places."""
        fields = {name: value for name, value in found.items() if name in _FIELDS}
        extras_T = {n: v for n, v in found.items() if n not in fields and n.endswith("_T")}
        extras_N = {n: v for n, v in found.items() if n not in fields and not n.endswith("_T")}
        return self.replace(**fields, extras_T={**self.extras_T, **extras_T}, extras_N={**self.extras_N, **extras_N})

    def mark_signal(self) -> Batch:
        """Rows without a trained token whose advantage is other than zero have no signal: passes may leave them out."""
        assert self.advantage_T is not None
        moves_T = self.mask_T & (self.advantage_T != 0)
        return self.replace(signal_N=self.signal_N & (self.count_N(moves_T) > 0))

    def minibatches(self) -> list[Batch]:
        """The mini-batches, in order, each with its own denominators."""
        whole = self.replace(counts=Counts(0, 0))  # else each cut would count the whole; parts count themselves
        parts = [whole.select((self.minibatch_N == m).nonzero()[:, 0]) for m in self.minibatch_N.unique().tolist()]
        return [p.replace(counts=p.replace(counts=None).count()) for p in parts]

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """Rows of all parts, in order. Parts were cut from one batch (samples and bundles are numbered in it) and have
        the same optional fields and extras."""
        import torch

        first = parts[0]
        changes: dict[str, Any] = {}
        for name, values in ((f.name, [getattr(p, f.name) for p in parts]) for f in dataclasses.fields(first)):
            if name in ("offset_N1", "counts"):
                continue
            if len({tuple(sorted(v)) if isinstance(v, Mapping) else v is None for v in values}) > 1:
                raise ValueError(f"parts of one batch differ in {name}: every pass fills all of them, or none")
            if isinstance(values[0], Mapping):
                changes[name] = {k: torch.cat([v[k] for v in values]) for k in values[0]}
            elif values[0] is not None:
                changes[name] = torch.cat(values)
        lengths = torch.cat([p.length_N for p in parts])
        changes["offset_N1"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return first.replace(**changes)

    # ------------------------------------------------------------------ over ranks

    def units(self, attention: float) -> list[Unit]:
        """Bundles and what their passes cost, in tokens; `attention`: of a token's looking at one token.

        A group is a family: what all its rows begin with counts once. Mini-batches, and in them rows with and without
        signal, are parts, so that every pass over a batch cuts it as the step on one of its mini-batches does.
        """
        import numpy as np

        token_T, start, length_N = self.token_T.numpy(), self.offset_N1.tolist(), self.length_N.numpy()
        signal, minibatch, group = self.signal_N.tolist(), self.minibatch_N.tolist(), self.group_N.tolist()
        members: dict[int, list[int]] = {}
        for row, family in enumerate(group):
            members.setdefault(family, []).append(row)
        shared = {f: _begin([token_T[start[r] : start[r + 1]] for r in rows]) for f, rows in members.items()}
        before_N = np.array([shared[family] for family in group], np.int64)
        once_N = 1 - 1 / np.array([len(members[family]) for family in group], np.int64)  # computed only once
        cost_N = length_N - before_N * once_N + attention * (length_N**2 - before_N**2 * once_N) / 2
        cost: list[float] = cost_N.tolist()
        bundles: dict[int, list[int]] = {}
        for row, bundle in enumerate(self.bundle_N.tolist()):
            bundles.setdefault(bundle, []).append(row)
        found: list[Unit] = []
        for rows in bundles.values():
            part = 2 * minibatch[rows[0]] + (not any(map(signal.__getitem__, rows)))
            found.append(Unit(rows, sum(map(cost.__getitem__, rows)), group[rows[0]], part))
        return found

    def gather(self, rows: Sequence[Sequence[int]], results: Sequence[Any]) -> Any:
        """What was found about `rows` of this batch, part by part, as if it had been found about the whole: [T] and [N]
        tensors by name, or what a step learned. Anything else must be the same for all parts; the first is taken."""
        import torch

        from treadle.handles import Learned

        if isinstance(results[0], Learned):
            seen = self.gather(rows, [result.seen for result in results])
            return Learned(merge(*(result.statistics for result in results)), seen)
        if not isinstance(results[0], Mapping):
            return results[0]
        rows_M = [torch.as_tensor(r, dtype=torch.int64) for r in rows]
        runs = [run for number, part in enumerate(rows_M) for run in _runs(self, part, number)]
        runs.sort()
        tiled = _long(runs) and all(a.end == b.start for a, b in pairwise(runs))
        tiled = tiled and (runs[0].start, runs[-1].end) == (0, len(self.token_T))
        tokens = [] if tiled else [_tokens_of(self, part) for part in rows_M]
        found: dict[str, Tensor] = {}
        for name, first in results[0].items():
            per_token = name.rpartition("_")[2] == "T"
            if per_token and tiled:
                found[name] = torch.cat([results[r.part][name][r.at : r.at + r.end - r.start] for r in runs])
                continue
            whole = found[name] = first.new_empty((len(self.token_T) if per_token else len(self), *first.shape[1:]))
            for at, result in zip(tokens if per_token else rows_M, results, strict=True):
                whole[at] = result[name]
        return found

    # ------------------------------------------------------------------ from records

    @staticmethod
    def pack(groups: Sequence[Group], minibatches: int = 1) -> Batch:
        """Pack the usable samples of these groups; failed ones are in no batch, no baseline and no denominator.

        Mini-batches take whole groups in turn, so that each holds the same number of prompts, give or take one.
        """
        import numpy as np
        import torch

        rows: list[tuple[int, int, Kind, Trajectory]] = []
        number = 0
        for at, group in enumerate(groups):
            for sample in group.usable:
                rows += [(at, number, sample.kind, t) for t in sample.trajectories]
                number += 1
        if not rows:
            raise ValueError("no trajectory to pack: every sample of every group failed")
        trajectories = [t for *_, t in rows]
        lengths = torch.tensor([len(t.token_T) for t in trajectories])
        rewards = [t.reward if t.reward is not None else Reward(math.nan) for t in trajectories]
        provenance_T = _flat(t.provenance_T for t in trajectories)
        baseline_N = torch.tensor([kind == Kind.BASELINE for *_, kind, _ in rows])
        return Batch(
            token_T=_flat(t.token_T for t in trajectories),
            provenance_T=provenance_T,
            sampling_logprob_T=_flat(t.logprob_T for t in trajectories),
            version_T=_flat(t.version_T for t in trajectories),
            offset_N1=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            group_N=torch.tensor([groups[at].index for at, *_ in rows]),
            sample_N=torch.tensor([number for _, number, *_ in rows]),
            bundle_N=_bundles(rows),
            baseline_N=baseline_N,
            truncated_N=torch.tensor([t.ended == Ended.TRUNCATED for t in trajectories]),
            temperature_N=torch.tensor([t.temperature for t in trajectories], dtype=torch.float32),
            reward_N=torch.tensor([r.value for r in rewards], dtype=torch.float64),
            reward_T=_flat(_placed(t, r) for t, r in zip(trajectories, rewards, strict=True)),
            mask_T=(provenance_T == Provenance.SAMPLED) & ~torch.repeat_interleave(baseline_N, lengths),
            signal_N=~baseline_N,
            minibatch_N=torch.tensor([at % minibatches for at, *_ in rows]),
            reward_parts_N={
                name: torch.tensor([r.parts.get(name, math.nan) for r in rewards], dtype=torch.float64)
                for name in sorted({name for r in rewards for name in r.parts})
            },
            extras_T={k: _flat(values) for k, values in _columns([t.extras_T for t in trajectories]).items()},
            extras_N={
                k: torch.from_numpy(np.stack(values))
                for k, values in _columns([t.extras_N for t in trajectories]).items()
            },
        )


_FIELDS = frozenset(field.name for field in dataclasses.fields(Batch))


def shared_prefix(rows: Sequence[Tensor]) -> int:
    """How many tokens all of these begin with."""
    return _begin([row.numpy() for row in rows])


def _begin(rows: Sequence[np.ndarray]) -> int:
    """The same of arrays: a call of numpy on a short row takes a third of torch's."""
    shared = min(map(len, rows))
    for other in rows[1:]:
        if not shared:
            break
        differs = rows[0][:shared] != other[:shared]
        at = int(differs.argmax())
        shared = at if differs[at] else shared
    return shared


class _Run(NamedTuple):
    """Tokens that lie side by side, both in a batch and in a part of it."""

    start: int  # in the batch
    end: int
    at: int  # in the part
    part: int


_LONG = 64
"""Tokens from which on it is cheaper to copy a run as a whole than token by token through an index."""


def _runs(batch: Batch, rows_M: Tensor, part: int = 0) -> list[_Run]:
    """The tokens of these rows, one row's after another's, in as few runs as they lie in."""
    import numpy as np

    rows, offset_N1 = rows_M.numpy(), batch.offset_N1.numpy()
    starts, ends = offset_N1[:-1][rows], offset_N1[1:][rows]
    some = ends > starts
    starts, ends = starts[some], ends[some]
    if not len(starts):
        return []
    breaks = np.flatnonzero(starts[1:] != ends[:-1])
    starts, ends = starts[np.append(0, breaks + 1)], ends[np.append(breaks, -1)]
    at = np.cumsum(ends - starts) - (ends - starts)
    return [_Run(*run, part) for run in zip(starts.tolist(), ends.tolist(), at.tolist(), strict=True)]


def _long(runs: Sequence[_Run]) -> bool:
    """Whether to go by runs."""
    return bool(runs) and sum(r.end - r.start for r in runs) >= _LONG * len(runs)


def _taking(batch: Batch, rows_M: Tensor) -> Callable[[Tensor], Tensor]:
    """What takes the tokens of these rows out of a [T] tensor."""
    import torch

    runs = _runs(batch, rows_M)
    if len(runs) == 1:
        return lambda x: x[runs[0].start : runs[0].end]  # where it lies
    if _long(runs):
        return lambda x: torch.cat([x[r.start : r.end] for r in runs])
    take_T = _tokens_of(batch, rows_M)
    return lambda x: x[take_T]


def _tokens_of(batch: Batch, rows_M: Tensor) -> Tensor:
    """Where the tokens of these rows lie, one row's after another's."""
    import torch

    starts, lengths = batch.offset_N1[:-1][rows_M], batch.length_N[rows_M]
    ends = lengths.cumsum(0)
    return torch.repeat_interleave(starts - ends + lengths, lengths) + torch.arange(int(lengths.sum()))


def _each(batch: Batch, tokens: Any, rows: Any) -> dict[str, Any]:
    """Apply `tokens` to every [T] field and `rows` to every [N] field."""
    changes: dict[str, Any] = {}
    for name, value in ((f.name, getattr(batch, f.name)) for f in dataclasses.fields(batch)):
        apply = tokens if name.endswith("_T") else rows if name.endswith("_N") else None
        if apply is None or value is None:
            continue
        changes[name] = {k: apply(v) for k, v in value.items()} if isinstance(value, Mapping) else apply(value)
    return changes


def _flat(arrays: Any) -> Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.concatenate(list(arrays)))


def _columns(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """Extras by name, each with one array per trajectory."""
    if len({frozenset(row) for row in rows}) > 1:
        names = sorted({name for row in rows for name in row})
        raise ValueError(f"an extra is on every trajectory of a batch or on none; some of these lack one of {names}")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _placed(trajectory: Trajectory, reward: Reward) -> np.ndarray:
    """The reward on tokens, float32 [T]: by turn where it came by turn, else at the last sampled token."""
    import numpy as np

    reward_T = np.zeros(len(trajectory.token_T), np.float32)
    if reward.turns and len(reward.turns) != len(trajectory.turn_ends):
        raise RewardError(
            f"the reward of prompt {trajectory.prompt.id} has {len(reward.turns)} turns, its trajectory "
            f"{len(trajectory.turn_ends)}; give one number per turn, or one value for the episode"
        )
    if reward.turns:
        reward_T[list(trajectory.turn_ends)] = reward.turns
    elif trajectory.turn_ends:
        reward_T[trajectory.turn_ends[-1]] = reward.value
    return reward_T


def _bundles(rows: Sequence[tuple[int, int, Kind, Trajectory]]) -> Tensor:
    """Number bundles across the batch; a trajectory without one is its own."""
    import torch

    seen: dict[tuple[int, int], int] = {}
    keys = [(at, t.bundle) if t.bundle is not None else (-1, i) for i, (at, _, _, t) in enumerate(rows)]
    return torch.tensor([seen.setdefault(key, len(seen)) for key in keys])
