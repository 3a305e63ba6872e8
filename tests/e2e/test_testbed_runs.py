"""Runs over real hosts: links that are cut, hosts that are killed, torchrun on both."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from paceline.testbed import BedHost, Testbed
from paceline.trace import read_trace
from paceline.trace.events import Decided, WorkerJoined, WorkerLeft
from paceline.trace.tally import Result
from support.runs import SCRIPTS, Lab, once, wait_until
from support.tensors import assert_close, assert_equal
from support.testbed import Testbeds

SECRET = "the secret of a run on a testbed"
PORT = 29600
SAMPLES, BATCH, EPOCHS = 400, 4, 2
SIZES = ("--samples", str(SAMPLES), "--batch", str(BATCH), "--epochs", str(EPOCHS))
ONE_EACH = ("--workers", "2", "--here", "1")
pytestmark = pytest.mark.timeout(180)


class Hosts:
    """Commands on the hosts of a testbed, with one folder each for their runs."""

    def __init__(self, bed: Testbed, root: Path) -> None:
        self.bed, self.root = bed, root
        self.processes: list[subprocess.Popen[str]] = []
        self.pause = ("--pause", str(root / "go on"), "--before", "5")

    def until_paused(self) -> None:
        """Wait until both workers wait before an iteration."""
        wait_until(lambda: len(list(self.root.glob("go on.*"))) == 2, "the run goes on", 90)

    def go_on(self) -> None:
        """Let them."""
        (self.root / "go on").touch()

    def start(self, host: str, *command: str, **more: str) -> subprocess.Popen[str]:
        """A command on a host; what it prints ends up in a file beside the runs."""
        folder = self.root / host
        folder.mkdir(exist_ok=True)
        env = os.environ | {"PACELINE_SECRET": SECRET} | more
        with open(folder / "out.txt", "a") as out:
            process = self.bed[host].popen(
                list(command), stdout=out, stderr=out, text=True, env=env, cwd=folder
            )
        self.processes.append(process)
        return process

    def train(self, host: str, *flags: str) -> subprocess.Popen[str]:
        """A run that listens."""
        address = f"{self.bed[host].address}:{PORT}"
        script = ("train", str(SCRIPTS / "train.py"), "--listen", address, *flags)
        return self.start(
            host, sys.executable, "-m", "paceline", *script, "--", "momentum", *SIZES, *self.pause
        )

    def join(self, host: str, first: str, workers: int) -> subprocess.Popen[str]:
        """Workers for it."""
        address = f"{self.bed[first].address}:{PORT}"
        return self.start(host, sys.executable, "-m", "paceline", "host", address, "-n", str(workers))

    def folder(self, host: str) -> Path:
        """The one run of a host."""
        return next((self.root / host / "runs").glob("*-*"))

    def events(self, host: str, kind: type) -> int:
        """How many events of a kind its trace has by now."""
        runs = self.root / host / "runs"
        traces = list(runs.glob("*-*/trace.jsonl")) if runs.is_dir() else []
        if not traces or not traces[0].stat().st_size:
            return 0
        return sum(isinstance(event, kind) for event in read_trace(traces[0]))

    def result(self, host: str) -> Result:
        """How it ended."""
        return msgspec.json.decode((self.folder(host) / "result.json").read_bytes(), type=Result)

    def wait(self) -> list[int]:
        """Until all commands have ended; their statuses."""
        return [process.wait(timeout=120) for process in self.processes]

    def said(self) -> str:
        """Everything that was printed."""
        return "\n".join(f"--- {path}\n{path.read_text()}" for path in sorted(self.root.glob("*/out.txt")))


def used(folder: Path) -> dict[tuple[int, int], int]:
    """Which positions went into pushes, and how often."""
    places: dict[tuple[int, int], int] = {}
    for event in read_trace(folder):
        if isinstance(event, Decided) and event.pushed is not None:
            for epoch, first, size in event.work:
                for position in range(first, first + size):
                    places[epoch, position] = places.get((epoch, position), 0) + 1
    return places


def two_hosts(testbeds: Testbeds, tmp_path: Path) -> Hosts:
    return Hosts(testbeds("a", "b", link_mbit=400), tmp_path)


def survive_a_cut(hosts: Hosts) -> None:
    """Host b joins, is cut off for ten seconds, and nothing is lost."""
    hosts.join("b", "a", 1)
    hosts.until_paused()
    hosts.bed["b"].cut()
    hosts.go_on()
    time.sleep(10)
    seen = hosts.events("a", Decided)
    hosts.bed["b"].heal()
    assert hosts.wait() == [0, 0], hosts.said()
    assert hosts.events("a", Decided) > seen
    assert hosts.result("a").failures == []
    config = msgspec.json.decode((hosts.folder("a") / "config.json").read_bytes())
    assert config["tls"], "beyond loopback nobody had to ask for it"
    assert used(hosts.folder("a")) == once(EPOCHS, SAMPLES)


@pytest.mark.long
def test_a_link_cut_for_ten_seconds_delays_a_run_and_changes_nothing_else(
    testbeds: Testbeds, tmp_path: Path
) -> None:
    hosts = two_hosts(testbeds, tmp_path)
    hosts.train("a", *ONE_EACH, "-p", "dssp")
    survive_a_cut(hosts)
    assert hosts.events("a", WorkerLeft) == 2  # both finished; nobody was lost


@pytest.mark.long
@pytest.mark.parametrize(
    ("protocol", "settings"), [("selsync", ("window=2", "delta=0.02")), ("local_sgd", ("period=3",))]
)
def test_a_link_cut_for_ten_seconds_changes_no_weight_of_peers(
    lab: Lab, testbeds: Testbeds, tmp_path: Path, protocol: str, settings: tuple[str, ...]
) -> None:
    asked = dict(each.split("=") for each in settings)
    near = lab.trained("train.py", "momentum", *SIZES, workers=2, protocol=protocol, settings=asked)
    hosts = two_hosts(testbeds, tmp_path)
    flags = [word for each in settings for word in ("--set", each)]
    hosts.train("a", *ONE_EACH, "-p", protocol, *flags)
    survive_a_cut(hosts)
    assert_equal(load_file(hosts.folder("a") / "weights.safetensors"), near.weights)


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["selsync", "ssp"])
def test_a_host_that_loses_power_is_given_up_and_its_work_is_done_by_others(
    testbeds: Testbeds, tmp_path: Path, protocol: str
) -> None:
    hosts = two_hosts(testbeds, tmp_path)
    first = hosts.train("a", *ONE_EACH, "-p", protocol, "--host-patience", "4")
    hosts.join("b", "a", 1)
    hosts.until_paused()
    hosts.bed["b"].cut()
    hosts.bed["b"].kill()
    hosts.go_on()
    assert first.wait(timeout=120) == 0, hosts.said()
    failures = hosts.result("a").failures
    assert [failure.worker for failure in failures] == [1]
    assert "out of reach" in failures[0].detail
    assert used(hosts.folder("a")) == once(EPOCHS, SAMPLES)


def torchrun(hosts: Hosts, host: str, node: int, *flags: str) -> None:
    """One node of two."""
    first: BedHost = hosts.bed["a"]
    launch = ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2")
    meet = ("--master-addr", first.address, "--master-port", "29500")
    script = ("train", str(SCRIPTS / "train.py"), *flags, "--", "normed", *SIZES)
    run = (sys.executable, "-m", "torch.distributed.run", *launch, *meet, "-m", "paceline", *script)
    hosts.start(host, *run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("protocol", "more"),
    [("bsp", ("--store-hosts", "2")), ("bsp", ("--plain",)), ("local_sgd", ()), ("bsp", ())],
)
def test_torchrun_over_two_hosts_gives_the_weights_of_the_local_engine(
    lab: Lab, testbeds: Testbeds, tmp_path: Path, protocol: str, more: tuple[str, ...]
) -> None:
    near = lab.trained("train.py", "normed", *SIZES, workers=4, protocol=protocol, seed=3)
    hosts = two_hosts(testbeds, tmp_path)
    for node, host in enumerate(("a", "b")):
        torchrun(hosts, host, node, "-p", protocol, "--seed", "3", *more)
    assert hosts.wait() == [0, 0], hosts.said()
    assert hosts.events("a", WorkerJoined) == 4
    far = load_file(hosts.folder("a") / "weights.safetensors")
    assert_close(far, near.weights, 1e-6)
    assert_equal(far, near.weights)
