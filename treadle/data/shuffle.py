"""An order of any number of rows that needs no memory: the row at a position is computed from (position, key).

A Feistel network permutes the numbers below the next power of two; numbers that are no row are sent through it again
until they are one, at most twice on average (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

import hashlib

_ROUNDS = 16
"""Fewer leave some orders of very few rows twice as frequent as others."""


def shuffled(position: int, size: int, key: str) -> int:
    """The row at `position` (0 ≤ position < size) of the permutation of `size` rows that `key` names. About 50 µs."""
    bits = max(2, (size - 1).bit_length())
    low = bits // 2
    high_mask, low_mask = (1 << bits - low) - 1, (1 << low) - 1
    while True:
        high, rest = position >> low, position & low_mask
        for turn in range(0, _ROUNDS, 2):
            high ^= _noise(key, turn, rest) & high_mask
            rest ^= _noise(key, turn + 1, high) & low_mask
        position = high << low | rest
        if position < size:
            return position


def _noise(key: str, turn: int, half: int) -> int:
    """64 bits that look random."""
    return int.from_bytes(hashlib.blake2b(f"{key}/{turn}/{half}".encode(), digest_size=8).digest(), "little")
