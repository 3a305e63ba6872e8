"""`paceline replay`: carry a recorded run out again, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, new_run, print_json
from paceline.decoding import decode_json
from paceline.errors import Undecodable

if TYPE_CHECKING:
    from paceline.config import RunConfig

HERE: dict[str, Any] = {
    **dict.fromkeys(("address", "master", "listen", "here", "tls_cert", "tls_key")),
    "engine": "local",
    "store_hosts": 1,
    "tls": False,
    "plain": False,
}
"""Wherever a run's workers and store were: its replay is on this machine."""


def replay(
    run: Annotated[Path, typer.Argument(help="The folder of a recorded run, such as runs/latest.")],
    until: Annotated[
        int | None, typer.Option(help="Stop after this verdict; the weights as they were then are kept.")
    ] = None,
    runs: o.Runs = Path("runs"),
    json: o.Json = False,
) -> None:
    """Carry out a recorded run again, to the same bits.

    The trace tells the arrivals: same data, same weights, asynchronous or not.

    The same workers compute again; the store, or the place where peers meet, hears them in the recorded
    order and at the recorded times. Ends with 1 if the weights differ from the recorded ones in a single bit.
    """
    with errors_for_people():
        from paceline.cli.running.conduct import conduct
        from paceline.cli.running.engines import open_engine
        from paceline.errors import RunStopped

        run = run.resolve()  # `latest` is about to point elsewhere
        config = _config(run, until, runs)
        answer: dict[str, Any] = {"run": config.folder, "replayed": str(run), "until": until}
        with open_engine({"script": config.script}) as engine:
            try:
                conduct(engine, config)
            except RunStopped:
                if until is None and not _was_stopped(run):
                    raise
        answer |= _verdict(run, config.path, until)
        if json:
            print_json(answer)
        else:
            print(answer["verdict"])
            print(config.folder)
        if answer["identical"] is False:
            raise typer.Exit(1)


def _config(run: Path, until: int | None, runs: Path) -> RunConfig:
    import msgspec

    from paceline.cli.train import checked_protocol
    from paceline.config import RunConfig
    from paceline.errors import ConfigError, NoTrace, TraceError

    file = run / "config.json"
    try:
        old = decode_json(file.read_bytes(), kind=RunConfig)
    except OSError as error:
        raise NoTrace(
            f"no recorded run at {run}: {file.name}: {error.strerror}. Give a run folder."
        ) from None
    except Undecodable as error:
        raise TraceError(
            f"{file} is not a run's configuration: {error}. It is damaged; replay another run."
        ) from None
    split = old.mesh is not None or old.plan is not None
    if old.workers == 1 or old.cluster is not None or old.script is None or split:
        raise ConfigError(
            "only a real run of several workers, with the whole model each, needs a replay; run anything "
            "else again, it repeats."
        )
    if not Path(old.script).is_file():
        raise ConfigError(
            f"the script of that run is not at {old.script}, seen from here. Replay it in the folder where "
            "it was started."
        )
    _check_record(run, until)
    sha256 = checked_protocol(old.protocol, old.settings)[1]
    name, folder = new_run(runs, "replay")
    changes: dict[str, Any] = {"slow": {}, "device_time_s": None, "jitter": 0.0, "on_failure": "continue"}
    changes |= {"run": name, "folder": str(folder), "replay": str(run), "until": until}
    changes |= {"checkpoint_every": None, "protocol_sha256": sha256}
    return msgspec.structs.replace(old, **changes, **HERE)


def _check_record(run: Path, until: int | None) -> None:
    """All of it can be read, and it has the end that is to be arrived at."""
    from paceline.errors import ConfigError
    from paceline.trace import read_trace, tally
    from paceline.trace.events import Decided, WorkEnded

    total = tally(read_trace(run))
    last, enough = 0, None
    for event in read_trace(run):
        if isinstance(event, Decided):
            last = event.number
        elif isinstance(event, WorkEnded):
            enough = last
    if until is not None and not 1 <= until <= last:
        raise ConfigError(f"--until names a verdict of the record, 1 to {last}, got {until}.")
    if enough is not None and (until is None or until > enough):
        raise ConfigError(
            "a script ended this run with pace.stop(), and how far the others were when they heard of it is "
            f"not on record. Replay it up to a verdict before that, with --until (at most {enough})."
        )
    _check_gaps(run, until)
    peers = total.start is not None and total.start.family == "peer"
    if peers and until is None and _was_stopped(run):
        raise ConfigError(
            "this peer run was stopped or failed, and how its workers ended it is not on record. "
            "Replay it up to a verdict before that, with --until."
        )
    if until is None and (total.end is None or not (run / "weights.safetensors").is_file()):
        raise ConfigError(
            f"the record at {run} has no end to arrive at: the run was killed, failed, or still goes on. "
            "Replay it up to a verdict, with --until."
        )


def _check_gaps(run: Path, until: int | None) -> None:
    """What is not on record cannot be carried out again."""
    from paceline.errors import ConfigError
    from paceline.trace import read_trace
    from paceline.trace.events import Decided, Gap

    last = 0
    for event in read_trace(run):
        if isinstance(event, Decided):
            last = event.number
        elif isinstance(event, Gap) and (until is None or until > last):
            raise ConfigError(
                f"the record at {run} lacks {event.events} events from {event.since:.1f} s on ({event.why}), "
                f"so it cannot be replayed beyond that. Replay it up to verdict {last} with --until"
                + (", or record a run with --trace-limit none." if event.wanted else ".")
            )


def _was_stopped(run: Path) -> bool:
    from paceline.trace import read_trace, tally

    return tally(read_trace(run)).result().status != "finished"


def _verdict(run: Path, again: Path, until: int | None) -> dict[str, Any]:
    """Compare what the two runs decided, and what they arrived at."""
    if until is not None:
        weights = again / "weights.safetensors"
        return {"identical": None, "verdict": f"stopped after verdict {until}; the weights are in {weights}"}
    decisions, bits = _same_decisions(run, again), _same_weights(run, again)
    verdict = "the same verdicts" if decisions else "other verdicts"
    verdict += ", the same weights bit for bit" if bits else ", and other weights"
    return {"identical": decisions and bits, "verdict": verdict}


def _same_decisions(run: Path, again: Path) -> bool:
    from paceline.trace import read_trace
    from paceline.trace.events import Decided

    def taken(folder: Path) -> list[Any]:
        seen = (e for e in read_trace(folder) if isinstance(e, Decided))
        return [(e.number, e.pushed, e.fate, e.flushed, e.release, e.version, e.work) for e in seen]

    return taken(run) == taken(again)


def _same_weights(run: Path, again: Path) -> bool:
    from safetensors.torch import load_file

    first, second = load_file(run / "weights.safetensors"), load_file(again / "weights.safetensors")
    return first.keys() == second.keys() and all(bool((first[name] == second[name]).all()) for name in first)
