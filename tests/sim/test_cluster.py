"""Clusters from files and flags: what is right is read, what is wrong is said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.errors import ConfigError, TraceError
from paceline.protocols.paced.ssp import SSP
from paceline.sim import (
    Cluster,
    Drift,
    Exponential,
    Fixed,
    Group,
    Link,
    Lognormal,
    Membership,
    Recorded,
    Stall,
    Transient,
    load_cluster,
    simulate,
)
from paceline.trace import TraceWriter

WHOLE = """
workers = 8
batch = 32
model_bytes = 100e6
apply_s = 0.002
[compute]
kind = "lognormal"
mean_s = 0.1
spread = 0.2
[link]
latency_s = 0.0005
bandwidth_bytes_per_s = 1.25e9
[links.3]
bandwidth_bytes_per_s = 125_000_000
[slow]
3 = 2.5
[transient]
factor = 2
mean_length_s = 5
mean_gap_s = 20.0
[drift]
factor = 1.5
over_s = 600
[stall]
every_s = 8
length_s = 2
[[event]]
at_s = 30
kill = 5
[[event]]
at_s = 60
join = 5
"""


def load(folder: Path, text: str) -> Cluster:
    (folder / "c.toml").write_text(text)
    return load_cluster(folder / "c.toml")


def test_a_file_says_all_there_is_to_say(tmp_path: Path) -> None:
    assert load(tmp_path, WHOLE) == Cluster(
        workers=8,
        batch=32,
        model_bytes=100_000_000,
        apply_s=0.002,
        compute=Lognormal(0.1, 0.2),
        link=Link(0.0005, 1.25e9),
        links={3: Link(0.0, 1.25e8)},
        slow={3: 2.5},
        transient=Transient(2.0, 5.0, 20.0),
        drift=Drift(1.5, 600.0),
        stall=Stall(8.0, 2.0),
        event=(Membership(30.0, kill=5), Membership(60.0, join=5)),
    )


def test_groups_add_up_to_the_workers(tmp_path: Path) -> None:
    text = """
    [[group]]
    count = 3
    compute = {kind = "exponential", mean_s = 0.2}
    [[group]]
    count = 2
    slow = 2.0
    transient = {factor = 3, mean_length_s = 1, mean_gap_s = 9}
    """
    cluster = load(tmp_path, text)
    assert cluster.workers == 5
    assert cluster.group == (
        Group(3, Exponential(0.2)),
        Group(2, slow=2.0, transient=Transient(3.0, 1.0, 9.0)),
    )


def test_a_recorded_run_is_looked_for_beside_the_file(tmp_path: Path) -> None:
    made = recorded_run(tmp_path / "runs" / "a")
    cluster = load(tmp_path, 'workers = 2\n[compute]\nkind = "recorded"\nrun = "runs/a"')
    assert isinstance(cluster.compute, Recorded)
    assert cluster.compute.times_s == made.times_s
    assert "times_s" not in cluster.describe()["compute"]


def test_a_cluster_from_a_run_has_its_workers_times_and_sizes(tmp_path: Path) -> None:
    made = recorded_run(tmp_path)
    cluster = Cluster.from_run(tmp_path)
    assert (cluster.workers, cluster.batch, cluster.model_bytes) == (2, 16, 4000)
    assert isinstance(cluster.compute, Recorded)
    assert cluster.compute.times_s == made.times_s


def recorded_run(folder: Path) -> Recorded:
    """Two workers of 1 s and 3 s."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = TraceWriter(folder / "trace.jsonl")
    cluster = Cluster.from_flags(workers=2, compute_s=1.0, slow={1: 3.0}, model_bytes=4000, batch=16)
    tally = simulate(SSP(3), cluster, iterations=10, trace=writer.write)
    writer.close()
    return Recorded("", ((1.0,) * tally.clock[0], (3.0,) * tally.clock[1]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker = 3", "unknown key in the file: 'worker'. Did you mean 'workers'?"),
        ("workers = 99999999999999999999", "at most 10000000 workers, got 99999999999999999999. Use fewer"),
        ("workers = 0", "a cluster needs workers >= 1, got 0. Use --workers 4"),
        ("workers = 'four'", "workers in the file has a wrong value: Expected `int`, got `str`, got 'four'"),
        ("workers = 2.5", "workers in the file has a wrong value"),
        ("batch = 3", "the file has no workers, got {'batch': 3}. Add workers"),
        ("workers = 2\nbatch = 0", "batch must be >= 1, got 0."),
        ("workers = 2\nmodel_bytes = 0", "model_bytes must be > 0, got 0."),
        ("workers = 2\napply_s = -1", "apply_s must be >= 0, got -1.0."),
        ("workers = 2\napply_s = nan", "apply_s must be >= 0, got nan."),
        ("workers = 2\ncompute = 3", "[compute] needs a kind, got 3. Available: exponential, fixed"),
        ("workers = 2\n[compute]\nkind = 'norml'", "kind of compute 'norml'. Did you mean 'normal'?"),
        ("workers = 2\n[compute]\nkind = 'fixed'", "[compute] of kind 'fixed' has no mean_s, got {}."),
        ("workers = 2\n[compute]\nkind = 'fixed'\nmean_s = 0", "mean_s must be > 0, got 0.0."),
        ("workers = 2\n[compute]\nkind = 'fixed'\nmean_s = 1\nspred = 1", "of kind 'fixed': 'spred'."),
        ("workers = 2\n[compute]\nkind = 'normal'\nmean_s = 1\nspread = 0.5", "0..0.3, got 0.5. Use kind"),
        ("workers = 2\n[compute]\nkind = 'lognormal'\nmean_s = 1\nspread = -1", "spread must be >= 0, got"),
        ("workers = 2\n[compute]\nkind = 'exponential'\nmean_s = 1\nspread = 2", "in 0..1, got 2.0."),
        ("workers = 2\n[compute]\nkind = 'pareto'\nmean_s = 1\nprobability = 2", "in 0..1, got 2.0."),
        ("workers = 2\n[compute]\nkind = 'pareto'\nmean_s = 1\nshape = 1", "shape must be > 1, got 1.0."),
        ("workers = 2\n[compute]\nkind = 'recorded'", "needs the run it was recorded in, got None."),
        ("workers = 2\n[compute]\nkind = 'recorded'\nrun = 'nowhere'", "nowhere. Give a run folder"),
        ("workers = 2\n[link]\nlatency_s = -1", "link latency_s must be >= 0, got -1.0."),
        ("workers = 2\n[link]\nlatencys = 1", "key in [link]: 'latencys'. Did you mean 'latency_s'?"),
        ("workers = 2\n[link]\nbandwidth_bytes_per_s = 0", "bandwidth_bytes_per_s must be > 0, got 0"),
        ("workers = 2\n[link]\nbandwidth_bytes_per_s = 9", "the model's size is unknown. Set model_bytes"),
        ("workers = 2\n[links.5]\nlatency_s = 1", "links names a rank that does not exist, got 5."),
        ("workers = 2\n[links.a]\nlatency_s = 1", "[links] is keyed by rank, got 'a'."),
        ("workers = 2\n[slow]\n2 = 2.0", "slow names a rank that does not exist, got 2. Ranks here are 0..1"),
        ("workers = 2\n[slow]\n1 = 0", "slow factor of rank 1 must be > 0, got 0.0."),
        ("workers = 2\n[slow]\nall = 2", "[slow] is keyed by rank, got 'all'."),
        ("workers = 2\nslow = 2", "[slow] must be a table of keys and values, got 2."),
        ("workers = 2\n[transient]\nfactor = 2", "[transient] has no mean_length_s, got {'factor': 2}."),
        (
            "workers = 2\n[transient]\nfactor = 0.5\nmean_length_s = 1\nmean_gap_s = 1",
            "factor must be >= 1, got 0.5.",
        ),
        (
            "workers = 2\n[transient]\nfactor = 2\nmean_length_s = 0\nmean_gap_s = 1",
            "mean_length_s must be > 0, got 0.0.",
        ),
        ("workers = 2\n[drift]\nfactor = 2", "[drift] has no over_s, got {'factor': 2}."),
        ("workers = 2\n[drift]\nfactor = 0\nover_s = 1", "drift factor must be > 0, got 0.0."),
        ("workers = 2\n[drift]\nfactor = 2\nover_s = 0", "drift over_s must be > 0, got 0.0."),
        ("workers = 2\n[compute]\nkind = 'halfnormal'\nmean_s = 1\nspread = 0.8", "in 0..0.7555, got 0.8."),
        ("workers = 2\n[[group]]\ncount = 3", "the groups count 3 workers, and workers differs, got 2."),
        ("[[group]]\ncount = 0", "group count must be >= 1, got 0."),
        ("[[group]]\ncount = 1\nslow = -1", "slow factor of a group must be > 0, got -1.0."),
        ("[[group]]\nnumber = 1", "unknown key in [[group]]: 'number'."),
        ("workers = 2\n[event]\nat_s = 1", "[[event]] must be a list of tables"),
        ("workers = 2\n[[event]]\nat_s = 1", "needs either kill or join, got {'kill': None"),
        ("workers = 2\n[[event]]\nat_s = -1\nkill = 0", "at_s must be >= 0, got -1.0."),
        ("workers = 2\n[[event]]\nat_s = 1\nkill = 2", "event names a rank that does not exist, got 2."),
        (
            "workers = 2\n[[event]]\nat_s = 1\nkill = 1\n[[event]]\nat_s = 2\nkill = 1",
            "rank 1 is killed while away, got 2.0.",
        ),
        (
            "workers = 2\n[[event]]\nat_s = 1\njoin = 1\n[[event]]\nat_s = 2\njoin = 1",
            "rank 1 joins while present, got 2.0.",
        ),
        ("workers = ", "is not TOML"),
    ],
)
def test_a_wrong_file_says_what_where_and_what_to_do(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)
    assert str(tmp_path / "c.toml") in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the cluster file .*no\.toml: No such file"):
        load_cluster(tmp_path / "no.toml")


def test_a_cluster_cannot_be_taken_from_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace at"):
        Cluster.from_run(tmp_path)


def test_flags_make_like_workers_some_of_them_slower() -> None:
    cluster = Cluster.from_flags(workers=4, compute_s=0.2, slow={3: 2.5})
    assert cluster == Cluster(workers=4, compute=Fixed(0.2), slow={3: 2.5})
    assert Cluster.from_flags(workers=1, jitter=0.1).compute == Lognormal(0.1, 0.1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"workers": -1}, "workers >= 1, got -1"),
        ({"workers": 2, "slow": {2: 2.0}}, "rank that does not exist, got 2"),
        ({"workers": 2, "compute_s": 0.0}, "mean_s must be > 0, got 0.0"),
        ({"workers": 2, "jitter": -0.1}, "spread must be >= 0, got -0.1"),
        ({"workers": 2, "bandwidth_bytes_per_s": 1e9}, "Set model_bytes"),
    ],
)
def test_wrong_flags_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Cluster.from_flags(**flags)


@pytest.mark.parametrize("workers", [1, 2, 7, 10, 1000])
def test_groups_keep_their_shares_when_a_cluster_is_resized(workers: int) -> None:
    cluster = Cluster(workers=10, group=(Group(7), Group(3, slow=2.0))).with_workers(workers)
    slow = sum(group.count for group in cluster.group if group.slow == 2.0)
    assert sum(group.count for group in cluster.group) == cluster.workers == workers
    assert abs(slow - 0.3 * workers) <= 0.5


def test_a_resized_cluster_still_knows_its_ranks() -> None:
    cluster = Cluster.from_flags(workers=4, slow={3: 2.0})
    assert cluster.with_workers(8).slow == {3: 2.0}
    with pytest.raises(ConfigError, match="rank that does not exist, got 3"):
        cluster.with_workers(3)
    assert cluster.with_slow({0: 4.0}).slow == {3: 2.0, 0: 4.0}


def test_a_described_cluster_is_plain_json(tmp_path: Path) -> None:
    plain = load(tmp_path, WHOLE).describe()
    assert msgspec.json.decode(msgspec.json.encode(plain)) == plain
    assert plain["compute"] == {"kind": "lognormal", "mean_s": 0.1, "spread": 0.2}
    assert plain["slow"] == {"3": 2.5}
