"""Peers on two hosts: the same numbers as on one, whatever happens to the wire between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.engines.local import LocalEngine
from paceline.errors import ConfigError
from paceline.protocols.settings import make_peer
from paceline.trace.events import Evaluated, Exchanged, Note, Reported, WorkerLeft
from support.hosts import Apart
from support.runs import Lab, Run, once, wait_until
from support.tensors import assert_equal, assert_finite
from support.tight import TIGHT, every_peer, every_repeating

SAMPLES, BATCH, EPOCHS = 50, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def spare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second host's folder for what is not to last."""
    return tmp_path_factory.mktemp("spare")


@pytest.fixture(scope="module")
def elsewhere(warm_lab: Lab, spare: Path) -> Iterator[LocalEngine]:
    """The second host's engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(spare))
        engine = LocalEngine()
    warm_lab.further.add(engine._process.pid)
    yield engine
    warm_lab.further.discard(engine._process.pid)
    engine.close()


def last_seen(run: Run) -> dict[str, float]:
    """What was evaluated last, when all had done their last iteration: before, it depends on who is fast."""
    values: dict[str, float] = run.of(Evaluated)[-1].values
    return values


LONGER = ("--samples", 240, "--batch", 4, "--epochs", 3)


def slowly(protocol: str) -> dict[str, Any]:
    """Four workers, the last one slow, and time to disturb them."""
    settings = TIGHT.get(protocol, {})
    return {
        "workers": 4,
        "protocol": protocol,
        "settings": settings,
        "device_time_s": 0.003,
        "slow": {3: 2.0},
    }


def trained(apart: Apart) -> Run:
    """Wait for a run that has to finish."""
    run = apart.finish()
    assert run.result.status == "finished", f"{run.end.detail}\n{run.logs()}"
    return run


@every_repeating
@pytest.mark.parametrize("here", [0, 2])
def test_two_hosts_arrive_where_one_does_bit_for_bit(
    lab: Lab, elsewhere: LocalEngine, protocol: str, here: int
) -> None:
    """Dropout, BatchNorm and a shuffled loader included; no round has to be full."""
    args = ("train.py", "noisy", *SIZES, "--shuffle")
    dials: dict[str, Any] = {
        "workers": 4,
        "protocol": protocol,
        "settings": TIGHT.get(protocol, {}),
        "seed": 7,
    }
    near = lab.trained(*args, **dials, private_weights=True)
    apart = Apart(lab, elsewhere, *args, here=here, **dials)
    apart.host(4 - here)
    far = trained(apart)
    assert_equal(far.weights, near.weights)
    assert far.used() == once(EPOCHS, SAMPLES)


SLIM = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join()
torch.set_num_threads(1)  # gradients have other bits with more, and a lone worker of a host has
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 120), torch.nn.BatchNorm1d(120), torch.nn.Linear(120, 40))
x, y = torch.randn(58, 40), torch.randint(40, (58,))
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(2):
    for x, y in loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
WAYS = ["topk:0.05", "int8", "powersgd:2", "fp16", "bf16"]
COMPRESSED = [
    (protocol, way)
    for protocol in ("allreduce", "dpsgd", "ds_sync", "easgd", "hpsgd", "osp", "selsync")
    for way in (WAYS[3:] if protocol in ("dpsgd", "ds_sync") else WAYS)
    if (protocol, way) != ("osp", "powersgd:2")
]


@pytest.mark.parametrize(("protocol", "way"), COMPRESSED)
@pytest.mark.parametrize("here", [1, 2, 0])
def test_compressed_two_hosts_arrive_where_one_does_bit_for_bit_with_the_bytes_that_are_told(
    lab: Lab, elsewhere: LocalEngine, protocol: str, way: str, here: int
) -> None:
    """Also what a host adds up itself of what the other sends; the last round is not full."""
    settings = TIGHT.get(protocol, {})
    dials: dict[str, Any] = {"workers": 3, "protocol": protocol, "settings": settings, "compress": way}
    script = lab.script(SLIM)
    near = lab.trained(script, **dials)
    apart = Apart(lab, elsewhere, script, here=here, **dials)
    apart.host(3 - here)
    far = trained(apart)
    assert_equal(far.weights, near.weights)
    model = sum(each.numel() * each.element_size() for each in far.weights.values())
    sent = sum(far.result.bytes_sent_each[here:])
    replicas = 2 * (3 - here) * model  # with what stands for them, when their workers leave
    assert sent < apart.wire.there_bytes < 1.1 * sent + replicas + model
    got = far.result.bytes_received / 3 * (3 - here if protocol == "dpsgd" else 1)
    assert apart.wire.back_bytes < 1.1 * got + 2 * model, "a mixture is one worker's, an average one host's"
    assert any(f"--compress {way}: vectors travel compressed" in note.text for note in far.of(Note))


WIDE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 5000), torch.nn.Linear(5000, 3))
x, y = torch.randn(64, 6), torch.randint(3, (64,))
loader = DataLoader(TensorDataset(x, y), batch_size=4)
model, optimizer, loader = pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
for _ in pace.epochs(2):
    for x, y in loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


# -- the wire ---------------------------------------------------------------------------------------


@every_peer
def test_a_wire_cut_again_and_again_loses_and_doubles_nothing(
    lab: Lab, elsewhere: LocalEngine, protocol: str
) -> None:
    random = Random(protocol)
    apart = Apart(lab, elsewhere, "train.py", "momentum", *LONGER, here=2, **slowly(protocol))
    apart.host(2)
    apart.wire.cut_after(random.randrange(4000) for _ in range(6))
    run = trained(apart)
    assert run.used() == once(3, 240)
    assert not run.died
    assert apart.wire.all_cut
    assert apart.wire.connections > 2


@pytest.mark.parametrize(
    ("protocol", "way"),
    [
        *((protocol, "none") for protocol in ("allreduce", "dpsgd", "hpsgd", "local_sgd", "osp", "selsync")),
        *(("allreduce", "int8"), ("osp", "int8"), ("hpsgd", "topk:0.05"), ("selsync", "powersgd:2")),
        *(("dpsgd", "bf16"), ("local_sgd", "fp16")),
    ],
)
def test_a_cut_wire_changes_no_bit(lab: Lab, elsewhere: LocalEngine, protocol: str, way: str) -> None:
    """Whatever was on its way: vectors, answers, answers to what was started, replicas to be evaluated."""
    args = ("peers.py", "momentum", "--evaluate", "lead")
    settings = TIGHT.get(protocol, {})
    dials: dict[str, Any] = {"workers": 4, "protocol": protocol, "settings": settings, "compress": way}
    near = lab.trained(*args, **dials, private_weights=True)
    apart = Apart(lab, elsewhere, *args, here=2, **dials)
    apart.host(2)
    random = Random(f"{protocol}/{way}")
    apart.wire.cut_after(random.randrange(4000) for _ in range(20))
    far = trained(apart)
    assert apart.wire.all_cut
    assert_equal(far.weights, near.weights)


def test_a_vote_moves_no_vector_and_an_answer_for_all_one_per_host(lab: Lab, elsewhere: LocalEngine) -> None:
    """Three workers there. What a run costs that only votes after its first step, and what averages add."""
    moved = {}
    for name, delta in {"votes": 1e9, "averages": 0.0}.items():
        settings = {"window": 1, "delta": delta}
        dials: dict[str, Any] = {"workers": 4, "protocol": "selsync", "settings": settings}
        apart = Apart(lab, elsewhere, lab.script(WIDE), here=1, **dials)
        apart.host(3)
        run = trained(apart)
        sizes = [event.bytes for event in run.of(Exchanged) if event.operation == "average"]
        moved[name] = apart.wire.there_bytes, apart.wire.back_bytes, sum(sizes)
    there, back, averaged = (
        more - less for less, more in zip(moved["votes"], moved["averages"], strict=True)
    )
    assert averaged > 1e6
    assert there == pytest.approx(3 * averaged, rel=0.1)
    assert back == pytest.approx(averaged, rel=0.1)


# -- evaluation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("here", [0, 2])
@every_repeating
def test_the_mean_of_all_replicas_is_evaluated_wherever_they_and_the_lead_are(
    lab: Lab, elsewhere: LocalEngine, protocol: str, here: int
) -> None:
    args = ("peers.py", "normed", "--evaluate", "all")
    dials: dict[str, Any] = {"workers": 4, "protocol": protocol, "settings": TIGHT.get(protocol, {})}
    near = lab.trained(*args, **dials, private_weights=True)
    apart = Apart(lab, elsewhere, *args, here=here, **dials)
    apart.host(4 - here)
    far = trained(apart)
    assert len(far.of(Evaluated)) == 3
    if not make_peer(protocol, {}).settles:  # where they do, some have and some have not
        assert last_seen(far) == last_seen(near)
    assert_equal(far.weights, near.weights)


@pytest.mark.parametrize("who", [(0,), (2,), (1, 3)])
def test_any_rank_of_any_host_may_ask_how_far_apart_all_are(
    lab: Lab, elsewhere: LocalEngine, who: tuple[int, ...]
) -> None:
    # all agree in every iteration, so nobody is ahead when somebody asks; and they never synchronise
    dials: dict[str, Any] = {"workers": 4, "protocol": "selsync", "settings": {"delta": 1e9, "window": 1}}
    args = ("momentum", "--ask", *who)
    near = lab.trained("apart.py", *args, **dials)
    apart = Apart(lab, elsewhere, "apart.py", *args, here=2, **dials)
    apart.host(2)
    told, expected = (run.of(Reported)[-1].values["consensus_distance"] for run in (trained(apart), near))
    assert told == expected > 0


# -- trouble ----------------------------------------------------------------------------------------


@every_peer
def test_a_worker_killed_on_another_host_is_named_and_the_others_do_its_work(
    lab: Lab, elsewhere: LocalEngine, protocol: str
) -> None:
    args = ("momentum", *LONGER, *lab.pause(3))
    apart = Apart(lab, elsewhere, "train.py", *args, here=2, **slowly(protocol))
    apart.host(2)
    lab.until_paused(4)
    apart.kill(3)
    lab.go_on()
    run = trained(apart)
    assert run.used() == once(3, 240)
    assert [failure.worker for failure in run.result.failures] == [3]
    assert "on host" in run.result.failures[0].detail
    assert_finite(run.weights)


@every_peer
def test_a_host_that_is_killed_takes_its_workers_along_and_the_others_go_on(
    lab: Lab, elsewhere: LocalEngine, protocol: str
) -> None:
    args = ("momentum", *LONGER, *lab.pause(3))
    apart = Apart(lab, elsewhere, "train.py", *args, here=2, **slowly(protocol))
    apart.host(2)
    lab.until_paused(4)
    apart.kill_host()
    lab.go_on()
    run = trained(apart)
    assert run.used() == once(3, 240)
    assert {failure.worker for failure in run.result.failures} == {2, 3}


def test_on_failure_stop_ends_the_run_with_rank_and_host_named(lab: Lab, elsewhere: LocalEngine) -> None:
    dials = slowly("local_sgd") | {"on_failure": "stop"}
    apart = Apart(lab, elsewhere, "train.py", "momentum", "--epochs", 100_000, here=2, **dials)
    apart.host(2)
    apart.running.until_pushes(8)
    apart.kill(3)
    run = apart.finish()
    assert run.result.status == "failed"
    assert "rank 3 died" in run.end.detail
    assert "on host" in run.end.detail


def test_a_gradient_that_is_not_finite_is_named_wherever_it_comes_from(
    lab: Lab, elsewhere: LocalEngine
) -> None:
    apart = Apart(lab, elsewhere, "peers.py", "momentum", "--bad", 1, here=1, workers=2, protocol="allreduce")
    apart.host(1)
    run = apart.finish()
    assert run.result.status == "failed"
    assert "rank 1" in run.end.detail
    assert "'0.weight'" in run.end.detail


@pytest.mark.long
def test_peers_that_have_begun_take_no_second_host_in_and_go_on(lab: Lab, elsewhere: LocalEngine) -> None:
    args = ("momentum", *LONGER, *lab.pause(3))
    apart = Apart(lab, elsewhere, "train.py", *args, here=2, **slowly("local_sgd"))
    apart.host(2)
    lab.until_paused(4)
    apart.kill_host()
    assert elsewhere.wait(30) is not None
    wait_until(lambda: apart.running.events(WorkerLeft) == 2, "the loss is noticed")
    with pytest.raises(ConfigError, match="cannot take in new workers"):
        apart.host(2)
    lab.go_on()
    run = lab.finish(apart.running)
    apart.wire.close()
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(3, 240)


@pytest.mark.parametrize("here", [0, 2])
@pytest.mark.parametrize("protocol", ["allreduce", "diloco", "dpsgd", "easgd", "local_sgd", "selsync"])
def test_stopped_and_resumed_over_two_hosts_it_equals_the_uninterrupted_run_bit_for_bit(
    lab: Lab, elsewhere: LocalEngine, spare: Path, protocol: str, here: int
) -> None:
    """Workers elsewhere keep what they go on from in the run's folder, and nothing where they were."""
    settings = TIGHT.get(protocol, {})
    dials: dict[str, Any] = {"workers": 4, "protocol": protocol, "settings": settings, "seed": 3}
    args = ("train.py", "noisy", *SIZES, "--shuffle")
    pause = ("--pause", lab.root / "go on", "--before", 3)
    apart = Apart(lab, elsewhere, *args, *pause, here=here, **dials)
    apart.host(4 - here)
    lab.until_paused(4)
    apart.running.stop()
    (lab.root / "go on").touch()
    first = apart.finish()
    assert first.result.status == "stopped", f"{first.end}\n{first.logs()}"
    assert not list(spare.glob("paceline-*"))
    again = Apart(lab, elsewhere, *args, here=here, resume=str(first.folder / "checkpoint"), **dials)
    again.host(4 - here)
    second = trained(again)
    whole = lab.trained(*args, **dials, private_weights=True)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)
    assert_equal(second.weights, whole.weights)


def test_where_nobody_waits_a_stopped_run_saves_the_mean_of_all_hosts(
    lab: Lab, elsewhere: LocalEngine
) -> None:
    dials = {"workers": 2, "protocol": "ad_psgd", "device_time_s": 0.003}
    apart = Apart(lab, elsewhere, "train.py", "momentum", "--epochs", 100_000, here=1, **dials)
    apart.host(1)
    apart.running.until_pushes(8)
    apart.running.stop()
    run = apart.finish()
    assert run.result.status == "stopped"
    assert apart.statuses == {1: 0}
    assert not list(run.folder.glob("checkpoint*"))
    assert_finite(run.weights)


def test_without_a_lock_a_worker_elsewhere_is_sent_the_centre_and_sends_it_back(
    lab: Lab, elsewhere: LocalEngine
) -> None:
    """A replay on one host, where nothing travels, comes to the same bits."""
    settings = {"mode": "asynchronous", "period": 1, "lock": False}
    args, dials = ("train.py", "momentum", *SIZES), {"workers": 2, "protocol": "easgd", "settings": settings}
    apart = Apart(lab, elsewhere, *args, here=1, **dials)
    apart.host(1)
    far = trained(apart)
    moved = {(event.bytes > 0, event.answer_bytes != 0) for event in far.of(Exchanged)}
    assert moved == {(False, True), (True, False)}
    assert_equal(lab.trained(*args, **dials, replay=str(far.folder)).weights, far.weights)


def test_gloo_is_refused_between_hosts_with_the_reason(lab: Lab, elsewhere: LocalEngine) -> None:
    dials = {"workers": 2, "protocol": "local_sgd", "fabric": "gloo"}
    apart = Apart(lab, elsewhere, "train.py", "momentum", *SIZES, here=1, **dials)
    apart.host(1)
    run = apart.finish()
    assert run.end.user_mistake
    assert "workers of other hosts take part" in run.end.detail
    assert "--fabric shared" in run.end.detail
