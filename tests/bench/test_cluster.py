"""Time to accuracy on a small cluster: what takes part, what is counted, what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from paceline.errors import ConfigError
from paceline.protocols import PACED, PEERS
from paceline.testbed import why_not
from paceline.trace import TraceWriter
from paceline.trace.events import SCHEMA, Decided, Evaluated, Event, RunStarted
from paceline_bench.cluster import cifar, text
from paceline_bench.cluster.cluster import check
from paceline_bench.cluster.course import AccuracyCourse, Figures, Reached
from paceline_bench.cluster.entries import entries, every_entry, parse_entry
from paceline_bench.cluster.scene import SCENES, Scene
from paceline_bench.cluster.script import copy_of, decayed, keeper, warmed
from paceline_bench.cluster.tasks import TASKS
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.harness.record import BenchRecord
from paceline_bench.harness.run import chosen
from support.command import run_command

SCENE: Scene = msgspec.structs.replace(
    SCENES["unequal"], targets=(0.3, 0.5), limit_s=10.0, device_s=1.0, batch=8
)
FIGURES = Figures(
    seconds=20.0,
    samples_per_s=100.0,
    waiting=0.25,
    accuracy=0.5,
    best=0.5,
    reached=(Reached(0.3, 20.0, 2000), Reached(0.5, 40.0, 4000)),
    late=0.0,
    ranks=frozenset(range(4)),
)
needs_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@needs_hosts
@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_sides_train_on_hosts_with_all_workers_and_are_compared(tmp_path: Path) -> None:
    """By the command of the documentation."""
    words = ["bench", "cluster", "--quick", "--protocols", "bsp"]
    done = run_command(*words, "--json", cwd=tmp_path, timeout_s=280.0)
    assert done.returncode == 0, done.stderr
    [record] = msgspec.json.decode(done.stdout, type=list[BenchRecord])
    assert [row.case["protocol"] for row in record.rows] == ["ddp", "bsp"]
    for row in record.rows:
        assert row.value is not None, row.remark
        assert row.case["time"] != "not reached"
        assert "took part" not in row.remark
        assert float(row.case["MB over the slow link"]) > 1
    assert record.rows[0].value == 1.0


def test_every_protocol_takes_part_ddp_first_and_balanced_batches_once() -> None:
    names = [entry.name for entry in every_entry()]
    assert names[0] == "ddp"
    assert sorted(names) == sorted(["ddp", "bsp+balance", *PACED, *PEERS])


def test_settings_are_shown_in_full_and_given_ones_win() -> None:
    assert parse_entry("ssp").shown == "staleness=3"
    assert parse_entry("local_sgd:period=2").flags[:4] == ["--protocol", "local_sgd", "--set", "period=2"]
    assert parse_entry("bsp+balance").flags == ["--protocol", "bsp", "--balance"]


def test_only_stale_gradients_that_nothing_corrects_get_half_the_learning_rate_unless_one_is_given() -> None:
    names = ("ddp", "asp", "asp+none", "bsp+none", "ad_psgd", "asp+none@0.05", "ddp@0.1")
    rates = [parse_entry(name).rate(0.06) for name in names]
    assert rates == [0.06, 0.06, 0.03, 0.06, 0.03, 0.05, 0.1]


def test_an_entry_names_its_correction_and_hands_it_on() -> None:
    entry = parse_entry("dssp+dana+gap@0.05:preset=figure2")
    assert (entry.correct, entry.title) == ("dana+gap", "dssp+dana+gap:preset=figure2")
    assert entry.flags[-2:] == ["--correct", "dana+gap"]
    assert parse_entry("bsp+balance+none").flags == ["--protocol", "bsp", "--balance", "--correct", "none"]


def test_an_entry_says_on_how_many_hosts_its_store_lies() -> None:
    entry = parse_entry("asp+store_hosts=4@0.05")
    assert (entry.title, entry.store_hosts, entry.lr) == ("asp+store_hosts=4", 4, 0.05)
    assert entry.flags == ["--protocol", "asp", "--store-hosts", "4"]


def test_ddp_is_always_among_those_that_were_chosen() -> None:
    assert [entry.name for entry in entries(["asp"])] == ["ddp", "asp"]
    assert [entry.name for entry in entries(["asp", "ddp"])] == ["asp", "ddp"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dsssp", "Did you mean 'dssp'"),
        ("asp@fast", "a learning rate is a number > 0, got 'fast'"),
        ("ssp:staleness", "a setting is NAME=VALUE"),
        ("ddp+balance", "ddp has neither settings nor balance"),
        ("asp+dna", "unknown correction of stale gradients 'dna'"),
        ("allreduce+store_hosts=2", "goes with protocols that have one"),
        ("asp+store_hosts=no", "For instance asp\\+store_hosts=4"),
    ],
)
def test_a_wrong_entry_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_entry(text)


@needs_hosts
def test_without_data_it_says_what_it_needs_and_where_that_is() -> None:
    with pytest.raises(ConfigError, match=r"--data DIR, .*test_batch.bin .*kriz/cifar"):
        chosen(["cluster"], BenchPlan())


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="which only root may"):
        check(BenchPlan(quick=True))


def test_images_are_read_as_they_were_written(tmp_path: Path) -> None:
    cifar.make_up(tmp_path, training=30, test=20, seed=0)
    pixels, classes = cifar.training_set(tmp_path).tensors
    assert pixels.shape == (30, 3, 32, 32)
    assert pixels.dtype == torch.uint8
    first = (tmp_path / "data_batch_1.bin").read_bytes()
    assert classes[0] == first[0]
    assert pixels[0, 2, 31, 31] == first[3072]
    assert cifar.test_set(tmp_path, 7)[0].shape == (7, 3, 32, 32)


def test_some_of_the_training_files_are_enough_and_none_is_not(tmp_path: Path) -> None:
    cifar.make_up(tmp_path, training=30, test=20, seed=0)
    (tmp_path / "data_batch_1.bin").rename(tmp_path / "data_batch_4.bin")
    assert cifar.count(cifar.find(tmp_path).training) == 30
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(ConfigError, match=r"at least one of data_batch_1.bin to data_batch_5.bin"):
        cifar.find(tmp_path)


def test_a_file_of_another_layout_is_refused_by_its_size(tmp_path: Path) -> None:
    cifar.make_up(tmp_path, training=30, test=20, seed=0)
    (tmp_path / "test_batch.bin").write_bytes(bytes(3074))
    with pytest.raises(ConfigError, match=r"has 3074 bytes"):
        cifar.find(tmp_path)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_model_fits_into_ddps_first_bucket(task: str) -> None:
    size = sum(4 * values.numel() for values in TASKS[task].model(0).parameters())
    assert 0.9e6 < size < vars(torch.distributed)["_DEFAULT_FIRST_BUCKET_BYTES"]


def test_copies_are_the_weights_and_numbered(tmp_path: Path) -> None:
    keep, model = keeper(tmp_path), TASKS["images"].model
    assert [keep(model(0)), keep(model(1))] == [{"copy": 1}, {"copy": 2}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.safetensors", "2.safetensors"]


def followed(tmp_path: Path, events: list[Event], accuracies: list[float]) -> AccuracyCourse:
    """A course after these events; copies get these accuracies in turn."""
    writer = TraceWriter(tmp_path / "trace.jsonl")
    writer.write(RunStarted(0.0, SCHEMA, "r", "bsp", {}, 4, 0, False, ""))
    for event in events:
        writer.write(event)
        if isinstance(event, Evaluated) and "copy" in event.values:
            copy_of(tmp_path, int(event.values["copy"])).touch()
    writer.close()
    left = iter(accuracies)
    course = AccuracyCourse(SCENE, tmp_path, lambda path: next(left))
    course.look([tmp_path / "trace.jsonl"])
    return course


def push(t: float, rank: int, compute_s: float = 1.0, fate: str | None = None) -> Decided:
    return Decided(t, 1, rank, 1, samples=8, compute_s=compute_s, fate=fate)  # type: ignore[arg-type]


def copy(t: float, number: int) -> Evaluated:
    return Evaluated(t, 0, 1, 8, {"copy": number})


def test_the_clock_begins_with_the_first_iteration(tmp_path: Path) -> None:
    copies = [copy(31.5, 1), copy(32.5, 2), copy(34.5, 3)]
    course = followed(tmp_path, [push(31.0, 0), *copies, push(34.0, 0)], [0.5, 0.5, 0.5])
    assert course.is_over
    assert course.figures().reached == (Reached(0.3, 4.5, 8), Reached(0.5, 4.5, 8))
    assert course.figures().seconds == 4.0


def test_accuracy_is_the_mean_of_three_copies(tmp_path: Path) -> None:
    copies = [copy(1.0 + number, number) for number in range(1, 5)]
    course = followed(tmp_path, [push(1.0, 0), *copies], [0.9, 0.1, 0.2, 0.3])
    assert course.best == pytest.approx(0.4)
    assert course.figures().accuracy == pytest.approx(0.2)


def test_a_copy_that_comes_after_the_limit_does_not_count(tmp_path: Path) -> None:
    copies = [copy(7.0, 1), copy(8.0, 2), copy(9.0, 3), copy(10.1, 4)]
    course = followed(tmp_path, [push(1.0, 0), *copies], [0.4, 0.4, 0.4, 0.9])
    assert course.figures().to(0.5) is None
    assert course.best == pytest.approx(0.4)


def test_waiting_is_the_time_in_which_devices_do_not_compute(tmp_path: Path) -> None:
    course = followed(tmp_path, [push(1.0, 0), push(2.0, 1), push(4.0, 0)], [])
    assert course.figures().waiting == 1 - 3 / 8


def test_dropped_gradients_are_no_samples_of_the_model(tmp_path: Path) -> None:
    course = followed(tmp_path, [push(1.0, 0), push(2.0, 1, fate="drop")], [])
    assert course.figures().samples_per_s == 8 / 2


def test_an_iteration_is_late_when_its_device_would_have_been_faster(tmp_path: Path) -> None:
    slow = [push(1.0, 2, 2.0), push(3.0, 2, 2.0)]  # as slow as it is meant to be
    late = [push(1.0, 0, 9.0), push(3.0, 0, 1.5)]  # the first one warms up
    assert followed(tmp_path, [*slow, *late], []).figures().late == 1 / 4


def test_a_run_that_measures_itself_needs_no_judge(tmp_path: Path) -> None:
    looks = [Evaluated(1.0 + n, 0, n, 8 * n, {"accuracy": 0.1 * n}) for n in range(1, 5)]
    figures = followed(tmp_path, [push(1.0, 0), *looks], []).figures()
    assert figures.to(0.3) == Reached(0.3, 5.0, 32)
    assert figures.accuracy == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (BenchPlan(simulated=True, scenes=("unequl",)), "Did you mean 'unequal'"),
        (BenchPlan(scenes=("decay",)), "for virtual time only. Add --simulated"),
        (BenchPlan(simulated=True, targets=(0.5, 0.4)), "targets rise"),
    ],
)
@needs_hosts
def test_a_scene_or_target_that_cannot_be_is_refused(plan: BenchPlan, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(plan)


def test_the_rate_rises_by_samples_and_falls_along_a_cosine() -> None:
    assert [warmed(done, 512, 2048) for done in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert [decayed(done, 10) for done in (0, 5, 10, 11)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert decayed(7, 0) == 1.0


def test_text_for_testing_is_not_trained_on() -> None:
    tested, trained = (set(map(tuple, x.tolist())) for x in (text.test_set(10**6), text.training_set()))
    assert len(tested & trained) < 0.01 * len(tested)  # phrases that the text repeats
    assert len(tested) > 500


def test_only_clusters_are_simulated() -> None:
    with pytest.raises(ConfigError, match="--simulated is for cluster alone, got exchange"):
        chosen(["exchange"], BenchPlan(simulated=True))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_same_table_in_virtual_time_needs_neither_root_nor_hosts(tmp_path: Path) -> None:
    """By the command of the documentation."""
    words = ["bench", "cluster", "--simulated", "--quick", "--protocols", "asp,bsp"]
    done = run_command(*words, "--json", cwd=tmp_path, timeout_s=280.0)
    assert done.returncode == 0, done.stderr
    [record] = msgspec.json.decode(done.stdout, type=list[BenchRecord])
    assert record.name == "cluster-simulated"
    assert [(row.case["protocol"], row.case["correction"]) for row in record.rows] == [
        ("ddp", "none"),
        ("asp", "dana"),
        ("bsp", "none"),
    ]
    assert all(row.value is not None and not row.remark for row in record.rows)
