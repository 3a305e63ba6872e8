"""HAP's program synthesis: the cheapest distributed program, by best-first search over what has been
established.

A state says which properties the living tensors have. Instructions are considered in the order of the
graph, which loses nothing, since a program's time is the sum of its instructions'. Every tensor is
computed once and moved at most once; results of cheap operations are not moved. `A*`: what remains takes
at least its flops at the speed of all devices together.

The end has to be divided: the loss in summands, scores in summands or slices. Were the result whole
everywhere, so would be its gradient, and adding up gradients would add up what all have already.

Two things keep it small without giving up exactness. A state with a moved copy is dropped if the same one
without the copy is cheaper by at least the move, which can still be made later. And pieces of the graph
that repeat are searched once for everything that can enter them (`pieces`)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.plan.hap.costs import FREE, HapCosts, Price
from paceline.plan.hap.graph import Graph, Node
from paceline.plan.hap.pieces import Held, State, WorkPiece, repeated
from paceline.plan.hap.program import Instruction, Kind, Program
from paceline.plan.hap.rules import CHEAP, IDENTITY, REDUCE, ShardingRule, gather, granules, rules_of

Place = tuple[int, State]
"""How many operations are done, and how the tensors that live on are held."""
NAMES: dict[str, Kind] = {
    "GI": "all_gather",
    "IG": "slice",
    "RG": "reduce_scatter",
    "RI": "all_reduce",
    "GG": "all_to_all",
}


class Limits(NamedTuple):
    """What programs may do; the simple alternatives are programs that may do less."""

    move: bool = True
    shard_parameters: bool = True
    guided: bool = True
    """Use the estimate of what remains (A*); without it, plain uniform-cost search."""
    byte_price: float = 0.0
    """Seconds that a byte counts which devices hold: raised until a program fits."""
    copies: float = 4.0
    """Bytes held for each byte of a parameter."""


class _Move(NamedTuple):
    """A collective on one tensor."""

    name: str
    before: str
    after: str
    price: Price
    segment: int
    seconds: float


class _SearchStep(NamedTuple):
    """How a state was reached; instructions are written down for the way that is taken in the end only."""

    before: Place | None
    rule: ShardingRule | None = None
    moves: tuple[_Move, ...] = ()
    placed: tuple[tuple[str, str], ...] = ()
    paid: float = 0.0
    done: Instruction | None = None
    through: tuple[WorkPiece, _Ways, State] | None = None
    """A whole piece at once: which, all ways through one of its kind, and how it is left."""

    def renamed(self, names: dict[str, str], by: int) -> _SearchStep:
        """The same step in another piece of the kind, so many operations later."""
        assert self.before is not None
        moves = tuple(move._replace(name=names[move.name]) for move in self.moves)
        placed = tuple((names[name], how) for name, how in self.placed)
        return self._replace(before=(self.before[0] + by, ()), moves=moves, placed=placed)


class _Ways(NamedTuple):
    """All ways through a piece: what leaves it, under numbers, the place that is, and the steps there."""

    piece: WorkPiece
    ends: dict[State, tuple[float, Place]]
    came: dict[Place, _SearchStep]

    def steps(self, end: State, piece: WorkPiece) -> list[_SearchStep]:
        """The steps to one end, in the names of a piece of this kind."""
        names = dict(zip(self.piece.names, piece.names, strict=True))
        steps, step = [], self.came[self.ends[end][1]]
        while step.before is not None:
            steps.append(step.renamed(names, piece.start - self.piece.start))
            step = self.came[step.before]
        return steps[::-1]


class Search:
    """One search: a graph, prices, and what is allowed."""

    def __init__(self, graph: Graph, costs: HapCosts, limits: Limits = Limits()) -> None:
        self.graph, self.costs, self.limits = graph, costs, limits
        self.nodes, self.last = graph.by_name(), graph.last_uses()
        self.work = [(place, node) for place, node in enumerate(graph.nodes) if not node.leaf]
        self.sizes = granules(graph)
        self.rules = self._all_rules()
        uses = [name for node in graph.nodes for name in set(node.inputs)]
        self.pieces = repeated(graph, self.sizes)
        self._ways: dict[tuple[str, State], _Ways] = {}
        self.shared = {n.name for n in graph.nodes if n.op == "parameter" and uses.count(n.name) > 1}
        self._moves: dict[tuple[str, str, str, int], _Move | None] = {}

    def _all_rules(self) -> list[list[tuple[ShardingRule, float]]]:
        """Of every operation, with the seconds that computing takes."""
        made = []
        for _, node in self.work:
            rules = rules_of(node, [self.nodes[name].shape for name in node.inputs])
            allowed = [rule for rule in rules if self._allowed(rule, node)]
            made.append([(r, self.costs.compute_s(node.flops, r.shared, node.segment)) for r in allowed])
        return made

    def _allowed(self, rule: ShardingRule, node: Node) -> bool:
        if self.costs.cluster.size == 1:
            return not rule.shared and REDUCE not in (*rule.pre, rule.post)
        for name, held in [*zip(node.inputs, rule.pre, strict=True), (node.name, rule.post)]:
            if held[0] == "G":
                dim, known = int(held[1:]), self.nodes[name]
                if known.shape[dim] // self.sizes[name, dim] < 2:
                    return False
                if known.op == "parameter" and not self.limits.shard_parameters:
                    return False
        return True

    def run(self) -> Program:
        """The cheapest program."""
        ends = len(self.work)
        came: dict[Place, _SearchStep] = {}
        for _, at in self._explored((0, ()), ends + 1, self._estimates(), came):
            return self._program(at, came)
        raise ConfigError(
            "this model cannot be divided over devices: its loss cannot be cut into summands, or its scores "
            "into slices. Train it on one device, without a plan."
        )

    def _explored(
        self,
        start: Place,
        stop: int,
        estimate: list[float],
        came: dict[Place, _SearchStep],
        pieces: bool = True,
    ) -> Iterator[tuple[float, Place]]:
        """All states after `stop` operations, the cheapest first. `came`: how one gets there, filled in."""
        best: dict[Place, float] = {start: 0.0}
        came[start] = _SearchStep(None)
        order = count()
        heap = [(estimate[start[0]], next(order), 0.0, start)]
        while heap:
            _, _, cost, at = heapq.heappop(heap)
            if cost > best[at] or self._surpassed(at, cost, best):
                continue
            if at[0] == stop:
                yield cost, at
                continue
            for extra, key, step in self._next(at, pieces):
                if cost + extra < best.get(key, float("inf")):
                    best[key], came[key] = cost + extra, step
                    heapq.heappush(heap, (cost + extra + estimate[key[0]], next(order), cost + extra, key))

    def _next(self, at: Place, pieces: bool) -> Iterator[tuple[float, Place, _SearchStep]]:
        if at[0] == len(self.work):
            return self._finish(at)
        piece = self.pieces.get(at[0]) if pieces else None
        return self._successors(at) if piece is None else self._across(piece, at)

    def _across(self, piece: WorkPiece, at: Place) -> Iterator[tuple[float, Place, _SearchStep]]:
        """Everything that can come out of a piece."""
        mine, others = piece.inside(at[1])
        if (piece.kind, mine) not in self._ways:
            begin = (piece.start, tuple(sorted(piece.outside(mine).items())))
            came: dict[Place, _SearchStep] = {}
            ends = self._explored(begin, piece.stop, [0.0] * (piece.stop + 1), came, pieces=False)
            found = {piece.inside(end[1])[0]: (cost, end) for cost, end in ends}
            self._ways[piece.kind, mine] = _Ways(piece, found, came)
        ways = self._ways[piece.kind, mine]
        for left, (seconds, _) in ways.ends.items():
            state = tuple(sorted([*others, *piece.outside(left).items()]))
            yield seconds, (piece.stop, state), _SearchStep(at, through=(piece, ways, left))

    def _surpassed(self, at: Place, cost: float, best: dict[Place, float]) -> bool:
        """Whether some moved copy could as well be made later, at the same cost or less."""
        place, state = at
        for i, (name, held) in enumerate(state):
            if len(held) > 1:
                without = (*state[:i], (name, held[:1]), *state[i + 1 :])
                known = best.get((place, without))
                if known is not None and known + self._moved_s(name, held) <= cost:
                    return True
        return False

    def _moved_s(self, name: str, held: Held) -> float:
        """What the move took that a tensor has had."""
        (before, own), (after, later) = (each.partition("@")[::2] for each in held)
        segment = int(own or later or 0)
        price = self.costs.move(before, after, self.nodes[name].size_bytes, segment)
        assert price is not None
        return price.at(self.costs.longest[segment])

    def _estimates(self) -> list[float]:
        """At every place, a time that the rest takes at least."""
        speed = sum(self.costs.speeds)
        rest = [0.0, 0.0]
        for _, node in reversed(self.work):
            rest.append(rest[-1] + (3 * node.flops / speed if self.limits.guided else 0.0))
        return rest[::-1]

    # -- successors ---------------------------------------------------------------------------

    def _successors(self, at: Place) -> Iterator[tuple[float, Place, _SearchStep]]:
        place, node = self.work[at[0]]
        for rule, compute_s in self.rules[at[0]]:
            ready = self._provide(node, rule, dict(at[1]))
            if ready is None:
                continue
            holds, moves, placed, paid = ready
            holds[node.name] = (_key(rule.post, node.segment),)
            alive = tuple(sorted(item for item in holds.items() if self.last.get(item[0], -1) > place))
            paid += self.costs.inside(rule.sums)
            seconds = compute_s + paid + sum(move.seconds for move in moves)
            if self.limits.byte_price:
                seconds += self._held_price(node, rule, placed)
            yield seconds, (at[0] + 1, alive), _SearchStep(at, rule, tuple(moves), tuple(placed), paid)

    def _written(self, step: _SearchStep) -> list[Instruction]:
        """The instructions of one step of the way."""
        if step.done is not None:
            return [*(_moved(move) for move in step.moves), step.done]
        assert step.rule is not None
        assert step.before is not None
        node = self.work[step.before[0]][1]
        made = [_moved(move) for move in step.moves]
        made.append(
            Instruction(
                kind="compute",
                tensor=node.name,
                before=step.rule.pre,
                after=step.rule.post,
                flops=node.flops,
                shared=step.rule.shared,
                segment=node.segment,
                compute_s=self.costs.compute_s(node.flops, step.rule.shared, node.segment),
                comm_s=step.paid,
                fixed_s=step.paid,
                parameters=tuple(name for name, _ in step.placed),
            )
        )
        return made

    def _held_price(self, node: Node, rule: ShardingRule, placed: list[tuple[str, str]]) -> float:
        """What is held because of this operation, at the price of a byte."""
        if not self.limits.byte_price:
            return 0.0
        share = self.costs.longest[node.segment]
        held = node.size_bytes * (share if rule.post[0] == "G" else 1.0)
        for name, how in placed:
            held += self.limits.copies * self.nodes[name].size_bytes * (share if how[0] == "G" else 1.0)
        return self.limits.byte_price * held

    def _provide(
        self, node: Node, rule: ShardingRule, holds: dict[str, Held]
    ) -> tuple[dict[str, Held], list[_Move], list[tuple[str, str]], float] | None:
        """Have all inputs as the rule needs them; None if that cannot be."""
        made: list[_Move] = []
        placed: list[tuple[str, str]] = []
        paid = 0.0
        for name, wanted in zip(node.inputs, rule.pre, strict=True):
            known = self.nodes[name]
            if known.op in ("input", "constant"):
                if wanted == REDUCE:
                    return None
            elif known.op == "parameter":
                if name not in holds:
                    if wanted == REDUCE:
                        return None
                    placed.append((name, wanted))
                    trained = known.attrs.get("trained", True)
                    paid += (
                        self.costs.replicated(known.size_bytes).fixed
                        if wanted == IDENTITY and trained
                        else 0.0
                    )
                    if name in self.shared:
                        holds[name] = (_key(wanted, node.segment),)
                elif holds[name] != (_key(wanted, node.segment),):
                    return None
            elif not self._move(known, wanted, holds, made, node.segment):
                return None
        return holds, made, placed, paid

    def _move(
        self, known: Node, wanted: str, holds: dict[str, Held], made: list[_Move], segment: int
    ) -> bool:
        """Have a computed tensor as it is wanted."""
        held = holds[known.name]
        if _key(wanted, segment) in held:
            return True
        if len(held) > 1 or not self.limits.move or known.op in CHEAP:
            return False
        before, own = _plain(held[0]), known.segment if held[0][0] == "G" else segment
        if before[0] == wanted[0] == "G" and own != segment:
            return False
        key = (known.name, before, wanted, own)
        if key not in self._moves:
            price = self.costs.move(before, wanted, known.size_bytes, own)
            self._moves[key] = price and _Move(
                known.name, before, wanted, price, own, price.at(self.costs.longest[own])
            )
        move = self._moves[key]
        if move is None:
            return False
        holds[known.name] = (held[0], _key(wanted, segment))
        made.append(move)
        return True

    def _finish(self, at: Place) -> Iterator[tuple[float, Place, _SearchStep]]:
        """A loss has to be summands; scores are divided, and then whole for the script to go on with."""
        output = self.nodes[self.graph.output]
        for held, moves in self._ends(output, dict(at[1])[output.name]):
            price = self.costs.collect(held, output.size_bytes, output.segment)
            seconds = price.at(self.costs.longest[output.segment])
            done = Instruction(
                kind="finish",
                tensor=output.name,
                before=(held,),
                after=IDENTITY,
                variant=price.variant,
                segment=output.segment,
                comm_s=seconds,
                fixed_s=price.fixed,
                longest_s=price.longest,
            )
            yield seconds, (at[0] + 1, ()), _SearchStep(at, moves=moves, done=done)

    def _ends(self, output: Node, held: Held) -> Iterator[tuple[str, tuple[_Move, ...]]]:
        """How the result may be held at the end, and the slice that divides what is whole on all devices."""
        forms = [_plain(each) for each in held]
        if self.costs.cluster.size == 1:
            yield IDENTITY, ()
        elif self.graph.loss:
            yield from ((form, ()) for form in forms if form == REDUCE)
        elif forms == [IDENTITY]:
            if self.limits.move and output.op not in CHEAP:
                segment = output.segment
                for dim in self._divisible(output)[:1]:
                    yield dim, (_Move(output.name, IDENTITY, dim, FREE, segment, 0.0),)
        else:
            yield from ((form, ()) for form in forms if form != IDENTITY)

    def _divisible(self, node: Node) -> list[str]:
        """The slices that a tensor can be cut into."""
        lengths = [length // self.sizes[node.name, dim] for dim, length in enumerate(node.shape)]
        return [gather(dim) for dim, units in enumerate(lengths) if units > 1]

    def _program(self, at: Place, came: dict[Place, _SearchStep]) -> Program:
        steps, before = list[_SearchStep](), came[at]
        while before.before is not None:
            if before.through is None:
                steps.append(before)
            else:
                piece, ways, left = before.through
                steps += reversed(ways.steps(left, piece))
            before = came[before.before]
        made = [each for step in reversed(steps) for each in self._written(step)]
        placed = {name: how for step in steps for name, how in step.placed}
        return Program(instructions=tuple(made), placements=dict(sorted(placed.items())))


def _key(held: str, segment: int) -> str:
    """Slices have the lengths of a segment, so those of another one are something else."""
    return f"{held}@{segment}" if held[0] == "G" else held


def _plain(held: str) -> str:
    return held.partition("@")[0]


def _moved(move: _Move) -> Instruction:
    return Instruction(
        kind=NAMES[move.before[0] + move.after[0]],
        tensor=move.name,
        before=(move.before,),
        after=move.after,
        variant=move.price.variant,
        segment=move.segment,
        comm_s=move.seconds,
        fixed_s=move.price.fixed,
        longest_s=move.price.longest,
    )


def synthesize(graph: Graph, costs: HapCosts, limits: Limits = Limits()) -> Program:
    """The cheapest program for these ratios."""
    return Search(graph, costs, limits).run()
