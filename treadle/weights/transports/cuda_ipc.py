"""Weights between processes that share one GPU: a receiver maps the sender's memory, nothing is copied.

Not run by the tests. A bucket's tensors must stay as they are until every receiver has taken it, so the sender waits
for that, whether or not a publish is staged; a receiver copies what it keeps.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import reduce_tensor

from treadle.weights.transports import mailbox

if TYPE_CHECKING:
    from treadle.weights.stream import Address, Bucket

_DEVICE = 6  # where the arguments that rebuild a tensor name its device


class Sender(mailbox.PostingSender):
    """Posts handles of the tensors' memory."""

    host = False

    def put(self, bucket: Bucket) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in bucket.items()}  # alive until they are taken
        handles = {name: reduce_tensor(tensor) for name, tensor in tensors.items()}
        torch.cuda.synchronize()
        self._post({"handles": base64.b64encode(pickle.dumps(handles)).decode()})
        self._box.wait_taken(self._count - 1)


class Receiver:
    """Maps the sender's memory by the handles."""

    def __init__(self, who: str) -> None:
        self._who = who

    def buckets(self, address: Address) -> Iterator[Bucket]:
        for index, note in mailbox.notes(address):
            bucket = {}
            for name, (rebuild, arguments) in pickle.loads(base64.b64decode(note["handles"])).items():
                placed = list(arguments)
                placed[_DEVICE] = torch.cuda.current_device()
                bucket[name] = rebuild(*placed).clone()
            torch.cuda.synchronize()
            mailbox.take(address, self._who, index)
            yield bucket
