"""The three ways in which a call on a group reaches its workers.

A worker is an ordinary class. Its public methods carry one verb each:

everywhere  every rank gets the same arguments; the result is rank 0's
sharded     a batch is split over the data-parallel ranks by cost; results are gathered in the original order
one         rank 0 alone
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Verb(StrEnum):
    EVERYWHERE = "everywhere"
    SHARDED = "sharded"
    ONE = "one"


_VERB = "__treadle_verb__"


def everywhere(method: F) -> F:
    """Same arguments to all ranks, rank 0's result."""
    setattr(method, _VERB, Verb.EVERYWHERE)
    return method


def sharded(method: F) -> F:
    """Split the batch over data-parallel ranks, gather in the original order."""
    setattr(method, _VERB, Verb.SHARDED)
    return method


def one(method: F) -> F:
    """Rank 0 alone."""
    setattr(method, _VERB, Verb.ONE)
    return method


def verb_of(worker: type, name: str) -> Verb:
    """The verb of a worker's method; AttributeError if it is not there or has none."""
    verb = vars(getattr(worker, name)).get(_VERB)
    if verb is None:
        raise AttributeError(f"{worker.__name__}.{name} has no verb; mark it @everywhere, @sharded or @one")
    return verb


def arguments(worker: type, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments of a worker's method, by position as far as that goes; TypeError where they do not fit it."""
    bound = inspect.signature(getattr(worker, name)).bind(None, *args, **kwargs)
    return bound.args[1:], bound.kwargs
