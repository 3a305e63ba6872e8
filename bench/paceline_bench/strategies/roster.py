"""Who takes part in the benchmark of strategies: the paper's six, and what Paceline would use instead.

The paper's parameter servers are plain: nothing is done about stale gradients. Its weight of a push is not
known, so the asynchronous one runs with both: 1/N (`ps-async`), which moves the weights as far per epoch as
the synchronous one, and 1 (`ps-async-sum`). The rules of its modified server are not known either: ours waits
for each of two reasons (`bounded_ps`). Those of ours run with their defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from paceline.errors import ConfigError, unknown
from paceline_bench.strategies.cells import Cell

LOCAL_STEPS = 4
"""From one average of `local_sgd` to the next."""
PLAIN = {"correct": "none"}
USUAL = {"correct": "auto"}
"""As the command has it."""


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train."""

    name: str
    protocol: str | None = None
    """None: Paceline has no part in it."""
    settings: dict[str, Any] = {}
    dials: dict[str, Any] = {}
    """Of the run, beside the protocol."""
    rate_of: str = ""
    """Whose learning rate it has; empty: it tries rates itself."""
    slow_links: bool = False
    """Whether it is for slow links, and takes part nowhere else."""
    ours: bool = False
    """Whether it is one of those that Paceline would use instead of the paper's."""

    @property
    def flags(self) -> list[str]:
        """For `paceline train`."""
        chosen = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        dials = [word for key, value in self.dials.items() for word in _flag(key, value)]
        return ["--protocol", self.protocol or "", *chosen, *dials]

    def takes(self, cell: Cell) -> bool:
        """Whether it makes sense there. Memory is compared among those whose formulas differ. A store lies on
        as many hosts as there are."""
        if self.name == "single":
            return True
        if self.slow_links:
            return cell.link == "throttled" and cell.workers == self.dials.get("store_hosts", cell.workers)
        return self.name in ("ddp", "fsdp", "ps-sync") if cell.kind == "memory" else True


def _flag(key: str, value: Any) -> list[str]:
    name = f"--{key.replace('_', '-')}"
    return [name] if value is True else [name, str(value)]


STRATEGIES = {
    each.name: each
    for each in (
        Strategy(name="single"),
        Strategy(name="ddp"),
        Strategy(name="fsdp"),
        Strategy(name="ps-sync", protocol="bsp", dials=PLAIN),
        Strategy(name="ps-async", protocol="asp", dials=PLAIN | {"weighting": "mean"}),
        Strategy(name="ps-async-sum", protocol="asp", dials=PLAIN | {"weighting": "sum"}),
        Strategy(
            name="ps-async-mod", protocol="bounded_ps", settings={"staleness": 2, "resync": 10}, dials=PLAIN
        ),
        Strategy(name="allreduce", protocol="allreduce", ours=True),
        Strategy(
            name="bsp+store_hosts",
            protocol="bsp",
            dials={"store_hosts": 4},
            rate_of="ps-sync",
            slow_links=True,
            ours=True,
        ),
        Strategy(
            name="allreduce+int8",
            protocol="allreduce",
            dials={"compress": "int8"},
            rate_of="allreduce",
            slow_links=True,
            ours=True,
        ),
        Strategy(
            name="local_sgd",
            protocol="local_sgd",
            settings={"period": LOCAL_STEPS},
            rate_of="allreduce",
            slow_links=True,
            ours=True,
        ),
        Strategy(name="bsp+balance", protocol="bsp", dials={"balance": True}, ours=True),
        Strategy(name="backup_bsp", protocol="backup_bsp", dials=USUAL, ours=True),
        Strategy(name="dssp", protocol="dssp", dials=USUAL, ours=True),
        Strategy(name="asp", protocol="asp", dials=USUAL, ours=True),
    )
}
QUICK_NAMES = ("single", "ddp", "fsdp", "ps-sync", "ps-async", "ps-async-mod", "dssp")
NEEDED = ("single", "ddp", "ps-sync")
"""What the others are compared with."""


def chosen_strategies(names: Iterable[str], quick: bool = False) -> list[Strategy]:
    """By name, in the order of the roster, with those that others are compared with."""
    wanted = {name.strip() for name in names} or set(QUICK_NAMES if quick else STRATEGIES)
    for name in wanted:
        if name not in STRATEGIES:
            if "@" in name or ":" in name:
                raise ConfigError(f"bench strategies takes names without settings or rates, got {name!r}.")
            raise unknown("strategy", name, STRATEGIES)
    return [each for name, each in STRATEGIES.items() if name in wanted or name in NEEDED]
