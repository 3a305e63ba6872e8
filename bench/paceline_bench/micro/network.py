"""Push and pull between two hosts, against gloo, torch's RPC and itself under TLS on the same link.

On loopback, and (with the privileges it takes) between two hosts of a testbed whose links have a
known speed. There the plain socket tells what the link gives, and the share of it is the figure;
torch's RPC is held to TCP there, because it sees that both hosts are one machine and takes another way.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

from paceline.decoding import decode_json
from paceline.errors import RunError
from paceline.testbed import HostSpec, Testbed, why_not
from paceline_bench.harness.ends import OVER_TCP, WAYS
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import ratio_of_medians, spread

LINK_MBIT = 1000
ANSWER_S = 100
TARGETS = {"gloo": 1.0, "torch rpc": 2.0, OVER_TCP: 2.0}
PIPES: dict[str, Any] = {
    "stdin": subprocess.PIPE,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.DEVNULL,
    "text": True,
}
Start = Callable[[str, Sequence[str]], "subprocess.Popen[str]"]


def network(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Loopback first, then a real link."""
    rows = []
    for size in plan.sizes_mb:
        rows += _loopback(plan, size, say)
    reason = why_not()
    if reason is not None:
        say(f"no link of a known speed: {reason}")
        return rows
    for size in plan.sizes_mb:
        rows += _link(plan, size, say)
    return rows


def _loopback(plan: BenchPlan, size: float, say: Say) -> list[BenchRow]:
    def start(role: str, command: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, **PIPES)

    seen = _measure(plan, size, start, "127.0.0.1", 10)
    return [_row(plan, size, "loopback", way, seen, TARGETS.get(way), say) for way in list(seen)[1:]]


def _link(plan: BenchPlan, size: float, say: Say) -> list[BenchRow]:
    with Testbed.up({name: HostSpec(link_mbit=LINK_MBIT) for name in ("a", "b")}) as bed:

        def start(role: str, command: Sequence[str]) -> subprocess.Popen[str]:
            host = bed["a" if role == "server" else "b"]
            return host.popen(list(command), **PIPES)

        seen = _measure(plan, size, start, bed["a"].address, 4)
    where = f"{LINK_MBIT} Mbit/s"
    ways = [way for way in list(seen)[1:] if way != "torch rpc"]
    rows = [_row(plan, size, where, way, seen, 1.0 if way == "gloo" else None, say) for way in ways]
    if size < 10:  # what fits into the link's burst travels faster than the link
        return rows
    return [*rows, _share(plan, size, seen["paceline"], say)]


def _measure(
    plan: BenchPlan, size: float, start: Start, host: str, most: int
) -> dict[str, list[list[float]]]:
    """All ways in turns, block by block; that many blocks if they take long."""
    blocks, rounds = plan.rounds(size) if size < 10 or plan.quick else (most, 3)
    ways = [way for way in WAYS if not (plan.quick and way == OVER_TCP)]
    with ExitStack() as stack:
        clients = {way: stack.enter_context(_pair(way, start, host, size)) for way in ways}
        for client in clients.values():
            _block(client, plan.warm_up)
        seen: dict[str, list[list[float]]] = {way: [] for way in ways}
        for _ in range(blocks):
            for way, client in clients.items():
                seen[way].append(_block(client, rounds))
    return seen


@contextmanager
def _pair(way: str, start: Start, host: str, size: float) -> Iterator[subprocess.Popen[str]]:
    """Both ends; the client's."""
    where = [host, str(_free_port()), str(round(size * 1e6) // 4 * 4)]
    command = [sys.executable, "-m", "paceline_bench.harness.ends", way]
    ends = [start(role, [*command, role, *where]) for role in ("server", "client")]
    try:
        yield ends[1]
    finally:
        for end in ends:
            end.kill()
            end.wait()
            for stream in (end.stdin, end.stdout):
                if stream is not None:
                    stream.close()


def _block(client: subprocess.Popen[str], rounds: int) -> list[float]:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(f"{rounds}\n")
    client.stdin.flush()
    answers = select.select([client.stdout], [], [], ANSWER_S)[0]
    line = client.stdout.readline() if answers else ""
    if not line:
        how = "broke" if answers else f"said nothing for {ANSWER_S} s"
        raise RunError(f"an end of the link {how}: {client.args!r}")
    took: list[float] = decode_json(line)
    return took


def _row(
    plan: BenchPlan,
    size: float,
    where: str,
    way: str,
    seen: dict[str, list[list[float]]],
    target: float | None,
    say: Say,
) -> BenchRow:
    value, interval = ratio_of_medians(seen[way], seen["paceline"], plan.seed)
    sealed = way == "paceline tls"
    found = f"with TLS {value:.2f}x the time" if sealed else f"against {way}: {value:.2f}x"
    say(f"network {where}, {size:g} MB, {found}")
    return BenchRow(
        case={"MB": size, "link": where, "peer": way},
        measured={
            "paceline": spread(list(chain(*seen["paceline"]))),
            "peer": spread(list(chain(*seen[way]))),
        },
        figure="speedup",
        value=value,
        interval=interval,
        target=None if plan.quick or size < 10 else target,
        limit_s=None,
        remark="what TLS costs: the time with it over the time without" if sealed else "",
    )


def _share(plan: BenchPlan, size: float, seen: list[list[float]], say: Say) -> BenchRow:
    """Of the link's nominal rate: both ways one after the other, headers not counted."""
    ideal = 2 * size * 8 / LINK_MBIT
    value, interval = ratio_of_medians([[ideal]] * len(seen), seen, plan.seed)
    say(f"network {LINK_MBIT} Mbit/s, {size:g} MB: {100 * value:.0f} % of the link")
    return BenchRow(
        case={"MB": size, "link": f"{LINK_MBIT} Mbit/s", "peer": "nominal rate"},
        measured={"paceline": spread(list(chain(*seen)))},
        figure="speedup",
        value=value,
        interval=interval,
        target=None if plan.quick or size < 10 else 0.9,
        limit_s=ideal,
        remark="",
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
