"""One end of a link under test: a process that pushes a tensor and gets one back, by one way or another.

`python -m paceline_bench.harness.ends WAY ROLE HOST PORT BYTES`: the client reads a number of rounds per line
from standard input and prints how long each took, as one JSON list; the server answers until it is
killed. Ways: Paceline's session, the same under TLS, gloo's send and recv, torch's RPC (as it comes, which
on one machine is through its memory, and held to TCP), and a plain socket, which is what the link can
give to one thread.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from paceline.fabric.dialer import Dialer
from paceline.fabric.door import Door, Enter
from paceline.fabric.session import Session, prepare
from paceline.fabric.tls import Seal, Trust
from paceline.fabric.wire import check_secret

SECRET = check_secret("the secret of a benchmark, for nobody else")
OVER_TCP = "torch rpc over TCP"
WAYS = ("paceline", "paceline tls", "gloo", "torch rpc", OVER_TCP, "socket")
TCP: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
Round = Callable[[], None]


class Mirror:
    """Memory that is written to, and what to do when it is full."""

    def __init__(self, size_bytes: int, full: Callable[[], None]) -> None:
        self.memory = memory_of(size_bytes)
        self._full = full

    def place(self, lane: int, what: int, offset: int, length: int) -> memoryview:
        """A piece arrives."""
        return self.memory[offset : offset + length]

    def arrived(self, lane: int, what: int, data: bytes) -> None:
        """All pieces have."""
        self._full()


def memory_of(size_bytes: int) -> memoryview:
    """Memory as a run has it: it begins with a page."""
    memory = memoryview(mmap.mmap(-1, size_bytes))
    memory[:] = bytes(size_bytes)  # so that it is there
    return memory


def session_client(host: str, port: int, size: int, trust: Trust | None = None) -> Round:
    """Push through a session."""
    back = threading.Event()
    mirror = Mirror(size, back.set)
    dialer = Dialer((host, port), SECRET, Enter("bench", "client"), mirror, print, trust=trust)
    dialer.open()
    gradient = memory_of(size)
    gradient[:] = (os.urandom(1 << 16) * (size // (1 << 16) + 1))[:size]

    def go() -> None:
        back.clear()
        dialer.session.send_memory(0, 0, gradient, 0, size)
        dialer.session.send(0, b"push")
        back.wait()

    return go


def session_server(host: str, port: int, size: int, seal: Seal | None = None) -> None:
    """Answer with as much."""

    def answer() -> None:
        session.send_memory(0, 0, weights, 0, size)
        session.send(0, b"release")

    weights = memory_of(size)
    session = Session(Mirror(size, answer), lambda why, closed: None)
    Door((host, port), SECRET, lambda asked: (session, b""), seal)
    threading.Event().wait()


def sealed_client(host: str, port: int, size: int) -> Round:
    """Push through a session under TLS."""
    return session_client(host, port, size, Trust())


def sealed_server(host: str, port: int, size: int) -> None:
    """Answer with as much."""
    session_server(host, port, size, Seal())


def socket_client(host: str, port: int, size: int) -> Round:
    """Push through a plain connection."""
    sock = _patiently(host, port)
    gradient, weights = memory_of(size), memory_of(size)

    def go() -> None:
        sock.sendall(gradient)
        sock.recv_into(weights, size, socket.MSG_WAITALL)

    return go


def socket_server(host: str, port: int, size: int) -> None:
    """Answer with as much."""
    sock, _ = socket.create_server((host, port)).accept()
    prepare(sock)
    memory = memory_of(size)
    while sock.recv_into(memory, size, socket.MSG_WAITALL) == size:
        sock.sendall(memory)


def gloo_client(host: str, port: int, size: int) -> Round:
    """Push with `send`, pull with `recv`."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=1, world_size=2)
    gradient, weights = torch.ones(size // 4), torch.empty(size // 4)

    def go() -> None:
        dist.send(gradient, 0)
        dist.recv(weights, 0)

    return go


def gloo_server(host: str, port: int, size: int) -> None:
    """Answer with as much."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=0, world_size=2)
    weights = torch.ones(size // 4)
    while True:
        dist.recv(weights, 1)
        dist.send(weights, 1)


def rpc_client(host: str, port: int, size: int, tcp: bool = False) -> Round:
    """Push as an argument, pull as a result."""
    from torch.distributed import rpc

    _rpc(host, port, "client", 1, tcp)
    gradient = torch.ones(size // 4)

    def go() -> None:
        rpc.rpc_sync("server", mirror_of, args=(gradient,))

    return go


def rpc_server(host: str, port: int, size: int, tcp: bool = False) -> None:
    """Answer with as much."""
    _rpc(host, port, "server", 0, tcp)
    threading.Event().wait()


def tcp_client(host: str, port: int, size: int) -> Round:
    """The same by TCP, though both ends are on one machine."""
    return rpc_client(host, port, size, tcp=True)


def tcp_server(host: str, port: int, size: int) -> None:
    """Answer with as much."""
    rpc_server(host, port, size, tcp=True)


def mirror_of(gradient: torch.Tensor) -> torch.Tensor:
    """What the server does."""
    return gradient


def _rpc(host: str, port: int, name: str, rank: int, tcp: bool) -> None:
    from torch.distributed import rpc

    ways = TCP if tcp else {}
    where = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{host}:{port}", **ways)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=where)  # type: ignore[no-untyped-call]


def _patiently(host: str, port: int) -> socket.socket:
    until = time.monotonic() + 30
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=5)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            prepare(sock)
            return sock


_CLIENTS = session_client, sealed_client, gloo_client, rpc_client, tcp_client, socket_client
_SERVERS = session_server, sealed_server, gloo_server, rpc_server, tcp_server, socket_server
CLIENTS: dict[str, Callable[[str, int, int], Round]] = dict(zip(WAYS, _CLIENTS, strict=True))
SERVERS: dict[str, Callable[[str, int, int], None]] = dict(zip(WAYS, _SERVERS, strict=True))


def main() -> None:
    """Be one end."""
    way, role, host, port, size = sys.argv[1:]
    torch.set_num_threads(1)
    if role == "server":
        SERVERS[way](host, int(port), int(size))
        return
    go = CLIENTS[way](host, int(port), int(size))
    for line in sys.stdin:
        took = []
        for _ in range(int(line)):
            began = time.perf_counter()
            go()
            took.append(time.perf_counter() - began)
        print(msgspec.json.encode(took).decode(), flush=True)
    os._exit(0)  # nobody has to wait for the others' goodbyes


if __name__ == "__main__":
    main()
