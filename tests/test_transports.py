"""Weights between real processes: they arrive bit for bit, or somebody says in time what went wrong."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import weights_help
from tests.weights_help import (
    MAILBOXES,
    TRANSPORTS,
    Landed,
    Worker,
    as_bits,
    fingerprints,
    of_bits,
    some_weights,
    stepped,
)
from treadle.errors import WeightSyncError
from treadle.weights.digest import compare
from treadle.weights.stream import Address, Landing, Sent, Shipper

SOON = {"shared_memory": 0.5, "files": 0.5, "broadcast": 1.0}  # seconds: timeouts of publishes that are to fail
IN_TIME = 10.0  # seconds in which it has failed, on a busy machine; no timeout of the tests' own is as short

every_transport = pytest.mark.parametrize("transport", TRANSPORTS)
mailboxes = pytest.mark.parametrize("transport", MAILBOXES)
staged_or_not = pytest.mark.parametrize("staged", [True, False], ids=["staged", "unstaged"])


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Worker]]:
    """Two processes that receive, for all tests that leave them alive."""
    workers = [Worker("a"), Worker("b")]
    yield workers
    for worker in workers:
        worker.close()


@pytest.fixture
def two(engines: list[Worker]) -> tuple[Worker, Worker]:
    for number, worker in enumerate(engines):
        if worker.owes:  # a test has failed, and left it at work
            worker.close()
            engines[number] = Worker(worker.name)
        engines[number].call(weights_help.fresh)
    return engines[0], engines[1]


@pytest.fixture
def one(two: tuple[Worker, Worker]) -> Worker:
    return two[0]


@pytest.fixture(scope="module")
def spare() -> Iterator[list[Worker]]:
    """A process that starts while others are waited for."""
    workers = [Worker("doomed")]
    yield workers
    workers[0].close()


@pytest.fixture
def doomed(spare: list[Worker]) -> Iterator[Worker]:
    """A process that a test may end."""
    worker, spare[0] = spare[0], Worker("doomed")
    worker.call(weights_help.fresh)  # it is at work
    yield worker
    worker.close()


@pytest.fixture
def shipper() -> Iterator[Shipper]:
    shipper = Shipper()
    yield shipper
    shipper.close()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Callable[..., Address]]:
    """Makes the address of a publish, at a place of its own."""
    places: list[str] = []

    def make(transport: str, *receivers: str, **changes: Any) -> Address:
        places.append(weights_help.place_for(transport, tmp_path))
        usual = {"transport": transport, "place": places[-1], "session": 0, "receivers": receivers or ("a",)}
        usual |= {"bucket_bytes": 100_000, "staged": True, "delta": False, "keep": False, "timeout": 20.0}
        return Address(**usual | changes)

    yield make
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


def publish(
    shipper: Shipper, workers: tuple[Worker, ...], address: Address, tensors: Mapping[str, Tensor]
) -> tuple[Sent, list[Landed]]:
    """One that has to succeed: every receiver has the sender's bits, in the sender's order."""
    for worker in workers:
        worker.start(weights_help.receive, address)
    sent = shipper.send(tensors.items(), address)
    landed = [worker.result() for worker in workers]
    assert list(sent.manifest) == list(tensors)
    for found in landed:
        compare(sent.manifest, found.manifest, 0, "an engine")
        assert found.found == fingerprints(tensors.items())
    return sent, landed


def fails(worker: Worker, match: str = ".", within: float = IN_TIME) -> str:
    """What the receiver says, in time."""
    with pytest.raises(WeightSyncError, match=match) as caught:
        worker.result(within)
    return str(caught.value)


def note(address: Address, index: int) -> Path:
    return Path(address.place) / f"{address.session:08d}" / f"{index:06d}.json"


def payload(address: Address, index: int) -> Path:
    """Where the tensors of a bucket lie."""
    what = json.loads(note(address, index).read_text())
    return Path(what["segment"]) if address.transport == "shared_memory" else note(address, index).parent / what["file"]


# What arrives.


@every_transport
@staged_or_not
@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
@pytest.mark.parametrize("receivers", [1, 2])
def test_three_publishes_arrive_bit_for_bit(
    transport: str,
    staged: bool,
    delta: bool,
    receivers: int,
    two: tuple[Worker, Worker],
    shipper: Shipper,
    address: Callable[..., Address],
) -> None:
    workers = two[:receivers]
    place = address(transport, *(worker.name for worker in workers), staged=staged, keep=delta)
    before, weights = None, some_weights()
    whole = sum(tensor.nbytes for tensor in weights.values())
    for session in range(3):
        at = replace(place, session=session, delta=delta and session > 0)
        sent, landed = publish(shipper, workers, at, weights)
        assert len(landed) == receivers
        if not delta:
            assert (sent.sent_bytes, sent.unchanged) == (whole, None)
        elif before is None:
            assert (sent.sent_bytes, sent.unchanged) == (whole, 0)
        else:
            assert sent.sent_bytes < 0.7 * whole
            assert sent.unchanged == sum(
                int((as_bits(before[name]) == as_bits(tensor)).sum()) for name, tensor in weights.items()
            )
        before, weights = weights, stepped(weights, session)
    shipper.close()
    assert not os.path.exists(place.place)


KINDS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.int64, torch.bool]
streams = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.lists(st.sampled_from([0, 1, 1, 2, 3, 17]), max_size=3).map(tuple),
        st.sampled_from(["plain", "transposed", "part", "tied", "single"]),
    ),
    max_size=12,
)


@every_transport
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(streams, st.booleans(), st.booleans(), st.sampled_from([1, 100, 10_000]))
def test_tensors_of_any_kind_arrive(
    transport: str,
    one: Worker,
    address: Callable[..., Address],
    drawn: list[tuple[torch.dtype, tuple[int, ...], str]],
    staged: bool,
    keep: bool,
    bucket_bytes: int,
) -> None:
    """Scalars, empty ones, views, tied ones, none at all; buckets of a byte."""
    make = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for number, (dtype, shape, layout) in enumerate(drawn):
        tensor = of_bits(shape, dtype, make) if dtype != torch.bool else torch.rand(shape, generator=make) < 0.5
        if layout == "tied" and tensors:
            tensor = next(iter(tensors.values()))
        elif layout == "transposed":
            tensor = tensor.movedim(0, -1) if tensor.dim() else tensor
        elif layout == "part":
            tensor = torch.cat([tensor.reshape(-1)] * 3)[1 : 1 + tensor.numel()].reshape(shape)
        elif layout == "single":
            tensor = torch.stack([tensor, tensor], dim=-1)[..., 1]
        tensors[f"{'zyx'[number % 3]}.{number}"] = tensor
    shipper, place = Shipper(), address(transport, staged=staged, keep=keep, bucket_bytes=bucket_bytes)
    one.call(weights_help.fresh)
    publish(shipper, (one,), place, tensors)
    changed = stepped(tensors, 1) if torch.bool not in {t.dtype for t in tensors.values()} else tensors
    publish(shipper, (one,), replace(place, session=1, delta=keep), changed)
    shipper.close()


@every_transport
def test_a_publish_may_begin_at_either_end(
    transport: str, two: tuple[Worker, Worker], address: Callable[..., Address]
) -> None:
    """Staged, a sender of a mailbox does not wait for anybody; a group waits for all of its members."""
    receiver, sender = two
    for session in range(2):
        at = address(transport, session=session)
        calls = {receiver: (weights_help.receive, at), sender: (weights_help.send, at, session)}
        for worker in two if session else reversed(two):
            worker.start(*calls[worker])
            time.sleep(0.2)
        sent, landed = sender.result(), receiver.result()
        compare(sent.manifest, landed.manifest, 0, "an engine")
        assert landed.found == fingerprints(some_weights(session).items())


@mailboxes
@staged_or_not
def test_segments_and_directories_are_gone_after_a_close(
    transport: str, staged: bool, one: Worker, shipper: Shipper, address: Callable[..., Address]
) -> None:
    at = address(transport, staged=staged)
    for session in range(3):
        publish(shipper, (one,), replace(at, session=session), some_weights())
    elsewhere = address(transport, staged=staged, session=3)
    publish(shipper, (one,), elsewhere, some_weights())
    assert not os.path.exists(at.place)
    assert os.path.isdir(elsewhere.place)
    shipper.close()
    assert not os.path.exists(elsewhere.place)


@mailboxes
def test_a_sender_does_not_use_more_room_the_longer_it_sends(
    transport: str, one: Worker, shipper: Shipper, address: Callable[..., Address]
) -> None:
    at = address(transport)
    room = []
    for session in range(4):
        publish(shipper, (one,), replace(at, session=session), some_weights())
        room.append(sum(path.stat().st_size for path in Path(at.place).rglob("*") if path.is_file()))
    assert max(room[1:]) < room[0] * 1.01


@mailboxes
@staged_or_not
def test_what_an_earlier_session_left_does_not_confuse_a_new_one(
    transport: str, staged: bool, one: Worker, address: Callable[..., Address]
) -> None:
    """A sender that died leaves notes, files and segments; the receiver still has some of them open."""
    at, old = address(transport, staged=staged), Shipper()
    publish(old, (one,), at, some_weights(1))
    publish(old, (one,), replace(at, session=1), some_weights(2))
    directory = note(at, 0).parent
    directory.mkdir()
    (directory / "000000.json").write_text("{")
    (directory / "000000.partial").write_text("{")
    (directory / "000000.taken.a").touch()
    (directory / "000001.taken.a").touch()
    (directory / "end.json").write_text('{"buckets": 1}')
    new = Shipper()
    for session in (1, 0, 2):
        at = replace(at, session=session)
        weights = some_weights(10 + session)
        sent = None
        if staged:  # or the receiver would look before the sender has put the old things away
            sent = new.send(weights.items(), at)
            landed = one.call(weights_help.receive, at)
        else:
            shutil.rmtree(note(at, 0).parent, ignore_errors=True)
            sent, (landed,) = publish(new, (one,), at, weights)
        compare(sent.manifest, landed.manifest, 0, "an engine")
        assert landed.found == fingerprints(weights.items())
    new.close()
    assert not os.path.exists(at.place)


# How much memory it takes.

MB = 1_000_000
SIZES = [MB] * 95 + [5 * MB] + [MB] * 95 + [5 * MB]


@every_transport
def test_a_stream_of_200_MB_takes_a_bucket_of_8_MB_at_either_end(
    transport: str, two: tuple[Worker, Worker], address: Callable[..., Address]
) -> None:
    sender, receiver = two
    at = address(transport, receiver.name, bucket_bytes=8 * MB, staged=False)
    for session, sizes in enumerate([SIZES[:12], SIZES]):  # the first one to load what is needed
        at = replace(at, session=session)
        receiver.start(weights_help.receive_stream, at)
        sender.start(weights_help.send_stream, at, sizes)
        peaks = receiver.result(), sender.result()
    sender.call(weights_help.fresh)
    for peak in peaks:
        assert MB <= peak <= (8 + 5 + 2) * MB, "a bucket, the largest tensor, and what a socket or mapped file takes"


@every_transport
@staged_or_not
@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
def test_a_sender_holds_no_more_than_a_bucket_of_what_is_exported(
    transport: str,
    staged: bool,
    delta: bool,
    one: Worker,
    shipper: Shipper,
    address: Callable[..., Address],
) -> None:
    """And one tensor more, counted to the byte: each lies in an array of which we see when it is gone."""
    bucket, large, sizes = 400_000, 900_000, [100_000] * 15 + [900_000, 900_000] + [100_000] * 15
    alive: list[int] = []

    def exported() -> Iterator[tuple[str, Tensor]]:
        for number, size in enumerate(sizes):
            array = np.full(size // 4, number, np.float32)
            alive.append(size)
            weakref.finalize(array, alive.remove, size)
            until(lambda: sum(alive) <= bucket + large)  # a thread may just be about to let go
            tensor = torch.from_numpy(array)
            del array
            yield f"layer.{number}", tensor
            del tensor

    at = address(transport, bucket_bytes=bucket, staged=staged, keep=delta)
    for session in range(2):
        at = replace(at, session=session, delta=delta and session > 0)
        one.start(weights_help.receive, at)
        sent = shipper.send(exported(), at)
        compare(sent.manifest, one.result().manifest, 0, "an engine")
    until(lambda: not alive)


# What goes wrong.


@pytest.mark.parametrize(
    ("transport", "staged"),
    [("shared_memory", True), ("shared_memory", False), ("files", False), ("broadcast", True), ("broadcast", False)],
)
def test_a_sender_that_dies_midway_is_an_error_at_every_receiver(
    transport: str, staged: bool, two: tuple[Worker, Worker], doomed: Worker, address: Callable[..., Address]
) -> None:
    at = address(transport, "a", "b", staged=staged, timeout=SOON[transport])
    for worker in two:
        worker.start(weights_help.receive, at)
    doomed.start(weights_help.send_and_die, at)
    assert doomed.died()
    for worker in two:
        fails(worker)


@every_transport
def test_a_receiver_that_dies_is_an_error_of_the_sender_who_waits_for_it(
    transport: str, one: Worker, doomed: Worker, shipper: Shipper, address: Callable[..., Address]
) -> None:
    at = address(transport, "doomed", "a", staged=False, timeout=SOON[transport])
    one.start(weights_help.receive, at)
    doomed.start(weights_help.receive_and_die, at)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="doomed") as caught:
        shipper.send(some_weights().items(), at)
    assert time.monotonic() - started < IN_TIME
    if transport in MAILBOXES:
        assert "doomed did not take bucket" in str(caught.value)  # and nothing about the one that lives
    assert doomed.died()
    fails(one)
    again = address(transport, "a", session=1)
    publish(shipper, (one,), again, some_weights(1))


@every_transport
def test_weights_that_nobody_sends_are_an_error(transport: str, one: Worker, address: Callable[..., Address]) -> None:
    one.start(weights_help.receive, address(transport, staged=False, timeout=SOON[transport]))
    fails(one)


@pytest.mark.parametrize(("transport", "staged"), [("shared_memory", False), ("files", False), ("broadcast", True)])
def test_weights_that_nobody_takes_are_an_error(
    transport: str, staged: bool, shipper: Shipper, address: Callable[..., Address]
) -> None:
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="a"):
        shipper.send(some_weights().items(), address(transport, "a", staged=staged, timeout=SOON[transport]))
    assert SOON[transport] <= time.monotonic() - started < IN_TIME


@every_transport
@staged_or_not
def test_an_export_that_fails_is_raised_as_it_is_and_the_next_publish_works(
    transport: str, staged: bool, one: Worker, shipper: Shipper, address: Callable[..., Address]
) -> None:
    def exported() -> Iterator[tuple[str, Tensor]]:
        yield from list(some_weights().items())[:100]
        raise MemoryError("the trainer's own")

    at = address(transport, staged=staged, timeout=SOON[transport])
    one.start(weights_help.receive, at)
    with pytest.raises(MemoryError, match="the trainer's own"):
        shipper.send(exported(), at)
    fails(one)
    at = address(transport, session=1, staged=staged) if transport == "broadcast" else replace(at, session=1)
    publish(shipper, (one,), at, some_weights(1))


@mailboxes
@staged_or_not
@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
def test_a_receiver_that_missed_a_publish_is_told_by_the_digests(
    transport: str, staged: bool, delta: bool, one: Worker, shipper: Shipper, address: Callable[..., Address]
) -> None:
    """It does not know; whoever compares does, and the next whole publish mends it."""
    at = address(transport, keep=True)
    first, second, third = (some_weights(0), stepped(some_weights(0), 0), stepped(stepped(some_weights(0), 0), 1))
    publish(shipper, (one,), at, first)
    shipper.send(second.items(), replace(at, session=1, delta=True))
    late = replace(at, session=2, delta=delta, staged=staged)
    if not delta:
        publish(shipper, (one,), late, third)
        return
    one.start(weights_help.receive, late)
    sent, landed = shipper.send(third.items(), late), one.result()
    with pytest.raises(WeightSyncError, match=r"version 7: '[\w.]+' in an engine differs"):
        compare(sent.manifest, landed.manifest, 7, "an engine")
    publish(shipper, (one,), replace(at, session=3), third)


@pytest.mark.parametrize("staged", [True, False])
def test_no_room_in_shared_memory_is_an_error_that_says_what_to_do(
    staged: bool, shipper: Shipper, address: Callable[..., Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = os.posix_fallocate, 0

    def full(descriptor: int, offset: int, size: int) -> None:
        nonlocal made
        made += 1
        if made > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    at = address("shared_memory", staged=staged)
    with pytest.raises(WeightSyncError, match=r"no room for \d+ MB .*No space left.*rollout.weights.transport=files"):
        shipper.send(some_weights().items(), at)
    assert len([path for path in Path(at.place).iterdir() if path.is_file()]) == 1, "the one that failed is still there"
    shipper.close()
    assert not os.path.exists(at.place)


def test_wherever_the_room_ends_it_is_an_error(doomed: Worker, tmp_path: Path) -> None:
    """In the midst of a bucket, or of a note about one: never a signal, and never half a publish."""
    for transport in MAILBOXES:
        for pages, said in doomed.call(weights_help.send_into_little_room, transport, str(tmp_path)):
            assert re.search("no room for|no place for|could not be written", said), (
                f"{transport}, {pages} pages: {said}"
            )


@mailboxes
@pytest.mark.parametrize("parent", ["a file", "/proc", "/proc/self/fd"])
def test_a_directory_that_cannot_be_written_is_an_error(
    transport: str, parent: str, shipper: Shipper, address: Callable[..., Address], tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(WeightSyncError, match="no place for weights"):
        shipper.send(some_weights().items(), address(transport, place=str(tmp_path / parent / "own")))


@mailboxes
@staged_or_not
def test_a_directory_that_is_gone_is_an_error_at_both_ends(
    transport: str, staged: bool, one: Worker, shipper: Shipper, address: Callable[..., Address]
) -> None:
    at = address(transport, staged=staged, timeout=SOON[transport])

    def exported() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(some_weights().items()):
            if number == 100:
                shutil.rmtree(at.place)
            yield pair

    one.start(weights_help.receive, at)
    with pytest.raises(WeightSyncError):
        shipper.send(exported(), at)
    fails(one)


def truncated(share: float) -> Callable[[Address], None]:
    return lambda at: os.truncate(path := payload(at, 1), int(path.stat().st_size * share))


def flipped_bit(at: Address) -> None:
    with open(payload(at, 1), "r+b") as file:
        middle = os.path.getsize(file.name) // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 4]))


def swapped(at: Address) -> None:
    one, other = note(at, 1), note(at, 2)
    text = one.read_bytes()
    other.replace(one)
    other.write_bytes(text)


def swapped_payloads(at: Address) -> None:
    one, other = payload(at, 1), payload(at, 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def other_note(change: Callable[[dict[str, Any]], Any]) -> Callable[[Address], None]:
    def damage(at: Address) -> None:
        what = json.loads(note(at, 1).read_text())
        change(what)
        note(at, 1).write_text(json.dumps(what))

    return damage


def noted(content: bytes) -> Callable[[Address], Any]:
    return lambda at: note(at, 1).write_bytes(content)


def ended(content: bytes) -> Callable[[Address], Any]:
    return lambda at: note(at, 0).with_name("end.json").write_bytes(content)


DAMAGES: dict[str, Callable[[Address], Any]] = {
    "a payload of half the size": truncated(0.5),
    "an empty payload": truncated(0.0),
    "no payload": lambda at: payload(at, 1).unlink(),
    "another bit": flipped_bit,
    "no note": lambda at: note(at, 1).unlink(),
    "no first note": lambda at: note(at, 0).unlink(),
    "notes swapped": swapped,
    "payloads swapped": swapped_payloads,
    "a bucket twice": lambda at: note(at, 2).write_bytes(note(at, 1).read_bytes()),
    "tensors without names": other_note(lambda what: what.pop("tensors")),
    "a tensor less": other_note(lambda what: what["tensors"].pop()),
    "a payload that is a number": other_note(lambda what: what.update(segment=3, file=3)),
    "a payload that is a directory": other_note(lambda what: what.update(segment="/dev", file="..")),
    "too few buckets": ended(b'{"buckets": 2}'),
    "too many buckets": ended(b'{"buckets": 1000}'),
    "no number of buckets": ended(b"{}"),
    "a number of buckets in words": ended(b'{"buckets": "two"}'),
    **{f"note {c!r}": noted(c) for c in (b"", b"{", b"null", b"[]", b"3", b"\xff\xfe", b"\0" * 100, b'{"bucket": 1}')},
    **{f"end {c!r}": ended(c) for c in (b"", b"nul", b"null", b"[]", b"\xff")},
}
OF_SEGMENTS: dict[str, Callable[[Address], Any]] = {
    "a name of another bucket": other_note(lambda what: what["tensors"][0].__setitem__(0, "embed.weight")),
    "another dtype": other_note(lambda what: what["tensors"][0].__setitem__(1, "float64")),
    "no dtype": other_note(lambda what: what["tensors"][0].__setitem__(1, "nn")),
    "another shape": other_note(lambda what: what["tensors"][0].__setitem__(2, [7, 7, 7])),
    "a negative shape": other_note(lambda what: what["tensors"][0].__setitem__(2, [-1])),
    "a shape that is no list": other_note(lambda what: what["tensors"][0].__setitem__(2, "3")),
    "another offset": other_note(lambda what: what["tensors"][0].__setitem__(3, 64)),
    "a negative offset": other_note(lambda what: what["tensors"][0].__setitem__(3, -64)),
    "an offset beyond the end": other_note(lambda what: what["tensors"][0].__setitem__(3, 1 << 40)),
}


@pytest.mark.parametrize(
    ("transport", "damage"),
    [*((t, d) for t in MAILBOXES for d in DAMAGES), *(("shared_memory", d) for d in OF_SEGMENTS)],
)
def test_damage_on_the_way_is_never_taken_for_weights(
    transport: str, damage: str, one: Worker, shipper: Shipper, address: Callable[..., Address]
) -> None:
    """Either the receiver says so, or the digests tell; the next publish works."""
    at = address(transport, timeout=SOON[transport])
    sent = shipper.send(some_weights().items(), at)
    assert json.loads(note(at, 0).with_name("end.json").read_text())["buckets"] > 4
    (DAMAGES | OF_SEGMENTS)[damage](at)
    one.start(weights_help.receive, at)
    with pytest.raises(WeightSyncError):
        compare(sent.manifest, one.result(IN_TIME).manifest, 0, "an engine")
    publish(shipper, (one,), replace(at, session=1, timeout=20.0), some_weights(1))


@mailboxes
def test_a_tensor_that_arrives_twice_is_named(
    transport: str, one: Worker, shipper: Shipper, address: Callable[..., Address]
) -> None:
    """Its first content may have been loaded already."""
    at = address(transport)
    shipper.send(some_weights().items(), at)
    again = json.loads(note(at, 0).read_text()) | {"bucket": 1}
    note(at, 1).write_text(json.dumps(again))
    one.start(weights_help.receive, at)
    fails(one, "'embed.weight' arrived twice")


# Giving up.

MARK = 12_347  # elements of a tensor that nobody else has


def marked() -> int:
    """Tensors of that size that are alive in this process."""
    return sum(type(thing) is Tensor and thing.numel() == MARK for thing in gc.get_objects())


@every_transport
@staged_or_not
@pytest.mark.parametrize("taken", [0, 11])
def test_giving_up_frees_what_came_and_a_new_receive_works_at_once(
    transport: str, staged: bool, taken: int, one: Worker, address: Callable[..., Address]
) -> None:
    landing = Landing("me")
    at = address(transport, "me", staged=staged, bucket_bytes=MARK * 8, timeout=1.0)
    one.start(weights_help.send_stream, at, [MARK * 4] * 20)
    receiving = landing.receive(at)
    coming = receiving.tensors()
    for number in range(taken):
        assert next(coming)[0] == f"layer.{number}"
    until(lambda: marked() > 0)
    receiving.give_up()
    del coming
    again = address(transport, "me", session=1, staged=staged) if transport == "broadcast" else replace(at, session=1)
    again = replace(again, timeout=20.0)
    one.start(weights_help.send, again, 5)
    second = landing.receive(again)
    until(lambda: marked() == 0)
    if transport == "broadcast":  # what is on its way when the receiver gives up may have been all
        with suppress(WeightSyncError):
            one.result(IN_TIME)
    elif staged:
        one.result(IN_TIME)
    else:
        fails(one, "me did not take")
    found = fingerprints(second.tensors())
    assert second.manifest is not None
    compare(one.result().manifest, second.manifest, 1, "this process")
    assert found == fingerprints(some_weights(5).items())


def until(what: Callable[[], bool]) -> None:
    ends = time.monotonic() + IN_TIME
    while not what():
        assert time.monotonic() < ends, "it did not come to that"
        time.sleep(0.01)
