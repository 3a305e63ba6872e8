"""The flags that several commands take, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.flags.host_options import EMULATION as EMULATION
from paceline.cli.flags.host_options import FAULTS as FAULTS
from paceline.cli.flags.host_options import HOSTS as HOSTS
from paceline.cli.flags.host_options import NUMBERS as NUMBERS
from paceline.cli.flags.host_options import PROTOCOL as PROTOCOL
from paceline.cli.flags.host_options import RECORD as RECORD
from paceline.cli.flags.host_options import TRAINING as TRAINING
from paceline.cli.flags.host_options import WORKERS as WORKERS
from paceline.cli.flags.host_options import Address as Address
from paceline.cli.flags.host_options import Dial as Dial
from paceline.cli.flags.host_options import Engine as Engine
from paceline.cli.flags.host_options import GuestTls as GuestTls
from paceline.cli.flags.host_options import Here as Here
from paceline.cli.flags.host_options import HostPatience as HostPatience
from paceline.cli.flags.host_options import Listen as Listen
from paceline.cli.flags.host_options import Master as Master
from paceline.cli.flags.host_options import SecretFile as SecretFile
from paceline.cli.flags.host_options import StoreHosts as StoreHosts
from paceline.cli.flags.host_options import Tls as Tls
from paceline.cli.flags.host_options import TlsCa as TlsCa
from paceline.cli.flags.host_options import TlsCert as TlsCert
from paceline.cli.flags.host_options import TlsKey as TlsKey
from paceline.cli.running.common import parse_slow, parse_weighting


def _slow(given: list[str] | None) -> dict[int, float]:
    return parse_slow(given or [])


def _ranks(given: list[int] | None) -> tuple[int, ...]:
    return tuple(sorted(set(given or ())))


Script = Annotated[
    Path,
    typer.Argument(
        metavar="SCRIPT", help="Your training script; it calls paceline.join() and pace.prepare()."
    ),
]
Args = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments for the script, after --.")]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster", help="A TOML file that describes the cluster, such as examples/clusters/spot.toml."
    ),
]
Workers = Annotated[
    int, typer.Option("--workers", "-n", help="Worker processes to start.", rich_help_panel=WORKERS), Dial(1)
]
Seed = Annotated[
    int,
    typer.Option(help="Seed of data order, jitter and random number generators.", rich_help_panel=TRAINING),
    Dial(0),
]
Target = Annotated[
    float | None,
    typer.Option(
        help="Target accuracy, for instance 0.95. The run records when it is first reached.",
        rich_help_panel=TRAINING,
    ),
    Dial(None),
]
Slow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK:FACTOR",
        help="Make a rank compute slower, for instance 3:2.5.",
        rich_help_panel=EMULATION,
    ),
    Dial(None, parse=_slow),
]
DeviceTime = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help=(
            "Stretch every worker's compute to this time (times its slow factor), so that workers that "
            "share cores behave as if each had its own device."
        ),
        rich_help_panel=EMULATION,
    ),
    Dial(None, "device_time_s"),
]
Jitter = Annotated[
    float,
    typer.Option(help="Relative spread of the padded compute time, seeded.", rich_help_panel=EMULATION),
    Dial(0.0),
]
Weighting = Annotated[
    str,
    typer.Option(
        metavar="mean|sum|NUMBER",
        help="How far one push moves the weights. mean: an epoch moves them equally far under every "
        "protocol; sum: every push is a whole step; a number: every push is that much of a step.",
        rich_help_panel=NUMBERS,
    ),
    Dial("mean", parse=parse_weighting),
]
Damping = Annotated[
    str,
    typer.Option(
        metavar="none|inverse|sqrt|exponential",
        help=(
            "Give a stale gradient less weight. Its staleness is the number of updates since its worker "
            "read the weights."
        ),
        rich_help_panel=NUMBERS,
    ),
    Dial("none"),
]
DropStaler = Annotated[
    int | None,
    typer.Option(
        metavar="UPDATES",
        help=(
            "Drop a gradient if there were more updates than this since its worker read the weights. Works "
            "with every protocol that has a store. The samples of a dropped gradient count as seen, and "
            "its worker continues as usual."
        ),
        rich_help_panel=NUMBERS,
    ),
    Dial(None),
]
LrCap = Annotated[
    float | None,
    typer.Option(
        metavar="RATE",
        help="The largest learning rate the store steps with, whatever the script's scheduler says.",
        rich_help_panel=NUMBERS,
    ),
    Dial(None),
]
Trigger = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help=(
            "Push a gradient only if its norm is at least SHARE times the usual norm of one batch's "
            "gradient. A gradient that is not pushed is added to the next one, so nothing is lost. For "
            "paced protocols without lockstep."
        ),
        rich_help_panel=NUMBERS,
    ),
    Dial(None),
]
TriggerMost = Annotated[
    int,
    typer.Option(
        metavar="N", help="With --trigger: push after N gradients in any case.", rich_help_panel=NUMBERS
    ),
    Dial(8),
]
Park = Annotated[
    list[int] | None,
    typer.Option(
        metavar="RANK",
        help="Leave this rank out; the others do its work. Can be given several times.",
        rich_help_panel=WORKERS,
    ),
    Dial(None, parse=_ranks),
]
Apply = Annotated[
    str,
    typer.Option(
        metavar="optimizer|increments",
        help=(
            "What workers push under protocols without lockstep. optimizer: gradients, with which the "
            "store steps. increments: the changes that the worker's own optimizer makes, which the store "
            "adds to the weights (the original form of SSP; each worker has its own momentum and learning "
            "rate)."
        ),
        rich_help_panel=NUMBERS,
    ),
    Dial("optimizer"),
]
ParkSlow = Annotated[
    float | None,
    typer.Option(
        metavar="CURVATURE",
        help=(
            "Park the slowest workers during the run until the learning rate is stable at the staleness of "
            "the others. CURVATURE is the largest Hessian eigenvalue of the loss. For asp, ssp and dssp."
        ),
        rich_help_panel=NUMBERS,
    ),
    Dial(None),
]
CORRECT = "auto|none|dana|gap|dc|dca|dana+gap"
Correct = Annotated[
    str,
    typer.Option(
        metavar=CORRECT,
        help=(
            "How the store corrects stale gradients. dana: one momentum per worker, and workers read "
            "predicted weights (SGD with momentum, Adam, AdamW, NAdam). gap: divide the gradient by how "
            "far the weights have moved since it was computed. dc, dca: delay compensation, constant or "
            "adaptive (dc:0.1 sets the strength). auto: the correction the script names; otherwise dana, "
            "if the protocol has no lockstep and the optimizer has momentum; otherwise none."
        ),
        rich_help_panel=NUMBERS,
    ),
    Dial("none"),
]
EachCorrect = Annotated[
    str,
    typer.Option(
        "--correct",
        metavar="HOW,...",
        help=(
            "How stale gradients are corrected (see train --help-all): one or several corrections, "
            "separated by commas, for instance none,dana. Every protocol with stale gradients runs once "
            "with each."
        ),
        rich_help_panel=NUMBERS,
    ),
]
Schedule = Annotated[
    str,
    typer.Option(
        metavar="samples|updates",
        help="What a prepared LR scheduler counts: samples processed, or optimizer updates.",
        rich_help_panel=NUMBERS,
    ),
    Dial("samples"),
]
ClipNorm = Annotated[
    float | None,
    typer.Option(
        help="Clip the gradient of every update to this norm. The store does it.", rich_help_panel=NUMBERS
    ),
    Dial(None),
]
Shards = Annotated[
    str,
    typer.Option(
        metavar="shared|equal|own|rotating",
        help=(
            "How workers share the data. shared: the next worker that is ready takes the next batch. "
            "equal: every worker gets an equal share. own: every worker keeps one chunk of the data for "
            "the whole run (DefDP), or everything its iterable dataset gives it. rotating: every worker "
            "moves to the next chunk each epoch (SelDP)."
        ),
        rich_help_panel=TRAINING,
    ),
    Dial("shared"),
]
Inject = Annotated[
    str,
    typer.Option(
        metavar="DONORS:SHARE",
        help=(
            "With --shards own or rotating: at every step this share of the workers gives this share of "
            "its batch to all others, for instance 0.25:0.25. SelSync does this when workers hold "
            "different kinds of data."
        ),
        rich_help_panel=TRAINING,
    ),
    Dial(""),
]
Balance = Annotated[
    bool,
    typer.Option(
        "--balance/--no-balance",
        help=(
            "Give every worker a batch in proportion to its measured speed. The batches still add up to "
            "workers x the loader's batch size. The loss must average over its batch, as PyTorch's losses "
            "do by default."
        ),
        rich_help_panel=PROTOCOL,
    ),
    Dial(False),
]
Compress = Annotated[
    str,
    typer.Option(
        metavar="none|fp16|bf16|int8|topk:SHARE|powersgd:RANK",
        help=(
            "Compress the vectors that workers average; for peer protocols only. Between hosts a vector "
            "travels compressed. The average comes back as the compressed vectors of the other hosts if "
            "that takes fewer bytes, and uncompressed otherwise. On one host compression changes the "
            "numbers but saves no time; bytes are counted as if they were sent. In a simulation it makes "
            "slow links faster. int8, topk and powersgd add what they leave out to the next vector. "
            "Protocols with a store refuse this flag because their gradients and weights travel "
            "uncompressed."
        ),
        rich_help_panel=PROTOCOL,
    ),
    Dial("none"),
]
EachCompress = Annotated[
    str,
    typer.Option(
        "--compress",
        metavar="HOW,...",
        help=(
            "For peer protocols only: one or several kinds of compression, separated by commas, for "
            "instance none,fp16,topk:0.01. Every protocol runs once with each (see train --help-all)."
        ),
        rich_help_panel=PROTOCOL,
    ),
]
BadGradient = Annotated[
    str,
    typer.Option(
        metavar="stop|skip",
        help="If a gradient contains NaN or infinity: stop the run, or skip the gradient.",
        rich_help_panel=FAULTS,
    ),
    Dial("stop"),
]
OnFailure = Annotated[
    str,
    typer.Option(
        metavar="continue|stop",
        help="If a worker dies: continue with the others, or stop the run.",
        rich_help_panel=FAULTS,
    ),
    Dial("continue"),
]
StuckAfter = Annotated[
    str | None,
    typer.Option(
        metavar="TIME[:warn|drop|stop]",
        help=(
            "If a worker is silent for this time (90s, 5m, 1h) while others wait for it: warn (name it), "
            "drop (continue without it, as if it had died) or stop (save and stop the run). Choose a time "
            "longer than an iteration or an evaluation takes. Default: warn after 10 s, or after several "
            "times its usual iteration time."
        ),
        rich_help_panel=FAULTS,
    ),
    Dial(None),
]
CheckpointEvery = Annotated[
    str | None,
    typer.Option(
        metavar="UPDATES|TIME",
        help=(
            "Save a checkpoint after this number of updates (500) or this time (60s, 10m, 1h), so that "
            "--resume can continue even if every process is killed at once. Default: save only when the "
            "run is stopped, or fails and can still save."
        ),
        rich_help_panel=RECORD,
    ),
    Dial(None),
]
TraceLimit = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help=(
            "Largest size of the trace, for instance 50MB. 0: as small as possible; none: no limit. Above "
            "the limit single iterations are counted but no longer written. Results and curves stay exact, "
            "but the run cannot be replayed, and the report has no timeline from there on. One iteration "
            "takes about 275 bytes."
        ),
        rich_help_panel=RECORD,
    ),
    Dial("256MB"),
]
Keep = Annotated[
    int,
    typer.Option(
        metavar="K",
        help=(
            "How many checkpoints to keep. If the newest is damaged, --resume takes the one before it. "
            "Each takes as much disk space as the weights and the optimizer's state."
        ),
        rich_help_panel=RECORD,
    ),
    Dial(2),
]
PrivateWeights = Annotated[
    bool,
    typer.Option(
        "--private-weights",
        help=(
            "Give every worker its own copy of the weights even in lockstep. Under allreduce every worker "
            "then has its own replica and optimizer, and scripts may write to the parameters."
        ),
        rich_help_panel=WORKERS,
    ),
    Dial(False),
]
Fabric = Annotated[
    str,
    typer.Option(
        metavar="shared|gloo",
        help=(
            "How the vectors of a peer protocol travel. shared: through shared memory, and between hosts "
            "over the run's authenticated connection. gloo: between workers of one machine by "
            "torch.distributed over the loopback interface (NCCL for a model on a GPU, untested). Over "
            "gloo a lost worker ends the run, and a worker that has finished waits for all others. "
            "One-sided protocols (ad_psgd, asynchronous easgd) and --compress need shared memory."
        ),
        rich_help_panel=WORKERS,
    ),
    Dial("shared"),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=SIZE,...",
        help=(
            "Split the model over a grid of workers, for instance data=2,stage=4: two copies of a pipeline "
            "with four stages. All workers run on this machine. Without --workers, one worker per place in "
            "the grid is started."
        ),
        rich_help_panel=WORKERS,
    ),
    Dial(None),
]
Runs = Annotated[Path, typer.Option(help="Folder that holds the runs.", rich_help_panel=RECORD)]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON document, and nothing else, on standard output.",
        rich_help_panel=RECORD,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set a setting of the protocol; `paceline protocols` lists them.",
        rich_help_panel=PROTOCOL,
    ),
]
