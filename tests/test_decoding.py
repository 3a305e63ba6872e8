"""Whatever bytes come from a network or a file, a parser gives a value or an error of ours, and no other."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import paceline
from paceline.cli.running.secret import given_secret
from paceline.config import RunConfig, config_of
from paceline.doctor.link import _info
from paceline.doctor.server import LENGTH, this_side
from paceline.engines import control
from paceline.errors import PacelineError
from paceline.fabric import door
from paceline.parallel import messages as mesh
from paceline.plan.hap.plan import load_hap_plan
from paceline.plan.osdp.plan import load_plan
from paceline.plan.profile.files import read_table
from paceline.plan.switch import Key, recall
from paceline.protocols.paced.ssp import SSP
from paceline.runtime.messages import hosts, portions, workers
from paceline.runtime.messages.answers import Halt, store_decoder
from paceline.sim.toml import load_cluster
from paceline.store.disk.checkpoint import read_checkpoint
from paceline.testbed.spec import load_spec
from paceline.trace.files import TraceWriter
from paceline.trace.life import owner_of, this_process
from paceline.view.report.record import read_record
from paceline.view.report.report import render_report
from paceline_bench.kept import read_kept
from paceline_bench.strategies.runs.request import Pause
from support.drive import Schedule
from support.traces import run_of

SOURCE = Path(paceline.__file__).parent


def test_nothing_is_decoded_in_another_place() -> None:
    direct = re.compile(r"msgspec\.\w+\.(decode|Decoder)\b|\bjson\.loads?\(|^import (json|tomllib)\b", re.M)
    files = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "decoding.py"]
    assert not [str(path.relative_to(SOURCE)) for path in files if direct.search(path.read_text())]


BAD_TEXT = b"\xff\xfe\x80"


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Valid bytes with some of them changed, or anything."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=60))
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        piece = draw(
            st.one_of(st.binary(max_size=3), st.sampled_from([BAD_TEXT, b"1e999", b"-9e307", b"[" * 9]))
        )
        data[at : at + draw(st.integers(0, 3))] = piece
    return bytes(data)


def fuzzed(valid: bytes, parse: Callable[[bytes], object]) -> None:
    """Valid bytes are understood; all others at most refused."""
    parse(valid)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None, database=None)
    @given(data=damaged(valid))
    @example(valid.replace(b"text", BAD_TEXT))
    @example(b"\x91" * 5000)
    @example(b"[" * 5000)
    def run(data: bytes) -> None:
        with suppress(PacelineError):
            parse(data)

    run()


MESSAGES: dict[str, tuple[Any, msgspec.Struct]] = {
    "from a worker": (workers.worker_decoder, workers.Say("warning", "text")),
    "from the store": (store_decoder, Halt("failed", "text")),
    "from a host": (hosts.host_decoder, hosts.Gone("text")),
    "to a host": (hosts.guest_decoder, hosts.Fetch(1)),
    "to a holder": (portions.to_holder, portions.Gather()),
    "from a holder": (portions.from_holder, portions.Broke("text")),
    "to the zygote": (control.zygote_decoder, control.Stop()),
    "from the zygote": (control.launcher_decoder, control.Started((1, 2))),
    "to the conductor": (mesh.conductor_decoder, mesh.Noted("warning", "text")),
    "from the conductor": (mesh.worker_decoder, mesh.EndRun(1)),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_that_is_none_is_refused(kind: str) -> None:
    decoder, message = MESSAGES[kind]
    fuzzed(msgspec.msgpack.encode(message), decoder.decode)


@pytest.mark.parametrize("way", ["door", "doctor"])
def test_a_stranger_that_talks_nonsense_is_refused(way: str) -> None:
    """Over real sockets."""

    def heard(data: bytes) -> object:
        here, there = socket.socketpair()
        with here, there:
            there.sendall(
                (len(data).to_bytes(4, "little") if way == "door" else LENGTH.pack(len(data))) + data
            )
            if way == "doctor":
                return _info(here)
            return door._receive(here, door.Entered)  # type: ignore[arg-type]

    valid = door.Entered(3, b"info", "text") if way == "door" else this_side()
    encode = msgspec.msgpack.encode if way == "door" else msgspec.json.encode
    fuzzed(encode(valid), heard)


KEY = Key("text", (), 2, {}, {})


def kept(folder: Path) -> object:
    return read_kept(folder / "kept.jsonl", Pause)


def report(folder: Path) -> object:
    return render_report([read_record(folder)])


FILES: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "owner.json": (msgspec.json.encode(this_process(1)), owner_of),
    "config.json": (msgspec.json.encode(RunConfig(run="text", folder="text")), config_of),
    "answers.json": (b"{}", lambda folder: recall(folder / "answers.json", KEY)),
    "kept.jsonl": (msgspec.json.encode(Pause(1, 2, 3.0)) + b"\n", kept),
    "profile.json": (b'{"text": [1]}', lambda folder: read_table(folder / "profile.json", "profile")),
    "profile.toml": (b'a = "text"', lambda folder: read_table(folder / "profile.toml", "profile")),
    "cluster.toml": (b"# text\nworkers = 2\n", lambda folder: load_cluster(folder / "cluster.toml")),
    "bed.toml": (b"# text\n[host.a]\ncpu = 1\n", lambda folder: load_spec(folder / "bed.toml")),
    "secret": (b"text" * 12, lambda folder: given_secret(folder / "secret")),
}


def parser_of(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
        return read(folder)

    return parse


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_damaged_is_refused(tmp_path: Path, name: str) -> None:
    valid, read = FILES[name]
    fuzzed(valid, parser_of(tmp_path, name, read))


@pytest.mark.parametrize("load", [load_plan, load_hap_plan])
def test_a_plan_that_is_damaged_is_refused(tmp_path: Path, load: Callable[[Path], object]) -> None:
    def parse(data: bytes) -> object:
        (tmp_path / "plan.json").write_bytes(data)
        try:
            return load(tmp_path / "plan.json")
        except PacelineError:
            return None

    fuzzed(b'{"text": {}, "batch": 1, "workers": 2, "nodes": []}', parse)


def test_a_checkpoint_that_is_damaged_is_refused(tmp_path: Path) -> None:
    class State(msgspec.Struct):
        text: str

    def read(folder: Path) -> object:
        return read_checkpoint(folder, "state.json", State)[0]

    for name in ("model", "optimizer"):
        save_file({}, tmp_path / f"{name}.safetensors")
    fuzzed(b'{"text": "text"}', parser_of(tmp_path, "state.json", read))
    (tmp_path / "state.json").write_bytes(b'{"text": "text"}')
    (tmp_path / "checksums.json").write_bytes(b'"text"')
    with pytest.raises(PacelineError, match="cannot be read"):
        read(tmp_path)


def test_a_trace_that_is_damaged_is_refused_or_drawn(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    for event in run_of(SSP(1), Schedule(workers=2, deaths=((7, 1),), seed=4)):
        writer.write(event)
    writer.close()
    valid = (tmp_path / "trace.jsonl").read_bytes()
    parse = parser_of(tmp_path, "trace.jsonl", report)
    for number in (b"1e999", b"-1e999", b"-9e307", b"9e307", b"9" * 40):
        for field in (b"t", b"compute_s", b"samples", b"staleness", b"clock", b"version"):
            with suppress(PacelineError):
                parse(re.sub(b'"%s":[0-9.]+' % field, b'"%s":%s' % (field, number), valid))
    fuzzed(valid, parse)
