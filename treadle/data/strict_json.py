"""JSON that means one thing: no NaN, no infinite numbers, no key twice, no half of a surrogate pair."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def decode(text: str) -> Any:
    """The value that `text` holds. Raises ValueError that says what is wrong with it."""
    try:
        value = _DECODER.decode(text)
        if "\\u" in text:  # an escape such as \ud800 alone is no text, and no tokenizer takes it
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("an escape \\ud800 … \\udfff without its other half is not text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not usable JSON ({error})") from None
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return whole


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_twins)
