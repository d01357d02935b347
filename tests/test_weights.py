"""Digests, cuts and deltas of weights, on any bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event, Thread, Timer
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.weights_help import as_bits, flipped, of_bits, place_for, raw, some_weights, stepped
from treadle.controller.host import free_port
from treadle.errors import WeightSyncError
from treadle.weights import digest
from treadle.weights.config import WeightsConfig
from treadle.weights.delta import INDEX, VALUE, Decoder, Encoder
from treadle.weights.digest import compare, describe
from treadle.weights.publish import Prober, ShippingPublisher
from treadle.weights.shipment import Shipment
from treadle.weights.stream import Address, Landing, Sent, Shipper, cut

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.uint8]
Formula = Callable[[Tensor], str]


def _in_pieces(raw: Tensor, host: Formula = digest._host) -> str:
    with patch.object(digest, "_PIECE", max(3, raw.numel() // 20)):
        return host(raw)


FORMULAS: dict[str, Formula] = {"host": digest._host, "pieces": _in_pieces, "gpu": digest.weighted}

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
dtypes = st.sampled_from(DTYPES)


@st.composite
def tensors(draw: st.DrawFn, least: int = 0) -> Tensor:
    """Of any bits, dtype, shape and layout in memory, of at least so many elements."""
    shape, dtype = draw(shapes.filter(lambda s: torch.Size(s).numel() >= least)), draw(dtypes)
    return laid_out(of_bits(shape, dtype, torch.Generator().manual_seed(draw(st.integers(0, 2**31)))), draw(layouts))


layouts = st.sampled_from(["plain", "transposed", "strided", "misaligned"])


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same elements, elsewhere in memory."""
    if layout == "transposed":
        return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() else tensor
    if layout == "strided":
        return torch.stack([tensor, tensor], dim=-1)[..., 1]
    if layout == "misaligned":
        return torch.cat([torch.zeros(1, dtype=tensor.dtype), tensor.reshape(-1)])[1:].reshape(tensor.shape)
    return tensor


def described(tensor: Tensor, by: str) -> str:
    """With the formula of the host or, here as well, of a GPU."""
    with patch.object(digest, "_host", FORMULAS[by]):
        return describe(tensor)


def of_words(values: Tensor, like: Tensor) -> Tensor:
    return values.view(like.dtype).reshape(like.shape)


both_formulas = pytest.mark.parametrize("by", FORMULAS)


@both_formulas
@given(tensors(least=1), st.data())
def test_one_flipped_bit_changes_the_digest(by: str, tensor: Tensor, data: st.DataObject) -> None:
    changed = tensor.clone(memory_format=torch.contiguous_format)
    body = changed.view(-1).view(torch.uint8)
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert described(changed, by) != described(tensor, by)


@both_formulas
@given(tensors(least=2), st.data())
def test_two_elements_that_change_places_change_the_digest(by: str, tensor: Tensor, data: st.DataObject) -> None:
    values = as_bits(tensor)
    one, other = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=2, max_size=2, unique=True))
    assume(values[one] != values[other])
    values[[one, other]] = values[[other, one]]
    assert described(of_words(values, tensor), by) != described(tensor, by)


@both_formulas
@given(st.integers(2, 6), st.integers(1, 5), dtypes, st.randoms(use_true_random=False))
def test_rows_in_another_order_have_another_digest(
    by: str, rows: int, columns: int, dtype: torch.dtype, draw: Random
) -> None:
    tensor = of_bits((rows, columns), dtype, torch.Generator().manual_seed(draw.randrange(2**31)))
    moved = tensor[draw.sample(range(rows), rows)]
    assume(raw(moved) != raw(tensor))
    assert described(moved, by) != described(tensor, by)


@both_formulas
@given(tensors(), layouts)
def test_only_what_a_tensor_holds_counts_not_where_it_lies(by: str, tensor: Tensor, layout: str) -> None:
    moved = laid_out(tensor, layout)
    assert raw(moved) == raw(tensor)
    assert described(moved, by) == described(tensor, by)


@both_formulas
@given(st.sampled_from([(4, ()), (4, (6,)), (2, (2, 3)), (1, (5,)), (2, (0, 3))]))
def test_the_same_bytes_in_another_dtype_have_another_digest(by: str, drawn: tuple[int, tuple[int, ...]]) -> None:
    size, shape = drawn
    kinds = {1: (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool)}
    kinds |= {2: (torch.bfloat16, torch.float16, torch.int16), 4: (torch.float32, torch.int32)}
    zeros = [torch.zeros(shape, dtype=dtype) for dtype in kinds[size]]
    assert len({described(tensor, by) for tensor in zeros}) == len(kinds[size])


@both_formulas
@pytest.mark.parametrize("group", [[(), (1,), (1, 1)], [(6,), (2, 3), (3, 2), (1, 6), (6, 1)], [(0,), (0, 3), (3, 0)]])
def test_the_same_bytes_in_another_shape_have_another_digest(by: str, group: list[tuple[int, ...]]) -> None:
    values = torch.arange(torch.Size(group[0]).numel(), dtype=torch.bfloat16)
    assert len({described(values.reshape(shape), by) for shape in group}) == len(group)


@both_formulas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_zeros_of_both_signs_and_nans_of_all_payloads_differ(by: str, dtype: torch.dtype) -> None:
    width = dtype.itemsize * 8
    all_ones = {32: 0x7FFFFFFF, 16: 0x7FFF, 8: 0x7F}[width]
    patterns = [0, -(1 << width - 1), all_ones, all_ones - 1, -1, -2]
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    found = [torch.tensor([p], dtype=kind).view(dtype) for p in patterns]
    assert [bool(t.isnan()) for t in found] == [False, False, True, True, True, True]
    assert len({described(t, by) for t in found}) == len(patterns)


@both_formulas
def test_in_a_tensor_of_many_parts_every_part_and_its_place_count(by: str) -> None:
    """Larger than what the GPU's formula takes at a time, and not a whole number of words."""
    part = digest._WORDS * 2  # in elements of 2 bytes
    length = 3 * part + 1
    tensor = of_bits((length,), torch.bfloat16, torch.Generator().manual_seed(0))
    values = as_bits(tensor)
    seen = {described(tensor, by)}
    for place in (0, part - 1, part, 2 * part + 5, length - 1):
        values[place] ^= 1
        seen.add(described(values.view(torch.bfloat16), by))
        values[place] ^= 1
    for one, other in ((5, 5 + part), (7, 7 + 2 * part), (part + 2, 2 * part + 2)):  # equal places of two parts
        assert values[one] != values[other]
        swapped = values.clone()
        swapped[[one, other]] = values[[other, one]]
        seen.add(described(swapped.view(torch.bfloat16), by))
    whole = values[: 3 * part].view(3, part)
    seen.add(described(torch.cat([whole[[1, 0, 2]].reshape(-1), values[-1:]]).view(torch.bfloat16), by))
    assert len(seen) == 1 + 5 + 3 + 1


@given(tensors(), st.integers(1, 9))
def test_a_gpus_digest_does_not_depend_on_how_much_it_takes_at_a_time(tensor: Tensor, words: int) -> None:
    at_once = described(tensor, "gpu")
    with patch.object(digest, "_WORDS", words):
        assert described(tensor, "gpu") == at_once


def test_a_tensor_of_many_pieces_is_seen_whole() -> None:
    """A bit in each piece, and two pieces that change places."""
    tensor = torch.arange(11 << 20, dtype=torch.int32)  # 44 MB
    whole = describe(tensor)
    assert describe(tensor.clone()) == whole
    for at in range(0, len(tensor), digest._PIECE // 4):
        tensor[at] ^= 1
        assert describe(tensor) != whole
        tensor[at] ^= 1
    first, second, rest = tensor.split([digest._PIECE // 4] * 2 + [len(tensor) - digest._PIECE // 2])
    assert describe(torch.cat([second, first, rest])) != whole


@pytest.mark.parametrize("tensor", [torch.nn.Parameter(torch.ones(3)), torch.ones(2, 3, requires_grad=True) * 2])
def test_a_tensor_with_a_gradient_is_described_as_its_values_are(tensor: Tensor) -> None:
    assert describe(tensor) == describe(tensor.detach().clone())


def test_a_description_says_dtype_and_shape_in_words() -> None:
    found = describe(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert found.startswith("bfloat16[2, 3] ")


def test_what_differs_is_named() -> None:
    sent = {name: describe(torch.tensor(float(i))) for i, name in enumerate(["a.weight", "b.weight", "c.weight"])}
    compare(sent, dict(reversed(sent.items())), 3, "engine 0")
    with pytest.raises(WeightSyncError, match=r"version 3: 'b.weight' in engine 0 differs"):
        compare(sent, sent | {"b.weight": sent["a.weight"]}, 3, "engine 0")
    with pytest.raises(WeightSyncError, match=r"version 3: 'c.weight' was published, but engine 0 does not hold it"):
        compare(sent, {name: sent[name] for name in ("a.weight", "b.weight")}, 3, "engine 0")
    with pytest.raises(WeightSyncError, match=r"version 3: engine 0 holds 'z.weight', which was not published"):
        compare(sent, sent | {"z.weight": sent["a.weight"]}, 3, "engine 0")
    with pytest.raises(WeightSyncError, match="differs"):
        compare({"a": describe(torch.zeros(1))}, {"a": describe(torch.zeros(1, dtype=torch.bfloat16))}, 0, "an engine")


# Cuts.


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 64))
@example([0, 0, 0], 1)
@example([41, 0, 41], 40)
def test_a_cut_keeps_every_tensor_and_no_bucket_is_too_large(sizes: list[int], size: int) -> None:
    stream = [(str(number), torch.zeros(length, dtype=torch.uint8)) for number, length in enumerate(sizes)]
    buckets = [dict(bucket) for bucket in cut(stream, size)]
    assert [pair for bucket in buckets for pair in bucket.items()] == stream
    for bucket in buckets:
        assert bucket
        large = [tensor for tensor in bucket.values() if tensor.nbytes]
        assert sum(tensor.nbytes for tensor in large) <= size or len(large) == 1


def test_a_bucket_is_given_out_before_more_than_one_further_tensor_is_made() -> None:
    made = 0

    def making() -> Iterator[tuple[str, Tensor]]:
        nonlocal made
        for made in range(1, 21):
            yield str(made), torch.zeros(3 if made % 5 else 12, dtype=torch.uint8)

    taken = 0
    for bucket in cut(making(), 10):
        taken += len(bucket)
        assert made <= taken + 1
        if any(tensor.nbytes > 10 for tensor in bucket.values()):
            assert made == taken, "two large tensors at a time"
    assert taken == 20


# Deltas.

NAMES = ["embed.weight", "a", "a.b", "a#", "layers.10.up", "norm"]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[bool, dict[str, Tensor]]]:
    """Publishes, whole or not: tensors stay, change a little or much, change shape or dtype, go and come back."""
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    held: dict[str, Tensor] = {}
    publishes = []
    for number in range(draw(st.integers(1, 6))):
        now = {}
        for name in draw(st.permutations(NAMES)):
            what = draw(st.sampled_from(["same", "little", "much", "new", "gone"]))
            if what == "gone":
                continue
            old = held.get(name)
            if old is None or what == "new":
                now[name] = of_bits(draw(shapes), draw(dtypes), make)
            elif what == "same":
                now[name] = old
            else:
                now[name] = flipped(old, 0.1 if what == "little" else 0.9, make)
        held |= now
        publishes.append((number == 0 or draw(st.booleans()), now))
    return publishes


def decoded(decoder: Decoder, stream: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """What a receiver gives out; the memory in which a bucket came is used again at once."""
    found = []
    for name, tensor in stream:
        arrived = tensor.clone()
        found += [(n, t.clone()) for n, t in decoder.decode(name, arrived)]
        arrived.view(-1).view(torch.uint8).fill_(0xAB) if arrived.numel() else None
    return found


@settings(max_examples=200)
@given(histories())
def test_any_publishes_are_decoded_bit_for_bit(history: list[tuple[bool, dict[str, Tensor]]]) -> None:
    encoder, decoder = Encoder(), Decoder()
    last: dict[str, Tensor] = {}
    for whole, now in history:
        encoder.begin(whole)
        if whole:
            decoder = Decoder()
        sent = [pair for name, tensor in now.items() for pair in encoder.encode(name, tensor)]
        found = decoded(decoder, sent)
        assert [name for name, _ in found] == list(now)
        assert [describe(tensor) for _, tensor in found] == [describe(tensor) for tensor in now.values()]
        assert encoder.elements == sum(tensor.numel() for tensor in now.values())
        unchanged = sum(
            int((as_bits(tensor) == as_bits(last[name])).sum())
            for name, tensor in now.items()
            if name in last and (last[name].dtype, last[name].shape) == (tensor.dtype, tensor.shape)
        )
        assert encoder.unchanged == unchanged
        assert sum(tensor.nbytes for _, tensor in sent) <= sum(tensor.nbytes for tensor in now.values())
        last |= now


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_sparse_changes_send_an_index_and_a_value_each(dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(0)
    old = of_bits((300, 400), dtype, make)
    new = flipped(old, 0.01, make)
    changed = int((as_bits(new) != as_bits(old)).sum())
    assert 900 < changed < 1500
    encoder = Encoder()
    encoder.begin(True)
    list(encoder.encode("w", old))
    encoder.begin(False)
    sent = list(encoder.encode("w", new))
    assert sum(tensor.nbytes for _, tensor in sent) == changed * (4 + dtype.itemsize)
    assert sum(tensor.nbytes for _, tensor in sent) < old.nbytes / 15
    assert encoder.unchanged == old.numel() - changed


def test_weights_that_are_trained_in_place_are_seen_to_change() -> None:
    """The sender's copy is its own, and so is what a receiver holds."""
    encoder, decoder = Encoder(), Decoder()
    weight = torch.zeros(100, dtype=torch.bfloat16)
    encoder.begin(True)
    decoded(decoder, list(encoder.encode("w", weight)))
    for step in range(1, 4):
        weight[step] = step
        encoder.begin(False)
        sent = list(encoder.encode("w", weight))
        assert sum(tensor.nbytes for _, tensor in sent) == 6
        ((_, held),) = decoded(decoder, sent)
        assert torch.equal(held, weight)


@settings(max_examples=200)
@given(histories(), st.integers(1, 5))
def test_a_decoder_that_missed_a_publish_does_not_pass(
    history: list[tuple[bool, dict[str, Tensor]]], missed: int
) -> None:
    """Either it says that something is missing, or the digests tell, or it holds the right weights all the same."""
    encoder, decoder = Encoder(), Decoder()
    for number, (whole, now) in enumerate(history):
        encoder.begin(whole)
        if whole:
            decoder = Decoder()
        sent = [pair for name, tensor in now.items() for pair in encoder.encode(name, tensor)]
        if number == missed:
            continue
        try:
            found = dict(decoded(decoder, sent))
            compare({n: describe(t) for n, t in now.items()}, {n: describe(t) for n, t in found.items()}, 0, "it")
        except WeightSyncError:
            break  # the next publish is whole
        except (IndexError, RuntimeError):
            break  # a change that does not fit what is held: `Receiving` makes it one of ours
        assert {n: raw(t) for n, t in found.items()} == {n: raw(t) for n, t in now.items()}


def test_changes_without_what_they_change_are_refused() -> None:
    index, value = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1.0, 2.0])
    empty = Decoder()
    assert list(empty.decode("w" + INDEX, index)) == []
    with pytest.raises(WeightSyncError, match="'w'"):
        list(empty.decode("w" + VALUE, value))
    holding = Decoder()
    list(holding.decode("w", torch.zeros(3)))
    list(holding.decode("v", torch.zeros(3)))
    with pytest.raises(WeightSyncError, match="'w'"):
        list(holding.decode("w" + VALUE, value))  # without their index
    list(holding.decode("v" + INDEX, index))
    with pytest.raises(WeightSyncError, match="'w'"):
        list(holding.decode("w" + VALUE, value))  # with another one's
    list(holding.decode("w" + INDEX, index))
    with pytest.raises(WeightSyncError, match="'w': 2 elements changed, 1 values arrived"):
        list(holding.decode("w" + VALUE, value[:1]))


# Whole publishes, inside one process: what does not depend on a transport.


def shipped(address: Address, tensors: dict[str, Tensor], shipper: Shipper, landing: Landing) -> tuple[Sent, list]:
    receiving = landing.receive(address)
    found: list[tuple[str, Tensor]] = []
    thread = Thread(target=lambda: found.extend((n, t.clone()) for n, t in receiving.tensors()))
    thread.start()
    sent = shipper.send(tensors.items(), address)
    thread.join()
    assert receiving.manifest is not None
    compare(sent.manifest, receiving.manifest, 0, "it")
    return sent, found


def address_of(directory: Path, session: int = 0, **changes: Any) -> Address:
    usual = {"transport": "files", "place": place_for("files", directory), "session": session, "receivers": ("it",)}
    usual |= {"bucket_bytes": 1000, "staged": True, "delta": False, "keep": False, "timeout": 5.0}
    return Address(**usual | changes)


def test_digests_do_not_depend_on_how_the_stream_was_cut(tmp_path: Path) -> None:
    weights = stepped(some_weights(), 1)
    manifests, shipper = [], Shipper()
    for session, size in enumerate([3000, 70_000, 10_000_000]):
        address = address_of(tmp_path, session, bucket_bytes=size)
        manifests.append(shipped(address, weights, shipper, Landing("it"))[0].manifest)
        shipper.close()
    assert list(manifests[0]) == list(weights)
    assert manifests[0] == manifests[1] == manifests[2] == {name: describe(t) for name, t in weights.items()}


@pytest.mark.parametrize("keep", [False, True])
def test_a_name_that_is_exported_twice_is_refused(keep: bool, tmp_path: Path) -> None:
    shipper = Shipper()
    twice = iter([("w", torch.zeros(2)), ("v", torch.zeros(2)), ("w", torch.ones(2))])
    with pytest.raises(WeightSyncError, match="'w'"):
        shipper.send(twice, address_of(tmp_path, keep=keep))
    shipper.close()


@pytest.mark.parametrize("delta", [False, True])
def test_tensors_do_not_pile_up_before_a_slow_digest(delta: bool, tmp_path: Path) -> None:
    """While nothing is digested, no more is asked for than a bucket and a tensor, though nothing has to be sent."""
    asked = 0
    go = Event()

    def exported() -> Iterator[tuple[str, Tensor]]:
        nonlocal asked
        for number in range(40):
            asked += not go.is_set()
            yield str(number), torch.zeros(50)

    def waiting(tensor: Tensor) -> str:
        go.wait()
        return describe(tensor)

    shipper, at = Shipper(), address_of(tmp_path, keep=delta)
    shipper.send(exported(), at)
    asked = 0
    later = Timer(0.2, go.set)
    later.start()
    with patch("treadle.weights.stream.describe", waiting):
        sent = shipper.send(exported(), replace(at, session=1, delta=delta))
    later.join()
    assert sent.sent_bytes == (0 if delta else 40 * 200)
    assert len(sent.manifest) == 40
    assert 1 <= asked <= 6
    shipper.close()


def test_unchanged_elements_and_bytes_of_a_delta_are_told(tmp_path: Path) -> None:
    shipper, landing = Shipper(), Landing("it")
    place = place_for("files", tmp_path)
    first, second = torch.zeros(1000, dtype=torch.bfloat16), torch.ones(500)
    sent, _ = shipped(address_of(tmp_path, 0, place=place, keep=True), {"a": first, "b": second}, shipper, landing)
    assert (sent.sent_bytes, sent.elements, sent.unchanged) == (4000, 1500, 0)
    first[7] = -0.0
    sent, found = shipped(
        address_of(tmp_path, 1, place=place, keep=True, delta=True), {"a": first, "b": second}, shipper, landing
    )
    assert (sent.sent_bytes, sent.elements, sent.unchanged) == (6, 1500, 1499)
    assert [(name, raw(tensor)) for name, tensor in found] == [("a", raw(first)), ("b", raw(second))]
    sent, _ = shipped(address_of(tmp_path, 2, place=place), {"a": first, "b": second}, shipper, landing)
    assert (sent.sent_bytes, sent.unchanged) == (4000, None)
    shipper.close()


def test_a_tensor_that_comes_back_after_a_whole_publish_is_sent_whole(tmp_path: Path) -> None:
    """A whole publish is for receivers that hold nothing: they never had the tensors that were left out of it."""
    shipper, landing, place = Shipper(), Landing("it"), place_for("files", tmp_path)
    a, b = torch.zeros(100), torch.ones(100)
    for session, (tensors, delta) in enumerate(
        [({"a": a, "b": b}, False), ({"a": a}, False), ({"a": a, "b": b}, True)]
    ):
        address = address_of(tmp_path, session, place=place, keep=True, delta=delta)
        _, found = shipped(address, tensors, shipper, landing)
        assert [(name, raw(tensor)) for name, tensor in found] == [(n, raw(t)) for n, t in tensors.items()]
    shipper.close()


class FakePool:
    """Engines that take what they are told to take."""

    weights = WeightsConfig(transport="broadcast")
    place, attempts, supply = "/nowhere", 1, None

    def __init__(self) -> None:
        self.addresses: list[Address] = []
        self.names: tuple[str, ...] = ("a", "b")
        self.fails = False

    def receivers(self) -> tuple[str, ...]:
        return self.names

    def each(self) -> dict[str, Any]:
        return {}

    async def load(self, shipment: Shipment, version: int, on_publish: str) -> dict[str, float]:
        self.addresses.append(shipment.address)
        if self.fails:
            raise WeightSyncError("an engine says no")
        return {}

    async def publish(self, address: Address) -> Sent:
        return Sent({}, 0, 0, None, 0.0, 0.0, 0.0)

    async def rendezvous(self) -> str:
        return f"127.0.0.1:{free_port()}"

    async def someone(self) -> None: ...


def test_a_process_group_is_kept_until_its_members_change_or_a_publish_fails() -> None:
    """After a failure one end may still have the old group, in the middle of a broadcast: both are told a new port."""

    class Content:
        async def __call__(self, version: int, engines: Any) -> float:
            return 0.0

        async def foresee(self, version: int) -> None: ...

    async def places() -> list[str]:
        pool: Any = FakePool()
        publisher = ShippingPublisher(pool, pool, cast(Prober, Content()), "resume")
        for version in range(3):
            await publisher(version)
        pool.fails = True
        with pytest.raises(WeightSyncError, match="an engine says no"):
            await publisher(3)
        pool.fails = False
        await publisher(3)
        pool.names = ("a", "c")
        await publisher(4)
        await publisher(5)
        assert [address.session for address in pool.addresses] == list(range(7))
        return [address.place for address in pool.addresses]

    first, second, third, fourth, mended, other, last = asyncio.run(places())
    assert first == second == third == fourth
    assert mended != fourth
    assert other == last
    assert len({fourth, mended, other}) == 3
