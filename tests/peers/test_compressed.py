"""Compressed averages: the same for all, nothing lost for good, and what protocols promise still holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import BadGradient, ConfigError
from paceline.protocols import PEERS
from paceline.protocols.core.operations import Average
from paceline.protocols.core.peer import Me
from paceline.protocols.rules.compression import check_family, parse_compression
from paceline.protocols.settings import make_peer
from paceline.runtime.peer.compression import Packing
from paceline.store.compression.codecs import Matrix
from paceline.store.vector import FlatVector
from support.peers import Crew
from support.problems import SIZE, large_batch, noisy, nothing
from support.tight import TIGHT

WAYS = ["fp16", "bf16", "int8", "topk:0.34", "powersgd:1"]
MATRICES = [[Matrix(0, 2, 3)]]
MIXING = {"dpsgd", "ds_sync"}
AVERAGING = PEERS.keys() - {"ad_psgd"}
SETTINGS: dict[str, dict[str, Any]] = TIGHT | {"diloco": {"period": 3, "momentum": 0.5}}


def crew(protocol: str, compress: str, workers: int = 4, gradient: Any = None, **more: Any) -> Crew:
    made = make_peer(protocol, SETTINGS.get(protocol, {}))
    asked = noisy(3) if gradient is None else gradient
    return Crew(made, workers, asked, compress=compress, matrices=MATRICES, **more)


def attraction(rank: int, iteration: int, x: Tensor) -> Tensor:
    """Everybody is drawn to zero from one, without noise."""
    return x * torch.linspace(0.5, 1.0, SIZE, dtype=torch.float64)


def packing(compress: str, rank: int = 0) -> tuple[Packing, Me]:
    parameters = FlatVector([torch.linspace(-1, 1, SIZE, dtype=torch.float64)])
    me = Me(rank, 2, 0, parameters, FlatVector([torch.ones(2)]))
    return Packing(parse_compression(compress), me, MATRICES), me


# -- what goes out and what comes back ---------------------------------------------------------------


def test_without_compression_the_very_vector_travels_and_the_very_answer_arrives() -> None:
    pack, me = packing("none")
    for vector in (me.parameters, me.buffers, FlatVector([torch.ones(SIZE)])):
        packed = pack.pack(Average(vector))
        assert packed.vector is vector
        assert packed.opened(vector) is vector
        assert packed.size_bytes == vector.size_bytes
    assert not vars(me.private)


@pytest.mark.parametrize("way", WAYS)
def test_buffers_travel_as_they_are(way: str) -> None:
    pack, me = packing(way)
    assert pack.pack(Average(me.buffers)).vector is me.buffers


@pytest.mark.parametrize("way", ["int8", "topk:0.34", "powersgd:1"])
@given(seed=st.integers(0, 1000))
def test_all_that_was_given_has_arrived_but_for_the_residual(way: str, seed: int) -> None:
    pack, _ = packing(way)
    drawn = torch.Generator().manual_seed(seed)
    given_, arrived = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for _ in range(10):
        vector = FlatVector([torch.randn(SIZE, generator=drawn, dtype=torch.float64)])
        packed = pack.pack(Average(vector))
        packed.opened(packed.vector)
        given_ += vector.parts[0]
        arrived += packed.vector.parts[0]
    (residual,) = pack.kept.residuals["change"]
    torch.testing.assert_close(arrived + residual, given_, rtol=0, atol=1e-12)
    assert float(residual.abs().max()) > 0


def test_every_kind_of_vector_has_a_residual_of_its_own() -> None:
    pack, me = packing("topk:0.34")
    vector = FlatVector([torch.arange(1.0, SIZE + 1, dtype=torch.float64)])
    pack.pack(Average(vector))
    pack.pack(Average(vector * 10.0, remainder="other"))
    me.parameters[:] = me.parameters + vector * 100.0
    pack.pack(Average(me.parameters))
    left = {kind: float(parts[0].sum()) for kind, parts in pack.kept.residuals.items()}
    assert left == pytest.approx({"change": 6.0, "other": 60.0, "model": 600.0}), "1 + 2 + 3 are left out"


def test_a_vector_without_weight_sends_nothing_and_keeps_what_was_left_out() -> None:
    """A gradient that was skipped counts 0: what is fed back into it would be lost."""
    pack, _ = packing("topk:0.34")
    pack.pack(Average(FlatVector([torch.arange(1.0, SIZE + 1)])))
    (before,) = pack.kept.residuals["change"]
    packed = pack.pack(Average(FlatVector([torch.zeros(SIZE)]), weight=0.0))
    assert float(packed.vector.parts[0].abs().sum()) == 0
    assert torch.equal(pack.kept.residuals["change"][0], before)


def test_what_is_too_large_for_the_type_is_said() -> None:
    pack, _ = packing("fp16", rank=3)
    with pytest.raises(
        BadGradient, match=r"rank 3 has to send 1e\+05, which is too large for --compress fp16"
    ):
        pack.pack(Average(FlatVector([torch.tensor([1.0, -1e5])])))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_finite_passes_for_others_to_find(way: str) -> None:
    pack, _ = packing(way)
    vector = torch.ones(SIZE, dtype=torch.float64)
    vector[2] = float("nan")
    assert not bool(torch.isfinite(pack.pack(Average(FlatVector([vector]))).vector.parts[0]).all())


# -- with every protocol -------------------------------------------------------------------------------


@pytest.mark.some(24)
@pytest.mark.parametrize(
    ("protocol", "way"),
    [(p, w) for p in sorted(AVERAGING - MIXING) for w in WAYS if (p, w) != ("osp", "powersgd:1")],
)
def test_everybody_gets_the_same_and_arrives_where_all_are_drawn_to(protocol: str, way: str) -> None:
    run = crew(protocol, way, gradient=attraction, initial=lambda rank: torch.ones(SIZE, dtype=torch.float64))
    run.run(240)
    run.settle()
    for model in run.models():
        assert float(model.norm()) < 0.02
    if protocol not in ("easgd", "selsync"):
        first, *others = run.models()
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("way", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("protocol", sorted(AVERAGING - MIXING))
def test_many_bits_per_number_end_near_the_uncompressed_run(protocol: str, way: str) -> None:
    plain, compressed = crew(protocol, "none").run(30).mean(), crew(protocol, way).run(30).mean()
    error = float((compressed - plain).norm())
    assert 0 < error < 0.03


def test_the_mean_of_topk_gradients_and_residuals_is_the_plain_mean() -> None:
    """With SGD the sum of all steps, and what is still to come, is that of the gradients."""
    run = crew("allreduce", "topk:0.34", gradient=lambda rank, iteration, x: torch.full_like(x, rank + 1.0))
    start = run.workers[0].x.clone()
    run.run(9)
    rest = torch.stack([worker.packing.kept.residuals["change"][0] for worker in run.workers]).mean(0)
    torch.testing.assert_close(run.mean() - 0.1 * rest, start - 0.1 * 9 * 2.5)


@pytest.mark.parametrize("way", ["int8", "topk:0.34"])
def test_what_is_left_out_of_a_tensor_is_added_whichever_stage_carries_it(way: str) -> None:
    """OSP splits anew every other iteration: arrived and kept back are all that was given, by tensor."""
    run = crew(
        "osp", way, gradient=lambda rank, iteration, x: torch.sin(iteration + (rank + 1.0) * x * 0 + 1)
    )
    start = run.workers[0].x.clone()
    run.run(9)
    run.settle()
    rest = torch.stack([worker.packing.kept.residuals["change"][0] for worker in run.workers]).mean(0)
    total = sum(torch.sin(torch.full_like(start, t + 1.0)) for t in range(9))
    torch.testing.assert_close(run.mean() - 0.1 * rest, start - 0.1 * total)


IN_PARTS = {
    "diloco_fragments": ("diloco", {"period": 4, "fragments": 2, "momentum": 0.0, "lr": 1.0}),
    "diloco_late_fragments": (
        "diloco",
        {"period": 4, "fragments": 2, "momentum": 0.0, "lr": 1.0, "delay": 1},
    ),
    "local_sgd_groups": ("local_sgd", {"period": 4, "group_size": 2}),
}
"""What averages some tensors, or among some workers, between the averages of everything among all."""


def partly(case: str, way: str, **more: Any) -> Crew:
    name, settings = IN_PARTS[case]
    return Crew(make_peer(name, settings), 4, compress=way, matrices=MATRICES, **more)


@pytest.mark.parametrize("way", ["int8", "topk:0.34"])
@pytest.mark.parametrize("case", ["diloco_fragments", "local_sgd_groups"])
def test_averages_in_parts_and_groups_lose_nothing_for_good(case: str, way: str) -> None:
    """What arrived, and what is kept back, is all that was given: every worker's own gradient, by tensor."""
    run = partly(case, way, gradient=lambda rank, iteration, x: torch.sin(x * 0 + iteration + rank))
    start = run.workers[0].x.clone()
    run.run(11)
    run.settle()
    rest = torch.stack([worker.packing.kept.residuals["change"][0] for worker in run.workers]).mean(0)
    total = sum(torch.sin(torch.tensor(float(t + r))) for t in range(11) for r in range(4)) / 4
    torch.testing.assert_close(run.mean() - rest, start - 0.1 * total, rtol=0, atol=1e-6)
    assert float(rest.abs().max()) > 0


@pytest.mark.parametrize("way", ["fp16", "bf16", "int8", "topk:0.34"])
@pytest.mark.parametrize("case", sorted(IN_PARTS))
def test_averages_in_parts_and_groups_arrive_where_all_are_drawn_to(case: str, way: str) -> None:
    ones = torch.ones(SIZE, dtype=torch.float64)
    run = partly(case, way, gradient=attraction, initial=lambda rank: ones).run(240).settle()
    first, *others = run.models()
    assert float(first.norm()) < 0.02
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("case", sorted(IN_PARTS))
def test_powersgd_is_refused_where_not_all_take_the_basis_from_the_same_mean(case: str) -> None:
    name, settings = IN_PARTS[case]
    check_family("int8", name, make_peer(name, settings))
    with pytest.raises(ConfigError, match=r"tensors now and others later|averages in groups"):
        check_family("powersgd:1", name, make_peer(name, settings))


@pytest.mark.parametrize("way", WAYS)
def test_selsync_sends_differences_to_the_last_common_model(way: str) -> None:
    """With delta 0 that is the large batch, up to what is still to come."""
    made = make_peer("selsync", {"delta": 0.0})
    run = Crew(made, 4, noisy(5), compress=way, matrices=MATRICES).run(40)
    assert run.equal()
    reference = large_batch(4, 40, noisy(5))
    assert float((run.mean() - reference).norm()) < 0.35
    kept = [worker.packing.kept.common.parts[0] for worker in run.workers]
    assert all(torch.equal(common, run.workers[0].x) for common in kept)


def test_what_is_left_of_a_spring_is_not_fed_back_a_second_time() -> None:
    """A displacement to the centre stays until it is closed: with a residual the centre would overshoot."""
    made = make_peer("easgd", {"period": 1, "beta": 0.9})
    ones = torch.ones(SIZE, dtype=torch.float64)
    run = Crew(made, 2, nothing, compress="topk:0.17", initial=lambda rank: ones)
    for worker in run.workers:
        worker.x[:] = torch.arange(2.0, SIZE + 2, dtype=torch.float64)
    centres = []
    for _ in range(30):
        run.run(1)
        centres.append(run.models()[0])
    apart = torch.arange(2.0, SIZE + 2, dtype=torch.float64)
    assert all(bool((centre <= apart + 1e-9).all()) for centre in centres), "it never goes beyond"
    assert float((centres[-1] - run.workers[0].x).norm()) < 0.1
    assert not run.workers[0].packing.kept.residuals


# -- where there is no common model ---------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fp16", "bf16"])
@pytest.mark.parametrize("protocol", sorted(MIXING))
def test_rounded_mixing_leaves_the_mean_of_all_as_it_was(protocol: str, way: str) -> None:
    def spread(rank: int) -> Tensor:
        return torch.linspace(-1, 1, SIZE, dtype=torch.float64) * (rank + 0.7) + 0.123456789 * rank

    run = crew(protocol, way, gradient=nothing, initial=spread)
    before = run.mean()
    run.run(40)
    torch.testing.assert_close(run.mean(), before, rtol=0, atol=1e-13)
    apart = max(float((x - run.mean()).abs().max()) for x in run.parameters())
    assert apart < 5 * 2.0 ** (-10 if way == "fp16" else -7)


@pytest.mark.parametrize("way", ["int8", "topk:0.34", "powersgd:1"])
@pytest.mark.parametrize("protocol", sorted(MIXING))
def test_leaving_most_of_a_model_out_is_refused(protocol: str, way: str) -> None:
    with pytest.raises(ConfigError, match="no last common model"):
        crew(protocol, way).run(1)


@pytest.mark.parametrize("protocol", sorted(AVERAGING))
def test_bytes_are_those_of_the_compressed_vectors(protocol: str) -> None:
    plain, half = (crew(protocol, way).run(12).sent for way in ("none", "fp16"))
    assert {rank: 4 * sent for rank, sent in half.items()} == dict(plain), "two bytes instead of eight"
