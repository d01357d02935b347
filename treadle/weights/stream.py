"""The two ends of a publish: a sender cuts a stream of named tensors into buckets, a receiver puts it together again.

    Shipper.send(tensors, address) ─► bucket ─► bucket ─► …   transport   … ─► Receiving: whole tensors, and digests

What is sent, and what arrived, is digested on each side in the dtype that was exported. A `Receiving` works on a thread
of its own: where a publish is staged it takes everything while its process goes on with other things; otherwise it is
never more than a bucket ahead of whoever loads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from treadle.errors import WeightSyncError
from treadle.weights.delta import Decoder, Encoder
from treadle.weights.digest import Manifest, describe

if TYPE_CHECKING:
    from torch import Tensor

Bucket = Mapping[str, "Tensor"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where one publish goes. It travels to both ends."""

    transport: str  # a module of treadle.weights.transports
    place: str  # a directory, or host:port
    session: int  # counts publishes, those that failed included
    receivers: tuple[str, ...]  # one a process that loads
    bucket_bytes: int
    staged: bool
    delta: bool  # the receivers hold what the session before sent
    keep: bool  # both sides keep what this session sends: a later one may be a delta
    timeout: float  # seconds without progress


@dataclass(frozen=True, slots=True)
class Sent:
    """What a sender has to say."""

    manifest: Manifest
    sent_bytes: int  # on the wire, once for all receivers
    elements: int
    unchanged: int | None  # elements with the bits of the publish before; None where nobody looked
    assembly: float  # seconds for gathering, casting, finding what changed
    wire: float  # seconds for handing it over
    digest: float  # seconds of the sender's digests: beside the wire, on a thread of their own


class Sender(Protocol):
    """One end of a transport. Lives as long as the trainer."""

    host: bool  # receivers find the tensors in the host's memory

    def begin(self, address: Address) -> None: ...
    def put(self, bucket: Bucket) -> None:
        """Hand over; waits while receivers hold as much as they may. Raises `WeightSyncError` after the timeout."""
        ...

    def end(self) -> None: ...
    def close(self) -> None: ...


class Receiver(Protocol):
    """The other end. Lives as long as the process that loads."""

    def buckets(self, address: Address) -> Iterator[Bucket]:
        """The buckets of one publish. Where it is not staged, the tensors of a bucket are the caller's own."""
        ...


def cut(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Buckets of whole tensors, of at most `size` bytes or of one larger tensor."""
    bucket: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket, filled = {}, 0
        bucket[name] = tensor
        filled += tensor.nbytes
        del tensor  # or it would be held while the next one is made, and so below
        if filled >= size:
            yield bucket
            bucket, filled = {}, 0
    if bucket:
        yield bucket


class Shipper:
    """Sends weights, publish after publish. One for each process that holds them."""

    def __init__(self) -> None:
        self._senders: dict[str, Sender] = {}
        self._encoder = Encoder()

    def send(self, tensors: Iterable[tuple[str, Tensor]], address: Address) -> Sent:
        """Send every tensor; returns when all are handed over. At most one bucket is held beside them."""
        sender = self._sender(address.transport)
        digests: dict[str, Future[tuple[str, float]]] = {}
        wire = sent = 0.0
        started = time.perf_counter()
        # A receiver that is not staged takes the next bucket while one is loaded: both together are one bucket's worth.
        size = address.bucket_bytes if address.staged else address.bucket_bytes // 2
        with ThreadPoolExecutor(1, "treadle-digest") as digester:

            def watched() -> Iterator[tuple[str, Tensor]]:
                for name, tensor in tensors:
                    if name in digests:
                        raise WeightSyncError(f"'{name}' was exported twice in one publish")
                    body = tensor.detach().cpu() if sender.host else tensor  # both ends digest on the same device
                    digests[name] = digester.submit(_timed, body)
                    if address.keep:
                        yield from self._encoder.encode(name, body)
                        digests[name].result()  # little of it may have been sent: do not let such tensors pile up
                    else:
                        yield name, body
                    del tensor, body

            self._encoder.begin(whole=not address.delta)
            sender.begin(address)
            for bucket in cut(watched(), size):
                before = time.perf_counter()
                sender.put(bucket)
                sent += sum(t.nbytes for t in bucket.values())
                wire += time.perf_counter() - before
                next(reversed(digests.values())).result()  # and so all others: then no thread needs the bucket
                del bucket  # before the next one is made
            before = time.perf_counter()
            sender.end()
            wire += time.perf_counter() - before
            found = {name: future.result() for name, future in digests.items()}
        return Sent(
            manifest={name: what for name, (what, _) in found.items()},
            sent_bytes=int(sent),
            elements=self._encoder.elements,
            unchanged=self._encoder.unchanged if address.keep else None,
            assembly=time.perf_counter() - started - wire,
            wire=wire,
            digest=sum(seconds for _, seconds in found.values()),
        )

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _sender(self, transport: str) -> Sender:
        if transport not in self._senders:
            self._senders[transport] = import_module(f"treadle.weights.transports.{transport}").Sender()
        return self._senders[transport]


class Landing:
    """Receives weights, publish after publish. One for each process that loads them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._receivers: dict[str, Receiver] = {}
        self._decoder = Decoder()

    def receive(self, address: Address) -> Receiving:
        """Begin to receive one publish."""
        if address.transport not in self._receivers:
            module = import_module(f"treadle.weights.transports.{address.transport}")
            self._receivers[address.transport] = module.Receiver(self._name)
        if not address.delta:
            self._decoder = Decoder()
        return Receiving(address, self._receivers[address.transport], self._decoder)


class Receiving:
    """One publish on its way in."""

    def __init__(self, address: Address, receiver: Receiver, decoder: Decoder) -> None:
        self._address, self._receiver, self._decoder = address, receiver, decoder
        self._change = threading.Condition()
        self._waiting: deque[list[tuple[str, Tensor]]] = deque()
        self._manifest: dict[str, str] = {}
        self._error: Exception | None = None
        self._ended = self._given_up = False
        self.digest_seconds = 0.0
        threading.Thread(target=self._take, name="treadle-weights", daemon=True).start()

    @property
    def manifest(self) -> Manifest | None:
        """What arrived, once all of it has; raises what went wrong."""
        with self._change:
            if self._error is not None:
                raise self._error
            return self._manifest if self._ended else None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, in the order sent, as they come; raises what went wrong."""
        while True:
            with self._change:
                if not self._change.wait_for(
                    lambda: self._waiting or self._ended or self._error, self._address.timeout
                ):
                    raise WeightSyncError(f"no weights arrived for {self._address.timeout:g} s; is the trainer alive?")
                if self._error is not None:
                    raise self._error
                if not self._waiting:
                    return
                bucket = self._waiting.popleft()
            yield from bucket
            bucket.clear()
            with self._change:
                self._change.notify_all()

    def give_up(self) -> None:
        """Stop receiving, and forget what has come."""
        with self._change:
            self._given_up = True
            self._waiting.clear()
            self._change.notify_all()

    def _take(self) -> None:
        try:
            for bucket in self._receiver.buckets(self._address):
                named = [pair for name, tensor in bucket.items() for pair in self._decoded(name, tensor)]
                self._digest(named)
                with self._change:
                    if not self._given_up:
                        self._waiting.append(named)
                        self._change.notify_all()
                        if not self._address.staged:
                            self._change.wait_for(lambda: not self._waiting or self._given_up)
                    if self._given_up:
                        return
                del bucket, named
        except Exception as error:  # carried to whoever loads, whatever it is
            self._end(
                error if isinstance(error, WeightSyncError) else WeightSyncError(f"weights did not arrive: {error!r}")
            )
        else:
            self._end(None)

    def _digest(self, named: list[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            what, seconds = _timed(tensor)
            if name in self._manifest:
                raise WeightSyncError(f"'{name}' arrived twice in one publish")
            self._manifest[name] = what
            self.digest_seconds += seconds

    def _decoded(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        return self._decoder.decode(name, tensor) if self._address.keep else [(name, tensor)]

    def _end(self, error: Exception | None) -> None:
        with self._change:
            self._error, self._ended = error, error is None
            self._change.notify_all()


def _timed(tensor: Tensor) -> tuple[str, float]:
    started = time.perf_counter()
    return describe(tensor), time.perf_counter() - started
