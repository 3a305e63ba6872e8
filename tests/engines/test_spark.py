"""Spark starts the workers: the same run as on one machine, in executors of real Spark clusters."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("pyspark", reason="PySpark is not installed: make test-spark")

from pyspark import SparkContext
from pyspark.sql import SparkSession

from paceline.cli.running.conduct import conduct
from paceline.engines.control import Ended
from paceline.engines.spark import SparkEngine, check_master, check_slots, connect, train_on
from paceline.errors import ConfigError, RunError
from paceline.store.disk.folders import saved_in
from paceline.trace import read_trace
from paceline.trace.events import Exchanged
from support.runs import TOKEN, Lab, Run, once, wait_until
from support.spark import Cluster, end_spark
from support.tensors import assert_close

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::ResourceWarning")]

FAILS = """
import os, torch, paceline
from torch.utils.data import DataLoader, TensorDataset
pace = paceline.join()
model = torch.nn.Linear(2, 1)
loader = DataLoader(TensorDataset(torch.zeros(400, 2)), batch_size=2)
model, optimizer, loader = pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for step, (x,) in enumerate(loader):
    if step == 5 and pace.rank == 1:
        raise LookupError("the cupboard is bare")
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

ROWS = """
import torch, paceline
from torch.utils.data import DataLoader
pace = paceline.join()
model = torch.nn.Linear(2, 1)
loader = DataLoader(pace.partition(shuffle=True), batch_size=4)
model, optimizer, loader = pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
for epoch in pace.epochs(2):
    seen = []
    for rows in loader:
        seen += rows["id"].tolist()
        loss = (model(torch.stack(rows["features"], 1).float()) ** 2).mean() + 1
        loss.backward()
        pace.report(loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
    print("rows", epoch, seen)
"""


GRID = """
import sys, torch, paceline
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from paceline.parallel.layers import parallelize
pace = paceline.join("row_split")
mesh = pace.mesh(data=2, model=2)
torch.manual_seed(0)
model = parallelize(nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)), mesh)
loader = DataLoader(pace.partition(shuffle="--in-order" not in sys.argv), batch_size=8)
model, optimizer, loader = pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
for epoch in pace.epochs(2):
    seen = []
    for rows in loader:
        seen += rows["id"].tolist()
        x = torch.stack(rows["features"], 1).float()
        F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("rows", epoch, seen)
"""


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Whatever these tests start, JVMs included, carries a token of their own, and is gone afterwards."""
    before = os.environ.get(TOKEN)
    lab = Lab(tmp_path_factory.mktemp("spark"))
    yield lab
    lab.close()
    wait_until(lambda: not lab.leftovers(), "all processes are gone", 60)
    os.environ.pop(TOKEN)
    if before is not None:
        os.environ[TOKEN] = before


@pytest.fixture(scope="module")
def spark(around: Lab) -> Iterator[SparkContext]:
    """Two executors in processes of their own, for all tests here: they start slowly."""
    context = connect("local-cluster[2,1,1024]")
    yield context
    end_spark(context)


@pytest.fixture
def lab(around: Lab, tmp_path: Path) -> Lab:
    around.root = tmp_path
    return around


def on_spark(lab: Lab, spark: SparkContext, script: str | Path, *args: object, **dials: Any) -> Run:
    """A whole run, conducted as the command does it; it raises what the command would say."""
    config, engine = lab.config(script, *args, workers=2, **dials), SparkEngine(spark)
    try:
        conduct(engine, config)
    finally:
        engine.close()
    return Run(config, Ended({}, 0))


def test_bsp_equals_the_local_engine_to_rounding(lab: Lab, spark: SparkContext) -> None:
    """Spark's classic data parallelism, a map-reduce of gradients: one process with the union batch."""
    there = on_spark(lab, spark, "train.py", "momentum", protocol="bsp", seed=3)
    here = lab.trained("train.py", "momentum", workers=2, protocol="bsp", seed=3)
    assert_close(there.weights, here.weights, 1e-6)
    assert there.used() == here.used()


def test_averaging_weights_after_every_step_is_averaging_gradients(lab: Lab, spark: SparkContext) -> None:
    """Map-reduce of weights with one local step each, against gradients: the same for plain SGD."""
    sizes = ("sgd", "--samples", 32, "--epochs", 1)
    there = on_spark(lab, spark, "train.py", *sizes, protocol="local_sgd", settings={"period": 1})
    here = lab.trained("train.py", *sizes, workers=2, protocol="allreduce")
    assert_close(there.weights, here.weights, 1e-5)


def test_dssp_keeps_its_bound(lab: Lab, spark: SparkContext) -> None:
    dials: dict[str, Any] = {"slow": {1: 4.0}, "device_time_s": 0.003, "settings": {"lower": 1, "upper": 3}}
    run = on_spark(lab, spark, "train.py", "momentum", "--samples", 240, protocol="dssp", **dials)
    assert run.result.max_clock_gap is not None
    assert 1 <= run.result.max_clock_gap <= 3


def test_a_script_that_fails_is_reported_with_rank_host_and_log(lab: Lab, spark: SparkContext) -> None:
    with pytest.raises(RunError) as told:
        on_spark(lab, spark, lab.script(FAILS), protocol="bsp", on_failure="stop")
    found = re.search(r"Rank 1 was on host (\S+); read (\S+/rank1\.log)\.", str(told.value))
    assert "LookupError: the cupboard is bare" in str(told.value)
    assert found, told.value
    assert found[1] == socket.gethostname()
    log = Path(found[2])
    assert "Traceback" in log.read_text()


def test_a_worker_that_ends_before_it_joins_does_not_hang_the_others(lab: Lab, spark: SparkContext) -> None:
    text = (
        "import os, paceline\nfrom paceline.runtime import seat\nif seat.mine().rank:\n    os._exit(3)\n"
        + FAILS
    )
    with pytest.raises(RunError, match=r"rank 1 ended before training began\. Read \S+rank1\.log\."):
        on_spark(lab, spark, lab.script(text))


def test_deepspark_gets_its_rows_partition_by_partition_each_exactly_once(
    lab: Lab, spark: SparkContext
) -> None:
    settings = {"mode": "asynchronous", "adaptive": True, "period": 2}
    frame = SparkSession(spark).range(0, 41, 1, 2).selectExpr("id", "array(id / 41, 1 - id / 41) AS features")
    parts = [[row.id for row in part] for part in frame.rdd.glom().collect()]
    result = train_on(frame, lab.script(ROWS), runs=lab.root, protocol="easgd", settings=settings)
    folder = lab.root / result.run
    for rank, ids in enumerate(parts):
        log = (folder / "logs" / f"rank{rank}.log").read_text()
        epochs = [json.loads(text) for text in re.findall(r"rows \d (\[.*\])", log)]
        assert [Counter(seen) for seen in epochs] == [Counter(ids), Counter(ids)]
        assert epochs[0] != epochs[1]
    assert result.samples == 82
    exchanges = [event for event in read_trace(folder) if isinstance(event, Exchanged)]
    assert {(event.operation, event.workers) for event in exchanges} == {
        ("exchange", (0,)),
        ("exchange", (1,)),
    }


def test_a_run_that_is_stopped_saves_itself(lab: Lab, spark: SparkContext) -> None:
    config = lab.config("train.py", "momentum", "--epochs", 100_000, workers=2, protocol="ssp")
    engine = SparkEngine(spark)
    try:
        engine.launch(config)
        wait_until(lambda: (config.path / "trace.jsonl").stat().st_size > 2000, "training has begun")
        engine.stop()
        ended = engine.wait(60)
    finally:
        engine.close()
    assert ended is not None
    assert (ended.statuses, ended.store_status) == ({0: 0, 1: 0}, 0)
    assert (config.path / "checkpoint").is_dir()


def test_tasks_that_spark_kills_take_their_workers_along(lab: Lab, spark: SparkContext) -> None:
    config = lab.config("train.py", "momentum", "--epochs", 100_000, workers=2, protocol="ssp")
    engine = SparkEngine(spark)
    engine.launch(config)
    wait_until(lambda: len(placed(lab)) == 2, "workers are there")
    engine.close()
    wait_until(lambda: not placed(lab), "workers are gone", 30)


def placed(lab: Lab) -> set[int]:
    """Our workers in Spark's tasks."""

    def ours(pid: int) -> bool:
        try:
            return b"paceline.engines.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    return {pid for pid in lab.leftovers() if ours(pid)}


def test_a_lost_executor_ends_the_run_which_goes_on_from_its_checkpoint(
    lab: Lab, spark: SparkContext
) -> None:
    dials: dict[str, Any] = {"protocol": "dssp", "tls": True}
    sizes = ("momentum", "--samples", 240, "--epochs", 2, "--pause", lab.root / "go on", "--before", 9)
    config, engine = lab.config("train.py", *sizes, workers=2, **dials), SparkEngine(spark)
    try:
        killer = threading.Thread(target=kill_an_executor, args=(lab,))
        killer.start()
        with pytest.raises(
            RunError, match=r"Spark gave the workers' stage up: ExecutorLost.* Read \S+/logs/"
        ):
            conduct(engine, config)
        killer.join(30)
    finally:
        engine.close()
    (lab.root / "go on").touch()
    first = Run(config, Ended({}, 0))
    both_there(spark)
    second = on_spark(lab, spark, "train.py", *sizes, resume=str(saved_in(first.folder)), **dials)
    assert first.used() + second.used() == once(2, 240)


def both_there(spark: SparkContext) -> None:
    """Spark starts another JVM for an executor that was lost, which takes as long as the machine is busy."""
    check_slots(spark, 2, settled_s=120)


def kill_an_executor(lab: Lab) -> None:
    """In the middle of training: the JVM that a worker is in."""
    lab.until_paused(2)
    executor = min(placed(lab))
    while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{executor}/cmdline").read_bytes():
        executor = int(Path(f"/proc/{executor}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(executor, signal.SIGKILL)


def test_no_spark_at_an_address_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        master = f"spark://127.0.0.1:{taken.getsockname()[1]}"
        check_master(f"spark://127.0.0.1:1,{master.removeprefix('spark://')}")
    with pytest.raises(ConfigError, match=f"no Spark at {master}: Connection refused"):
        connect(master)


def test_too_few_slots_are_refused_at_once(spark: SparkContext) -> None:
    both_there(spark)
    with pytest.raises(ConfigError, match=r"3 workers need 3 slots .* Spark has 2 .* Use --workers 2"):
        check_slots(spark, 3, settled_s=0.5)


def test_bsp_on_a_standalone_master_equals_the_local_engine(lab: Lab) -> None:
    flags = ["--protocol", "bsp", "--workers", "2", "--seed", "3", "--runs", str(lab.root), "--json"]
    script = str(lab.config("train.py").script)
    with Cluster(lab.root, workers=2) as cluster:
        engine = ["--engine", "spark", "--master", cluster.master]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "train", script, *engine, *flags, "--", "momentum"],
            env=os.environ | cluster.environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    here = lab.trained("train.py", "momentum", workers=2, protocol="bsp", seed=3)
    assert_close(load_file(lab.root / result["run"] / "weights.safetensors"), here.weights, 1e-6)


def test_a_mesh_on_spark_trains_as_on_the_local_engine(lab: Lab, spark: SparkContext) -> None:
    dials: dict[str, Any] = {"mesh": {"model": 2}, "protocol": "row_split"}
    there = on_spark(lab, spark, "rows.py", **dials)
    here = lab.trained("rows.py", workers=2, **dials)
    assert_close(there.weights, here.weights, 1e-6)
    assert there.result.bytes_by_axis == here.result.bytes_by_axis


FRAMES = """
import sys
from pyspark.sql import SparkSession
from paceline.engines.spark import train_on
script, runs, sizes = sys.argv[1], sys.argv[2], [int(word) for word in sys.argv[3].split(",")]
session = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").getOrCreate()
firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
def rows(rank, _):
    for i in range(firsts[rank], firsts[rank] + sizes[rank]):
        yield i, [float(i % 7), 1.0]
rdd = session.sparkContext.parallelize(range(4), 4).mapPartitionsWithIndex(rows)
frame = session.createDataFrame(rdd, "id long, features array<double>")
for how in sys.argv[4:]:
    mode, *more = how.split("+")
    settings = {"mode": mode, "every": int(more[0]) if more else 0}
    words = ("--in-order",) if "in-order" in how else ()
    mesh = {"data": 2, "model": 2}
    result = train_on(frame, script, *words, runs=runs, mesh=mesh, protocol="row_split", settings=settings)
    print(how, result.run, result.status, result.samples, result.workers, flush=True)
session.stop()
"""


def in_python(program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A user's own program, with a Spark session of its own."""
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def trained_on_frames(lab: Lab, sizes: list[int], *modes: str) -> dict[str, Path]:
    """Runs on a grid of four tasks whose partitions have these sizes; the folder of each."""
    words = [str(lab.script(GRID)), str(lab.root), ",".join(map(str, sizes)), *modes]
    done = in_python(FRAMES, *words, PYSPARK_PYTHON=sys.executable)
    ends = [line.split() for line in done.stdout.splitlines()]
    assert [end[0] for end in ends] == list(modes), done.stderr
    assert all(end[2:] == ["finished", str(2 * sum(sizes)), "4"] for end in ends), done.stdout
    return {end[0]: lab.root / end[1] for end in ends}


def rows_of(sizes: list[int]) -> list[list[int]]:
    """The rows of the two copies, each of two partitions."""
    every, first = iter(range(sum(sizes))), sizes[0] + sizes[1]
    return [list(islice(every, first)), list(every)]


def by_hand(sizes: list[int], period: int | None) -> dict[str, Tensor]:
    """Two epochs in one process: union batches (None), or copies averaged by samples after every period."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
    copies, seen = ([start] if period is None else [deepcopy(start) for _ in range(2)]), [0, 0]
    turns = -(-max(map(len, rows_of(sizes))) // 8)
    for turn in [*range(turns)] * 2:
        cut = [rows[len(rows) * turn // turns : len(rows) * (turn + 1) // turns] for rows in rows_of(sizes)]
        for model, rows in zip(copies, [cut[0] + cut[1]] if period is None else cut, strict=True):
            x = torch.tensor([[float(i % 7), 1.0] for i in rows])
            gradients = torch.autograd.grad(
                F.mse_loss(model(x), x.sum(1, keepdim=True)), list(model.parameters())
            )
            with torch.no_grad():
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p -= 0.05 * gradient
        seen = [had + len(rows) for had, rows in zip(seen, cut, strict=True)]
        if period is not None and (turn + 1) % period == 0:
            average(copies, seen)
            seen = [0, 0]
    return {name: tensor.detach() for name, tensor in copies[0].state_dict().items()}


@torch.no_grad()
def average(copies: list[nn.Sequential], weights: list[int]) -> None:
    for same in zip(*(model.parameters() for model in copies), strict=True):
        mean = sum(p * weight for p, weight in zip(same, weights, strict=True)) / sum(weights)
        for p in same:
            p.copy_(mean)


def test_unequal_partitions_weigh_as_much_as_their_rows_in_both_modes(lab: Lab) -> None:
    """Invariants 2 and 7 on a grid: copies of 27 and 9 rows, four batches each; `avg` after every batch, and
    after every pass."""
    sizes = [19, 8, 2, 7]
    modes = {"grad+0+in-order": None, "avg+1+in-order": 1, "avg+0+in-order": 4}
    for how, folder in trained_on_frames(lab, sizes, *modes).items():
        assert_close(load_file(folder / "weights.safetensors"), by_hand(sizes, modes[how]), 1e-5)
    apart = by_hand(sizes, 4)["0.weight"] - by_hand(sizes, None)["0.weight"]
    assert apart.abs().max() > 1e-4, "the two modes differ, or nothing was shown"


def test_executors_whose_python_has_no_paceline_are_told_of(lab: Lab) -> None:
    bare = lab.root / "bare" / "bin" / "python3"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare.parents[1]], check=True, timeout=60)
    words = (str(lab.script(GRID)), str(lab.root), "4,4,4,4", "grad")
    done = in_python(FRAMES, *words, PYSPARK_PYTHON=str(bare))
    assert "Python of Spark's executors has no paceline. Set PYSPARK_PYTHON to one that has" in done.stderr


def test_rows_of_a_frame_are_read_once_by_one_task_and_shared_within_a_copy(lab: Lab) -> None:
    """Invariant 7: as many tasks as workers; no row is read twice, and all ranks' rows are the frame."""
    sizes = [23, 22, 30, 15]
    [folder] = trained_on_frames(lab, sizes, "grad").values()
    seen = {
        rank: re.findall(r"rows (\d) (.*)", (folder / "logs" / f"rank{rank}.log").read_text())
        for rank in range(4)
    }
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    for epoch in range(2):
        used = [json.loads(seen[copy][epoch][1]) for copy in (0, 2)]
        assert [sorted(each) for each in used] == rows_of(sizes)
    assert seen[0][0][1] != seen[0][1][1]


def test_a_frame_that_does_not_fill_the_mesh_is_refused_with_what_to_do(
    lab: Lab, spark: SparkContext
) -> None:
    with pytest.raises(
        ConfigError, match=r"has 4 places, and the data 2 partitions. Use data.repartition\(4\)"
    ):
        train_on(spark.parallelize(range(8), 2), "script.py", runs=lab.root, mesh={"data": 2, "model": 2})
    assert not list(lab.root.iterdir())
