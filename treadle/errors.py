"""The error tree. Every message names the culprit, says what is allowed, and how to mend it.

TreadleError
├── ConfigError          a key, a value or a rule between keys; raised before anything is loaded (exit code 2)
├── DataError            a data file, a row, a prompt, a chat template
├── ModelError           a model directory, an architecture, a tokenizer
├── RewardError          a reward that raised, hung or returned what is not a reward
├── RolloutError         a generation engine refused or failed a request
│   └── ReplicaLost      one of several engines died, hung, or was given up
├── WeightSyncError      weights that did not arrive as they were sent
├── TrainingError        a step that cannot go on (too many non-finite gradients, nothing left to train)
├── RunError             the run directory: in use, damaged, not a run, disk full
│   └── LedgerError      the books do not balance: a sample was lost or counted twice
└── WorkerError          a worker of a group died, hung or raised (role, rank, step and remote traceback)

`ValueError` and friends are for our own callers' mistakes inside the process, `assert` for our invariants.
"""

from __future__ import annotations


class TreadleError(Exception):
    """Base of all errors that a user is meant to read."""

    exit_code = 1


class ConfigError(TreadleError):
    """The configuration is wrong; nothing has been loaded yet."""

    exit_code = 2


class DataError(TreadleError):
    """A data source or one of its rows cannot be used."""


class ModelError(TreadleError):
    """A model or tokenizer cannot be loaded or cannot do what is asked."""


class RewardError(TreadleError):
    """A reward raised, ran past its time limit, or returned something that is not a reward."""


class RolloutError(TreadleError):
    """A generation engine refused or failed a request."""


class ReplicaLost(RolloutError):
    """One of several generation engines died, hung, or was given up; others may go on."""


class WeightSyncError(TreadleError):
    """The rollout engine does not hold the weights that the trainer published."""


class TrainingError(TreadleError):
    """Training cannot go on."""


class RunError(TreadleError):
    """The run directory cannot be used."""


class LedgerError(RunError):
    """Issued samples and their ends do not add up."""


class WorkerError(TreadleError):
    """A worker failed. Carries the role, the rank and the worker's own traceback as its cause."""
