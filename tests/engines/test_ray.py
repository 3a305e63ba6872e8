"""Ray as an engine: the same runs, wherever Ray has room."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from paceline.engines import ray_cluster
from paceline.trace import read_trace
from paceline.trace.events import WorkerJoined
from paceline.trace.life import owner_of
from support.command import error_lines, run_command, start_command
from support.rays import MISSING, OneNode, TwoNodes, ray_for_a_module, run_in, short_folder
from support.runs import SCRIPTS, Lab, once, wait_until
from support.stops import stop_arrived
from support.tensors import assert_equal
from support.testbed import Testbeds

SAMPLES, BATCH, EPOCHS = 240, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
SCRIPT = SCRIPTS / "train.py"
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def node() -> Iterator[OneNode]:
    """One Ray for all tests of this file."""
    with ray_for_a_module(cpus=2) as node:
        yield node


class OnRay:
    """`paceline train` on the Ray of this file."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.latest = folder / "runs" / "latest"

    def start(self, script: Path, *words: object) -> subprocess.Popen[str]:
        """Begin a run."""
        return start_command(
            "train", script, "--engine", "ray", "--address", self.address, *words, cwd=self.folder
        )

    def seen(self, kind: type[Any]) -> list[Any]:
        """Events of a kind, by now."""
        trace = self.latest / "trace.jsonl"
        there = trace.exists() and trace.stat().st_size
        return [event for event in read_trace(trace) if isinstance(event, kind)] if there else []

    def end(self, command: subprocess.Popen[str], status: int = 0) -> str:
        """Wait for the end; what it said on standard error."""
        _, errors = command.communicate(timeout=200)
        assert command.returncode == status, errors
        return errors


@pytest.fixture
def ray(node: OneNode, lab: Lab, tmp_path: Path) -> Iterator[OnRay]:
    """Afterwards no worker may be left on it."""
    yield OnRay(node.address, tmp_path)
    wait_until(lambda: not node.workers_left(), "workers on Ray are gone", 20)


def test_bsp_on_ray_equals_the_local_engine_bit_for_bit(ray: OnRay, lab: Lab) -> None:
    sizes = ("normed", *SIZES, "--shuffle")
    near = lab.trained("train.py", *sizes, workers=2, protocol="bsp", seed=5)
    ray.end(ray.start(SCRIPT, "--workers", 2, "--protocol", "bsp", "--seed", 5, "--", *sizes))
    far = run_in(ray.latest)
    assert_equal(far.weights, near.weights)
    assert far.used() == once(EPOCHS, SAMPLES)
    assert far.result.samples == near.result.samples
    assert (ray.latest / "address").read_text().startswith("127.0.0.1:")


@pytest.mark.long
def test_dssp_on_ray_keeps_its_bound_although_an_actor_is_killed_with_its_worker(
    ray: OnRay, lab: Lab
) -> None:
    flags = ("-p", "dssp", "--set", "lower=1", "--set", "upper=4", "--workers", 2)
    slow, args = ("--device-time", 0.005, "--slow", "1:3"), ("momentum", *SIZES, *lab.pause(20))
    command = ray.start(SCRIPT, *flags, *slow, "--", *args)
    lab.until_paused(2)
    [pid] = [event.pid for event in ray.seen(WorkerJoined) if event.worker == 1]
    os.kill(parent_of(pid), signal.SIGKILL)
    lab.go_on()
    errors = ray.end(command)
    run = run_in(ray.latest)
    assert run.result.max_clock_gap is not None
    assert run.result.max_clock_gap <= 4
    assert run.used() == once(EPOCHS, SAMPLES)
    assert run.died == {1}
    assert f"Rank 1 was on host {socket.gethostname()}; read runs/" in errors


def parent_of(pid: int) -> int:
    """A worker's actor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.long
def test_a_failing_script_is_reported_with_rank_host_and_log(ray: OnRay, lab: Lab) -> None:
    script = lab.script("print('so far')\n1 / 0\n")
    [error] = error_lines(ray.end(ray.start(script, "--workers", 2), status=1))
    assert "every worker failed; ZeroDivisionError: division by zero (before training began)" in error
    told = re.search(r"Rank (\d) was on host", error)
    assert told is not None, error
    log = ray.latest.resolve() / "logs" / f"rank{told[1]}.log"
    assert f"Rank {told[1]} was on host {socket.gethostname()}; read runs/{log.parts[-3]}/" in error
    assert "so far" in log.read_text()
    assert "ZeroDivisionError" in log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_on_ray_leaves_a_checkpoint_and_resume_goes_on_there(
    ray: OnRay, lab: Lab, number: signal.Signals
) -> None:
    args = ("momentum", *SIZES, *lab.pause(5))
    command = ray.start(SCRIPT, "-p", "ssp", "--", *args)
    lab.until_paused(2)
    owner = owner_of(ray.latest)
    assert owner is not None
    os.kill(command.pid, number)
    wait_until(lambda: stop_arrived(owner.pid), "the stop has been passed on")
    lab.go_on()
    [error] = error_lines(ray.end(command, status=1))
    assert "--resume" in error
    first = run_in(ray.latest.resolve())
    assert first.result.status == "stopped"
    resumed = run_command("train", SCRIPT, "--resume", first.folder, cwd=ray.folder, timeout_s=200)
    assert resumed.returncode == 0, resumed.stderr
    second = run_in(ray.latest)
    assert second.config.engine == "ray"
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)


def test_no_ray_at_an_address_is_said_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason=MISSING)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    done = run_command("train", SCRIPT, "--engine", "ray", "--address", address, cwd=tmp_path)
    assert done.returncode == 2
    assert f"no Ray at {address}: Connection refused" in error_lines(done.stderr)[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("says", "is_one"), [(b"HTTP/1.0 400 Bad Request\r\n", False), (b"", False), (ray_cluster.SETTINGS, True)]
)
def test_somebody_else_at_the_address_is_not_taken_for_ray(says: bytes, is_one: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(says)
        theirs.shutdown(socket.SHUT_WR)
        assert ray_cluster._speaks_http2(ours) is is_one


def test_without_ray_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from paceline.cli.main import main; main()"
    command = [sys.executable, "-c", code, "train", str(SCRIPT), "--engine", "ray"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert error_lines(done.stderr) == ["error: --engine ray needs Ray: pip install 'paceline[ray]'."]


@pytest.mark.long
def test_a_node_of_ray_that_is_lost_takes_its_workers_along_and_the_others_go_on(
    lab: Lab, testbeds: Testbeds, tmp_path: Path
) -> None:
    bed = testbeds("a", "b", link_mbit=1000)
    with short_folder() as folder:
        nodes = TwoNodes(bed["a"], bed["b"], folder)
        flags = ("--workers", 3, "-p", "asp", "--host-patience", 2)
        command = nodes.start(SCRIPT, *flags, "--", "momentum", *SIZES, *lab.pause(5), cwd=tmp_path)
        run = OnRay(nodes.address, tmp_path)
        lab.until_paused(3)
        bed["b"].kill()
        lab.go_on()
        errors = run.end(command)
        bed["a"].kill()
    there = run_in(run.latest)
    assert there.used() == once(EPOCHS, SAMPLES)
    assert there.died
    for rank in there.died:
        assert f"warning: Rank {rank} was on host b; read runs/" in errors


@pytest.mark.long
def test_a_store_on_two_nodes_of_ray_gives_the_weights_of_the_local_engine_over_tls_too(
    lab: Lab, testbeds: Testbeds, tmp_path: Path
) -> None:
    near = lab.trained("train.py", "normed", *SIZES, workers=4, protocol="bsp")
    bed = testbeds("a", "b", link_mbit=1000)
    with short_folder() as folder:
        nodes = TwoNodes(bed["a"], bed["b"], folder)
        flags = ("--workers", 4, "-p", "bsp", "--store-hosts", 2, "--tls", "--", "normed", *SIZES)
        result = nodes.train(SCRIPT, *flags, cwd=tmp_path)
        bed["b"].kill()
        bed["a"].kill()
    assert result.status == "finished"
    assert result.samples == SAMPLES * EPOCHS
    latest = tmp_path / "runs" / "latest"
    assert_equal(load_file(latest / "weights.safetensors"), near.weights)
    assert (latest / "address").read_text().startswith(bed["a"].address)


@pytest.mark.long
def test_a_mesh_on_ray_trains_as_on_the_local_engine(ray: OnRay, lab: Lab) -> None:
    near = lab.trained("rows.py", workers=2, mesh={"model": 2}, protocol="row_split")
    ray.end(ray.start(SCRIPTS / "rows.py", "--mesh", "model=2", "--protocol", "row_split"))
    far = run_in(ray.latest)
    assert_equal(far.weights, near.weights)
    assert far.result.mesh == {"model": 2}
    assert far.result.bytes_by_axis == near.result.bytes_by_axis
