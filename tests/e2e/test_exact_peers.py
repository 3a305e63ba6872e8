"""Peers in exact simulation: the numbers of real processes, and the decisions of sizes alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from e2e.scripts.cases import CASES
from paceline.protocols import PEERS
from paceline.protocols.settings import make_peer
from paceline.sim import simulate_peers
from paceline.sim.request import ClusterRequest
from paceline.trace.events import AnyEvent, Decided, Evaluated, Exchanged
from support.account import unbooked_s
from support.runs import Lab, Run, once
from support.tensors import assert_close, assert_equal, assert_finite
from support.tight import TIGHT

WORKERS, SAMPLES, BATCH, EPOCHS, SEED = 4, 192, 4, 1, 5
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
PUSHES = EPOCHS * SAMPLES // BATCH
LOOSE: list[tuple[str, dict[str, Any]]] = [
    ("dpsgd", {"overlap": True}),
    ("dpsgd", {"topology": "matching"}),
    ("dpsgd", {"measure_every": 3}),
    ("easgd", {"period": 2, "mode": "asynchronous"}),
    ("easgd", {"period": 1, "mode": "asynchronous", "lock": False}),
    ("fedavg", {"period": 3, "fraction": 0.5}),
    ("hpsgd", {}),
    ("osp", {**TIGHT["osp"], "budget": "measured"}),
    ("osp", {**TIGHT["osp"], "budget": "times"}),
]
"""Further ways in which workers talk: those that follow times, and those that compute twice."""
VARIANTS = [*((name, TIGHT.get(name, {})) for name in sorted(PEERS)), *LOOSE]
REPEATING = [each for each in VARIANTS if make_peer(*each).repeats]
FREE = [each for each in VARIANTS if not make_peer(*each).repeats]
SIZED = [each for each in VARIANTS if each[0] != "selsync" and "measure_every" not in each[1]]
"""What sizes alone can simulate: not what looks at the values of gradients."""


def label(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *(f"{k}={v}" for k, v in variant[1].items())])


def request(**more: Any) -> ClusterRequest:
    return ClusterRequest(
        **{
            "workers": WORKERS,
            "slow": {3: 2.5},
            "compute_s": 0.1,
            "jitter": 0.3,
            "batch": BATCH,
            "model_bytes": 6400,
        }
        | more
    )


def exactly(lab: Lab, variant: tuple[str, Any], *args: object, on: ClusterRequest, **dials: Any) -> Run:
    cluster = msgspec.to_builtins(on, str_keys=True)
    name, settings = variant
    named = {"workers": on.workers, "protocol": name, "settings": settings, "seed": SEED}
    return lab.trained("train.py", *args, **named | {"cluster": cluster} | dials)


def outline(events: list[AnyEvent]) -> list[tuple[Any, ...]]:
    """Who met whom when and for how long, who pushed and who was released, until work runs out."""
    seen: list[tuple[Any, ...]] = []
    for e in events:
        if isinstance(e, Exchanged):
            seen.append((round(e.t, 9), e.operation, e.workers, round(e.seconds, 9)))
        elif isinstance(e, Decided):
            spent = round(e.compute_s, 9), round(e.exchange_s, 9)
            seen.append((round(e.t, 9), e.pushed, e.clock, e.version, e.flushed, e.release, e.gap, spent))
    pushes = [i for i, e in enumerate(seen) if isinstance(e[1], int)]
    return seen[: pushes[PUSHES - 3 * WORKERS]]


LINKS: list[dict[str, float]] = [{}, {"latency_s": 0.01, "bandwidth_bytes_per_s": 2e5}]


@pytest.mark.parametrize("link", LINKS, ids=["no time", "some time"])
@pytest.mark.parametrize("variant", SIZED, ids=label)
def test_sizes_alone_make_the_decisions_of_an_exact_simulation(
    lab: Lab, variant: tuple[str, dict[str, Any]], link: dict[str, float]
) -> None:
    if variant[0] == "osp" and link:  # what is put off depends on the sizes of a model's tensors
        link = {"latency_s": 0.01}
    on, events = request(**link), list[AnyEvent]()
    run = exactly(lab, variant, "momentum", *SIZES, on=on)
    simulate_peers(make_peer(*variant), on.cluster(), iterations=PUSHES, seed=SEED, trace=events.append)
    assert outline(run.trace) == outline(events)
    assert run.used() == once(EPOCHS, SAMPLES)
    assert unbooked_s(run.trace) == pytest.approx([0.0] * WORKERS, abs=1e-9)


# -- the numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", REPEATING, ids=label)
def test_processes_over_both_fabrics_and_the_simulator_arrive_at_the_same_numbers(
    lab: Lab, variant: tuple[str, dict[str, Any]]
) -> None:
    """Bit for bit those of shared memory, to rounding those of gloo. The last round need not be full, unless
    pairs go on by themselves: there it matters who of the others has left by then."""
    samples = 48 if "topology" in variant[1] else 50
    args = ("normed", "--samples", samples, "--batch", 4, "--epochs", 3, "--shuffle")
    dials: dict[str, Any] = {"workers": 4, "protocol": variant[0], "settings": variant[1], "seed": SEED}
    exact = exactly(lab, variant, *args, on=request(latency_s=0.02))
    shared = lab.trained("train.py", *args, **dials, device_time_s=0.002, slow={1: 4.0})
    assert_equal(exact.weights, shared.weights)
    assert exact.used() == shared.used() == once(3, samples)
    if variant[1].get("overlap") is not True:  # gloo has no mixtures that are started
        gloo = lab.trained("train.py", *args, **dials, fabric="gloo")
        assert_close(gloo.weights, exact.weights, 1e-10)


@pytest.mark.parametrize("variant", FREE, ids=label)
def test_what_depends_on_times_repeats_bit_for_bit_in_virtual_time(
    lab: Lab, variant: tuple[str, dict[str, Any]]
) -> None:
    args = ("noisy", "--samples", 50, "--batch", 4, "--epochs", 2, "--shuffle")
    one, other = (exactly(lab, variant, *args, on=request(latency_s=0.01)) for _ in range(2))
    assert_equal(one.weights, other.weights)
    assert one.trace[1:] == other.trace[1:]
    assert one.used() == once(2, 50)


@pytest.mark.parametrize("way", ["fp16", "topk:0.1"])
def test_compressed_they_are_those_of_processes_too(lab: Lab, way: str) -> None:
    on = request(bandwidth_bytes_per_s=1e5)
    variant: tuple[str, dict[str, Any]] = ("local_sgd", {"period": 2})
    exact = exactly(lab, variant, "momentum", *SIZES, on=on, compress=way)
    dials: dict[str, Any] = {"workers": 4, "protocol": variant[0], "settings": variant[1], "seed": SEED}
    real = lab.trained("train.py", "momentum", *SIZES, **dials, compress=way)
    assert_equal(exact.weights, real.weights)
    assert exact.result.bytes_sent == real.result.bytes_sent


# -- evaluation -------------------------------------------------------------------------------------


EVALUATED = [*((variant, "all") for variant in VARIANTS), (("local_sgd", {"period": 3}), "lead")]


@pytest.mark.parametrize(
    ("variant", "who"), EVALUATED, ids=lambda each: each if isinstance(each, str) else label(each)
)
def test_to_evaluate_takes_no_virtual_time_and_changes_nothing(
    lab: Lab, variant: tuple[str, dict[str, Any]], who: str
) -> None:
    on = request(latency_s=0.01)
    named: dict[str, Any] = {"workers": 4, "protocol": variant[0], "settings": variant[1], "seed": SEED}
    named["cluster"] = msgspec.to_builtins(on, str_keys=True)
    plain = lab.trained("peers.py", "momentum", "--evaluate", "none", **named)
    run = lab.trained("peers.py", "momentum", "--evaluate", who, **named)
    assert len(run.of(Evaluated)) == 3
    assert_equal(run.weights, plain.weights)
    assert run.of(Decided | Exchanged) == plain.of(Decided | Exchanged)


def test_an_evaluation_sees_all_replicas_as_they_are_at_that_time(lab: Lab) -> None:
    """Workers that never meet: when the lead has done four iterations, a slower one has done two."""
    slow = ClusterRequest(workers=3, slow={2: 1.7}, compute_s=0.1)
    named: dict[str, Any] = {"workers": 3, "protocol": "local_sgd", "settings": {"period": 1000}}
    named["cluster"] = msgspec.to_builtins(slow, str_keys=True)
    seen = lab.trained("peers.py", "momentum", **named).of(Evaluated)[0]
    case, totals = CASES["momentum"], []
    for rank, iterations in enumerate((4, 4, 2)):
        model, optimizer = case.build()
        x, y = case.samples(48)
        for first in range(4 * rank, 4 * rank + 12 * iterations, 12):
            case.iteration(model, optimizer, x[first : first + 4], y[first : first + 4])
        totals.append(sum(float(p.detach().sum()) for p in model.parameters()))
    assert seen.values["total"] == pytest.approx(sum(totals) / 3, abs=1e-12)
    assert seen.t == pytest.approx(0.4)


# -- the unexpected ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_a_worker_that_the_cluster_kills_is_not_waited_for_and_the_run_repeats(
    lab: Lab, variant: tuple[str, dict[str, Any]]
) -> None:
    file = lab.script(
        "workers = 4\n[link]\nlatency_s = 0.01\n[compute]\nkind = 'lognormal'\nmean_s = 0.1\nspread = 0.3\n"
        "[[event]]\nat_s = 0.73\nkill = 1\n"
    )
    on = ClusterRequest(file=str(file), workers=4)
    one, other = (exactly(lab, variant, "momentum", *SIZES, on=on) for _ in range(2))
    assert one.died == {1}
    assert one.used() == once(EPOCHS, SAMPLES)
    assert_equal(one.weights, other.weights)


def test_an_interrupted_simulation_ends_and_saves_the_mean(lab: Lab) -> None:
    cluster = msgspec.to_builtins(request(), str_keys=True)
    args = ("train.py", "momentum", "--samples", 192, "--epochs", 1_000_000)
    running = lab.start(*args, workers=4, protocol="hpsgd", cluster=cluster)
    running.until_pushes(9)
    running.stop()
    run = lab.finish(running)
    assert run.result.status == "stopped"
    assert_finite(run.weights)
