"""Parts of a graph that repeat, as the layers of a transformer do: each kind is searched once.

A graph is cut where a single computed tensor lives on. Two pieces are alike if they have the same operations
on the same shapes, in the same order, with the same leaves. What leaves a piece then depends on what
enters it and on nothing else, so the ways through one of them are those through all of its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from paceline.plan.hap.graph import Graph, Node
from paceline.plan.profile.files import digest

Held = tuple[str, ...]
"""How a tensor is held: as it was computed, and as it was moved to, if it was."""
State = tuple[tuple[str, Held], ...]


class WorkPiece(NamedTuple):
    """Operations `start` to `stop` of the work, and the names they have to do with, in order of
    appearance."""

    start: int
    stop: int
    names: tuple[str, ...]
    kind: str
    """The same for pieces that are alike."""

    def inside(self, state: State) -> tuple[State, State]:
        """What the piece has to do with, under numbers instead of names; and what passes it by."""
        numbers = {name: f"{place:04}" for place, name in enumerate(self.names)}
        mine = tuple(sorted((numbers[name], held) for name, held in state if name in numbers))
        return mine, tuple(item for item in state if item[0] not in numbers)

    def outside(self, state: State) -> dict[str, Held]:
        """Back from numbers to names."""
        return {self.names[int(number)]: held for number, held in state}


def repeated(graph: Graph, sizes: dict[tuple[str, int], int]) -> dict[int, WorkPiece]:
    """The pieces of which there are several alike, by where they start."""
    work = [node for node in graph.nodes if not node.leaf]
    nodes, last = graph.by_name(), _last_uses(work, graph.output)
    cuts = [0, *_cuts(work, last), len(work)]
    pieces, met = [], set[str]()
    for start, stop in pairwise(cuts):
        pieces.append(_piece(work, start, stop, nodes, last, sizes, met))
        met |= {name for node in work[start:stop] for name in node.inputs}
    often = Counter(piece.kind for piece in pieces)
    return {piece.start: piece for piece in pieces if often[piece.kind] > 1}


def _last_uses(work: list[Node], output: str) -> dict[str, int]:
    last = {name: place for place, node in enumerate(work) for name in node.inputs}
    return last | {output: len(work)}


def _cuts(work: list[Node], last: dict[str, int]) -> Iterable[int]:
    """Places before which just one computed tensor is alive."""
    alive: set[str] = set()
    for place, node in enumerate(work):
        alive = {name for name in alive if last.get(name, -1) >= place}
        if place and len(alive) == 1:
            yield place
        alive.add(node.name)


def _piece(
    work: list[Node],
    start: int,
    stop: int,
    nodes: dict[str, Node],
    last: dict[str, int],
    sizes: dict[tuple[str, int], int],
    met: set[str],
) -> WorkPiece:
    """`met`: what the operations before it have used."""
    inside = work[start:stop]
    names = tuple(dict.fromkeys(name for node in inside for name in (*node.inputs, node.name)))
    numbers = {name: number for number, name in enumerate(names)}

    def about(name: str) -> list[object]:
        node = nodes[name]
        grains = [sizes[name, dim] for dim in range(len(node.shape))]
        leaf = (node.op, str(node.attrs)) if node.leaf else ("", "")
        return [*leaf, list(node.shape), node.size_bytes, grains, last.get(name, -1) >= stop, name in met]

    told = [
        [node.op, str(node.attrs), node.flops, node.segment, [numbers[n] for n in (*node.inputs, node.name)]]
        for node in inside
    ]
    return WorkPiece(start, stop, names, digest([told, [about(name) for name in names]]))
