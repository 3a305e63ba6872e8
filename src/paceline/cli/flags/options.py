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
        help="Accuracy whose first reaching is the time to target, for instance 0.95.",
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
        help="Pad every worker's compute to this time (times its slow factor), so that workers that "
        "share cores behave as if each had a device of its own.",
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
        help="Shrink what a stale gradient counts by its staleness, the updates it missed since its read.",
        rich_help_panel=NUMBERS,
    ),
    Dial("none"),
]
DropStaler = Annotated[
    int | None,
    typer.Option(
        metavar="UPDATES",
        help="Drop a gradient that missed more updates than this since its worker read the weights, under any"
        " protocol with a store. Its samples count as seen, and its worker goes on as usual.",
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
        help="Push a gradient only if its norm is at least SHARE times the usual norm of a single batch's. "
        "What is kept is added to the next one, and nothing is lost. For paced protocols without lockstep.",
        rich_help_panel=NUMBERS,
    ),
    Dial(None),
]
TriggerMost = Annotated[
    int,
    typer.Option(
        metavar="N", help="With --trigger: push after so many in any case.", rich_help_panel=NUMBERS
    ),
    Dial(8),
]
Park = Annotated[
    list[int] | None,
    typer.Option(
        metavar="RANK",
        help="Leave this rank out, any number of times: it takes no part, and the others do all the work.",
        rich_help_panel=WORKERS,
    ),
    Dial(None, parse=_ranks),
]
Apply = Annotated[
    str,
    typer.Option(
        metavar="optimizer|increments",
        help="What a push is, where nobody waits for all. optimizer: a gradient, with which the store steps; "
        "increments: what a step of the worker's own optimizer changes, which the store adds (SSP's original "
        "form; momentum and rate are each worker's own).",
        rich_help_panel=NUMBERS,
    ),
    Dial("optimizer"),
]
ParkSlow = Annotated[
    float | None,
    typer.Option(
        metavar="CURVATURE",
        help="Park the slowest workers while the run goes on, until the staleness of the others is what the "
        "learning rate stands on a loss with this largest Hessian eigenvalue. For asp, ssp and dssp.",
        rich_help_panel=NUMBERS,
    ),
    Dial(None),
]
CORRECT = "auto|none|dana|gap|dc|dca|dana+gap"
Correct = Annotated[
    str,
    typer.Option(
        metavar=CORRECT,
        help="What is done about stale gradients, where a store applies them. dana: a momentum per worker, "
        "and weights handed out ahead (SGD with momentum, Adam, AdamW, NAdam); gap: divided by how far the "
        "weights moved meanwhile; dc, dca: delay compensation, constant or adaptive (dc:0.1 for another "
        "strength). auto: what the script names, else dana outside of lockstep if the optimizer has a "
        "momentum, else none.",
        rich_help_panel=NUMBERS,
    ),
    Dial("none"),
]
EachCorrect = Annotated[
    str,
    typer.Option(
        "--correct",
        metavar="HOW,...",
        help="What is done about stale gradients (see train --help): one or several ways, comma separated, "
        "for instance none,dana; every protocol whose gradients may be stale runs with each.",
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
    typer.Option(help="Clip the norm of every update's gradient, in the store.", rich_help_panel=NUMBERS),
    Dial(None),
]
Shards = Annotated[
    str,
    typer.Option(
        metavar="shared|equal|own|rotating",
        help="shared: whoever is ready takes the next batch; equal: every worker has an equal share; "
        "own: one chunk of the data each, for good (DefDP), or all that an iterable dataset gives it; "
        "rotating: every epoch the next chunk (SelDP).",
        rich_help_panel=TRAINING,
    ),
    Dial("shared"),
]
Inject = Annotated[
    str,
    typer.Option(
        metavar="DONORS:SHARE",
        help="With --shards own or rotating: at every step this share of the workers shares this share of "
        "its batch with all others, as SelSync does for data that are unlike. 0.25:0.25, say.",
        rich_help_panel=TRAINING,
    ),
    Dial(""),
]
Balance = Annotated[
    bool,
    typer.Option(
        "--balance/--no-balance",
        help="Give every worker a batch in proportion to its measured speed; together they stay workers x "
        "the loader's batch size. The loss must average over its batch, as PyTorch's do by default.",
        rich_help_panel=PROTOCOL,
    ),
    Dial(False),
]
Compress = Annotated[
    str,
    typer.Option(
        metavar="none|fp16|bf16|int8|topk:SHARE|powersgd:RANK",
        help="Peer protocols only: compress what is averaged. Between hosts vectors travel compressed; an "
        "average comes as the compressed vectors of the other hosts if those are fewer bytes, else whole. "
        "On one host nothing gets faster: the numbers are the same, and bytes are counted as they would be "
        "sent. In a simulation slow links get faster. int8, topk and powersgd feed back what they leave out. "
        "Protocols with a store refuse it: their gradients and weights travel whole.",
        rich_help_panel=PROTOCOL,
    ),
    Dial("none"),
]
EachCompress = Annotated[
    str,
    typer.Option(
        "--compress",
        metavar="HOW,...",
        help="Peer protocols only: one or several ways to compress, comma separated, for instance "
        "none,fp16,topk:0.01; every protocol runs with each (see train --help).",
        rich_help_panel=PROTOCOL,
    ),
]
BadGradient = Annotated[
    str,
    typer.Option(
        metavar="stop|skip", help="NaN or infinity in a gradient: stop, or skip it.", rich_help_panel=FAULTS
    ),
    Dial("stop"),
]
OnFailure = Annotated[
    str,
    typer.Option(
        metavar="continue|stop",
        help="A worker died: go on with the others, or stop the run.",
        rich_help_panel=FAULTS,
    ),
    Dial("continue"),
]
StuckAfter = Annotated[
    str | None,
    typer.Option(
        metavar="TIME[:warn|drop|stop]",
        help="A worker has said nothing for so long (90s, 5m, 1h) and others wait for it: name it, go on "
        "without it as if it had died, or save and stop. Choose more than an iteration or evaluation takes. "
        "Default: name it after 10 s, or after several times what it usually takes.",
        rich_help_panel=FAULTS,
    ),
    Dial(None),
]
CheckpointEvery = Annotated[
    str | None,
    typer.Option(
        metavar="UPDATES|TIME",
        help="Take a checkpoint every so often, after so many updates (500) or so much time (60s, 10m, 1h), "
        "so that --resume can go on even if everything is killed at once. Default: only when a run is "
        "stopped or fails in good order.",
        rich_help_panel=RECORD,
    ),
    Dial(None),
]
TraceLimit = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="How long the trace may get, for instance 50MB; 0: as short as it can be. Beyond that single "
        "iterations are left out of it, and counted all the same: results and curves stay what they are, but "
        "the run cannot be replayed, and its report shows no timeline from there on. An iteration takes "
        "about 275 bytes. none: no limit.",
        rich_help_panel=RECORD,
    ),
    Dial("256MB"),
]
Keep = Annotated[
    int,
    typer.Option(
        metavar="K",
        help="How many checkpoints to keep: the newest, and those before it, of which --resume takes the "
        "next if the newest is damaged. Each takes as much room as the weights and the optimizer's state.",
        rich_help_panel=RECORD,
    ),
    Dial(2),
]
PrivateWeights = Annotated[
    bool,
    typer.Option(
        "--private-weights",
        help="A copy of the weights for every worker even in lockstep. Under allreduce a replica and an "
        "optimizer of its own, whose parameters scripts may write to.",
        rich_help_panel=WORKERS,
    ),
    Dial(False),
]
Fabric = Annotated[
    str,
    typer.Option(
        metavar="shared|gloo",
        help="How a peer protocol's vectors travel: through shared memory (and between hosts over the run's "
        "authenticated connection), or, on one machine, between the workers by torch.distributed "
        "(gloo, on the loopback interface; for a model on a GPU NCCL, which is untested). "
        "Over gloo a lost worker ends the run, and a worker that has finished stays until all have; "
        "one-sided protocols (ad_psgd, asynchronous easgd) and --compress need shared memory.",
        rich_help_panel=WORKERS,
    ),
    Dial("shared"),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=SIZE,...",
        help="Split the model over a grid of workers, for instance data=2,stage=4: two copies of a pipeline "
        "with four stages. All workers are on this machine. Without --workers there are as many as places.",
        rich_help_panel=WORKERS,
    ),
    Dial(None),
]
Runs = Annotated[Path, typer.Option(help="Folder that holds the runs.", rich_help_panel=RECORD)]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="One JSON document on standard output, nothing else there.", rich_help_panel=RECORD
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the protocol; `paceline protocols` lists them.",
        rich_help_panel=PROTOCOL,
    ),
]
