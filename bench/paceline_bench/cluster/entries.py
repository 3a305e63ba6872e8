"""Who takes part in the benchmark of a small cluster, and with which settings.

Defaults where they fit runs of some hundred iterations. Where a default counts in longer runs than
these (a switch after a share of 10,000 epochs, an exchange every 500 iterations), it is shortened.

The learning rate is the one that suits DDP best. Only those that step along stale gradients without any
correction get half of it: with all of it `asp` needs four times as many samples to the same accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from paceline.corrections import AUTO, NONE, parse_correction
from paceline.errors import ConfigError
from paceline.protocols import PACED, PEERS
from paceline.protocols.settings import make_any, resolved
from paceline_bench.cluster.other import NAME as DDP
from paceline_bench.cluster.scene import Scene

BALANCED = "balance"
HOLDERS = "store_hosts="
SETTINGS: dict[str, dict[str, str]] = {
    "sync_switch": {"phases": "bsp@4096,asp"},
    "hybrid_sgd": {"h": "100"},
    "bounded_ps": {"resync": "20"},
    "local_sgd": {"period": "4"},
    "fedavg": {"period": "8"},
    "diloco": {"period": "8", "momentum": "0.5"},
    "easgd": {"period": "4"},
    "selsync": {"window": "10"},
    "osp": {"ramp_length": "20", "rank_every": "10"},
}
"""What is sensible here and not the default."""
STALE = ("asp", "ssp", "dssp", "psp", "elastic_bsp", "bounded_ps", "hybrid_sgd", "sync_switch", "ad_psgd")
"""Those that step along stale gradients."""
STALE_SHARE = 0.5
"""Of the learning rate of all others, where nothing is corrected."""
WANTED = {
    "asp": 2.2,
    "dssp:preset=figure2": 2.0,
    "dssp": 1.6,
    "elastic_bsp": 1.7,
    "ssp": 1.6,
    "psp": 1.6,
    "hybrid_sgd": 1.5,
    "sync_switch": 1.5,
}
"""How many times sooner than DDP an entry is to be on the unequal hosts."""
WANTED_EQUAL = 0.97
"""And on equal ones."""


class Entry(msgspec.Struct, frozen=True):
    """One line of the table."""

    protocol: str
    settings: dict[str, str] = {}
    balance: bool = False
    lr: float | None = None
    """None: what is sensible for it."""
    correct: str = AUTO
    """What is done about stale gradients."""
    store_hosts: int = 1
    """How many hosts hold a portion of the store."""

    @property
    def name(self) -> str:
        """What it is called, without its settings."""
        corrected = "" if self.correct == AUTO else f"+{self.correct}"
        spread = "" if self.store_hosts == 1 else f"+{HOLDERS}{self.store_hosts}"
        return self.protocol + f"+{BALANCED}" * self.balance + spread + corrected

    @property
    def title(self) -> str:
        """What it is called, with the settings that were given."""
        usual = SETTINGS.get(self.protocol, {})
        given = (f":{key}={value}" for key, value in self.settings.items() if usual.get(key) != value)
        return self.name + "".join(given)

    def rate(self, usual: float) -> float:
        """Its learning rate, where the usual one is this."""
        if self.lr is not None:
            return self.lr
        plain = self.correct == NONE or self.protocol in PEERS
        return usual * STALE_SHARE if plain and self.protocol in STALE else usual

    def rates(self, given: tuple[float, ...], scene: Scene) -> tuple[float, ...]:
        """Of those that are given; one rate where it has its own, as DDP has, whose best is known."""
        return given if given and self.lr is None and self.protocol != DDP else (self.rate(scene.lr),)

    @property
    def shown(self) -> str:
        """All its settings, for people."""
        if self.protocol == DDP:
            return ""
        every = resolved(make_any(self.protocol, self.settings))
        return ", ".join(f"{key}={value}" for key, value in every.items() if value != "")

    @property
    def flags(self) -> list[str]:
        """For `paceline train`."""
        chosen = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        corrected = [] if self.correct == AUTO else ["--correct", self.correct]
        spread = [] if self.store_hosts == 1 else ["--store-hosts", str(self.store_hosts)]
        return ["--protocol", self.protocol, *chosen, *["--balance"] * self.balance, *spread, *corrected]


def every_entry() -> list[Entry]:
    """DDP first, because all others are compared with it; then all protocols, and balanced batches."""
    names = [DDP, "bsp", f"bsp+{BALANCED}", *(name for name in PACED if name != "bsp"), *PEERS]
    return entries(names)


def entries(names: Iterable[str]) -> list[Entry]:
    """Entries by name, DDP always among them: without it there is nothing to compare with."""
    found = [parse_entry(name) for name in names]
    return found if any(entry.protocol == DDP for entry in found) else [Entry(DDP), *found]


def parse_entry(text: str) -> Entry:
    """`asp`, `bsp+balance`, with a correction, settings or a learning rate of one's own: `asp+dana+gap`,
    `ssp:staleness=5`, `asp@0.06`; `asp+store_hosts=4` with a portion of the store on each of four hosts."""
    first, *given = text.strip().split(":")
    named, at, rate = first.partition("@")
    protocol, *parts = named.split("+")
    balance, holders = BALANCED in parts, [part for part in parts if part.startswith(HOLDERS)]
    correct = "+".join(part for part in parts if part not in (BALANCED, *holders)) or AUTO
    lr = _rate(rate) if at else None
    if protocol == DDP:
        if parts or given:
            raise ConfigError(f"{DDP} has neither settings nor balance nor corrections, got {text!r}.")
        return Entry(DDP, lr=lr)
    parse_correction(correct)
    settings = SETTINGS.get(protocol, {}) | dict(_setting(item) for item in given)
    make_any(protocol, settings)
    return Entry(protocol, settings, balance, lr, correct, _store_hosts(protocol, holders, text))


def _store_hosts(protocol: str, given: list[str], text: str) -> int:
    if not given:
        return 1
    count = given[-1].removeprefix(HOLDERS)
    if protocol not in PACED or not count.isdecimal() or int(count) < 1:
        raise ConfigError(
            f"+{HOLDERS}N says how many hosts hold a portion of a store, so it goes with protocols that have "
            f"one ({', '.join(PACED)}), got {text!r}. For instance asp+{HOLDERS}4."
        )
    return int(count)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise ConfigError(f"a learning rate is a number > 0, got {text!r}. For instance asp@0.03.")
    return rate


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"a setting is NAME=VALUE, got {text!r}. For instance ssp:staleness=5.")
    return name.strip(), value.strip()
