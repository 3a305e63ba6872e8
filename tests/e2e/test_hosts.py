"""Workers on two hosts: the same run, whatever happens to the wire between them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from e2e.test_peer_barriers import ALL as ASK_ALL
from e2e.test_peer_barriers import EVALUATES, gaps
from paceline.engines.hosting import enrol
from paceline.engines.local import LocalEngine
from paceline.errors import ConfigError
from paceline.fabric.session import HEARTBEAT_S
from paceline.protocols import PACED
from paceline.trace.events import Evaluated, Passed, WorkerJoined, WorkerLeft
from support.command import run_command
from support.hosts import SECRET, Apart
from support.runs import Lab, once, wait_until
from support.tensors import assert_equal

SAMPLES, BATCH, EPOCHS = 240, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
DIALS = {"workers": 4, "device_time_s": 0.003, "slow": {3: 2.0}}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def elsewhere(warm_lab: Lab) -> Iterator[LocalEngine]:
    """The second host's engine."""
    engine = LocalEngine()
    warm_lab.further.add(engine._process.pid)
    yield engine
    warm_lab.further.discard(engine._process.pid)
    engine.close()


@pytest.mark.parametrize(("here", "tls"), [(0, False), (2, False), (2, True)])
def test_bsp_over_two_hosts_equals_bsp_on_one_bit_for_bit(
    lab: Lab, elsewhere: LocalEngine, here: int, tls: bool
) -> None:
    dials = {"workers": 4, "protocol": "bsp", "seed": 5}
    near = lab.trained("train.py", "normed", *SIZES, "--shuffle", **dials)
    apart = Apart(lab, elsewhere, "train.py", "normed", *SIZES, "--shuffle", here=here, tls=tls, **dials)
    apart.host(4 - here)
    far = apart.finish()
    assert far.result.status == "finished", far.end.detail
    assert_equal(far.weights, near.weights)
    assert far.used() == once(EPOCHS, SAMPLES)


@pytest.mark.parametrize("protocol", sorted(PACED))
def test_a_wire_cut_again_and_again_loses_and_doubles_nothing(
    lab: Lab, elsewhere: LocalEngine, protocol: str
) -> None:
    random = Random(protocol)
    apart = Apart(lab, elsewhere, "train.py", "momentum", *SIZES, here=2, protocol=protocol, **DIALS)
    apart.host(2)
    apart.wire.cut_after(random.randrange(4000) for _ in range(6))
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(EPOCHS, SAMPLES)
    assert not run.died
    assert apart.wire.all_cut
    assert apart.wire.connections > 2


@pytest.mark.parametrize("tls", [False, True])
def test_a_cut_wire_changes_no_bit_of_bsp(lab: Lab, elsewhere: LocalEngine, tls: bool) -> None:
    dials = {"workers": 4, "protocol": "bsp"}
    near = lab.trained("train.py", "momentum", *SIZES, **dials)
    apart = Apart(lab, elsewhere, "train.py", "momentum", *SIZES, here=2, tls=tls, **dials)
    apart.host(2)
    random = Random(tls)
    apart.wire.cut_after(random.randrange(4000) for _ in range(20))
    assert_equal(apart.finish().weights, near.weights)
    assert apart.wire.all_cut


@pytest.mark.parametrize("protocol", ["bsp", "ssp", "dssp", "asp"])
def test_a_worker_killed_on_another_host_is_named_and_the_others_do_its_work(
    lab: Lab, elsewhere: LocalEngine, protocol: str
) -> None:
    apart = Apart(
        lab, elsewhere, "train.py", "momentum", *SIZES, *lab.pause(3), here=2, protocol=protocol, **DIALS
    )
    apart.host(2)
    lab.until_paused(4)
    apart.kill(3)
    lab.go_on()
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(EPOCHS, SAMPLES)
    assert [failure.worker for failure in run.result.failures] == [3]
    assert "on host" in run.result.failures[0].detail


def test_a_worker_stuck_on_another_host_is_dropped_and_ended_there(lab: Lab, elsewhere: LocalEngine) -> None:
    dials = DIALS | {"protocol": "bsp", "stuck_after": "1s:drop"}
    apart = Apart(lab, elsewhere, "train.py", "momentum", *SIZES, *lab.pause(3, 3, only=3), here=2, **dials)
    apart.host(2)
    lab.until_paused(1)
    with contextlib.suppress(ProcessLookupError):  # who is long at its pause is stuck as well
        os.kill(apart.pids[3], signal.SIGSTOP)
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(EPOCHS, SAMPLES)
    assert run.died == {3}
    assert "(--stuck-after 1s:drop)" in run.result.failures[0].detail
    assert apart.statuses[3] == -signal.SIGKILL


def test_who_asks_all_on_both_hosts_is_never_further_ahead_than_the_staleness(
    lab: Lab, elsewhere: LocalEngine
) -> None:
    """Every worker keeps a barrier of its own, by its host's copy of the clocks; all wait for one there."""
    dials = DIALS | {"protocol": "psp", "settings": ASK_ALL | {"staleness": 2}}
    apart = Apart(lab, elsewhere, "train.py", "momentum", *SIZES, *lab.pause(1, only=3), here=2, **dials)
    apart.host(2)
    random = Random(1)
    apart.wire.cut_after(random.randrange(4000) for _ in range(3))
    lab.until_paused(1)
    apart.running.until_pushes(3 * (1 + 2))
    lab.go_on()
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert max(gaps(run)) == 2 == run.result.max_clock_gap, "more than promised, or nobody came as far"
    assert run.used() == once(EPOCHS, SAMPLES)
    assert run.result.barrier_questions == sum(event.asked for event in run.of(Passed))
    assert apart.wire.all_cut


def test_a_far_worker_that_all_wait_for_at_their_own_barriers_may_be_killed(
    lab: Lab, elsewhere: LocalEngine
) -> None:
    dials = DIALS | {"protocol": "psp", "settings": ASK_ALL, "slow": {3: 6000.0}}
    apart = Apart(lab, elsewhere, "train.py", "momentum", *SIZES, here=2, **dials)
    apart.host(2)
    apart.running.until_pushes(3)
    apart.kill(3)
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert run.died == {3}
    assert run.used() == once(EPOCHS, SAMPLES)


def test_who_evaluates_on_another_host_is_not_waited_for_and_comes_back_at_the_slowest_clock(
    lab: Lab, elsewhere: LocalEngine
) -> None:
    dials = {"workers": 3, "protocol": "psp", "settings": ASK_ALL | {"sample": 2}, "slow": {2: 2.0}}
    apart = Apart(lab, elsewhere, lab.script(EVALUATES), here=0, device_time_s=0.002, **dials)
    apart.host(3)
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert len(run.of(Evaluated)) == 3
    assert run.result.max_clock_gap == 0
    assert run.used() == once(3, 48)


def test_a_host_that_is_killed_takes_its_workers_along_and_the_run_goes_on(
    lab: Lab, elsewhere: LocalEngine
) -> None:
    apart = Apart(
        lab, elsewhere, "train.py", "momentum", *SIZES, *lab.pause(3), here=2, protocol="ssp", **DIALS
    )
    apart.host(2)
    lab.until_paused(4)
    apart.kill_host()
    lab.go_on()
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(EPOCHS, SAMPLES)
    assert {failure.worker for failure in run.result.failures} == {2, 3}


@pytest.mark.long
def test_a_second_host_takes_the_places_of_one_that_was_killed(lab: Lab, elsewhere: LocalEngine) -> None:
    args = ("momentum", *SIZES, *lab.pause(3))
    apart = Apart(lab, elsewhere, "train.py", *args, here=2, protocol="ssp", **DIALS)
    apart.host(2)
    lab.until_paused(4)
    apart.kill_host()
    assert elsewhere.wait(30) is not None
    wait_until(lambda: apart.running.events(WorkerLeft) == 2, "the loss is noticed")
    apart.host(2)
    wait_until(lambda: apart.running.events(WorkerJoined) == 6, "the others have come")
    lab.go_on()
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(EPOCHS, SAMPLES)
    joined = [event.worker for event in run.of(WorkerJoined)]
    assert joined.count(2) == joined.count(3) == 2


def test_more_workers_than_places_are_refused_and_the_run_goes_on(lab: Lab, elsewhere: LocalEngine) -> None:
    apart = Apart(lab, elsewhere, "train.py", "momentum", *SIZES, here=2, protocol="ssp", **DIALS)
    with pytest.raises(ConfigError, match=r"3 workers would like to join.* 2 are free"):
        enrol("{}:{}".format(*apart.address), SECRET, 3, lab.root, 5)
    with pytest.raises(ConfigError, match="secret is wrong"):
        enrol("{}:{}".format(*apart.address), SECRET + "!", 2, lab.root, 5)
    apart.host(2)
    assert apart.finish().result.status == "finished"


def test_who_does_not_encrypt_is_refused_and_the_run_goes_on(lab: Lab, elsewhere: LocalEngine) -> None:
    apart = Apart(lab, elsewhere, "train.py", "momentum", *SIZES, here=2, protocol="ssp", tls=True, **DIALS)
    with pytest.raises(ConfigError, match="speaks TLS only"):
        enrol("{}:{}".format(*apart.address), SECRET, 2, lab.root, 5)
    apart.host(2)
    assert apart.finish().result.status == "finished"


def test_stopping_the_run_stops_the_other_host_and_leaves_a_checkpoint(
    lab: Lab, elsewhere: LocalEngine
) -> None:
    apart = Apart(
        lab, elsewhere, "train.py", "momentum", "--epochs", 100_000, here=1, protocol="ssp", workers=2
    )
    apart.host(1)
    apart.running.until_pushes(8)
    apart.running.stop()
    run = apart.finish()
    assert run.result.status == "stopped"
    assert (run.folder / "checkpoint").is_dir()
    assert apart.statuses == {1: 0}


def test_who_has_left_may_write_to_its_model_though_nobody_hands_it_over(
    lab: Lab, elsewhere: LocalEngine
) -> None:
    """In lockstep it had read the weights that the others still read."""
    script = lab.script(
        "import torch, paceline\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "pace = paceline.join()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)\n"
        "model, optimizer, loader = pace.prepare(model, optimizer, loader)\n"
        "for (x,) in loader:\n"
        "    model(x).square().mean().backward()\n"
        "    optimizer.step()\n"
        "pace.leave()\n"
        "model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})\n"
    )
    apart = Apart(lab, elsewhere, script, here=1, workers=2, protocol="bsp")
    apart.host(1)
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert set(run.ended.statuses.values()) == {0}
    assert set(apart.statuses.values()) == {0}


@pytest.mark.parametrize("protocol", ["bsp", "local_sgd"])
def test_a_relay_that_dies_is_known_at_once_though_its_connection_was_reset(
    lab: Lab, elsewhere: LocalEngine, protocol: str
) -> None:
    """A relay that dies with something unread resets its connection. Nobody waits for the host's patience,
    which would outlast the test."""
    dials = DIALS | {"protocol": protocol, "host_patience_s": 500.0}
    apart = Apart(lab, elsewhere, "train.py", "momentum", *SIZES, *lab.pause(3), here=2, **dials)
    apart.wire.address = apart.address  # a wire would pass a reset on as an end in good order
    apart.host(2)
    lab.until_paused(4)
    os.kill(apart.relay_pid, signal.SIGSTOP)
    time.sleep(1.5 * HEARTBEAT_S)
    os.kill(apart.relay_pid, signal.SIGKILL)
    lab.go_on()
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert {failure.worker for failure in run.result.failures} == {2, 3}
    assert "is gone: its relay has died" in run.result.failures[0].detail


def test_a_host_that_comes_early_waits_for_a_place_and_who_left_in_good_order_finds_one_again(
    lab: Lab, elsewhere: LocalEngine
) -> None:
    asked = ("train.py", "momentum", "--epochs", 100_000)
    apart = Apart(lab, elsewhere, *asked, here=1, protocol="asp", workers=2)
    apart.host(1)
    apart.running.until_pushes(8)
    told: list[str] = []
    with pytest.raises(ConfigError, match=r"0 are free.* has waited for 0.5 s"):
        enrol("{}:{}".format(*apart.address), SECRET, 1, lab.root / "early", 0.5, put_off=told.append)
    assert "1 workers would like to join" in told[0]

    def leave(_: str) -> None:
        if not left:
            left.append(True)
            elsewhere.stop()

    left: list[bool] = []
    _, guest = enrol("{}:{}".format(*apart.address), SECRET, 1, lab.root / "early", 60, put_off=leave)
    assert guest.ranks == (1,)
    assert elsewhere.wait(30) is not None
    elsewhere.launch(apart.config, SECRET, guest)
    wait_until(lambda: apart.running.events(WorkerJoined) == 3, "it has come again")
    apart.running.stop()
    run = apart.finish()
    assert run.result.failures == []
    first = run.of(WorkerLeft)[0]
    assert (first.worker, first.reason) == (1, "finished")


def test_a_host_without_the_script_gives_its_places_back(
    lab: Lab, elsewhere: LocalEngine, tmp_path: Path
) -> None:
    apart = Apart(lab, elsewhere, "train.py", "momentum", *SIZES, here=1, protocol="ssp", workers=2)
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    named = ("--script", "nowhere.py", "--secret-file", secret)
    refused = run_command("host", "{}:{}".format(*apart.address), *named, cwd=tmp_path)
    assert (refused.returncode, "no script at nowhere.py" in refused.stderr) == (2, True)
    apart.host(1)
    assert apart.finish().result.status == "finished"
