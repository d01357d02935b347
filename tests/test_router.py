"""Which replica serves a request: conversations stay, groups share, load spreads, memory is bounded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout import router as module
from treadle.rollout.router import Load, Router

NAMES = ("0", "1", "2", "3")
ASKED = st.tuples(
    st.just("ask"),
    st.sampled_from([f"conversation {i}" for i in range(6)]),
    st.sampled_from(["", "prompt 0", "prompt 1"]),
    st.integers(1, 50),
)
CHANGES = st.one_of(
    ASKED,
    ASKED,
    st.tuples(st.just("end"), st.integers(0, 30)),
    st.tuples(st.just("leave"), st.sampled_from(NAMES)),
    st.tuples(st.just("join"), st.sampled_from(NAMES)),
)


def loads(*rooms: tuple[str, int, int, int]) -> list[Load]:
    return [Load(name, capacity, running, tokens) for name, capacity, running, tokens in rooms]


class Books:
    """What a router should know, kept the simple way."""

    def __init__(self, capacity: int) -> None:
        self.router, self.capacity = Router(), capacity
        self.there = {name: Load(name, capacity) for name in NAMES[:2]}
        self.served: list[tuple[str, int]] = []
        self.homes: dict[str, str] = {}
        self.prompts: dict[str, str] = {}

    def ask(self, conversation: str, prompt: str, tokens: int) -> None:
        chosen = self.router.choose(conversation, prompt, self.there.values())
        room = [load for load in self.there.values() if load.running < load.capacity]
        home, near = self.homes.get(conversation), self.prompts.get(prompt)
        if home in self.there:
            assert chosen == (home if self.there[home] in room else None)  # it waits for its own
        elif not room:
            assert chosen is None
        elif near in self.there and self.there[near] in room:
            assert chosen == near
        else:
            assert chosen in {load.name for load in room}
            assert self.there[chosen].tokens == min(load.tokens for load in room)
        if chosen is None:
            return
        self.router.placed(conversation, prompt, chosen)
        self.there[chosen].running += 1
        self.there[chosen].tokens += tokens
        self.served.append((chosen, tokens))
        self.homes[conversation] = chosen
        if prompt:
            self.prompts[prompt] = chosen

    def end(self, which: int) -> None:
        if self.served:
            name, tokens = self.served.pop(which % len(self.served))
            if name in self.there:
                self.there[name].running -= 1
                self.there[name].tokens -= tokens

    def leave(self, name: str) -> None:
        self.there.pop(name, None)
        self.served = [s for s in self.served if s[0] != name]

    def join(self, name: str) -> None:
        if name not in self.there:
            self.there[name] = Load(name, self.capacity)


@given(st.integers(1, 3), st.lists(CHANGES, max_size=60))
def test_requests_go_home_or_to_their_group_or_where_least_is_outstanding(
    capacity: int, changes: Sequence[tuple]
) -> None:
    """And never to a replica that is full or gone, whatever came before."""
    books = Books(capacity)
    for what, *how in changes:
        getattr(books, what)(*how)
        assert all(0 <= load.running <= capacity for load in books.there.values())


def test_a_conversation_waits_for_its_replica_while_another_one_is_idle() -> None:
    router = Router()
    router.placed("talk", "", "0")
    assert router.choose("talk", "", loads(("0", 1, 1, 10), ("1", 1, 0, 0))) is None
    assert router.choose("talk", "", loads(("0", 1, 0, 10), ("1", 1, 0, 0))) == "0"
    assert router.choose("another", "", loads(("0", 1, 1, 10), ("1", 1, 0, 0))) == "1"


def test_a_conversation_whose_replica_is_gone_goes_elsewhere() -> None:
    router = Router()
    router.placed("talk", "", "0")
    assert router.choose("talk", "", loads(("1", 1, 0, 0))) == "1"


def test_a_group_stays_together_until_its_replica_is_full() -> None:
    router, rooms = Router(), loads(("0", 3, 0, 0), ("1", 3, 0, 0))
    by_name, went = {load.name: load for load in rooms}, []
    for sample in range(6):
        chosen = router.choose(f"group.{sample}", "group", rooms)
        assert chosen is not None
        router.placed(f"group.{sample}", "group", chosen)
        by_name[chosen].running += 1
        by_name[chosen].tokens += 100
        went.append(chosen)
    assert went == ["0", "0", "0", "1", "1", "1"]
    assert router.choose("group.6", "group", rooms) is None


def test_requests_without_a_prefix_share_no_group() -> None:
    router = Router()
    router.placed("one", "", "0")
    assert router.choose("two", "", loads(("0", 3, 1, 100), ("1", 3, 0, 0))) == "1"


def test_nobody_there_means_waiting() -> None:
    assert Router().choose("any", "any", []) is None


def test_its_memory_is_bounded_and_keeps_what_was_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 8)
    router, there = Router(), loads(("0", 9, 0, 0), ("1", 9, 5, 500))
    for number in range(100):
        router.placed("kept", "kept", "1")
        router.placed(f"talk {number}", f"prompt {number}", "1")
    assert len(router._conversations) == len(router._prompts) == 8
    assert router.choose("kept", "", there) == "1"
    assert router.choose("new", "kept", there) == "1"
    assert router.choose("talk 0", "prompt 0", there) == "0"  # forgotten: it goes where least is outstanding


def test_the_real_bound_holds() -> None:
    router = Router()
    for number in range(module._REMEMBERED + 1000):
        router.placed(str(number), str(number), "0")
    assert len(router._conversations) == len(router._prompts) == module._REMEMBERED
