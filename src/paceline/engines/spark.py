"""Spark starts the workers: one task each, all at once (a barrier stage), in whatever executors there are.

The store runs on the driver's host. A task runs its worker as a child process: Spark's own Python process
is not ours to take over, and a task that Spark kills takes its worker along. What workers print comes back
into the run's folder. Gradients and weights go the ways of every other run, never through Spark.

    from paceline.engines.spark import train_on
    train_on(frame.repartition(4), "script.py", protocol="dssp")    # each worker its own partition's rows

There the script finds its rows with `pace.partition()`. They go from the task to its worker through a file
that has no name, as msgpack. How Spark brings rows to a task (by pickle, mostly) is Spark's affair, and so
is the wire on which tasks, and the run's secret with them, travel: where others listen, encrypt it with
`spark.network.crypto.enabled`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import decode_source, find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.config import RunConfig
from paceline.decoding import decode_json
from paceline.engines.control import Ended
from paceline.engines.logs import LogBook, call_home
from paceline.engines.meeting import MeetingPoint, StoreOrder, launch_service, meeting_of
from paceline.engines.worker import WorkerOrder, run_worker
from paceline.errors import ConfigError, RunError
from paceline.fabric.choice import listening
from paceline.fabric.stop_signals import handlers_kept
from paceline.fabric.tls import Seal
from paceline.fabric.wire import new_secret, parse_address
from paceline.protocols.grid import Grid
from paceline.runtime.worker.data.rows import spooled
from paceline.store.disk.folders import new_folder
from paceline.trace import Result, read_trace, tally

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame

EXECUTORS_S = 60.0
"""How long the first executor may take to appear."""
REACH_S = 5.0
"""How long a master may take to answer."""
SETTLED_S = 10.0
"""After so long without another one, those that are there are all there are."""
SAVING_S = 120.0
"""How long a store may take to end, and so to save, after all workers have ended in good order."""
LATE_S = 10.0
"""How long a run may take to begin, or to end, after one of its workers has ended."""


class SparkTask(msgspec.Struct, frozen=True):
    """What Spark carries to every task, as JSON."""

    order: WorkerOrder
    logs: tuple[str, int]
    data: bool
    """Whether the partition's rows are for the worker."""


def connect(master: str) -> SparkContext:
    """Spark as this run needs it. Its quirks end here: it would take Ctrl-C for itself."""
    from pyspark import SparkConf, SparkContext

    check_master(master)
    local = master.startswith("local")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.dynamicAllocation.enabled": "false",
        "spark.stage.maxConsecutiveAttempts": "1",
        **({"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"} if local else {}),
    }
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        with handlers_kept():
            conf = SparkConf().setMaster(master).setAppName("paceline").setAll(list(settings.items()))
            return SparkContext(conf=conf)
    except Exception as error:  # Java missing, a master that does not answer or is none: all sorts of types
        raise ConfigError(f"Spark did not start with --master {master}: {_first_line(error)}") from None


class SparkEngine:
    """Runs on a Spark that somebody else may use as well; `close` leaves it as it was."""

    def __init__(self, spark: SparkContext, data: RDD[Any] | None = None) -> None:
        self._spark, self._data = spark, data
        self._store: subprocess.Popen[bytes] | None = None
        self._logs: LogBook | None = None
        self._job: threading.Thread | None = None
        self._group = ""
        self._statuses: dict[int, int] = {}
        self._hosts: dict[int, str] = {}
        self._error = ""

    def launch(self, config: RunConfig, secret: str = "") -> None:
        """Start the store here, and one task per worker."""
        check_slots(self._spark, config.workers)
        host, secret = _driver_host(self._spark), secret or new_secret()
        config = listening(config, f"{host}:0")
        self._config, self._group = config, f"paceline {config.run}"
        order = msgspec.json.encode(StoreOrder(config, secret, os.getpid()))
        self._store, address = launch_service("store", order)
        seal = Seal(config.tls_cert, config.tls_key) if config.tls else None
        self._logs = LogBook(host, secret, config.path, config.workers, seal)
        worker = self._order(config, meeting_of(config, address, secret))
        task = SparkTask(worker, self._logs.address, self._data is not None)
        self._job = threading.Thread(target=self._run, args=(msgspec.json.encode(task),), daemon=True)
        self._job.start()

    def _order(self, config: RunConfig, meeting: MeetingPoint) -> WorkerOrder:
        assert config.script is not None
        script = Path(config.script).resolve()
        threads = int(self._spark.getConf().get("spark.task.cpus", "1") or 1)
        there = msgspec.structs.replace(config, script=str(script))
        source, folder = decode_source(script.read_bytes()), os.getcwd()
        return WorkerOrder(
            config=there, meeting=meeting, rank=-1, threads=threads, source=source, folder=folder
        )

    def _run(self, task: bytes) -> None:
        """The barrier stage, in a thread of its own: Spark answers when all tasks have ended."""
        workers = self._config.workers
        rows = self._spark.parallelize(range(workers), workers) if self._data is None else self._data
        try:
            self._spark.setJobGroup(self._group, self._group, interruptOnCancel=True)
            for rank, host, status in rows.barrier().mapPartitions(partial(work, task)).collect():
                self._hosts[rank], self._statuses[rank] = host, status
        except Exception as error:  # py4j's, whatever went wrong over there
            self._error = _first_line(error)

    def wait(self, timeout_s: float) -> Ended | None:
        """The end of the run, if it comes within this time."""
        assert self._job is not None
        assert self._store is not None
        assert self._logs is not None
        self._job.join(timeout_s)
        if self._job.is_alive():
            self._check_all_came(self._logs)
            return None
        self._logs.settle()
        try:
            in_order = not self._error and not any(self._statuses.values())
            self._store.wait(SAVING_S if in_order else LATE_S)
        except subprocess.TimeoutExpired:
            self._end_store()
            raise RunError(self._without_an_end()) from None
        detail = f"Spark gave the workers' stage up: {self._error.rstrip('.')}" if self._error else ""
        return Ended(self._statuses, self._store.returncode, self._hosts, detail)

    def _check_all_came(self, logs: LogBook) -> None:
        """A worker that ended without a word before the run began is waited for by nobody."""
        trace = self._config.path / "trace.jsonl"
        if trace.exists() and trace.stat().st_size:
            return
        late = [rank for rank, at in list(logs.ended.items()) if time.monotonic() - at > LATE_S]
        if late:
            log = self._config.path / "logs" / f"rank{late[0]}.log"
            said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            last = f": {said[-1].rstrip('.')}" if said else ""
            raise RunError(f"rank {late[0]} ended before training began{last}. Read {log}.")

    def _without_an_end(self) -> str:
        why = self._error or f"all tasks ended, with {self._statuses}, but the store waits for a worker"
        return f"Spark gave the workers' stage up: {why.rstrip('.')}. Read {self._config.path}/logs/."

    def stop(self) -> None:
        """Ask the run to end and to save its state."""
        if self._store is not None:
            self._store.terminate()

    def close(self) -> None:
        """End what is left of the run: tasks, store, log book."""
        if self._job is not None and self._job.is_alive():
            self._spark.cancelJobGroup(self._group)
            self._job.join(LATE_S)
        self._end_store()
        if self._logs is not None:
            self._logs.close()

    def _end_store(self) -> None:
        if self._store is None or self._store.poll() is not None:
            return
        self._store.terminate()
        try:
            self._store.wait(LATE_S)
        except subprocess.TimeoutExpired:
            self._store.kill()
            self._store.wait()


def check(where: str | None) -> None:
    """Whether PySpark is installed."""
    if find_spec("pyspark") is None:
        raise ConfigError("--engine spark needs PySpark. Install it: pip install 'paceline[spark]'")


@contextmanager
def opened(script: str | None, where: str | None) -> Iterator[SparkEngine]:
    """The engine on a Spark of its own, until the runs are over."""
    spark = connect(where or "local[*]")
    try:
        with closing(SparkEngine(spark)) as engine:
            yield engine
    finally:
        spark.stop()


def work(told: bytes, rows: Iterable[Any]) -> Iterator[tuple[int, str, int]]:
    """A task: run one worker, and pass on what it prints. Called by Spark, in an executor."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    task, rank = decode_json(told, kind=SparkTask), context.partitionId()
    hosts = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
    local = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    meeting = task.order.meeting
    home = call_home(task.logs, meeting.secret, rank, meeting.trust)
    with home, spooled(rows, task.data) as partition:
        order = msgspec.structs.replace(task.order, rank=rank, partition=partition, local=local)
        yield rank, socket.gethostname(), run_worker(order, home.sendall)


def train_on(
    data: DataFrame | RDD[Any], script: str | Path, *args: str, runs: Path | str = "runs", **dials: Any
) -> Result:
    """Train `script` on as many workers as `data` has partitions; each finds its rows in `pace.partition()`.

    `dials` are those of `RunConfig`: protocol, settings, seed and so on. On a mesh, such as
    `mesh={"data": 2, "model": 2}`, the workers of a copy share their rows, and compute with the same batches.
    """
    rows: Any = data.rdd if hasattr(data, "rdd") else data
    _check_partitions(rows.getNumPartitions(), dials.get("mesh"))
    run = f"spark-{time.strftime('%Y%m%d-%H%M%S')}-{new_secret()[:4]}"
    folder = new_folder(Path(runs), run)
    workers = rows.getNumPartitions()
    config = RunConfig(
        run=run,
        folder=str(folder),
        script=str(script),
        args=args,
        workers=workers,
        **({"correct": "auto"} | dials),
    )
    engine = SparkEngine(rows.context, rows)
    try:
        engine.launch(config)
        while (ended := engine.wait(1.0)) is None:
            pass
    finally:
        engine.close()
    return _result(folder, ended)


def _check_partitions(partitions: int, mesh: dict[str, int] | None) -> None:
    """Every worker of a mesh is a task, and has a partition."""
    places = Grid(mesh).count if mesh else partitions
    if places != partitions:
        raise ConfigError(
            f"the mesh {Grid(mesh or {})} has {places} places, and the data {partitions} partitions. Use "
            f"data.repartition({places})."
        )


def _result(folder: Path, ended: Ended) -> Result:
    total = tally(read_trace(folder))
    if total.end is not None and total.end.status == "finished":
        return total.result()
    detail = "the store ended without a message" if total.end is None else total.end.detail
    failed = [f"Rank {r} was on host {ended.hosts[r]}." for r, code in sorted(ended.statuses.items()) if code]
    said = [f"{ended.detail}."] if ended.detail else []
    raise RunError(f"{detail.rstrip('.')}. {' '.join([*said, *failed, f'Read {folder}/logs/.'])}")


def check_slots(spark: SparkContext, workers: int, settled_s: float = SETTLED_S) -> None:
    """All workers start at once or not at all; Spark itself would wait ten minutes for slots to appear."""
    scheduler: Any = spark._jsc.sc()
    profile = scheduler.resourceProfileManager().defaultResourceProfile()
    slots, since = 0, time.monotonic()
    while (now := scheduler.maxNumConcurrentTasks(profile)) < workers:
        if now != slots:
            slots, since = now, time.monotonic()
        if time.monotonic() - since > (settled_s if slots else EXECUTORS_S):
            raise _too_few(workers, slots, str(spark.master))
        time.sleep(0.1)


def _too_few(workers: int, slots: int, master: str) -> ConfigError:
    if not slots:
        return ConfigError(
            f"Spark at {master} had no executor for {EXECUTORS_S:g} s. Check that it has workers with free "
            "cores and memory."
        )
    return ConfigError(
        f"{workers} workers need {workers} slots at the same time, but Spark has {slots} "
        f"(executors x cores / spark.task.cpus, at {master}). Use --workers {slots}, or give Spark more."
    )


def check_master(master: str) -> None:
    """Whether somebody is there: Spark itself tries for a minute, and then seems to have no executors."""
    scheme, _, addresses = master.partition("spark://")
    if scheme or not addresses:
        return
    for address in addresses.split(","):
        try:
            socket.create_connection(parse_address(address), REACH_S).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
    raise ConfigError(f"no Spark at {master}: {why}. Name a master that runs, or local[2] for this machine.")


def _driver_host(spark: SparkContext) -> str:
    """Where executors reach this host: as they reach Spark's driver."""
    if str(spark.master).startswith("local"):
        return "127.0.0.1"
    return socket.gethostbyname(spark.getConf().get("spark.driver.host") or socket.gethostname())


def _first_line(error: Exception) -> str:
    """What a Java exception says, without its hundred lines of trace: a lost executor, if that is why."""
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage() or java)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("ModuleNotFoundError: No module named 'paceline") for line in lines):
        return (
            "the Python of Spark's executors has no paceline. Set PYSPARK_PYTHON to one that has, such as "
            f"{sys.executable}, before the Spark session is made"
        )
    lost = (line for line in lines if line.startswith("ExecutorLost"))
    return next(lost, lines[0] if lines else type(error).__name__)
