"""The third family of protocols, those that split a model: by name, with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.errors import ConfigError, unknown
from paceline.parallel.embedding.sparse_2d import Sparse2D
from paceline.parallel.layers.row_split import RowSplit
from paceline.parallel.named.dynamic_sequence import DynamicSequence
from paceline.parallel.pipeline.engine import Schedule
from paceline.parallel.pipeline.named.adl import ADL
from paceline.parallel.pipeline.named.bp import BP
from paceline.parallel.pipeline.named.ddg import DDG
from paceline.parallel.pipeline.named.fdg import FDG
from paceline.parallel.pipeline.named.fr import FeaturesReplay
from paceline.parallel.pipeline.named.layerwise import Layerwise
from paceline.protocols import PEERS, Peer
from paceline.protocols.settings import About, about_class, build, make_peer

ALONG = ("allreduce", "local_sgd", "dpsgd")
"""The peer protocols that keep the copies along the axis `data` in step."""


class Splitting(Protocol):
    """A published way to split a model: its fields are its settings."""

    @property
    def data(self) -> str:
        """What keeps copies in step."""


class Pipelined(Splitting, Protocol):
    """A published pipeline."""

    def schedule(self, stages: int) -> Schedule:
        """What so many stages do."""


PIPELINES: dict[str, Any] = {
    "adl": ADL,
    "bp": BP,
    "ddg": DDG,
    "fdg": FDG,
    "fr": FeaturesReplay,
    "layerwise": Layerwise,
}


IN_LAYERS: dict[str, tuple[str, Any]] = {
    "dynamic_sequence": ("sequence", DynamicSequence),
    "row_split": ("model", RowSplit),
    "sparse_2d": ("shard", Sparse2D),
}
"""Those that split a model inside an ordinary loop: the axis along which they do, and the class."""
SPLITS = {name: ("stage", kind) for name, kind in PIPELINES.items()} | IN_LAYERS
"""All of the family."""


def axis_of(name: str) -> str:
    """The axis of a mesh along which a protocol splits the model."""
    return SPLITS[name][0]


def make_split(name: str, settings: Mapping[str, Any] | None = None) -> Splitting:
    """Build one of the family. Values may be strings, as `--set` gives them."""
    if name not in SPLITS:
        raise unknown("protocol", name, SPLITS)
    made: Splitting = build(name, SPLITS[name][1], settings)
    parse_along(made.data)
    return made


def along_of(name: str | None, settings: Mapping[str, Any], batches: int) -> Peer:
    """What keeps copies in step in an ordinary loop of so many batches per epoch."""
    if name in SPLITS:
        made: Any = make_split(name, settings)
        return parse_along((made.for_pass(batches) if hasattr(made, "for_pass") else made).data)[1]
    return check_along(name or "allreduce", settings)


def make_pipeline(name: str, settings: Mapping[str, Any] | None = None) -> Pipelined:
    """Build one. Values may be strings, as `--set` gives them."""
    if name not in PIPELINES:
        raise unknown("protocol", name, PIPELINES)
    made: Any = make_split(name, settings)
    checked: Pipelined = made
    return checked


def about_split(name: str) -> About:
    """Name, paper, promise and settings, read from the protocol's own file."""
    return about_class(name, "split", SPLITS[name][1])


def parse_along(text: str) -> tuple[str, Peer]:
    """`local_sgd:period=4` is a peer protocol with its settings."""
    name, *given = (part.strip() for part in text.split(":"))
    pairs = [part.partition("=") for part in given]
    return name, check_along(name, {key: value for key, _, value in pairs})


def check_along(name: str, settings: Mapping[str, Any]) -> Peer:
    """A peer protocol that can work along an axis."""
    if name not in ALONG:
        what = "unknown" if name not in PEERS else "not for an axis of a mesh"
        raise ConfigError(f"data={name}: {what}. Copies are kept in step by one of: {', '.join(ALONG)}.")
    protocol = make_peer(name, settings)
    if protocol.probes or getattr(protocol, "overlap", False):
        raise ConfigError(f"data={name}: measure_every and overlap do not work along an axis of a mesh.")
    return protocol
