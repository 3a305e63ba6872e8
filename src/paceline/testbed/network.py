"""Namespaces, links and their speeds: a star of hosts around one bridge.

    paceline.lab.a          paceline.lab            paceline.lab.b
    eth0 10.77.0.1 ──── to-a ── switch ── to-b ──── eth0 10.77.0.2

Both ends of a link are shaped on their way out, so a host's speed holds in each direction. A link is cut
by taking its port out of the bridge: both ends stay up, packets vanish, and TCP sees silence as with a
cable pulled somewhere on the way. Nothing is ever made in the namespace of the machine.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.decoding import decode_json
from paceline.errors import ConfigError, RunError
from paceline.testbed.spec import HostSpec, Spec
from paceline.testbed.system import call

NAMESPACES = Path("/run/netns")
BRIDGE = "switch"
_QUEUE_MS = 25
"""What waits longer than this for its turn on a link is dropped."""


def switch_of(bed: str) -> str:
    """The namespace of the bridge."""
    return f"paceline.{bed}"


def namespace_of(bed: str, host: str) -> str:
    """The namespace of a host. A dot separates, for no name holds one."""
    return f"paceline.{bed}.{host}"


def addresses(spec: Spec) -> dict[str, str]:
    """Of every host. All testbeds use the same ones, since none sees another."""
    return {host: f"10.77.0.{index}" for index, host in enumerate(spec.hosts, 1)}


def namespaces(bed: str) -> list[str]:
    """Those that exist of a testbed, hosts first."""
    own, begin = switch_of(bed), namespace_of(bed, "")
    names = [path.name for path in NAMESPACES.iterdir()] if NAMESPACES.is_dir() else []
    return sorted((n for n in names if n == own or n.startswith(begin)), key=lambda n: (n == own, n))


def build(spec: Spec) -> None:
    """Make all namespaces and links."""
    switch = switch_of(spec.name)
    call("ip", "netns", "add", switch)
    bridge = [f"link add name {BRIDGE} type bridge", f"link set dev {BRIDGE} up"]
    call("ip", "-n", switch, "-batch", "-", lines=bridge)
    for host, address in addresses(spec).items():
        _join(spec.name, host, address)
        _shape(spec.name, host, spec.hosts[host])


def _join(bed: str, host: str, address: str) -> None:
    namespace, switch, port = namespace_of(bed, host), switch_of(bed), port_of(host)
    call("ip", "netns", "add", namespace)
    call(
        *("ip", "-n", switch, "-batch", "-"),
        lines=[
            f"link add name {port} type veth peer name eth0 netns {namespace}",
            f"link set dev {port} master {BRIDGE}",
            f"link set dev {port} up",
        ],
    )
    call(
        *("ip", "-n", namespace, "-batch", "-"),
        lines=["link set dev lo up", f"addr add {address}/24 dev eth0", "link set dev eth0 up"],
    )


def port_of(host: str) -> str:
    """The bridge's end of a host's link."""
    return f"to-{host}"


def _shape(bed: str, host: str, spec: HostSpec) -> None:
    ends = (namespace_of(bed, host), "eth0"), (switch_of(bed), port_of(host))
    for namespace, device in ends:
        parent = "root"
        if spec.latency_ms is not None:
            _delay(namespace, device, host, spec.latency_ms)
            parent = "parent 1:1"
        if spec.link_mbit is not None:
            _limit(namespace, device, parent, spec.link_mbit)


def _limit(namespace: str, device: str, parent: str, mbit: float) -> None:
    # Two milliseconds' worth at once, and never less than a few packets.
    burst = max(int(mbit * 1e6 / 8 * 0.002), 6_000)
    tbf = f"tbf rate {int(mbit * 1e6)}bit burst {burst} latency {_QUEUE_MS}ms"
    call("tc", "-n", namespace, "qdisc", "add", "dev", device, *parent.split(), *tbf.split())


def _delay(namespace: str, device: str, host: str, latency_ms: float) -> None:
    netem = f"netem delay {latency_ms}ms limit 100000"
    try:
        call("tc", "-n", namespace, *f"qdisc add dev {device} root handle 1: {netem}".split())
    except RunError as error:
        raise ConfigError(
            f"host {host!r} asks for latency_ms = {latency_ms:g}, and this kernel cannot delay packets: "
            f"it has no netem ({error}). Leave latency_ms out, or take a kernel with CONFIG_NET_SCH_NETEM."
        ) from None


def cut(bed: str, host: str) -> None:
    """Let all packets from and to a host vanish, without telling either end."""
    call("ip", "-n", switch_of(bed), "link", "set", "dev", port_of(host), "nomaster")


def heal(bed: str, host: str) -> None:
    """The opposite."""
    call("ip", "-n", switch_of(bed), "link", "set", "dev", port_of(host), "master", BRIDGE)


def joined(bed: str) -> set[str]:
    """Ports that are not cut."""
    links = decode_json(call("ip", "-n", switch_of(bed), "-json", "link", "show") or "[]")
    return {link["ifname"] for link in links if link.get("master") == BRIDGE}


def remove(bed: str) -> None:
    """Delete whatever exists of a testbed's links and namespaces. Its processes have to be gone."""
    _delete_links(bed)
    for namespace in namespaces(bed):
        call("ip", "netns", "delete", namespace)


def _delete_links(bed: str) -> None:
    # A closed socket that still has bytes to send keeps its namespace alive for minutes after its name
    # is gone: the links must not linger with it.
    if not (NAMESPACES / switch_of(bed)).exists():
        return
    with contextlib.suppress(RunError):
        links = decode_json(call("ip", "-n", switch_of(bed), "-json", "link", "show") or "[]")
        names = [link["ifname"] for link in links if link["ifname"] != "lo"]
        call("ip", "-n", switch_of(bed), "-batch", "-", lines=[f"link delete dev {name}" for name in names])
