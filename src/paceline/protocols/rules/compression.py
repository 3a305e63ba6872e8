"""Compression: vectors that are averaged travel in fewer bytes, and lose a little precision.

Papers: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019;
Lin et al., "Deep Gradient Compression", ICLR 2018 (topk); Vogels et al., "PowerSGD", NeurIPS 2019 (powersgd).

One rule for every protocol. *Changes* (gradients, displacements) are compressed directly. A *model* that all
workers average is compressed as its difference from the last model that was the same for all. A model that
only some workers average, or that neighbours mix, has no such common model: it is only rounded (fp16, bf16),
and every worker keeps its own rounding error, so the mean of all does not change. Float buffers are few, and
they are statistics, not changes: they travel uncompressed.

With int8, topk and powersgd, which lose a lot, each worker remembers what was left out and adds it to its
next vector of that kind: late, but not lost. This file only decides; it handles no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import ceil

from paceline.errors import ConfigError, unknown
from paceline.protocols.core.operations import Average, Mix
from paceline.protocols.core.peer import Me, Peer

INT8_CHUNK = 1024
"""Numbers that share a scale."""
SCALE_BYTES = INDEX_BYTES = FLOAT_BYTES = 4
DEFAULTS = {"none": None, "fp16": None, "bf16": None, "int8": None, "topk": 0.01, "powersgd": 4.0}
"""Every kind of compression, with its default amount: a share of the numbers, or a rank."""
ALLOWED = "none, fp16, bf16, int8, topk:SHARE (0 < share <= 1) or powersgd:RANK (a whole number >= 1)"


class Treatment(Enum):
    """How a vector is sent."""

    WHOLE = auto()
    """Uncompressed."""
    CHANGE = auto()
    """Compressed; what is left out is added to the next one."""
    MODEL = auto()
    """The same for its difference from the last common model."""
    ROUNDED = auto()
    """Rounded; its worker keeps the rounding error."""


@dataclass(frozen=True, slots=True)
class Compression:
    """A way to compress."""

    name: str = "none"
    amount: float | None = None

    def __str__(self) -> str:
        return self.name if self.amount is None else f"{self.name}:{self.amount:g}"

    @property
    def is_rounding(self) -> bool:
        """Whether every number is kept, though not to the last digit."""
        return self.name in ("fp16", "bf16")

    @property
    def adds_up(self) -> bool:
        """Whether the sum of compressed vectors is as small as one of them. If not, each must reach every
        worker."""
        return self.name not in ("int8", "topk")

    def kept(self, count: int) -> int:
        """How many of `count` numbers `topk` keeps."""
        assert self.amount is not None
        return min(count, ceil(self.amount * count))

    def wire_bytes(self, count: int, width: int = FLOAT_BYTES) -> int:
        """Bytes sent for `count` numbers of the given size."""
        match self.name:
            case "fp16" | "bf16":
                return count * min(2, width)
            case "int8":
                return count + SCALE_BYTES * -(-count // INT8_CHUNK)
            case "topk":
                return self.kept(count) * (width + INDEX_BYTES)
            case "powersgd":
                raise ConfigError(
                    f"what --compress {self} sends depends on the shapes of the model's matrices, and a "
                    "simulation of times knows only its size. Train for real, or use fp16, int8 or topk."
                )
        return count * width

    def treatment(self, operation: Average | Mix, me: Me) -> Treatment:
        """How the vector of an operation is sent. Refuses combinations that would be wrong."""
        if self.name == "none" or operation.vector is me.buffers:
            return Treatment.WHOLE
        is_model = operation.vector is me.parameters
        if isinstance(operation, Mix) or (is_model and operation.group is not None):
            if not self.is_rounding:
                mixing = isinstance(operation, Mix)
                raise self._no_common_model("mixes models" if mixing else "averages models in groups")
            return Treatment.ROUNDED
        return Treatment.MODEL if is_model else Treatment.CHANGE

    def _no_common_model(self, does: str) -> ConfigError:
        return ConfigError(
            f"--compress {self} does not suit a protocol that {does}: these workers have no last "
            "common model whose difference could be sent, and a model is not to be cut down itself. "
            "Use fp16 or bf16, or a protocol that averages among all, such as allreduce or local_sgd."
        )


def parse_compression(text: str) -> Compression:
    """`fp16`, `topk:0.01`, `powersgd:4`."""
    name, colon, given = text.strip().partition(":")
    if name not in DEFAULTS:
        raise unknown("--compress", name, DEFAULTS)
    amount = DEFAULTS[name]
    if not colon or amount is None:
        if colon:
            raise ConfigError(f"--compress {name} takes no amount, got {given!r}. Allowed: {ALLOWED}.")
        return Compression(name, amount)
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    fits = 0 < value <= 1 if name == "topk" else value >= 1 and value.is_integer()
    if not fits:
        raise ConfigError(f"--compress {name} got the amount {given!r}. Allowed: {ALLOWED}.")
    return Compression(name, value)


def check_family(text: str, name: str, protocol: object) -> None:
    """Refuse protocols whose workers do not average among themselves."""
    if text == "none":
        return
    if isinstance(protocol, Peer) and protocol.free:
        raise ConfigError(
            f"--compress {text} is for averages, and {name!r} as it is set exchanges one-sidedly, with a "
            "copy that no other worker shares. Use another peer protocol: local_sgd, say."
        )
    if isinstance(protocol, Peer) and protocol.in_parts and parse_compression(text).name == "powersgd":
        raise ConfigError(
            f"--compress {text} factorises all matrices of a model together, and {name!r} averages some "
            "tensors now and others later. Use fp16, bf16, int8 or topk."
        )
    if isinstance(protocol, Peer) and protocol.in_groups and parse_compression(text).name == "powersgd":
        raise ConfigError(
            f"--compress {text} projects on a basis that all workers take from the last mean, and {name!r} "
            "as it is set averages in groups, each of which has a mean of its own. Use fp16, bf16, int8 or "
            "topk, or leave group_size out."
        )
    if not isinstance(protocol, Peer):
        raise ConfigError(
            f"--compress {text} is for peer protocols, and {name!r} is paced: its store takes gradients as "
            "they are, from other hosts too. Use a peer protocol: allreduce, say."
        )
