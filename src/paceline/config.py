"""The settings of one run, after flags, recipe and defaults were combined. Saved as config.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.amounts import parse_every, parse_injection, parse_size, parse_stuck
from paceline.corrections import parse_correction
from paceline.decoding import decode_json
from paceline.errors import ConfigError, TraceError, Undecodable
from paceline.protocols.grid import check_workers
from paceline.protocols.rules import increments
from paceline.protocols.rules.compression import parse_compression
from paceline.protocols.rules.parking import check_parked

Weighting = Literal["mean", "sum"] | float
MOST_WORKERS = 10_000
"""Each is a process; more are a slip of the finger."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of a run, except those of its protocol."""

    run: str
    folder: str
    script: str | None = None
    args: tuple[str, ...] = ()
    workers: int = 1
    listen: str | None = None
    """Address at which workers of other hosts may join. None: all workers are on this machine."""
    here: int | None = None
    """How many workers are started on this machine (ranks from 0). None: all."""
    host_patience_s: float = 30.0
    """How long a host may be unreachable before its workers count as lost. A host that closes its connection
    properly has 3 s to come back; the run does not wait for a host whose relay has died."""
    tls: bool = False
    """Whether traffic between hosts is encrypted (TLS 1.3)."""
    plain: bool = False
    """Whether traffic stays unencrypted even beyond loopback."""
    tls_cert: str | None = None
    """File with the certificate to show; None: one is made for the run."""
    tls_key: str | None = None
    """File with its key."""
    store_hosts: int = 1
    """How many hosts hold the store, this one included. Each holds one portion of the weights."""
    mesh: dict[str, int] | None = None
    """The axes of the grid that the workers form, if the model is split over them; None: it is not."""
    protocol: str | None = None
    """None: the protocol the script names in `join`, or else bsp. Your own protocol is written as
    `my_rules.py:HalfWay`, relative to the folder in which the run was started."""
    protocol_sha256: str = ""
    """SHA-256 of your own protocol's file when the run was started; empty for built-in protocols."""
    settings: dict[str, Any] = {}
    engine: str = "local"
    """Who starts the workers: one of `paceline.engines.ENGINES`."""
    address: str | None = None
    """Where Ray is reached, if it runs already."""
    master: str | None = None
    """Where Spark is reached; None: it is started on this machine."""
    seed: int = 0
    target: float | None = None
    """Target accuracy. *Time to target* is when it is first reached."""
    weighting: Weighting = "mean"
    """How far one push moves the weights. `mean`: an epoch moves them equally far under every protocol
    (a push applied alone counts 1/active of a step, a flush of all counts as one step, a flush of
    some in between); `sum`: every push counts as a whole step; a number: that much of a step. With
    `balance` a push of n samples counts as n / the loader's batch size pushes, so that an epoch moves
    the weights as far however its samples are split."""
    damping: Literal["none", "inverse", "sqrt", "exponential"] = "none"
    """How a stale gradient shrinks, whether it is applied at once or with others: not at all, by
    1/staleness, 1/sqrt(staleness), or exp(-staleness/active workers). What is applied at once takes a
    smaller step; in a flush its part of the sum or the mean is smaller, and the others' are not larger."""
    drop_staler: int | None = None
    """Drop a gradient if there were more updates than this between its read and its push, whatever the paced
    protocol would do with it. Its samples count as seen, and its worker continues as usual. None: no gradient
    is dropped for its staleness."""
    lr_cap: float | None = None
    """The largest learning rate the store steps with, whatever the script or its scheduler says: of every
    parameter group, before `weighting` takes its share. None: no cap."""
    trigger: float | None = None
    """A worker pushes only if the norm of its gradient is at least this share of the usual norm of a single
    batch's, and adds what it keeps to the next one (see `runtime/worker/optimizer/trigger.py` for the exact
    rule); None: it pushes every gradient, unless its script names a share."""
    trigger_most: int = 8
    """With `trigger`: a worker pushes after this number of gradients in any case."""
    park: tuple[int, ...] = ()
    """Ranks that take no part: their processes end at once, and the others do all the work."""
    apply: Literal["optimizer", "increments"] = "optimizer"
    """What workers push. `optimizer`: gradients, with which the store steps. `increments`: the changes that
    the worker's own optimizer makes, each of which the store adds in full (the original form of SSP)."""
    park_slow: float | None = None
    """The largest curvature of the loss (Hessian eigenvalue). The slowest workers are parked during the run
    until the learning rate is stable at the staleness of the others. None: no worker is parked."""
    correct: str = "none"
    """How stale gradients are corrected: auto, none, dana, gap, dc, dca, or two of them as in dana+gap. auto
    means the correction the script names; otherwise dana, if the protocol has no lockstep and the optimizer
    has momentum; otherwise none. The command's default is auto; old runs without this setting had none."""
    schedule: Literal["samples", "updates"] = "samples"
    """What a prepared LR scheduler counts. `samples`: one step per batch x workers samples processed,
    whatever the protocol; `updates`: one per optimizer update, as the published systems did."""
    clip_norm: float | None = None
    """Clip the norm of every update's gradient to this, in the store, after averaging."""
    compress: str = "none"
    """How peers compress the vectors they average: none, fp16, bf16, int8, topk:SHARE, powersgd:RANK."""
    bad_gradient: Literal["stop", "skip"] = "stop"
    """What to do about NaN or infinity: stop the run, or skip the gradient and count it."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do when a worker dies: go on with the others, or stop the run."""
    shards: Literal["shared", "equal", "own", "rotating"] = "shared"
    """How workers share the data. `shared`: the next worker that is ready takes the next batch. `equal`:
    every worker gets an equal share of every epoch. `own`: every worker keeps one chunk of an order that is
    drawn once. `rotating`: the same chunks, but every worker moves to the next chunk each epoch."""
    inject: str = ""
    """DONORS:SHARE, for chunks of different kinds of data. At every step this share of the workers gives this
    share of its batch to all others. Batches are drawn smaller so that they have the loader's batch size
    after sharing."""
    balance: bool = False
    """Give every worker a batch in proportion to its measured speed, whatever the protocol; the sizes
    add up to workers x the loader's batch size. Gradients count by their samples, which is right for a
    loss that averages over its batch, as PyTorch's do, and wrong for one that sums: that cannot be seen
    from outside. Needs a map-style dataset, its loader's own batches, and shared work."""
    private_weights: bool = False
    """Give every worker its own copy even in lockstep; under allreduce a replica that steps by itself."""
    fabric: Literal["shared", "gloo"] = "shared"
    """How the vectors of a peer protocol travel: through memory that all processes of a machine share, and
    between machines over the run's own connection; or between the workers of one machine by
    torch.distributed's gloo, over the loopback interface (for a model on a GPU: by its NCCL, untested)."""
    slow: dict[int, float] = {}
    """Rank -> factor by which its compute is slowed (emulated)."""
    device_time_s: float | None = None
    """Stretch every worker's compute to this time, times its `slow` factor (emulated)."""
    jitter: float = 0.0
    """Relative spread of the padded compute time, seeded."""
    resume: str | None = None
    """Folder of the checkpoint to resume from."""
    checkpoint_every: str | None = None
    """How often a checkpoint is taken while the run goes on: 500 (updates), 60s, 10m or 1h; None: never."""
    keep: int = 2
    """How many checkpoints are kept: the newest, and those before it in case it is damaged."""
    stuck_after: str | None = None
    """How long a worker may be silent, and what happens then: 5m:warn, 5m:drop (continue without it) or
    5m:stop. None: warn after 10 s, or after several times its usual iteration time."""
    trace_limit: str | None = "256MB"
    """Size of the trace above which single iterations are no longer written: 50MB, 2GB. none, or None as in
    older runs: no limit."""
    plan: str | None = None
    """File of a sharding plan that takes the place of a protocol."""
    cluster: dict[str, Any] | None = None
    """In an exact simulation: the cluster that is simulated."""

    replay: str | None = None
    """Folder of a recorded run to replay, verdict by verdict."""
    until: int | None = None
    """In a replay: stop after this verdict."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers must be at least 1, got {self.workers}.")
        if self.workers > MOST_WORKERS:
            raise ConfigError(
                f"workers are processes, at most {MOST_WORKERS}, got {self.workers}. "
                "Use fewer; `paceline simulate` without a script takes more."
            )
        if abs(self.seed) >= 2**62:
            raise ConfigError(f"seed must have less than 62 bits, got {self.seed}. Use --seed 0, say.")
        if self.here is not None and not 0 <= self.here <= self.workers:
            raise ConfigError(
                f"--here {self.here} does not fit a run of {self.workers} workers. Use 0 to {self.workers}."
            )
        if self.here is not None and self.here < self.workers and self.listen is None:
            raise ConfigError(
                f"{self.workers - self.here} of {self.workers} workers must join from other hosts, but the "
                "run does not listen. Add --listen HOST:PORT."
            )
        self._check_tls()
        if self.mesh is not None:
            check_workers(self.mesh, self.workers)
            self._check_mesh()
        for rank, factor in self.slow.items():
            if not 0 <= rank < self.workers:
                last = self.workers - 1
                raise ConfigError(f"slow rank {rank} does not exist: the ranks are 0 to {last}.")
            _check_positive(f"slow factor of rank {rank}", factor)
        _check_positive("host patience", self.host_patience_s, " seconds")
        _check_positive("device time", self.device_time_s, " seconds")
        _check_positive("clip norm", self.clip_norm)
        _check_positive("lr cap", self.lr_cap)
        if not isinstance(self.weighting, str):
            _check_positive("weighting must be 'mean' or 'sum', or it", self.weighting)
        if self.park:
            self._check_parked()
        self._check_trigger()
        self._check_park_slow()
        if self.lr_cap is not None and self.workers == 1 and self.cluster is None and self.listen is None:
            raise ConfigError(
                "--lr-cap limits the steps of the store, but a single worker steps without a store. Leave "
                "--lr-cap out."
            )
        if self.apply == "increments":
            increments.check_dials(msgspec.structs.asdict(self))
        if self.drop_staler is not None and self.drop_staler < 0:
            raise ConfigError(f"--drop-staler takes a number of updates, 0 or more, got {self.drop_staler}.")
        if self.balance and self.shards != "shared":
            raise ConfigError(
                f"--balance gives a slow worker less work, but --shards {self.shards} gives every worker "
                "the same. Use --shards shared, or leave --balance out."
            )
        parse_compression(self.compress)
        parse_correction(self.correct)
        if self.connects and self.workers == 1:
            raise ConfigError(
                f"fabric {self.fabric!r} connects workers, but there is only 1. Use --workers 2 or more, "
                "or --fabric shared."
            )
        if self.inject:
            self._check_injection()
        if self.store_hosts < 1:
            raise ConfigError(f"--store-hosts must be at least 1, got {self.store_hosts}.")
        parse_size(self.trace_limit or "none")
        if self.keep < 1:
            raise ConfigError(f"--keep must be at least 1, got {self.keep}.")
        if self.checkpoint_every is not None:
            self._check_checkpoints(self.checkpoint_every)
        if self.stuck_after is not None:
            self._check_stuck(self.stuck_after)
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter must be in [0, 1), got {self.jitter:g}.")
        if self.target is not None and not math.isfinite(self.target):
            raise ConfigError(f"target must be an accuracy such as 0.95, got {self.target:g}.")

    def _check_checkpoints(self, every: str) -> None:
        parse_every(every)
        for asked, why, other in (
            (self.connects, f"over {self.fabric!r} no process has all replicas", "--fabric"),
            (
                self.compress != "none",
                "a checkpoint does not include what compression has left out",
                "--compress",
            ),
        ):
            if asked:
                raise ConfigError(
                    f"--checkpoint-every {every} needs the whole state of the run in one place, but {why}. "
                    f"Leave --checkpoint-every or {other} out."
                )

    def _check_parked(self) -> None:
        check_parked(self.park, self.workers, self.shards)
        if self.listen is not None or self.engine != "local" or self.mesh is not None or self.balance:
            raise ConfigError(
                "--park works only for workers that this command starts, without --mesh and --balance. "
                "With --listen, --engine or torchrun, start fewer workers instead."
            )

    def _check_trigger(self) -> None:
        _check_positive("trigger", self.trigger)
        if self.trigger_most < 1:
            raise ConfigError(f"--trigger-most is a number of gradients, 1 or more, got {self.trigger_most}.")
        alone = self.workers == 1 and self.cluster is None and self.listen is None
        for asked, why in (
            (alone, "needs a store, and a single worker steps without one"),
            (self.balance, "adds up gradients, but --balance counts each by its samples"),
        ):
            if asked and self.trigger is not None:
                raise ConfigError(f"--trigger {why}. Leave it out.")

    def _check_park_slow(self) -> None:
        _check_positive("park slow, a curvature,", self.park_slow)
        alone = self.workers == 1 and self.cluster is None and self.listen is None
        for asked, why in (
            (alone, "needs several workers, and this run has 1"),
            (self.balance, "sets slow workers aside, but --balance gives them less work"),
            (self.shards != "shared", f"sets workers aside, but --shards {self.shards} gives each a share"),
            (self.mesh is not None, "does not work with --mesh, because a copy needs all of its workers"),
        ):
            if asked and self.park_slow is not None:
                raise ConfigError(f"--park-slow {why}. Leave one of them out.")

    def _check_stuck(self, text: str) -> None:
        action = parse_stuck(text)[1]
        if action != "warn" and self.workers == 1 and self.listen is None:
            raise ConfigError(
                f"--stuck-after {text} continues or stops the run without the silent worker, but this run "
                f"has only 1 worker. Use {text.split(':')[0]}:warn."
            )

    def _check_tls(self) -> None:
        if self.tls and self.plain:
            raise ConfigError("--tls encrypts and --plain does not. Give only one of them.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("your own certificate needs both --tls-cert and --tls-key, and one is missing.")
        if self.tls_cert is not None and not self.tls:
            raise ConfigError(f"--tls-cert {self.tls_cert} needs TLS, which is off. Add --tls.")
        if self.tls and self.connects:
            raise ConfigError(
                f"with fabric {self.fabric!r} workers connect to each other by torch.distributed, which does "
                "not encrypt. Leave --tls out and use a tunnel (WireGuard), or leave --fabric out."
            )

    def _check_mesh(self) -> None:
        """Refuse settings that do not work when the model is split over a mesh."""
        for asked, flag, why in (
            (
                self.listen is not None,
                "--listen",
                "its groups (gloo) take in whoever connects, so it stays on one host",
            ),
            (self.connects, f"--fabric {self.fabric}", "a mesh has process groups of its own"),
            (self.balance, "--balance", "all workers of a copy work on the same batches"),
            (
                self.compress != "none",
                f"--compress {self.compress}",
                "what workers of a mesh send is not compressed",
            ),
            (self.shards != "shared", f"--shards {self.shards}", "copies take batches in turn"),
            (
                self.damping != "none",
                f"--damping {self.damping}",
                "staleness is fixed by how the model is split",
            ),
            (
                self.drop_staler is not None,
                f"--drop-staler {self.drop_staler}",
                "staleness is fixed by how the model is split",
            ),
            (self.lr_cap is not None, "--lr-cap", "every stage steps with the script's own rate"),
            (self.trigger is not None, "--trigger", "workers push to no store"),
            (self.weighting != "mean", f"--weighting {self.weighting}", "every update is one step"),
            (self.bad_gradient != "stop", "--bad-gradient skip", "all workers take every step"),
            (self.cluster is not None, "simulate SCRIPT", "a mesh runs in real time only"),
        ):
            if asked:
                raise ConfigError(f"{flag} does not go with --mesh: {why}. Leave one of them out.")

    def _check_injection(self) -> None:
        parse_injection(self.inject)
        if self.shards not in ("own", "rotating") or self.workers < 2:
            raise ConfigError(
                f"inject shares samples among workers with data of their own; with shards {self.shards!r} "
                f"and {self.workers} workers there are none. Use shards 'own' or 'rotating', more workers."
            )

    @property
    def trace_limit_bytes(self) -> int | None:
        """The same in bytes."""
        return parse_size(self.trace_limit or "none")

    @property
    def near(self) -> int:
        """How many workers are started on this machine."""
        return self.workers if self.here is None else self.here

    @property
    def path(self) -> Path:
        """The run's folder."""
        return Path(self.folder)

    @property
    def connects(self) -> bool:
        """Whether workers connect to each other: then none can go on without another."""
        return self.fabric != "shared"

    @property
    def emulated(self) -> dict[str, Any] | None:
        """The slow-downs and device times that were injected, for the record. None: nothing was."""
        if self.cluster is not None:
            return self.cluster
        injected: dict[str, Any] = {}
        if self.slow:
            injected["slow"] = {str(rank): factor for rank, factor in self.slow.items()}
        if self.device_time_s is not None:
            injected["device_time_s"] = self.device_time_s
        if self.jitter:
            injected["jitter"] = self.jitter
        return injected or None

    def damped(self, staleness: int, active: int) -> float:
        """Share of its step that a gradient of this staleness keeps (see `damping`)."""
        if self.damping == "none" or staleness <= 1:
            return 1.0
        if self.damping == "exponential":
            return math.exp(-staleness / max(active, 1))
        return 1.0 / (staleness if self.damping == "inverse" else math.sqrt(staleness))

    def step_share(self, batches: float, active: int, flush: str | None = None) -> float:
        """How much of a full step an update counts, for one gradient or the mean of several. A sum counts as
        one gradient does, because it already contains all of its gradients in full."""
        batches = 1.0 if flush == "sum" else batches
        if self.weighting == "mean":
            return 1.0 if flush == "mean" else batches / max(active, 1)
        return batches * (1.0 if self.weighting == "sum" else self.weighting)


def config_of(run: Path) -> RunConfig:
    """The configuration of a run's folder."""
    try:
        return decode_json((run / "config.json").read_bytes(), kind=RunConfig)
    except (OSError, Undecodable) as error:
        raise TraceError(f"cannot read the configuration of {run}: {error}.") from None


def _check_positive(what: str, value: float | None, unit: str = "") -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{what} must be > 0{unit}, got {value:g}.")
