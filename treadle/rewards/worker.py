"""A process that calls reward functions: `python -m treadle.rewards.worker`, started by `pool.py`.

It speaks frames over its standard input and output: 8 bytes of length, then a pickle. First come the owner's `sys.path`
and the functions by name, answered when they are loaded; then pairs (name, trajectory), each answered by (number, kind,
content): which frame of the owner's it answers, from 0 · "ok" and a Reward, "raised" and a traceback, or "wrong" and
what is not a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import queue
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

from treadle.rewards.values import NotAReward, as_reward, in_words

_GRACE_S = 2.0  # for the worker to end by itself once its owner is gone


def pack(content: bytes) -> bytes:
    """A frame."""
    return len(content).to_bytes(8, "little") + content


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # what a reward prints goes to standard error, not among the frames
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, frames), daemon=True).start()

    functions: dict[str, Any] = {}
    own = os.getpid()
    for number, frame in enumerate(iter(frames.get, None)):
        answer = _call(frame, functions) if functions else _load(frame, functions)
        if os.getpid() != own:  # a copy that the function forked and let return, too
            os._exit(0)
        replies.write(pack(pickle.dumps((number, *answer))))
        replies.flush()


def _read(requests: BinaryIO, frames: queue.SimpleQueue[bytes | None]) -> None:
    """Feeds the main thread (some rewards set alarms, which only work there). When the owner is gone, however it went,
    a worker that is stuck in a function ends too, with the processes it started."""
    while header := requests.read(8):
        frames.put(requests.read(int.from_bytes(header, "little")))
    frames.put(None)
    time.sleep(_GRACE_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _load(frame: bytes, functions: dict[str, Any]) -> tuple[str, Any]:
    try:
        sys.path[:], loadable = pickle.loads(frame)
        functions.update(pickle.loads(loadable))
    except BaseException as error:
        return "raised", in_words(error)
    return "ok", None


def _call(frame: bytes, functions: dict[str, Any]) -> tuple[str, Any]:
    """Whatever the function raises, `sys.exit` included, is an answer."""
    try:
        name, trajectory = pickle.loads(frame)
        value = functions[name](trajectory)
        if inspect.iscoroutine(value):  # a plain function that hands on a coroutine
            value = asyncio.run(value)
        return "ok", as_reward(value, len(trajectory.turn_ends))
    except NotAReward as error:
        return "wrong", str(error)
    except BaseException as error:
        return "raised", in_words(error)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the owner is gone
        main()
