"""What one worker takes in: the data it is given, counted, from one step of its optimizer to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec import structs

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.random_state import RandomState
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.runtime.messages.workers import Ready
from paceline.runtime.worker.data.fingerprint import fingerprint
from paceline.runtime.worker.data.loader import Dispensed, StridedLoader, paced_loader, source_of
from paceline.runtime.worker.data.partition import Partition
from paceline.runtime.worker.data.pass_log import PassLog
from paceline.runtime.worker.data.sample_order import SampleOrders
from paceline.runtime.worker.data.second_pass import SecondPass
from paceline.runtime.worker.data.unused import Unused
from paceline.runtime.worker.data.void import Void
from paceline.runtime.worker.emulation import Emulation, VirtualDevice
from paceline.runtime.worker.link import StoreLink
from paceline.store.together import parts_of
from paceline.store.work.budget import Batch, Source
from paceline.store.work.chunks import CHUNKED, Injection, arrange
from paceline.store.work.due import LoaderPasses


class Intake:
    """One worker's."""

    def __init__(self, link: StoreLink, device: Emulation | VirtualDevice) -> None:
        self._link, self._config = link, link.config
        self.device = device
        """What times the computing on the data."""
        self.repeats = SecondPass(device.begin)
        self.on_batch: Callable[[], None] = lambda: None
        """Told when a batch has reached the script, before it is computed."""
        self.on_end: Callable[[], None] = lambda: None
        """Told when a pass over the loader has come to its end."""
        self.reached: Callable[[], bool] = lambda: True
        """Whether backward has reached the batch at hand."""
        self.used: list[Batch] = []
        """The batches since the last step."""
        self.samples = 0
        """Their samples."""
        self.usual = 1
        """Samples of a full batch, as far as they are known beforehand."""
        self.resumed = False
        """Whether a resumed script only repeats what was done before."""
        self.lengths = (0, 0)
        """Of the loader before and after prepare, as far as they are known."""
        self.epoch = -1
        """Of the last batch."""
        self._fed = False
        self._batch: int | None = None
        self._since = [0]
        """Samples in the next gradient of each optimizer."""
        self._last = 0
        """Samples of the batch at hand."""
        self._open = False
        """Whether nobody has looked yet if that is in these gradients."""
        self._loader: Any = None
        self._source: Source | None = None
        self._sampler: Any = None
        self._whole_batches = False
        self._injection: Injection | None = None
        self._void = Void(())
        self._unused: Unused | None = None
        """Looks whether a prepared loader is used at all; one worker does so for all."""
        self._counted = False
        """Whether a loader tells how many samples there are."""
        self._in_pass = 0
        self.passes = 0
        """How many passes over the loader have ended, those included that a resumed script repeats."""
        self._begins = False
        """Whether a pass has begun and had no batch so far."""
        self._log = PassLog()
        self._stepped = False
        """Whether an optimizer has stepped in this pass."""
        self._told_broken_off = False
        self._random: RandomState | None = None
        """Where random numbers stood when the run was stopped that goes on; None once they stand there."""

    # -- preparing ----------------------------------------------------------------------------

    def offer(self, loader: Any, optimizer: torch.optim.Optimizer) -> Source | None:
        """What the loader offers to the run."""
        self._loader, self._since = loader, [0] * len(parts_of(optimizer))
        self._void = Void(p for group in optimizer.param_groups for p in group["params"])
        self._check_several()
        if loader is not None:
            self._source, self._sampler, self._whole_batches = source_of(loader)
        if self._source is not None:
            self._source = structs.replace(self._source, data=fingerprint(loader))
        self._source, self._injection = arrange(self._source, self._config, loader is not None)
        source = self._source
        self._batch = source.batch if source is not None and self._config.balance else None
        self.usual = 1 if source is None else source.batch
        return source

    def _check_several(self) -> None:
        """Refuse what would not be right with several optimizers."""
        config = self._config
        for flag, on in {
            "--balance": config.balance,
            f"--compress {config.compress}": config.compress != "none",
            f"--store-hosts {config.store_hosts}": config.store_hosts > 1,
            "--trigger": self._link.trigger is not None,
        }.items():
            if on and self.several:
                raise ConfigError(f"{flag} does not go with several optimizers, so far. Leave it out.")

    @property
    def several(self) -> bool:
        """Whether there are several optimizers, which step in turn with the same data."""
        return len(self._since) > 1

    def begin(self, ready: Ready) -> Any:
        """Training begins: the loader that the script is to have."""
        loader, source = self._loader, self._source
        self._counted = loader is not None
        self.lengths = 0 if source is None else source.batches, ready.rounds or 0
        if loader is None:
            self._mention_no_loader()
            self.passed()
            self.device.begin()
            return None
        if self._link.lead:
            self._unused = Unused(ready.rounds, self._link.say)
        if source is None:
            rank, size = self._part_of_stream(loader)

            def enough() -> bool:
                return self._link.enough

            def ends() -> None:
                self._pass_ends()
                self._end_pass()

            return StridedLoader(loader, rank, size, self.arrived, self.repeats, enough, ready.agrees, ends)
        return self._dispensing(loader, source, ready)

    def _dispensing(self, loader: Any, source: Source, ready: Ready) -> Any:
        config = self._config
        fixed = config.shards in CHUNKED
        orders = SampleOrders(self._sampler, source.units, config.seed, fixed, loader)
        if self._link.rank == 0:
            orders.say = self._link.note
        dispensed = Dispensed(
            self._link,
            orders,
            source,
            self._whole_batches,
            ready.epoch,
            self._injection,
            ready.rounds,
            self._load,
        )
        return paced_loader(loader, dispensed, self.begins, self.arrived, self.passed, self.repeats)

    def _part_of_stream(self, loader: Any) -> tuple[int, int]:
        """An iterable dataset: which batch to begin with, and how many are between two."""
        if isinstance(loader.dataset, Partition) or self._config.shards == "own":
            return 0, 1
        if self._link.lead:
            self._link.say(
                f"the loader has an iterable dataset: {self._config.workers} workers read the same stream, "
                "and each keeps its part of the batches. If the dataset gives every worker data of its own "
                "already, by RANK or at random, say --shards own: each then keeps all that it reads"
            )
        return self._link.rank, self._config.workers

    def _mention_no_loader(self) -> None:
        if self._link.lead:
            self._link.say(
                "prepare was given no loader: every worker draws its own batches with its own random "
                "numbers, and the data are not shared among workers. To have samples counted, call "
                "pace.report(samples=...) before each step; to share data, prepare a DataLoader"
            )

    # -- a pass over the loader ---------------------------------------------------------------
    # A loader draws a random number at the beginning of each pass. Resumed, a script begins passes again that
    # are behind it: what these draw is taken back, but not what a pass draws that is really new.

    def go_on(self, state: WorkerState) -> None:
        """The run goes on, and this worker where it stood."""
        self._random, self.epoch = state.random, state.epoch

    def _load(self, batch: Batch) -> None:
        """A batch is about to be loaded."""
        if self._random is not None and batch.epoch == self.epoch:
            self._random.restore()
        self._random = None

    def arrived(self, samples: int, batch: Batch | None = None) -> None:
        """A batch reached the script."""
        if self._begins and batch is not None:
            self._begin_pass(batch.epoch)
        self._void.end()
        if not samples:
            self._void.begin()
        if self._unused is not None:
            self._unused.arrived()
        self._settle()
        self._fed = self._open = True
        self._in_pass += 1
        self._log.arrived()
        self.samples += samples
        self._last = samples
        self._since = [each + samples for each in self._since]
        if batch is not None:
            self.epoch = batch.epoch
            self.used.append(batch)
        self.resumed = False
        self.on_batch()
        self.device.begin()

    def begins(self) -> None:
        """A pass over the loader begins."""
        self._begins = True
        self._log.begins()

    def told_passes(self) -> LoaderPasses | None:
        """The passes over the prepared loader, for the run's books."""
        unused = sum(batch.count > 0 for batch in self.used)
        return None if self._loader is None else self._log.told(self.lengths[1], unused)

    def _begin_pass(self, epoch: int) -> None:
        """Its first batch has come."""
        self._begins = False
        if self._in_pass and epoch != self.epoch:  # nothing was left: only the loader's end was not asked for
            self.passed()
        elif self._in_pass and self._link.lead and not self._told_broken_off:
            self._told_broken_off = True
            self._link.say(
                f"the script broke off a pass over the loader after {self._in_pass} batches and started "
                "another. The new pass continues with the rest of the epoch, whereas plain PyTorch would "
                "start the epoch again; --resume counts only whole epochs"
            )

    def _pass_ends(self) -> None:
        """What is computed from now on is on no batch of ours."""
        self._void.end()
        self._settle()
        self._last = 0
        self.on_end()

    def passed(self) -> None:
        """The loader has come to an end."""
        self._log.ends()
        self._pass_ends()
        length, batches = self.lengths[1], self._end_pass()
        stepped, self._stepped = self._stepped, False
        if batches and not stepped:
            self._link.say(
                f"rank {self._link.rank} had {batches} batches in a pass, and no prepared optimizer stepped. "
                "To look at data without training, use a loader that is not prepared: this one gives each "
                "worker a part. An optimizer made after prepare trains one worker's model: give it to prepare"
            )
        elif self.used and batches != length:
            left = "1 batch" if len(self.used) == 1 else f"{len(self.used)} batches"
            self._link.say(
                f"rank {self._link.rank} ended a pass with gradients of {left} that it has not "
                f"stepped with. It had {batches} batches, and len(loader) is {length}: under this "
                "protocol that is an average, so `i + 1 == len(loader)` misses the end. Step after the loop, "
                "too"
            )
        if self._random is not None:
            self._random.restore()

    def _end_pass(self) -> int:
        batches, self._in_pass = self._in_pass, 0
        self.passes += self._loader is not None
        return batches

    @property
    def between(self) -> bool:
        """Whether the script is between two passes over its loader."""
        return self._loader is not None and not self._in_pass

    def counted(self, values: dict[str, float]) -> dict[str, float]:
        """What a script reports, without the samples that only it can count."""
        if not self._counted and "samples" in values:
            self.samples += int(values.pop("samples"))
        return values

    # -- a step -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The batch at hand is behind us: it counts only if it is in a gradient."""
        if self._open and not self.reached():
            self._since = [max(0, each - self._last) for each in self._since]
        self._open = False

    def cleared(self, which: int) -> None:
        """An optimizer's gradient is gone, and so are the batches that were in it."""
        self._since[which] = self._last if self._open else 0

    def steps(self) -> None:
        """An optimizer is about to step."""
        if max(self._since) > self._last:  # else the batch at hand is all there is
            self._settle()
        self._open = False

    def computed(self) -> float:
        """The gradient is there: how long it took."""
        return self.device.finish(self._usual_batches())

    def _usual_batches(self) -> float:
        """What was computed, in batches of the loader's size; several of one iteration count as one."""
        return 1.0 if self._batch is None else self.samples / (self._batch * max(len(self.used), 1))

    def stepped(self, which: int) -> None:
        """An optimizer has stepped; what comes now is counted anew."""
        if self._unused is not None:
            self._unused.stepped()
        if not self._fed or self.several:
            self.device.begin()  # no prepared loader, or another step to come: compute begins now
        self._since[which] = 0
        self.used, self.samples, self._fed, self._stepped = [], 0, False, True

    def ends(self) -> None:
        """This worker takes no further part."""
        if self._unused is not None:
            self._unused.ends()

    @property
    def wants(self) -> bool:
        """Whether a batch is wanted that is not in hand yet."""
        return self._fed and self._link.granted == 0

    def again(self, which: int) -> bool:
        """Whether another of several optimizers has stepped with these data."""
        return self.several and (not self._fed if self._loader is not None else which > 0)

    def weigh(self, which: int) -> int:
        """What a gradient counts in a mean: its samples. Further steps on a batch count like the first."""
        return self._since[which] or self._last if self._counted else self.samples
