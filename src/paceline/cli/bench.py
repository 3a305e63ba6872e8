"""`paceline bench`: measured comparisons with other systems, on this machine."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, print_json


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="exchange, allreduce, store, network, hiding, cluster, fidelity, peers, pipeline, layers, "
            "plans, sequence, embedding, papers, strategies, death, lone, trace, simulator. Default: all "
            "but fidelity, peers and strategies; cluster only with --data. After papers: which recipes, for "
            "instance papers dssp osp."
        ),
    ] = None,
    json: o.Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows that everything works, measures nothing.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Keep each result in --folder, in the place of an older one.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where records are kept.")] = Path("benchmarks"),
    record_as: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="NAME",
            help="Name of the record, for a run that answers a question of its own. Default: the benchmark's "
            "own, whose older record is replaced.",
        ),
    ] = "",
    seed: o.Seed = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For cluster, peers and pipeline: CIFAR-10 in its binary version (data_batch_1.bin, ...). "
            "For papers and strategies: train on it. Without it, peers, papers and strategies train on the "
            "digits.",
        ),
    ] = None,
    protocols: Annotated[
        str,
        typer.Option(
            help="For cluster and fidelity: which, comma separated, settings after colons, for instance "
            "bsp,bsp+balance,asp@0.06,asp+dana+gap,ssp:staleness=5 (@: learning rate; +: balanced batches or "
            "a correction). DDP is always among them. Default: all. For peers: these, and ddp, "
            "post_local_sgd, fsdp2, rpc, ray, torchft, torchft_diloco, hivemind, deepspeed, horovod, byteps. "
            "For strategies: single, ddp, fsdp, ps-sync, ps-async, ps-async-sum, ps-async-mod, allreduce, "
            "bsp+balance, backup_bsp, dssp, asp."
        ),
    ] = "",
    torchrec: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For embedding: where TorchRec was installed with pip install --no-deps --target. Without "
            "it, it is looked for where Python looks, and left out if it is not there.",
        ),
    ] = None,
    rivals: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For peers: a folder that scripts/rivals has filled, with an interpreter for each rival "
            "that is no part of torch. Without it, they are looked for where Python looks.",
        ),
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="For cluster: exact simulation in virtual time, without root.")
    ] = False,
    scenes: Annotated[
        str,
        typer.Option(
            help="For cluster: which hosts and work, comma separated: unequal (the default), equal, stalls, "
            "text; and with --simulated decay, workers-4, workers-8, workers-16, workers-32. For fidelity: "
            "which of unequal, equal and slow_first; default all."
        ),
    ] = "",
    cells: Annotated[
        str,
        typer.Option(
            help="For strategies: which cells, comma separated, MODEL-WORKERS-LINK-STRAGGLER, for instance "
            "resnet-4-native-x2 or 'vgg-*-throttled-*'. Default: some of all kinds."
        ),
    ] = "",
    seeds: Annotated[
        int, typer.Option(min=1, help="For cluster, peers and strategies: so many seeds, from --seed on.")
    ] = 1,
    rates: Annotated[
        str,
        typer.Option(
            help="For cluster, peers and strategies: learning rates to try, comma separated. The first "
            "seed decides which is an entry's best. In cluster, DDP keeps its own."
        ),
    ] = "",
    targets: Annotated[
        str, typer.Option(help="For cluster and peers: accuracies to reach, for instance 0.42,0.5.")
    ] = "",
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For cluster, peers, fidelity, papers and strategies: keep what each run gives in this "
            "file, and do not run again what is in it.",
        ),
    ] = None,
) -> None:
    """Measure Paceline against other systems.

    Both run in turns within the same minutes, and results are ratios.

    Take a quiet machine: whatever else runs there is measured too.

    Example: paceline bench exchange store --record
    """
    with errors_for_people():
        _check_checkout()
        from paceline.errors import ConfigError
        from paceline_bench.harness.plan import BenchPlan
        from paceline_bench.harness.record import as_tables, write_record
        from paceline_bench.harness.run import BENCHMARKS, apart, chosen, run

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything started is ended
        if quick and record:
            raise ConfigError("--quick measures nothing worth keeping. Leave out --record, or --quick.")
        benchmarks, recipes = apart(names or [])
        plan = BenchPlan(
            recipes=recipes,
            record=record_as,
            quick=quick,
            seed=seed,
            data=None if data is None else str(data),
            protocols=_words(protocols),
            simulated=simulated,
            scenes=_words(scenes),
            cells=_words(cells),
            seeds=seeds,
            rates=_numbers(rates, "--rates"),
            targets=_numbers(targets, "--targets"),
            torchrec=None if torchrec is None else str(torchrec),
            rivals=None if rivals is None else str(rivals),
            results=None if results is None else str(results),
        )
        records = []
        for name in chosen(benchmarks, plan):
            records.append(run(name, plan, _say))
            if record:
                _say(f"wrote {write_record(folder, records[-1], BENCHMARKS[name].plots)}")
            if not json:
                print(f"{name}\n\n" + "\n".join(as_tables(records[-1].rows)) + "\n", flush=True)
        if json:
            print_json(records)


def _check_checkout() -> None:
    """The benchmarks are a package of their own, which no wheel holds."""
    from paceline.errors import ConfigError

    if importlib.util.find_spec("paceline_bench") is None:
        raise ConfigError(
            "the benchmarks are not installed: they are in the folder bench/ of a checkout, not in the "
            "wheel. Clone the repository and install it with pip install -e '.[bench]'."
        )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    from paceline.errors import ConfigError

    try:
        numbers = tuple(float(each) for each in text.split(",") if each.strip())
    except ValueError:
        numbers = (0.0,)
    if not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(
            f"{flag} takes numbers > 0, comma separated, got {text!r}. For instance {flag} 0.03,0.06."
        )
    return numbers


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
