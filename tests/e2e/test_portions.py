"""A store on several hosts: the same run as with one, whatever happens to the wires between them."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from e2e.scripts.cases import CASES
from e2e.test_peer_barriers import ALL as ASK_ALL
from e2e.test_peer_barriers import gaps
from paceline.engines.local import LocalEngine
from paceline.fabric.wire import TLS_MAGIC
from paceline.store.disk.folders import saved_in
from paceline.trace.events import Decided, Evaluated, Kept, Note, WorkerJoined, WorkerLeft
from support.runs import Lab, Run, children, once, wait_until
from support.shell import Shell
from support.spread import Spread
from support.tensors import assert_equal

SAMPLES, BATCH, EPOCHS = 160, 4, 2
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
DIALS = {"workers": 4, "here": 2, "device_time_s": 0.003, "slow": {3: 2.0}}
HELD = [
    ("hybrid_sgd", {"threshold": "constant", "first": 3, "wait": "never"}),
    ("bounded_ps", {"staleness": 3, "buffered": True, "resync": 3}),
    ("backup_bsp", {"backups": 1, "late": "apply"}),
]
"""Protocols under which a worker may run on while its gradient waits."""
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def warm_others(warm_lab: Lab) -> Iterator[list[LocalEngine]]:
    """Engines of two other hosts."""
    engines = [LocalEngine(), LocalEngine()]
    warm_lab.further.update(engine._process.pid for engine in engines)
    yield engines
    for engine in engines:
        warm_lab.further.discard(engine._process.pid)
        engine.close()


@pytest.fixture
def others(lab: Lab, warm_others: list[LocalEngine]) -> Iterator[list[LocalEngine]]:
    """The same for one test. Engines on which a test left a run are of no use to the next one."""
    yield warm_others
    unheard, _, _ = select.select([engine._channel for engine in warm_others], [], [], 0)
    if unheard or any(children(engine._process.pid) for engine in warm_others):
        for at, engine in enumerate(warm_others):
            lab.further.discard(engine._process.pid)
            engine.close()
            warm_others[at] = LocalEngine()
            lab.further.add(warm_others[at]._process.pid)


def assert_each_gradient_is_in_every_portion_once(run: Run, samples: int = SAMPLES) -> None:
    """Whole numbers add up exactly in any order: each parameter is its start minus every gradient."""
    x, _ = CASES["exact_in_parts"].samples(samples)
    pushed = sum((x[first : first + size].sum(0) for p in run.pushes for _, first, size in p.work), x[0] * 0)
    start = torch.arange(5.0, dtype=pushed.dtype)
    assert len(run.weights) == 5
    for name, tensor in run.weights.items():
        torch.testing.assert_close(tensor, start - pushed, msg=f"{name} differs")
    assert run.used() == once(EPOCHS, samples)


@pytest.mark.parametrize(
    ("case", "store_hosts", "workers"),
    [
        ("momentum", 2, (2,)),
        ("adamw", 2, (1, 1)),
        ("momentum", 3, (1, 1)),
        ("normed", 3, (2, 2)),
        ("zero_between", 3, (1, 1)),  # some parameters have no gradient
        ("wide_adamw", 3, (1, 1)),  # one parameter lies on several hosts
        ("two_types", 3, (1, 1)),
        ("frozen", 2, (1, 1)),
        ("single", 3, (1, 1)),
    ],
)
def test_bsp_with_a_spread_store_equals_bsp_on_one_host_bit_for_bit(
    lab: Lab, others: list[LocalEngine], case: str, store_hosts: int, workers: tuple[int, ...]
) -> None:
    dials = {"workers": 4, "protocol": "bsp", "seed": 5}
    args = ("train.py", case, *SIZES, "--shuffle")
    near = lab.trained(*args, **dials)
    spread = Spread(lab, others, *args, here=4 - sum(workers), store_hosts=store_hosts, **dials)
    spread.hosts(*workers)
    far = spread.finish()
    assert far.result.status == "finished", far.end.detail
    assert_equal(far.weights, near.weights)
    assert far.used() == once(EPOCHS, SAMPLES)
    assert all(ended.store_status == 0 and not any(ended.statuses.values()) for ended in spread.ended)


def test_bsp_clips_a_spread_store_as_one_host_does_bit_for_bit(lab: Lab, others: list[LocalEngine]) -> None:
    dials = {"workers": 3, "protocol": "bsp", "clip_norm": 0.05}
    args = ("train.py", "two_types", *SIZES)
    near = lab.trained(*args, **dials)
    spread = Spread(lab, others, *args, here=1, store_hosts=3, **dials)
    spread.hosts(1, 1)
    far = spread.finish()
    assert far.result.status == "finished", far.end.detail
    assert_equal(far.weights, near.weights)


@pytest.mark.parametrize(("protocol", "settings"), [("ssp", {}), *HELD])
def test_a_clipped_run_on_several_hosts_is_replayed_on_one_to_the_same_bits(
    lab: Lab, shell: Shell, others: list[LocalEngine], protocol: str, settings: dict[str, Any]
) -> None:
    """Pushes that are applied alone, and sums of which some wait in copies."""
    dials = DIALS | {"protocol": protocol, "settings": settings, "clip_norm": 0.05}
    args = ("train.py", "momentum", *SIZES)
    spread = Spread(lab, others, *args, store_hosts=3, **dials)
    spread.hosts(1, 1)
    far = spread.finish()
    assert far.result.status == "finished", far.end.detail
    (far.folder / "config.json").write_bytes(msgspec.json.encode(spread.running.config))
    again = shell("replay", far.folder, "--json")
    assert again.json["verdict"] == "the same verdicts, the same weights bit for bit", again.err


@pytest.mark.parametrize("protocol", ["asp", "ssp", "dssp"])
def test_wires_cut_again_and_again_lose_and_double_no_gradient_in_any_portion(
    lab: Lab, others: list[LocalEngine], protocol: str
) -> None:
    settings = {"staleness": 2} if protocol == "ssp" else {}
    dials = DIALS | {"protocol": protocol, "settings": settings, "weighting": "sum", "store_hosts": 3}
    spread = Spread(lab, others, "train.py", "exact_in_parts", *SIZES, *lab.pause(3), **dials)
    spread.hosts(1, 1)
    lab.until_paused(4)
    spread.cut()
    spread.cut_after(Random(protocol), 4)
    lab.go_on()
    run = spread.finish()
    assert run.result.status == "finished", run.end.detail
    assert not run.died
    assert_each_gradient_is_in_every_portion_once(run)
    assert spread.all_cut
    assert all(door.connections > 3 for door in spread.doors)
    assert protocol != "ssp" or max(push.gap for push in run.pushes) <= 2


@pytest.mark.parametrize(("protocol", "settings"), HELD)
def test_a_held_gradient_counts_once_in_every_portion_also_if_its_worker_runs_on(
    lab: Lab, others: list[LocalEngine], protocol: str, settings: dict[str, Any]
) -> None:
    dials = DIALS | {"protocol": protocol, "settings": settings, "weighting": "sum", "store_hosts": 3}
    spread = Spread(lab, others, "train.py", "exact_in_parts", *SIZES, **dials)
    spread.hosts(1, 1)
    run = spread.finish()
    assert run.result.status == "finished", run.end.detail
    assert_each_gradient_is_in_every_portion_once(run)


@pytest.mark.parametrize(("tls", "clip_norm"), [(False, 0.05), (True, None)])
def test_cut_wires_change_no_bit_of_bsp(
    lab: Lab, others: list[LocalEngine], tls: bool, clip_norm: float | None
) -> None:
    dials = {"workers": 4, "protocol": "bsp", "clip_norm": clip_norm}
    near = lab.trained("train.py", "momentum", *SIZES, **dials)
    spread = Spread(lab, others, "train.py", "momentum", *SIZES, here=2, store_hosts=3, tls=tls, **dials)
    spread.hosts(1, 1)
    spread.cut_after(Random(tls), 5)
    assert_equal(spread.finish().weights, near.weights)
    assert spread.all_cut


def test_a_holder_of_an_encrypted_run_speaks_tls_only(lab: Lab, others: list[LocalEngine]) -> None:
    dials = {"workers": 2, "here": 1, "protocol": "bsp", "store_hosts": 2, "tls": True}
    spread = Spread(lab, others, "train.py", "momentum", "--epochs", 100_000, **dials)
    spread.hosts(1)
    spread.running.until_training()
    with socket.create_connection(spread.doors[0].target) as stranger:
        assert stranger.recv(len(TLS_MAGIC), socket.MSG_WAITALL) == TLS_MAGIC
    spread.running.stop()
    assert spread.finish().result.status == "stopped"


@pytest.mark.parametrize(("protocol", "rank"), [("ssp", 0), ("ssp", 2), ("bsp", 3), ("asp", 3)])
def test_a_worker_that_is_killed_leaves_no_half_of_a_gradient(
    lab: Lab, others: list[LocalEngine], protocol: str, rank: int
) -> None:
    """Rank 0 is the coordinator's neighbour, rank 2 a holder's, rank 3 one of a host that holds nothing.

    36 batches are nine rounds of four workers, or three of them and eight of three: in lockstep with
    --weighting sum, whoever has no batch for a round counts in it.
    """
    samples = 36 * BATCH
    args = ("exact_in_parts", "--samples", samples, *SIZES[2:], *lab.pause(4))
    dials = DIALS | {"protocol": protocol, "weighting": "sum", "store_hosts": 2}
    spread = Spread(lab, others, "train.py", *args, **dials)
    spread.hosts(1, 1)
    lab.until_paused(4)
    spread.kill_worker(rank)
    lab.go_on()
    run = spread.finish()
    assert run.result.status == "finished", run.end.detail
    assert [failure.worker for failure in run.result.failures] == [rank]
    assert_each_gradient_is_in_every_portion_once(run, samples)


def test_a_host_that_holds_nothing_may_be_lost(lab: Lab, others: list[LocalEngine]) -> None:
    dials = DIALS | {"protocol": "ssp", "weighting": "sum", "store_hosts": 2}
    spread = Spread(lab, others, "train.py", "exact_in_parts", *SIZES, *lab.pause(3), **dials)
    spread.hosts(1, 1)
    lab.until_paused(4)
    spread.kill_host(1)
    lab.go_on()
    run = spread.finish()
    assert run.result.status == "finished", run.end.detail
    assert_each_gradient_is_in_every_portion_once(run)


def test_workers_keep_their_own_barriers_over_a_spread_store(lab: Lab, others: list[LocalEngine]) -> None:
    """All wait for one of the first host; a gradient counts on every copy of the clocks when all holders have
    been told to add it."""
    dials = DIALS | {"protocol": "psp", "settings": ASK_ALL, "weighting": "sum", "store_hosts": 2}
    spread = Spread(lab, others, "train.py", "exact_in_parts", *SIZES, *lab.pause(4, only=1), **dials)
    spread.hosts(1, 1)
    lab.until_paused(1)
    spread.running.until_pushes(3 + 3 * 4)
    lab.go_on()
    run = spread.finish()
    assert run.result.status == "finished", run.end.detail
    assert max(gaps(run)) == 0
    assert_each_gradient_is_in_every_portion_once(run)


@pytest.mark.long
def test_another_host_takes_the_places_of_one_that_held_nothing(lab: Lab, others: list[LocalEngine]) -> None:
    dials = DIALS | {"protocol": "ssp", "store_hosts": 2}
    spread = Spread(lab, others, "train.py", "momentum", *SIZES, *lab.pause(3), **dials)
    spread.hosts(1, 1)
    lab.until_paused(4)
    spread.kill_host(1)
    assert others[1].wait(30) is not None
    wait_until(lambda: spread.running.events(WorkerLeft) == 1, "the loss is noticed")
    spread.host(1, 1)
    wait_until(lambda: spread.running.events(WorkerJoined) == 5, "the other has come")
    lab.go_on()
    run = spread.finish()
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(EPOCHS, SAMPLES)
    assert [event.worker for event in run.of(WorkerJoined)].count(3) == 2


@pytest.mark.parametrize(("protocol", "clip_norm"), [("bsp", 0.05), ("ssp", None)])
def test_losing_a_holder_ends_the_run_and_names_it(
    lab: Lab, others: list[LocalEngine], protocol: str, clip_norm: float | None
) -> None:
    dials = DIALS | {"protocol": protocol, "store_hosts": 3, "clip_norm": clip_norm}
    spread = Spread(lab, others, "train.py", "momentum", "--epochs", 100_000, **dials)
    spread.hosts(1, 1)
    spread.running.until_pushes(8)
    spread.kill_host(1)
    run = spread.finish()
    assert run.result.status == "failed"
    held = (
        f"host {socket.gethostname()}, which held portion 3 of 3 of the weights, is gone: its relay has died"
    )
    assert held in run.end.detail
    assert not (run.folder / "weights.safetensors").exists()
    assert not (run.folder / "checkpoint").exists()


@pytest.mark.parametrize(("case", "spread_again"), [("adamw", False), ("adamw", True), ("wide_adamw", True)])
def test_a_spread_run_stopped_and_resumed_equals_one_uninterrupted_bit_for_bit(
    lab: Lab, others: list[LocalEngine], case: str, spread_again: bool
) -> None:
    """Second moments of all portions are gathered into one checkpoint, which any run may go on from."""
    dials = {"workers": 3, "protocol": "bsp", "seed": 3}
    args = ("train.py", case, *SIZES)
    pause = ("--pause", lab.root / "go on", "--before", 9)
    first = Spread(lab, others, *args, *pause, here=1, store_hosts=3, **dials)
    first.hosts(1, 1)
    lab.until_paused(3)
    first.running.stop()
    (lab.root / "go on").touch()
    stopped = first.finish()
    assert stopped.result.status == "stopped", stopped.end.detail
    resume = str(stopped.folder / "checkpoint")
    if spread_again:
        second = Spread(lab, others, *args, here=1, store_hosts=3, resume=resume, **dials)
        second.hosts(1, 1)
        run = second.finish()
    else:
        run = lab.trained(*args, resume=resume, **dials)
    assert_equal(run.weights, lab.trained(*args, **dials).weights)
    assert stopped.used() + run.used() == once(EPOCHS, SAMPLES)


def test_a_lost_portion_costs_no_more_than_what_came_after_the_last_checkpoint(
    lab: Lab, others: list[LocalEngine]
) -> None:
    dials = {"workers": 3, "protocol": "bsp", "seed": 3}
    args = ("train.py", "adamw", *SIZES)
    pause = ("--pause", lab.root / "go on", "--before", 9)
    first = Spread(lab, others, *args, *pause, here=1, store_hosts=3, checkpoint_every="3", **dials)
    first.hosts(1, 1)
    lab.until_paused(3)
    wait_until(lambda: first.running.events(Kept) > 0, "a checkpoint is on the disk")
    first.kill_host(0)
    (lab.root / "go on").touch()
    lost = first.finish()
    assert lost.result.status == "failed"
    assert "resume the last checkpoint" in lost.end.detail
    run = lab.trained(*args, resume=str(saved_in(lost.folder)), **dials)
    assert_equal(run.weights, lab.trained(*args, **dials).weights)


@pytest.mark.parametrize("protocol", ["asp", "ssp"])
def test_a_checkpoint_on_the_way_has_all_portions_at_one_version(
    lab: Lab, others: list[LocalEngine], protocol: str
) -> None:
    dials = DIALS | {"protocol": protocol, "weighting": "sum", "store_hosts": 3, "checkpoint_every": "3"}
    spread = Spread(lab, others, "train.py", "exact_in_parts", *SIZES[:4], "--epochs", 100_000, **dials)
    spread.hosts(1, 1)
    wait_until(lambda: spread.running.events(Kept) > 3, "some checkpoints are on the disk")
    spread.kill_host(1)
    run = spread.finish()
    assert run.result.status == "failed"
    folder = run.folder / "checkpoint"
    version = msgspec.json.decode((folder / "state.json").read_bytes())["version"]
    work = [part for push in run.pushes if push.version <= version for part in push.work]
    x, _ = CASES["exact_in_parts"].samples(SAMPLES)
    pushed = sum((x[first : first + size].sum(0) for _, first, size in work), x[0] * 0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, torch.arange(5.0, dtype=pushed.dtype) - pushed), name


@pytest.mark.parametrize("protocol", ["bsp", "ssp"])
def test_an_evaluation_sees_all_portions_at_one_version(
    lab: Lab, others: list[LocalEngine], protocol: str
) -> None:
    sizes = ("--samples", SAMPLES, "--epochs", EPOCHS)
    dials = DIALS | {"protocol": protocol, "weighting": "sum", "store_hosts": 3}
    spread = Spread(lab, others, "spread.py", *sizes, **dials)
    spread.hosts(1, 1)
    run = spread.finish()
    assert run.result.status == "finished", run.end.detail
    assert [event.values["apart"] for event in run.of(Evaluated)] == [0.0] * EPOCHS
    assert_each_gradient_is_in_every_portion_once(run)


def applied(run: Run) -> Iterator[tuple[int, int, int]]:
    """The work behind gradients that are in the weights: applied alone, or held and flushed."""
    held: list[tuple[int, int, int]] = []
    for event in run.trace:
        match event:
            case Decided(fate="apply"):
                yield from event.work
            case Decided(fate="hold"):
                held += event.work
            case WorkerLeft(reason="stopped"):  # what is decided from now on is carried out no more
                return
        if isinstance(event, Decided) and event.flush is not None:
            yield from held
            held = []


@pytest.mark.parametrize(
    ("what", "protocol", "rank", "parameter"),
    [("stop", "asp", 1, 4), ("stop", "bsp", 2, 2), ("skip", "asp", 3, 0), ("skip", "bsp", 1, 4)],
)
def test_a_gradient_that_is_not_finite_in_one_portion_is_applied_in_none(
    lab: Lab, others: list[LocalEngine], what: str, protocol: str, rank: int, parameter: int
) -> None:
    """The five parameters are two of the coordinator's and of each other host's, and one in between."""
    args = ("--samples", SAMPLES, "--epochs", EPOCHS, "--bad", rank, "--bad-parameter", parameter)
    dials = DIALS | {"protocol": protocol, "weighting": "sum", "store_hosts": 3, "bad_gradient": what}
    spread = Spread(lab, others, "spread.py", *args, **dials)
    spread.hosts(1, 1)
    run = spread.finish()
    x, _ = CASES["exact_in_parts"].samples(SAMPLES)
    total = sum((x[first : first + size].sum(0) for _, first, size in applied(run)), x[0] * 0)
    for tensor in run.weights.values():
        torch.testing.assert_close(tensor, torch.arange(5.0, dtype=total.dtype) - total)
    assert all((push.fate == "skip") == (push.pushed == rank) for push in run.pushes)
    if what == "stop":
        assert f"rank {rank} pushed a gradient with NaN or infinity in 'parts.{parameter}'" in run.end.detail
    else:
        assert run.result.status == "finished", run.end.detail


def test_more_hosts_than_came_or_than_the_model_is_large_enough_for_are_refused(
    lab: Lab, others: list[LocalEngine]
) -> None:
    for wanted, text in ((3, "workers are on 2"), (2, "what is trained is enough for 1 only")):
        case = "momentum" if wanted == 3 else "exact"
        spread = Spread(
            lab, others, "train.py", case, *SIZES, here=1, workers=2, protocol="ssp", store_hosts=wanted
        )
        spread.hosts(1)
        run = spread.finish()
        assert run.end.user_mistake
        assert text in run.end.detail


def test_a_peer_protocol_has_no_store_to_spread(lab: Lab, others: list[LocalEngine]) -> None:
    dials = {"here": 1, "workers": 2, "protocol": "local_sgd", "store_hosts": 2}
    spread = Spread(lab, others, "train.py", "momentum", *SIZES, **dials)
    spread.hosts(1)
    run = spread.finish()
    assert run.end.user_mistake
    assert "has no store to lie on several hosts" in run.end.detail


@pytest.mark.parametrize(
    ("dials", "text"),
    [
        ({"protocol": "bsp"}, "; --store-hosts 3 shares it"),
        (
            {"protocol": "allreduce"},
            "; --protocol bsp --store-hosts 3 shares it among the links of all hosts with",
        ),
        ({"protocol": "bsp", "store_hosts": 3}, None),
        ({"protocol": "local_sgd"}, None),
    ],
    ids=["bsp", "allreduce", "shared", "local_sgd"],
)
def test_a_run_on_three_hosts_says_that_one_link_carries_all_and_what_shares_it(
    lab: Lab, others: list[LocalEngine], dials: dict[str, Any], text: str | None
) -> None:
    spread = Spread(lab, others, "train.py", "momentum", *SIZES, here=1, workers=3, **dials)
    spread.hosts(1, 1)
    run = spread.finish()
    assert run.result.status == "finished", run.end.detail
    told = [note.text for note in run.of(Note) if "the link of one of the 3 hosts" in note.text]
    assert [text in each for each in told] == ([] if text is None else [True])
