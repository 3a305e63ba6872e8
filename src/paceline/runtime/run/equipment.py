"""Whether workers fit together, how much memory and disk they need, and their memory itself."""

from __future__ import annotations

from msgspec import structs
from torch import Tensor

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.fabric.segment import Segment
from paceline.runtime.run.member import Member
from paceline.store.layout import Layout
from paceline.store.optimizers import OptimizerSpec
from paceline.store.parameters import Gradients, ParameterStore
from paceline.store.spread.portions import Portion, used_of
from paceline.store.work.budget import Fingerprint, Source, different_data


def room_needed(layout: Layout, optimizer: OptimizerSpec, replicas: int = 0, states: int = 1) -> int:
    """Bytes on the disk, about: of the weights, and of a checkpoint with the model, so many states of
    optimizers and that of every peer with a replica of its own."""
    state = layout.weights_bytes * (1 if optimizer.name == "SGD" else 2)
    buffers = layout.segment_bytes - layout.gradient_end
    replica = layout.weights_bytes + buffers + state
    return 2 * (layout.weights_bytes + buffers) + states * state + replicas * replica


def check_same(lead: Member, members: list[Member]) -> None:
    """Refuse workers that do not train the same."""
    assert lead.registered is not None
    for member in members:
        assert member.registered is not None
        mine, theirs = lead.registered, member.registered
        if mine.layout.digest() != theirs.layout.digest():
            where = mine.layout.difference(theirs.layout)
            raise ConfigError(
                f"ranks 0 and {member.rank} have different models: {where}. Build the same on all."
            )
        if mine.after_step != theirs.after_step:
            who, others = (0, member.rank) if mine.after_step else (member.rank, 0)
            raise ConfigError(
                f"rank {who} has registered a function with pace.after_step() that rank {others} has not, or "
                "for another optimizer. Register the same on all workers, before pace.prepare()."
            )
        if mine.source and theirs.source and mine.source.order != theirs.source.order:
            raise ConfigError(
                f"the loader's generator has different states on ranks 0 and {member.rank}, so their epochs "
                "would have different orders. Use the same seed on all, or give the loader no generator."
            )
        if mine.source and theirs.source and not mine.source.data.fits(theirs.source.data):
            raise ConfigError(different_data(member.rank))
        if (mine.optimizer.name, _plain(mine.source)) != (theirs.optimizer.name, _plain(theirs.source)):
            raise ConfigError(
                f"ranks 0 and {member.rank} have different optimizers or loaders. Build the same."
            )


def _plain(source: Source | None) -> Source | None:
    """Without what tells its data apart, which was compared."""
    return source and structs.replace(source, data=Fingerprint())


def one_link(name: str, config: RunConfig, members: list[Member]) -> list[str]:
    """A hint where every step of a run goes over one host's link, and need not."""
    hosts = 1 + len({member.channel.host_number for member in members} - {None})
    if hosts < 3 or config.store_hosts > 1 or config.apply != "optimizer":
        return []
    instead = "--protocol bsp " if name == "allreduce" else ""
    same = " with the same steps" if instead else ""
    return [
        f"the link of one of the {hosts} hosts carries the traffic of all workers; {instead}--store-hosts "
        f"{hosts} shares it among the links of all hosts{same}"
    ]


def memory_needed(layout: Layout, members: list[Member], shared: bool, portion: Portion | None) -> int:
    """Bytes of the weights, which begin and end here as a whole, and of all workers' memories. Of a worker on
    another host only that is here which belongs to the portion."""
    sizes = [used_of(layout, portion if member.far else None).sizes for member in members]
    return layout.weights_bytes + sum(segment + (0 if shared else weights) for weights, segment in sizes)


def equip(
    member: Member,
    store: ParameterStore,
    initial: Segment | None,
    shared: bool,
    buffers: dict[str, Tensor],
    portion: Portion | None = None,
) -> None:
    """Give a worker its segment, with the given buffers (else rank 0's initial ones), and its weights: of one
    on another host only what is in the portion, if there is one."""
    assert member.registered is not None
    used = used_of(member.registered.layout, portion if member.far else None)
    layout, (weights_bytes, segment_bytes) = store.layout, used.sizes
    segment = member.segment = Segment.create(
        layout.segment_bytes, f"gradients of rank {member.rank}", segment_bytes
    )
    values = dict(buffers)
    if initial is not None:
        first = layout.buffer_views(initial.bytes[layout.weights_bytes :])
        values = {slot.name: view for slot, view in zip(layout.buffers, first, strict=True)} | values
    for slot, view in zip(layout.buffers, layout.buffer_views(segment.bytes), strict=True):
        view.copy_(values[slot.name])
    member.gradients = Gradients(layout, segment.bytes)
    if not shared:
        member.weights = Segment.create(layout.weights_bytes, f"weights of rank {member.rank}", weights_bytes)
        for start, stop in used.weights:
            member.weights.bytes[start:stop].copy_(store.weights[start:stop])
