"""Which Ray a run takes place on: the one at an address, the one we are in, or one of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from typing import Any

from paceline.errors import ConfigError, RunError
from paceline.fabric.stop_signals import handlers_kept
from paceline.fabric.wire import parse_address, receive_exactly

REACH_S = 5.0
"""How long a Ray at an address may take to answer."""
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
"""An empty frame of HTTP/2's settings: length, type, flags, stream."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def the_ray() -> Any:
    """Ray, which is hardly typed."""
    import ray

    return ray


def check_ray(address: str | None) -> None:
    """What can be known without waiting: whether Ray is installed, and whether somebody is at its address."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--engine ray needs Ray: pip install 'paceline[ray]'.")
    if address is None or address == "auto":
        return
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address} is for clients outside of a Ray cluster, but the store is on this host and workers "
            "have to reach it. Run this command on a node of the cluster, or with `ray job submit`."
        )
    _knock(address)


class RayCluster:
    """A connection to Ray. What was started or opened here is ended by `close`."""

    def __init__(self, address: str | None, workers: int) -> None:
        self._folder: str | None = None
        address = address or os.environ.get("RAY_ADDRESS")
        check_ray(address)
        if address is None:
            _prepare()
        ray = the_ray()
        self._ours = not ray.is_initialized()
        if self._ours and address is None:
            self._start(workers)
        elif self._ours:
            _connect(str(address))

    @property
    def listen(self) -> str:
        """Where a store on this host is reached by all nodes: loopback while there is but one."""
        ray = the_ray()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return f"{'127.0.0.1' if len(nodes) == 1 else ray.util.get_node_ip_address()}:0"

    def close(self) -> None:
        """Disconnect, and end a Ray that was started for this run."""
        ray = the_ray()
        if self._ours:
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, workers: int) -> None:
        """A Ray of this run's own; whoever does not have its token is refused."""
        ray = the_ray()
        self._folder = tempfile.mkdtemp(
            prefix="pl-"
        )  # short: sockets' paths below it may have 107 characters
        with handlers_kept():
            ray.init(
                "local",
                _node_ip_address="127.0.0.1",
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=100_000_000,
                _temp_dir=self._folder,
                **QUIET,
            )


def _prepare() -> None:
    """Before Ray is imported. The token is how its processes know each other; without, Ray would leave one in
    the home folder. Ray's workers are nice to others by default, the local engine's are not."""
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _connect(address: str) -> None:
    ray = the_ray()
    try:
        with handlers_kept():
            ray.init(address, **QUIET)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError, AuthenticationError
        with contextlib.suppress(Exception):
            ray.shutdown()
        raise ConfigError(f"cannot connect to Ray at {address}: {first_line(error)}") from None


def _knock(address: str) -> None:
    """Ray itself tries for minutes, also if somebody else answers."""
    try:
        with socket.create_connection(parse_address(address), REACH_S) as sock:
            answered = _speaks_http2(sock) or os.environ.get("RAY_USE_TLS", "0") != "0"
        why = "" if answered else "another program listens there"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise ConfigError(
            f"no Ray at {address}: {why}. Start one with `ray start --head`, or leave --address out for one "
            "of the run's own."
        )


def _speaks_http2(sock: socket.socket) -> bool:
    """Whether its settings come in answer to ours, as from every gRPC server; Ray's is one."""
    sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
    try:
        return receive_exactly(sock, len(SETTINGS), time.monotonic() + REACH_S)[3] == SETTINGS[3]
    except (OSError, RunError):
        return False


def first_line(error: BaseException) -> str:
    """What Ray says, as far as it tells something."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
