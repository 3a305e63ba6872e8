"""Tokens between two stages: first in, first out, each a small header and, unless it is empty, one tensor.

A thread takes what comes while the stage computes, so that a token is there when it is wanted; what is sent
is on its way while the stage goes on. Every way has tags of its own, so none holds up another.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ConfigError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
MOST_DIMENSIONS = 8
HEADER = 4 + MOST_DIMENSIONS


class Way(IntEnum):
    """What a token is for; its tags are 2 x this and one more."""

    ACTIVATIONS = 1
    GRADIENTS = 2
    LABELS = 3
    EVALUATED = 4
    """Activations of an evaluation, which pass the queues by."""
    RESULTS = 5
    """What the last stage makes of these, for the lead."""


class PayloadKind(IntEnum):
    """What follows a header."""

    EMPTY = 0
    TENSOR = 1
    END = 2
    """Nothing, ever again on this way; or the evaluation is over."""


class Sender:
    """Sends tokens to another worker."""

    def __init__(self, way: Way, rank: int, capacity: int) -> None:
        self._tag, self._rank, self._capacity = 2 * way, rank, capacity
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self.bytes = 0
        """Sent since somebody asked."""

    def send(self, token: int | None, tensor: Tensor | None) -> None:
        """A token; the tensor belongs to this way from now on."""
        header = torch.zeros(HEADER, dtype=torch.int64)
        if token is not None:
            assert tensor is not None
            tensor = tensor.contiguous()
            header[:4] = torch.tensor([PayloadKind.TENSOR, token, tensor.dim(), code_of(tensor)])
            header[4 : 4 + tensor.dim()] = torch.tensor(tensor.shape)
        self._post(header, self._tag)
        if token is not None and tensor is not None and tensor.numel():
            self._post(tensor, self._tag + 1)

    def end(self) -> None:
        """The last word."""
        header = torch.zeros(HEADER, dtype=torch.int64)
        header[0] = PayloadKind.END
        self._post(header, self._tag)

    def flush(self) -> None:
        """Wait until all has been taken."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _post(self, tensor: Tensor, tag: int) -> None:
        self._under_way.append((dist.isend(tensor, self._rank, tag=tag), tensor))
        self.bytes += tensor.numel() * tensor.element_size()
        while len(self._under_way) > 2 * self._capacity:
            self._under_way.popleft()[0].wait()

    def take_bytes(self) -> int:
        """Bytes since the last time."""
        sent, self.bytes = self.bytes, 0
        return sent


class Receiver:
    """Takes tokens from another worker, in a thread."""

    def __init__(self, way: Way, rank: int) -> None:
        self._tag, self._rank = 2 * way, rank
        self._queue: queue.SimpleQueue[tuple[PayloadKind, int, Tensor | None] | BaseException] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=f"paceline-{way.name.lower()}", daemon=True)
        self._thread.start()

    def take(self) -> tuple[int, Tensor] | None:
        """The next token; None: an empty one."""
        got = self._queue.get()
        if isinstance(got, BaseException):
            raise got
        kind, token, tensor = got
        return None if kind is not PayloadKind.TENSOR or tensor is None else (token, tensor)

    def join(self) -> None:
        """Wait for the last word."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                kind, token, tensor = receive(self._rank, self._tag)
                if kind is PayloadKind.END:
                    return
                self._queue.put((kind, token, tensor))
        except BaseException as error:  # whoever waits for a token has to hear of it
            self._queue.put(error)


def receive(rank: int, tag: int) -> tuple[PayloadKind, int, Tensor | None]:
    """One token, whatever it is."""
    header = torch.empty(HEADER, dtype=torch.int64)
    dist.recv(header, rank, tag=tag)
    kind, token, dimensions, code, *shape = header.tolist()
    if kind != PayloadKind.TENSOR:
        return PayloadKind(kind), 0, None
    tensor = torch.empty(shape[:dimensions], dtype=DTYPES[code])
    if tensor.numel():
        dist.recv(tensor, rank, tag=tag + 1)
    return PayloadKind.TENSOR, token, tensor


def code_of(tensor: Tensor) -> int:
    """A type as a number."""
    if tensor.dtype not in DTYPES or tensor.dim() > MOST_DIMENSIONS:
        raise ConfigError(
            f"a tensor of type {tensor.dtype} with {tensor.dim()} dimensions cannot go between stages. Use "
            f"one of {', '.join(str(each) for each in DTYPES)}, and at most {MOST_DIMENSIONS} dimensions."
        )
    return DTYPES.index(tensor.dtype)
