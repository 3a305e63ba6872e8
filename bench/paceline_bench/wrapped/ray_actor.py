"""A server of one flat tensor in a Ray actor, and who pushes to it: arrays travel through Ray's object store.

A cluster is the benchmark's own: never one that happens to run here, and with a token made for it alone, so
that strangers stay out and Ray neither uses nor leaves one in the home folder.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline_bench.wrapped.server import FlatServer, present

NAME = "server"
NAMESPACE = "paceline-bench"
PATIENCE_S = 60.0
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def secret(token: str) -> dict[str, str]:
    """For the environment of its processes, before Ray is imported: how they know each other."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}


class RayServer:
    """A server in Ray's terms: arrays in, arrays out."""

    def __init__(self, make: Callable[..., FlatServer], *about: Any) -> None:
        self._server = make(*about)

    def ready(self) -> None:
        """It is there."""

    def push(self, rank: int, gradient: Any) -> Any:
        """Apply and answer."""
        answer = self._server.push(rank, as_tensor(gradient))
        parts = answer if isinstance(answer, tuple) else (answer,)
        arrays = tuple(part.numpy() if isinstance(part, Tensor) else part for part in parts)
        return arrays if isinstance(answer, tuple) else arrays[0]

    def greet(self, rank: int) -> int:
        """A worker is there; how many are."""
        return self._server.greet(rank)


class RayClient:
    """A worker's side."""

    def __init__(self, rank: int, address: str, **more: Any) -> None:
        self._rank, self._ray = rank, connected(address, **more)
        self._actor: Any = self._ray.get_actor(NAME)

    def push(self, gradient: Tensor) -> Any:
        """Push and pull."""
        return self._ray.get(self._actor.push.remote(self._rank, gradient.numpy()), timeout=PATIENCE_S)

    def present(self, workers: int, within_s: float) -> int:
        """How many workers have come."""
        return present(self._greet, workers, within_s)

    def leave(self) -> None:
        """Disconnect."""
        self._ray.shutdown()

    def _greet(self) -> int:
        seen: Any = self._ray.get(self._actor.greet.remote(self._rank), timeout=PATIENCE_S)
        return int(seen)


def connected(address: str, **more: Any) -> Any:
    """Ray, as one of a cluster's processes has it; `local` makes a cluster."""
    import ray

    ray.init(address, namespace=NAMESPACE, **QUIET, **more)
    return ray


def hold(ray: Any, within_s: float, make: Callable[..., FlatServer], *about: Any, **options: Any) -> object:
    """The server's actor, warm; it lives as long as who holds it."""
    remote: Any = ray.remote(RayServer)
    actor = remote.options(name=NAME, num_cpus=1, **options).remote(make, *about)
    ray.get(actor.ready.remote(), timeout=within_s)
    held: object = actor
    return held


def as_tensor(array: Any) -> Tensor:
    """The same memory. Arrays in the object store cannot be written to, and nobody does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)
