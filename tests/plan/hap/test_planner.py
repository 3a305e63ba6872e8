"""HAP's program is the cheapest of all, its ratios are the best, and both do what the model implies at
its ends."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.errors import ConfigError
from paceline.plan.hap.costs import HapCosts
from paceline.plan.hap.graph import Graph, Node, make_graph
from paceline.plan.hap.plan import alternate, fastest, plan_hap, repriced
from paceline.plan.hap.program import Program
from paceline.plan.hap.ratios import best_ratios, held_bytes, proportional
from paceline.plan.hap.rules import CHEAP, IDENTITY, REDUCE, granules, round_lengths, rules_of
from paceline.plan.hap.search import Limits, Search, synthesize
from paceline.plan.profile import ClusterProfile, Device, TransferCost
from paceline.plan.profile.cluster import KINDS

FLOAT = 4


def cluster(*speeds: float, rate: float = 1e9, latency: float = 1e-6, memory: int = 2**50) -> ClusterProfile:
    devices = tuple(Device(name="d", flops_per_s=f, memory_bytes=memory) for f in speeds)
    return ClusterProfile(
        devices=devices, link=TransferCost(latency_s=latency, bytes_per_s=rate), overhead_bytes=0
    )


def stack(batch: int, *widths: int, loss: bool = True) -> Graph:
    """Linear layers without biases, and the sum of squares, say, as the loss."""
    nodes = [Node("x", "input", (), (batch, widths[0]), FLOAT * batch * widths[0])]
    last = "x"
    for i, (a, b) in enumerate(pairwise(widths)):
        nodes.append(Node(f"w{i}", "parameter", (), (b, a), FLOAT * a * b))
        nodes.append(
            Node(f"y{i}", "linear", (last, f"w{i}"), (batch, b), FLOAT * batch * b, 2.0 * batch * a * b)
        )
        last = f"y{i}"
    if loss:
        nodes.append(Node("loss", "sum", (last,), (), FLOAT, float(batch * widths[-1]), {"dims": [0, 1]}))
    return make_graph(nodes)


def bent(batch: int, *widths: int) -> Graph:
    """The same with something before the loss that is not linear, so that summands have to be added up
    for it."""
    nodes = list(stack(batch, *widths).nodes)
    loss, size = nodes.pop(), FLOAT * batch * widths[-1]
    nodes.append(Node("bent", "unary", loss.inputs, (batch, widths[-1]), size, float(batch * widths[-1])))
    return make_graph([*nodes, loss._replace(inputs=("bent",))])


def branching(batch: int, width: int) -> Graph:
    """One tensor that is used twice."""
    nodes = list(stack(batch, width, width, loss=False).nodes)
    size = FLOAT * batch * width
    nodes.append(Node("w1", "parameter", (), (width, width), FLOAT * width * width))
    nodes.append(Node("y1", "linear", ("y0", "w1"), (batch, width), size, 2.0 * batch * width * width))
    nodes.append(Node("z", "add", ("y0", "y1"), (batch, width), size, float(batch * width)))
    nodes.append(Node("loss", "sum", ("z",), (), FLOAT, float(batch * width), {"dims": [0, 1]}))
    return make_graph(nodes)


def every_program(graph: Graph, costs: HapCosts) -> Iterator[float]:
    """The time of every program there is: all rules, all single moves of every tensor, in plain words.

    Independent of the search: all ways to hold tensors are tried, whatever they cost.
    """
    nodes, sizes = graph.by_name(), granules(graph)
    work = [node for node in graph.nodes if not node.leaf]
    options = [rules_of(node, [nodes[i].shape for i in node.inputs]) for node in work]
    kinds = [IDENTITY, REDUCE, *(f"G{d}" for d in range(2))]
    moved = [[None, *kinds] if n.op not in CHEAP else [None] for n in work[:-1]] + [[None]]
    for chosen in product(*options):
        for moves in product(*moved):
            seconds = _time(work, chosen, moves, nodes, sizes, costs)
            if seconds is not None:
                yield seconds


def _time(work, chosen, moves, nodes, sizes, costs):  # type: ignore[no-untyped-def]
    held: dict[str, set[str]] = {}
    seconds = 0.0
    for node, rule, move in zip(work, chosen, moves, strict=True):
        for name, wanted in zip(node.inputs, rule.pre, strict=True):
            known = nodes[name]
            if wanted[0] == "G" and known.shape[int(wanted[1:])] // sizes[name, int(wanted[1:])] < 2:
                return None
            if known.leaf:
                if wanted == REDUCE:
                    return None
                if known.op == "parameter" and wanted == IDENTITY:
                    seconds += costs.replicated(known.size_bytes).fixed
            elif wanted not in held[name]:
                return None
        seconds += costs.compute_s(node.flops, rule.shared, 0)
        held[node.name] = {rule.post}
        if move is not None and move != rule.post:
            if move[0] == "G" and int(move[1:]) >= len(node.shape):
                return None
            price = costs.move(rule.post, move, node.size_bytes, 0)
            if price is None:
                return None
            seconds += price.at(costs.longest[0])
            held[node.name].add(move)
    told = costs.collect(REDUCE, work[-1].size_bytes, 0).at(costs.longest[0])
    return seconds + told if REDUCE in held[work[-1].name] else None


speeds = st.lists(st.sampled_from([1e9, 2e9, 5e9, 1e10]), min_size=2, max_size=3)
networks = st.tuples(st.sampled_from([1e6, 1e8, 1e10]), st.sampled_from([0.0, 1e-6, 1e-4]))
graphs = st.one_of(
    st.builds(stack, st.integers(2, 64), st.integers(2, 64), st.integers(2, 64), st.integers(2, 64)),
    st.builds(branching, st.integers(2, 64), st.integers(2, 64)),
)


@settings(max_examples=8)
@given(graphs, speeds, networks)
def test_the_program_is_the_cheapest_of_all_programs_with_and_without_the_estimate(
    graph: Graph, devices: list[float], network: tuple[float, float]
) -> None:
    machines = cluster(*devices, rate=network[0], latency=network[1])
    costs = HapCosts(machines, proportional(machines))
    found = synthesize(graph, costs)
    assert found.seconds == pytest.approx(min(every_program(graph, costs)), rel=1e-9)
    assert synthesize(graph, costs, Limits(guided=False)).seconds == pytest.approx(found.seconds, rel=1e-9)


@settings(max_examples=12)
@given(graphs, speeds, networks)
def test_ratios_are_as_good_as_the_best_of_a_grid(
    graph: Graph, devices: list[float], network: tuple[float, float]
) -> None:
    machines = cluster(*devices, rate=network[0], latency=network[1])
    program = synthesize(graph, HapCosts(machines, proportional(machines)))
    found = best_ratios(program, graph, machines, 1, 4.0)
    assert sum(found[0]) == pytest.approx(1.0)
    mine = repriced(program, HapCosts(machines, found)).seconds
    steps = 16
    for parts in product(range(steps + 1), repeat=len(devices) - 1):
        if sum(parts) <= steps:
            ratios = (tuple(p / steps for p in (*parts, steps - sum(parts))),)
            assert mine <= repriced(program, HapCosts(machines, ratios)).seconds * 1.0001


@settings(max_examples=12)
@given(graphs, speeds, networks)
def test_every_round_is_faster_than_the_one_before(
    graph: Graph, devices: list[float], network: tuple[float, float]
) -> None:
    machines = cluster(*devices, rate=network[0], latency=network[1])
    program, ratios, costs = alternate(graph, machines)
    assert list(costs) == sorted(costs, reverse=True)
    assert len(set(costs)) == len(costs)
    assert repriced(program, HapCosts(machines, ratios)).seconds == pytest.approx(costs[-1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda r: sum(r) > 0), st.integers(1, 100))
def test_rounded_lengths_add_up_and_are_within_one_of_the_ratio(
    given_ratios: list[float], units: int
) -> None:
    ratios = [r / sum(given_ratios) for r in given_ratios]
    lengths = round_lengths(ratios, units)
    assert sum(lengths) == units
    assert all(abs(length - ratio * units) < 1 + 1e-6 for length, ratio in zip(lengths, ratios, strict=True))
    even = round_lengths([1 / len(ratios)] * len(ratios), units * len(ratios))
    assert even == [units] * len(ratios)


def data_parallel(program: Program) -> bool:
    return set(program.placements.values()) == {IDENTITY}


def test_tiny_batches_of_huge_layers_shard_weights_and_huge_batches_of_tiny_ones_are_data_parallel() -> None:
    machines = cluster(1e12, 1e12, 1e12, 1e12)
    small = plan_hap(stack(4, 4096, 4096, 4096), machines, "m", 4).program
    assert not any(held == IDENTITY for held in small.placements.values())
    large = plan_hap(bent(65536, 16, 16, 16), machines, "m", 65536).program
    assert data_parallel(large)


def test_with_free_communication_everybody_finishes_at_the_same_time() -> None:
    machines = cluster(1e9, 2e9, 5e9, rate=1e18, latency=0.0)
    graph = stack(4096, 8, 8)
    plan = plan_hap(graph, machines, "m", 4096)
    assert plan.ratios[0] == pytest.approx((0.125, 0.25, 0.625), abs=1e-3)


def test_equal_devices_are_given_as_much_and_one_that_hardly_computes_gets_nothing() -> None:
    even = plan_hap(stack(512, 8, 8), cluster(1e9, 1e9, 1e9), "m", 512)
    uniform = repriced(even.program, HapCosts(cluster(1e9, 1e9, 1e9), ((1 / 3,) * 3,))).seconds
    assert even.predicted.seconds <= uniform * (1 + 1e-9)
    lame = plan_hap(stack(512, 8, 8), cluster(1e9, 1e9, 1.0, rate=1e15, latency=0.0), "m", 512)
    assert lame.ratios[0][2] < 1e-6


def test_one_device_runs_the_original_program_and_moves_nothing() -> None:
    plan = plan_hap(branching(8, 8), cluster(1e9), "m", 8)
    assert {i.kind for i in plan.program.instructions} == {"compute", "finish"}
    assert sum(i.comm_s for i in plan.program.instructions) == 0
    assert plan.predicted.seconds == pytest.approx(3 * sum(n.flops for n in branching(8, 8).nodes) / 1e9)


def test_a_slower_network_never_makes_programs_move_more() -> None:
    moved = []
    for rate in (1e12, 1e10, 1e8, 1e6):
        program = plan_hap(
            stack(256, 64, 64, 64), cluster(1e9, 1e9, rate=rate, latency=0.0), "m", 256
        ).program
        moved.append(sum(i.comm_s for i in program.instructions) * rate)
    assert moved == sorted(moved, reverse=True)


def test_memory_limits_hold_and_one_that_nothing_fits_into_is_named() -> None:
    graph = stack(4096, 64, 64)
    free = plan_hap(graph, cluster(1e9, 1e9, rate=1e15), "m", 4096)
    assert free.ratios[0][0] == pytest.approx(0.5, abs=0.01)
    tight = cluster(1e9, 1e9, rate=1e15)
    room = int(free.predicted.memory_bytes * 0.8)
    devices = (Device(name="small", flops_per_s=1e9, memory_bytes=room), tight.devices[1])
    limited = ClusterProfile(devices=devices, link=tight.link, overhead_bytes=0)
    plan = plan_hap(graph, limited, "m", 4096)
    assert plan.ratios[0][0] < 0.45
    with pytest.raises(ConfigError, match=r"cannot hold|no sharding ratios fit"):
        plan_hap(graph, cluster(1e9, 1e9, memory=1000), "m", 4096)


def test_where_replicas_do_not_fit_another_program_is_found() -> None:
    graph = bent(65536, 64, 64, 64)
    copies = 1e6  # of every parameter, so that these count
    assert data_parallel(plan_hap(graph, cluster(1e9, 1e9), "m", 65536, copies).program)
    room = int(0.8 * copies * 2 * FLOAT * 64 * 64)
    plan = plan_hap(graph, cluster(1e9, 1e9, memory=room), "m", 65536, copies)
    assert not data_parallel(plan.program)
    assert plan.predicted.memory_bytes <= room


def layered(batch: int, width: int, blocks: int) -> Graph:
    """Blocks that are alike, each with a branch beside it."""
    nodes = list(stack(batch, width, width, loss=False).nodes)
    last, size = "y0", FLOAT * batch * width
    for i in range(blocks):
        nodes.append(Node(f"v{i}", "parameter", (), (width, width), FLOAT * width * width))
        work = 2.0 * batch * width * width
        nodes.append(Node(f"p{i}", "linear", (last, f"v{i}"), (batch, width), size, work))
        nodes.append(Node(f"q{i}", "unary", (f"p{i}",), (batch, width), size, float(batch * width)))
        nodes.append(Node(f"z{i}", "add", (last, f"q{i}"), (batch, width), size, float(batch * width)))
        last = f"z{i}"
    nodes.append(Node("loss", "sum", (last,), (), FLOAT, float(batch * width), {"dims": [0, 1]}))
    return make_graph(nodes)


@settings(max_examples=20)
@given(st.integers(2, 64), st.integers(2, 64), speeds, networks, st.integers(1, 2))
def test_searching_pieces_that_repeat_once_gives_the_same_program(
    batch: int, width: int, devices: list[float], network: tuple[float, float], segments: int
) -> None:
    machines = cluster(*devices, rate=network[0], latency=network[1])
    graph = layered(batch, width, 4).parts(segments)
    whole, once = (Search(graph, HapCosts(machines, proportional(machines, segments))) for _ in range(2))
    assert len(once.pieces) >= 2
    whole.pieces = {}
    found = once.run()
    assert found.seconds == pytest.approx(whole.run().seconds, rel=1e-9)
    assert set(found.placements) == {node.name for node in graph.nodes if node.op == "parameter"}
    computed = [each.tensor for each in found.instructions if each.kind == "compute"]
    assert computed == [node.name for node in graph.nodes if not node.leaf]
    assert repriced(found, once.costs).seconds == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("count", [*range(2, 17), 33, 64])
def test_plans_are_valid_for_any_number_of_devices(count: int) -> None:
    machines = cluster(*(1e9 * (1 + i % 3) for i in range(count)))
    for graph in (stack(256, 64, 128, 32), branching(128, 64)):
        plan = plan_hap(graph, machines, "m", 256)
        assert plan.workers == count
        assert sum(plan.ratios[0]) == pytest.approx(1.0)
        whole = plan.program.instructions[-1]
        assert whole.kind == "finish", "the loss, for all: the simple ways do without"
        simple = min(way.seconds for way in plan.alternatives.values())
        assert plan.predicted.seconds - whole.comm_s <= simple * (1 + 1e-9)
        assert math.isfinite(plan.predicted.seconds)


def odd_cluster(draw: random.Random, count: int) -> ClusterProfile:
    """Devices and collectives at random, some very slow, so that programs of all kinds are the cheapest."""
    devices = tuple(
        Device(name="d", flops_per_s=draw.uniform(1e8, 4e9), memory_bytes=2**50) for _ in range(count)
    )
    lines = {
        kind: TransferCost(latency_s=draw.choice((0.0, 1e-7, 1e-5)), bytes_per_s=10 ** draw.uniform(6, 12))
        for kind in KINDS
    }
    link = TransferCost(latency_s=0.0, bytes_per_s=1e9)
    return ClusterProfile(devices=devices, link=link, collectives=lines, overhead_bytes=0)


def grid(count: int, steps: int) -> Iterator[tuple[tuple[float, ...]]]:
    for parts in product(range(steps + 1), repeat=count - 1):
        if sum(parts) <= steps:
            yield (tuple(p / steps for p in (*parts, steps - sum(parts))),)


def small_graph(draw: random.Random) -> Graph:
    batch, *widths = (draw.choice((2, 8, 64, 512)) for _ in range(4))
    make = draw.choice((stack, bent, lambda batch, width, *_: branching(batch, width)))
    return make(batch, *widths)


def level_cluster(draw: random.Random) -> ClusterProfile:
    """Very unequal devices, collectives of about one rate: padding to the longest piece costs much."""
    devices = tuple(
        Device(name="d", flops_per_s=10 ** draw.uniform(8, 10), memory_bytes=2**50)
        for _ in range(draw.choice((2, 3, 4)))
    )
    base, lines = 10 ** draw.uniform(6.5, 10), {}
    for kind in KINDS:
        latency, off = draw.choice((0.0, 1e-6, 1e-5)), 10 ** draw.uniform(-0.5, 0.5)
        rate = base * off * (0.1 if "grouped" in kind else 1.0)
        lines[kind] = TransferCost(latency_s=latency, bytes_per_s=rate)
    link = TransferCost(latency_s=0.0, bytes_per_s=1e9)
    return ClusterProfile(devices=devices, link=link, collectives=lines, overhead_bytes=0)


def test_no_program_is_faster_at_any_ratios_of_a_grid() -> None:
    apart = []
    for seed in (*range(25), 638, 1002, 1107, 1140, 1664, 1897):
        draw = random.Random(seed)
        machines = level_cluster(draw)
        graph = small_graph(draw)
        found, ratios, _ = fastest(graph, machines)
        assert repriced(found, HapCosts(machines, ratios)).seconds == pytest.approx(found.seconds)
        for point in grid(machines.size, {2: 24, 3: 8, 4: 5}[machines.size]):
            assert found.seconds <= synthesize(graph, HapCosts(machines, point)).seconds * (1 + 1e-9)
        apart.append(alternate(graph, machines)[0].seconds / found.seconds)
    assert min(apart) >= 1 - 1e-9
    assert max(apart) > 1.5, "alternation from the speeds alone ends above the best"


def test_ratios_are_the_best_of_a_grid_with_slow_links_and_little_memory() -> None:
    draw, moving, tight, refused = random.Random(8), 0, 0, 0
    for _ in range(80):
        count = draw.choice((2, 3))
        roomy, graph, copies = odd_cluster(draw, count), small_graph(draw), 4.0
        program = synthesize(graph, HapCosts(roomy, proportional(roomy)))
        free = best_ratios(program, graph, roomy, 1, copies)
        whole, (divided,) = held_bytes(program, graph, copies, 1)
        devices = tuple(
            replace(device, memory_bytes=int(whole + draw.uniform(0.05, 0.9) * divided) + 1)
            for device in roomy.devices
        )
        machines = replace(roomy, devices=devices)
        shares = [(device.memory_bytes - whole) / divided if divided else 1.0 for device in devices]
        points = [
            point for point in grid(count, 12) if all(b <= s for b, s in zip(*point, shares, strict=True))
        ]
        moving += sum(each.longest_s for each in program.instructions) > 0
        tight += any(b > s for b, s in zip(*free, shares, strict=True))
        if sum(shares) < 1:
            refused += 1
            with pytest.raises(ConfigError, match=r"cannot hold|no sharding ratios fit"):
                best_ratios(program, graph, machines, 1, copies)
            continue
        found = best_ratios(program, graph, machines, 1, copies)
        assert all(b <= s + 1e-6 for b, s in zip(*found, shares, strict=True))
        mine = repriced(program, HapCosts(machines, found)).seconds
        for point in points:
            assert mine <= repriced(program, HapCosts(machines, point)).seconds * 1.0001
    assert min(moving, tight, refused) >= 5, "the cases are of all kinds"


def test_prices_are_those_of_the_papers_table() -> None:
    """Bytes of both directions over each collective's own rate, the longest piece counting for all n."""
    rates = {kind: 1e6 * (3 + place) ** 2 for place, kind in enumerate(KINDS)}
    ag, rs, ar, a2a, gathered, scattered = (rates[kind] for kind in KINDS)
    latencies = {kind: 1e-3 * (1 + place) for place, kind in enumerate(KINDS)}
    lines = {kind: TransferCost(latency_s=latencies[kind], bytes_per_s=rates[kind]) for kind in KINDS}
    ratios, speeds, size = (0.5, 0.3, 0.2), (4e9, 2e9, 1e9), 6_000_000
    devices = tuple(Device(name="d", flops_per_s=f, memory_bytes=2**40) for f in speeds)
    machines = ClusterProfile(devices=devices, link=lines["all_gather"], collectives=lines, overhead_bytes=0)
    costs, n, longest = HapCosts(machines, (ratios,)), 3, 0.5

    def price(before: str, after: str) -> float:
        made = costs.move(before, after, size, 0)
        assert made is not None
        return made.at(longest)

    local = longest * size
    both = latencies["all_gather"] + latencies["reduce_scatter"]
    padded = both + n * local / ag + n * local / rs
    grouped = latencies["gather_grouped"] + latencies["scatter_grouped"] + size / gathered + size / scattered
    assert price("G1", "I") == pytest.approx(min(padded, grouped))
    assert price("R", "G0") == pytest.approx(min(padded, grouped)), "the adjoint of a gather"
    assert price("I", "G0") == 0, "a slice of what one has"
    assert price("R", "I") == pytest.approx(2 * (latencies["all_reduce"] + size / ar))
    assert price("G0", "G1") == pytest.approx(2 * (latencies["all_to_all"] + n * local / a2a))
    assert costs.move("I", "R", size, 0) is None
    assert costs.replicated(size).at(longest) == pytest.approx(latencies["all_reduce"] + size / ar)
    assert costs.collect("R", 4, 0).at(longest) == pytest.approx(latencies["all_reduce"] + 4 / ar)
    forward = latencies["all_gather"] + n * local / ag, latencies["gather_grouped"] + size / gathered
    assert costs.collect("G0", size, 0).at(longest) == pytest.approx(min(forward))
    assert costs.compute_s(1e9, True, 0) == pytest.approx(3 * max(0.5 / 4, 0.3 / 2, 0.2 / 1))
    assert costs.compute_s(1e9, False, 0) == pytest.approx(3.0), "all compute it, the slowest sets the pace"
    twice = 2 * latencies["all_gather"] + 2 * size / ag + latencies["reduce_scatter"] + size / rs
    assert costs.fully_sharded(size, trained=True) == pytest.approx(twice)


def scores(batch: int, *widths: int) -> Graph:
    """A model whose loss is the script's own affair."""
    return stack(batch, *widths, loss=False)


def test_the_end_of_a_program_is_divided_however_slow_the_network_is() -> None:
    """Whole everywhere, gradients would be whole as well, and adding them up would be for nothing."""
    for rate, latency in product((1e4, 1e7, 1e12), (0.0, 1e-3)):
        machines = cluster(1e12, 1e12, 3e11, rate=rate, latency=latency)
        for graph in (scores(8, 16, 16, 4), stack(8, 16, 16, 4), bent(8, 16, 16)):
            program = plan_hap(graph, machines, "m", 8).program
            last = program.instructions[-1]
            assert (last.kind, last.after) == ("finish", IDENTITY)
            assert last.before[0] == REDUCE or (not graph.loss and last.before[0][0] == "G")
            assert any(each.shared for each in program.instructions)


def test_a_result_that_all_compute_in_full_is_cut_before_it_ends() -> None:
    nodes = list(scores(8, 16, 16).nodes)
    nodes.append(Node("z", "piece", (nodes[-1].name,), (8, 16), FLOAT * 8 * 16, 128.0))
    program = plan_hap(make_graph(nodes), cluster(1e9, 2e9), "m", 8).program
    kinds = [(each.kind, each.before, each.after) for each in program.instructions[-3:]]
    assert kinds == [
        ("compute", ("I",), "I"),
        ("slice", ("I",), "G0"),
        ("finish", ("G0",), "I"),
    ]


def test_simple_ways_are_what_they_are_called() -> None:
    graph, batch, speeds = scores(4096, 64, 64), 4096, (3e9, 1e9)
    machines = cluster(*speeds, rate=1e8, latency=1e-3)
    plan = plan_hap(graph, machines, "m", batch)
    flops, weights, activations = 2.0 * 4096 * 64 * 64, FLOAT * 64 * 64, FLOAT * 4096 * 64
    together = weights / (1 << 20)
    line = machines.line("all_reduce")
    sum_s = line.latency_s * together + weights / line.bytes_per_s
    even, by_speed = plan.alternatives["DDP, even"], plan.alternatives["DDP, batches by speed (--balance)"]
    assert even.seconds == pytest.approx(3 * flops / 2 / 1e9 + sum_s), "the slow one has half of the samples"
    assert by_speed.seconds == pytest.approx(3 * flops / 4e9 + sum_s)
    assert even.memory_bytes == int(4 * weights + activations / 2)
    assert by_speed.memory_bytes == int(4 * weights + 0.75 * activations)
    gather, scatter = machines.line("all_gather"), machines.line("reduce_scatter")
    moved = 2 * (gather.latency_s * together + weights / gather.bytes_per_s)
    moved += scatter.latency_s * together + weights / scatter.bytes_per_s
    fsdp = plan.alternatives["FSDP, even"]
    assert fsdp.seconds == pytest.approx(3 * flops / 2 / 1e9 + moved)
    assert fsdp.memory_bytes == int(4 * weights / 2 + activations / 2)
    assert plan.alone is not None
    assert (plan.alone.device, plan.alone.predicted.seconds) == (0, pytest.approx(3 * flops / 3e9))


def test_the_plan_says_whether_dividing_pays() -> None:
    slow = plan_hap(scores(16, 64, 64), cluster(1e12, 3e12, rate=1e8, latency=1e-4), "m", 16)
    assert slow.better() == "device 1 alone"
    assert slow.verdict().startswith("one device alone is best: device 1 (d) takes ")
    fast = plan_hap(scores(4096, 64, 64), cluster(1e9, 1e9, rate=1e12, latency=0.0), "m", 4096)
    assert "times as fast as device 0 (d) alone" in fast.verdict()
    assert float(fast.verdict().split(", ")[2].split()[0]) == pytest.approx(2.0, abs=0.01)
    room = int(0.9 * (fast.alone.predicted.memory_bytes if fast.alone else 0))
    tight = cluster(1e9, 1e9, rate=1e12, latency=0.0, memory=room)
    small = plan_hap(scores(4096, 64, 64), tight, "m", 4096)
    assert small.verdict().endswith("no device holds the model by itself")
    slow_link = plan_hap(scores(4096, 64, 64), cluster(1e9, 1e9, rate=1e6), "m", 4096)
    assert slow_link.verdict().startswith("DDP, "), "bringing scores together takes longer than gradients"
    assert plan_hap(scores(8, 8, 8), cluster(1e9), "m", 8).verdict() == "one device: nothing is divided"


def test_collectives_are_priced_in_bytes_and_by_the_longest_piece() -> None:
    lines = {kind: TransferCost(latency_s=0.0, bytes_per_s=1e6) for kind in KINDS}
    device = Device(name="d", flops_per_s=1e9, memory_bytes=2**40)
    machines = ClusterProfile(
        devices=(device,) * 4, link=lines["all_gather"], collectives=lines, overhead_bytes=0
    )
    skewed = HapCosts(machines, ((0.7, 0.1, 0.1, 0.1),)).move("G0", "I", 1000, 0)
    even = HapCosts(machines, ((0.25,) * 4,)).move("G0", "I", 1000, 0)
    assert skewed is not None
    assert even is not None
    assert skewed.variant == "grouped", "padding would cost 2.8 times the bytes"
    assert skewed.at(0.7) == pytest.approx(2e-3)
    assert even.at(0.25) == pytest.approx(2e-3)
