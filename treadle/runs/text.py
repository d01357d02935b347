"""Text that a model, a reward or a data file wrote, made safe to store and to show."""

from __future__ import annotations


def encodable(text: str, encoding: str) -> str:
    """What this encoding cannot say becomes "?", so that printing it cannot fail."""
    return text.encode(encoding, "replace").decode(encoding)


def storable(text: str) -> str:
    """Valid UTF-8; a str may hold half a surrogate pair."""
    return encodable(text, "utf-8")


def readable(text: str, limit: int | None = None) -> str:
    """One line without anything a terminal could obey (control, direction and invisible characters), at most `limit`.

    `readable("4\\n\\x1b[31m", 80)` is "4 �[31m".
    """
    line = "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"
