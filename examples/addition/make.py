"""Write train.jsonl and held_out.jsonl: "What is x + y?" for one-digit numbers.

A pair is held out with both of its orders, so that no held-out sum was seen the other way round in training.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    pairs = [(x, y) for x in range(1, 10) for y in range(x, 10)]
    held_out = set(random.Random(0).sample(pairs, 12))
    for name, chosen in (("train", [p for p in pairs if p not in held_out]), ("held_out", sorted(held_out))):
        orders = [order for x, y in chosen for order in sorted({(x, y), (y, x)})]
        rows = [{"id": f"{x}+{y}", "prompt": f"What is {x} + {y}?", "answer": str(x + y)} for x, y in orders]
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
