"""One run, resolved: what the command, the recipe and the defaults came to. Saved as config.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from paceline.errors import ConfigError
from paceline.protocols.rules.compression import parse_compression

Weighting = Literal["mean", "sum"] | float
MOST_WORKERS = 10_000
"""Each is a process; more are a slip of the finger."""


class Every(NamedTuple):
    """How often checkpoints are taken: after so many updates, or seconds."""

    updates: int | None = None
    seconds: float | None = None


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every dial of a run that is not the protocol's own."""

    run: str
    folder: str
    script: str | None = None
    args: tuple[str, ...] = ()
    workers: int = 1
    listen: str | None = None
    """Address at which workers of other hosts may join; None: all are here."""
    here: int | None = None
    """How many of the workers are started on this machine, ranks 0 and up; None: all."""
    host_patience_s: float = 30.0
    """How long a host may be out of reach before its workers count as lost."""
    tls: bool = False
    """Whether what travels between hosts is encrypted (TLS 1.3)."""
    tls_cert: str | None = None
    """File with the certificate to show; None: one is made for the run."""
    tls_key: str | None = None
    """File with its key."""
    store_hosts: int = 1
    """How many hosts hold the store, this one included: the weights are cut into so many portions."""
    protocol: str | None = None
    """None: what the script names in `join`, else bsp."""
    settings: dict[str, Any] = {}
    engine: Literal["local", "ray", "spark"] = "local"
    """Who starts the workers: this machine, Ray, wherever it has room, or Spark, one task each."""
    address: str | None = None
    """Where Ray is reached, if it runs already."""
    master: str | None = None
    """Where Spark is reached; None: it is started on this machine."""
    seed: int = 0
    target: float | None = None
    """Accuracy whose first reaching is *time to target*."""
    weighting: Weighting = "mean"
    """How far one push moves the weights. `mean`: an epoch moves them equally far under every protocol
    (a push applied alone counts 1/active of a step, a flush of all counts as one step, a flush of
    some in between); `sum`: every push counts as a whole step; a number: that much of a step. With
    `balance` a push of n samples counts as n / the loader's batch size pushes, so that an epoch moves
    the weights as far however its samples are split."""
    damping: Literal["none", "inverse", "sqrt", "exponential"] = "none"
    """How a stale gradient's step shrinks, for pushes that are applied at once: not at all, by
    1/staleness, 1/sqrt(staleness), or exp(-staleness/active workers)."""
    schedule: Literal["samples", "updates"] = "samples"
    """What a prepared LR scheduler counts. `samples`: one step per batch x workers samples processed,
    whatever the protocol; `updates`: one per optimizer update, as the published systems did."""
    clip_norm: float | None = None
    """Clip the norm of every update's gradient to this, in the store, after averaging."""
    compress: str = "none"
    """How peers compress what they give to an average: none, fp16, bf16, int8, topk:SHARE, powersgd:RANK."""
    bad_gradient: Literal["stop", "skip"] = "stop"
    """What to do about NaN or infinity: stop the run, or skip the gradient and count it."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do when a worker dies: go on with the others, or stop the run."""
    shards: Literal["shared", "equal", "own", "rotating"] = "shared"
    """`shared`: whoever is ready takes the next batch; `equal`: every worker has an equal share of every
    epoch; `own`: one chunk of an order that is drawn once, for good; `rotating`: the same chunks, but every
    worker goes on to the next one with every epoch."""
    inject: str = ""
    """DONORS:SHARE, for chunks of unlike data: at every step this share of the workers shares this share
    of its batch with all others; batches are made smaller, so that with it they are the loader's size."""
    balance: bool = False
    """Give every worker a batch in proportion to its measured speed, whatever the protocol; the sizes
    add up to workers x the loader's batch size. Gradients count by their samples, which is right for a
    loss that averages over its batch, as PyTorch's do, and wrong for one that sums: that cannot be seen
    from outside. Needs a map-style dataset, its loader's own batches, and shared work."""
    private_weights: bool = False
    """Give every worker its own copy even in lockstep, so that scripts may write to parameters."""
    fabric: Literal["shared", "gloo"] = "shared"
    """How the vectors of a peer protocol travel: through memory that all processes of a machine share, and
    between machines over the run's own connection; or between the workers of one machine by
    torch.distributed's gloo, over the loopback interface (for a model on a GPU: by its NCCL, untested)."""
    slow: dict[int, float] = {}
    """Rank -> factor by which its compute is stretched (emulated)."""
    device_time_s: float | None = None
    """Pad every worker's compute to this, times its `slow` factor (emulated)."""
    jitter: float = 0.0
    """Relative spread of the padded compute time, seeded."""
    resume: str | None = None
    """Folder of a checkpoint to go on from."""
    checkpoint_every: str | None = None
    """How often a checkpoint is taken while the run goes on: 500 (updates), 60s, 10m or 1h; None: never."""
    plan: str | None = None
    """File of a sharding plan that takes the place of a protocol."""
    cluster: dict[str, Any] | None = None
    """In an exact simulation: the cluster in whose virtual time the run takes place."""

    replay: str | None = None
    """Folder of a recorded run to be carried out again, verdict by verdict."""
    until: int | None = None
    """In a replay: the verdict after which to stop."""

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
            raise ConfigError(f"{self.here} of {self.workers} workers cannot be here.")
        if self.here is not None and self.here < self.workers and self.listen is None:
            raise ConfigError(
                f"{self.workers - self.here} of {self.workers} workers are to come from elsewhere, but the "
                "run does not listen. Name an address with --listen HOST:PORT."
            )
        self._check_tls()
        for rank, factor in self.slow.items():
            if not 0 <= rank < self.workers:
                last = self.workers - 1
                raise ConfigError(f"slow rank {rank} does not exist: the ranks are 0 to {last}.")
            _check_positive(f"slow factor of rank {rank}", factor)
        _check_positive("host patience", self.host_patience_s, " seconds")
        _check_positive("device time", self.device_time_s, " seconds")
        _check_positive("clip norm", self.clip_norm)
        if not isinstance(self.weighting, str):
            _check_positive("weighting must be 'mean' or 'sum', or it", self.weighting)
        if self.balance and self.shards != "shared":
            raise ConfigError(
                f"balance gives a slow worker less to do, but shards {self.shards!r} gives everybody the "
                "same. "
                "Use shards 'shared', or leave --balance out."
            )
        parse_compression(self.compress)
        if self.connects and self.workers == 1:
            raise ConfigError(
                f"fabric {self.fabric!r} connects workers, but there is only 1. Use --workers 2 or more, "
                "or --fabric shared."
            )
        if self.inject:
            self._check_injection()
        if self.store_hosts < 1:
            raise ConfigError(f"the store lies on at least 1 host, got {self.store_hosts}.")
        if self.checkpoint_every is not None:
            self._check_checkpoints(self.checkpoint_every)
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter must be in [0, 1), got {self.jitter:g}.")
        if self.target is not None and not math.isfinite(self.target):
            raise ConfigError(f"target must be an accuracy such as 0.95, got {self.target:g}.")

    def _check_checkpoints(self, every: str) -> None:
        parse_every(every)
        for asked, why, other in (
            (self.connects, f"over {self.fabric!r} nobody has all replicas", "--fabric"),
            (self.compress != "none", "what compression keeps back is not saved yet", "--compress"),
        ):
            if asked:
                raise ConfigError(
                    f"--checkpoint-every {every} needs all of the run's state in one place, but {why}. "
                    f"Leave --checkpoint-every or {other} out."
                )

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("a certificate of your own takes --tls-cert and --tls-key, and one is missing.")
        if self.tls_cert is not None and not self.tls:
            raise ConfigError(f"the certificate {self.tls_cert} is for TLS, which is off. Add --tls.")
        if self.tls and self.connects:
            raise ConfigError(
                f"with fabric {self.fabric!r} workers connect to each other by torch.distributed, which does "
                "not encrypt. Leave --tls out and use a tunnel (WireGuard), or leave --fabric out."
            )

    def _check_injection(self) -> None:
        parse_injection(self.inject)
        if self.shards not in ("own", "rotating") or self.workers < 2:
            raise ConfigError(
                f"inject shares samples among workers with data of their own; with shards {self.shards!r} "
                f"and {self.workers} workers there are none. Use shards 'own' or 'rotating', more workers."
            )

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
        """What was injected, for the record; None when nothing was."""
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
        """The share of its step that a gradient of this staleness keeps (see `damping`)."""
        if self.damping == "none" or staleness <= 1:
            return 1.0
        if self.damping == "exponential":
            return math.exp(-staleness / max(active, 1))
        return 1.0 / (staleness if self.damping == "inverse" else math.sqrt(staleness))

    def step_share(self, batches: float, active: int, flush: str | None = None) -> float:
        """How much of a full step an update counts: of one gradient, or of a flush of several."""
        whole = flush in ("mean", "sum")
        if self.weighting == "mean":
            return 1.0 if whole else batches / max(active, 1)
        each = 1.0 if self.weighting == "sum" else float(self.weighting)
        return each if flush == "sum" else each * batches


def parse_every(text: str) -> Every:
    """`500`: updates; `60s`, `10m`, `1h`: time."""
    number, unit = text[:-1], {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        every = Every(updates=int(text)) if unit is None else Every(seconds=float(number) * unit)
    except ValueError:
        every = Every(updates=0)
    if not 0 < (every.updates or every.seconds or 0) < math.inf:
        raise ConfigError(
            "--checkpoint-every takes a number of updates such as 500, or a time such as 60s, 10m or 1h, "
            f"got {text!r}."
        )
    return every


def parse_injection(text: str) -> tuple[float, float]:
    """`0.25:0.5`: a quarter of the workers share half of their batches."""
    donors, _, share = text.partition(":")
    try:
        shares = float(donors), float(share)
    except ValueError:
        shares = (0.0, 0.0)
    if not all(0 < each <= 1 for each in shares):
        raise ConfigError(
            "inject is DONORS:SHARE, two shares in (0, 1] such as 0.25:0.25 (of the workers, of their "
            f"batches), got {text!r}."
        )
    return shares


def _check_positive(what: str, value: float | None, unit: str = "") -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{what} must be > 0{unit}, got {value:g}.")
