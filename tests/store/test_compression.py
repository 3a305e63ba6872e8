"""The codecs: what arrives, what it costs, what is left out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.protocols.rules.compression import INT8_CHUNK, Compression, parse_compression
from paceline.store.compression import codecs
from paceline.store.compression.codecs import (
    Basis,
    Matrix,
    encode,
    encode_low_rank,
    first_basis,
    matrices,
    next_basis,
)
from paceline.store.layout import describe

ALL = ["none", "fp16", "bf16", "int8", "topk:0.1", "topk:1"]
every_codec = pytest.mark.parametrize("how", [parse_compression(text) for text in ALL], ids=ALL)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def vectors(dtype: torch.dtype = torch.float32, size: int = 2500) -> st.SearchStrategy[Tensor]:
    """Numbers of very different sizes, zeros among them, longer and shorter than a chunk."""

    def draw(seed: int, count: int, exponent: float) -> Tensor:
        drawn = torch.Generator().manual_seed(seed)
        numbers = torch.randn(count, generator=drawn, dtype=torch.float64)
        numbers *= 10.0 ** (exponent * torch.rand(count, generator=drawn, dtype=torch.float64) - exponent / 2)
        numbers[torch.rand(count, generator=drawn) < 0.2] = 0.0
        return numbers.to(dtype)

    return st.builds(draw, st.integers(0, 10_000), st.integers(0, size), st.floats(0, 6))


# -- each codec ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "bits", "smallest"), [("fp16", 11, 2.0**-24), ("bf16", 8, 2.0**-133)])
@given(flat=vectors())
def test_rounding_errs_by_half_a_unit_in_the_last_place(
    name: str, bits: int, smallest: float, flat: Tensor
) -> None:
    decoded = encode(Compression(name), flat).decoded
    bound = (flat.abs() * 2.0**-bits).clamp(min=smallest / 2)
    assert bool(((decoded - flat).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
def test_int8_errs_by_half_a_step_and_has_no_more_than_255_values_per_chunk(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    flat = data.draw(vectors(dtype))
    decoded = encode(Compression("int8"), flat).decoded
    for start in range(0, flat.numel(), INT8_CHUNK):
        chunk, got = flat[start : start + INT8_CHUNK], decoded[start : start + INT8_CHUNK]
        step = float(chunk.abs().max()) / 127
        assert float((got - chunk).abs().max()) <= step / 2 * (1 + 1e-4)
        assert got.unique().numel() <= 255


def test_int8_gives_every_chunk_a_scale_of_its_own() -> None:
    flat = torch.cat([torch.full((INT8_CHUNK,), 1e-3), torch.full((INT8_CHUNK,), 1e3)])
    torch.testing.assert_close(encode(Compression("int8"), flat).decoded, flat)


@given(flat=vectors(), share=st.floats(0.001, 1))
def test_topk_keeps_exactly_the_k_largest_as_they_are(flat: Tensor, share: float) -> None:
    how = Compression("topk", share)
    encoded = encode(how, flat)
    kept = math.ceil(share * flat.numel())
    assert encoded.size_bytes == 8 * kept
    chosen = encoded.decoded != 0
    assert int(chosen.sum()) == min(kept, int((flat != 0).sum()))
    assert torch.equal(encoded.decoded[chosen], flat[chosen])
    if kept and bool(chosen.any()):
        left = flat[~chosen].abs()
        assert not left.numel() or float(left.max()) <= float(flat[chosen].abs().min())


def test_bytes_are_those_of_the_packed_vector() -> None:
    flat = torch.ones(2 * INT8_CHUNK + 1)
    sizes = {text: encode(parse_compression(text), flat).size_bytes for text in ALL}
    count = flat.numel()
    assert sizes["none"] == 4 * count
    assert sizes["fp16"] == sizes["bf16"] == 2 * count
    assert sizes["int8"] == count + 3 * 4
    assert sizes["topk:0.1"] == math.ceil(0.1 * count) * 8
    assert encode(Compression("fp16"), flat.double()).size_bytes == 2 * count
    assert encode(Compression("topk", 0.1), flat.double()).size_bytes == math.ceil(0.1 * count) * 12


# -- all codecs ---------------------------------------------------------------------------------------


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
def test_what_arrives_and_what_is_left_out_add_up_to_what_was_sent(
    how: Compression, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Over many steps, to rounding: error feedback loses nothing."""
    seed, count = data.draw(st.integers(0, 1000)), data.draw(st.integers(1, 1500))
    drawn = torch.Generator().manual_seed(seed)
    given_, arrived = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    residual = None
    for _ in range(12):
        flat = torch.randn(count, generator=drawn, dtype=dtype)
        encoded = encode(how, flat, residual)
        residual = encoded.residual
        given_ += flat
        arrived += encoded.decoded
    assert residual is not None
    rounding = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(arrived + residual.double(), given_, rtol=0, atol=rounding)


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(how: Compression, dtype: torch.dtype, bad: float) -> None:
    for at in (0, 700, 1499):
        flat = torch.linspace(-1, 1, 1500).to(dtype)
        flat[at] = bad
        decoded = encode(how, flat).decoded
        assert not math.isfinite(float(decoded[at]))
        assert not math.isfinite(float(decoded.double().square().sum()))


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_sizes_stay_and_nothing_costs_nothing(how: Compression, dtype: torch.dtype) -> None:
    empty = encode(how, torch.zeros(0, dtype=dtype))
    assert (empty.size_bytes, empty.decoded.numel()) == (0, 0)
    zeros = encode(how, torch.zeros(5, dtype=dtype))
    assert torch.equal(zeros.decoded, torch.zeros(5, dtype=dtype))
    flat = torch.linspace(-3, 3, 100).to(dtype)
    before = flat.clone()
    encoded = encode(how, flat)
    assert encoded.decoded.dtype == dtype
    assert torch.equal(flat, before)
    assert encoded.residual.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_narrow_already_travels_as_it_is(name: str, dtype: torch.dtype) -> None:
    flat = torch.linspace(-3, 3, 100).to(dtype)
    encoded = encode(Compression(name), flat)
    assert torch.equal(encoded.decoded, flat)
    assert encoded.size_bytes == 200


# -- low rank -----------------------------------------------------------------------------------------


def low_rank(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    one = torch.randn(rows, rank, generator=drawn, dtype=torch.float64)
    return one @ torch.randn(rank, columns, generator=drawn, dtype=torch.float64)


@pytest.mark.parametrize(("rows", "columns"), [(12, 7), (7, 12), (9, 9)])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_mean_of_that_rank_arrives_whole_from_the_third_exchange_on(
    rows: int, columns: int, rank: int
) -> None:
    matrix = Matrix(0, rows, columns)
    inside = low_rank(rows, columns, rank)
    basis = first_basis(matrix, rank, 5, inside)
    for _ in range(3):
        encoded = encode_low_rank(inside.flatten(), [(matrix, basis)])
        basis = next_basis(matrix, basis, encoded.decoded)
    torch.testing.assert_close(encoded.decoded.view(rows, columns), inside)


@given(seed=st.integers(0, 1000), workers=st.integers(2, 5))
def test_on_a_common_basis_compressing_and_adding_up_may_be_swapped(seed: int, workers: int) -> None:
    matrix = Matrix(3, 6, 5)
    drawn = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(40, generator=drawn, dtype=torch.float64) for _ in range(workers)]
    on = [(matrix, first_basis(matrix, 2, seed, vectors[0]))]
    each = torch.stack([encode_low_rank(vector, on).decoded for vector in vectors]).mean(0)
    whole = encode_low_rank(torch.stack(vectors).mean(0), on).decoded
    torch.testing.assert_close(each, whole)
    assert torch.linalg.matrix_rank(matrix.view(each)) == 2


def test_low_rank_sends_two_thin_matrices_on_one_side_by_turns_and_all_else_whole() -> None:
    matrix, rank = Matrix(2, 10, 6), 2
    flat = torch.randn(70)
    basis = first_basis(matrix, rank, 0, flat)
    right = encode_low_rank(flat, [(matrix, basis)])
    assert right.size_bytes == 4 * (10 + (10 + 6) * rank)
    left = next_basis(matrix, basis, right.decoded)
    assert encode_low_rank(flat, [(matrix, left)]).size_bytes == right.size_bytes
    assert torch.equal(right.decoded[:2], flat[:2])
    assert torch.equal(right.decoded[62:], flat[62:])
    assert isinstance(left, Basis)
    torch.testing.assert_close(left.columns.T @ left.columns, torch.eye(rank), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_low_rank_hides_nothing_that_is_not_finite(bad: float) -> None:
    flat = torch.randn(30)
    flat[7] = bad
    matrix = Matrix(0, 6, 5)
    assert not bool(
        torch.isfinite(encode_low_rank(flat, [(matrix, first_basis(matrix, 2, 0, flat))]).decoded).all()
    )


def test_matrices_are_found_where_their_gradients_lie() -> None:
    """Convolutions by their outermost dimension; vectors and what is too thin for the rank are left whole."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(5, 2), nn.Linear(4, 6))
    model[3].weight.data = model[3].weight.data.t().contiguous().t()
    layout = describe(model, list(model.parameters()))
    (found,) = matrices(layout, 2)
    assert [(m.rows, m.columns) for m in found] == [(8, 27), (4, 6)]
    segment = torch.zeros(layout.segment_bytes, dtype=torch.uint8)
    views = dict(zip([slot.name for slot in layout.trained], layout.gradient_views(segment), strict=True))
    flat = layout.regions[0].flat(segment, layout.regions[0].gradients)
    found[0].view(flat).fill_(1.0)
    found[1].view(flat).fill_(2.0)
    assert bool((views["0.weight"] == 1).all())
    assert bool((views["3.weight"] == 2).all())
    assert float(views["2.weight"].abs().sum() + views["0.bias"].abs().sum()) == 0


@pytest.mark.parametrize("count", [INT8_CHUNK, 5 * INT8_CHUNK, 5 * INT8_CHUNK + 3])
def test_long_vectors_are_put_together_block_by_block_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    drawn = torch.Generator().manual_seed(count)
    levels = torch.randint(-127, 128, (count,), generator=drawn, dtype=torch.int8)
    steps = torch.rand(-(-count // INT8_CHUNK), generator=drawn)
    whole, blocks = torch.empty(count), torch.full((count,), 7.0)
    codecs.in_steps(levels, steps, whole)
    assert torch.equal(whole, levels * steps.repeat_interleave(INT8_CHUNK)[:count])
    monkeypatch.setattr(codecs, "BLOCK", 2 * INT8_CHUNK)
    codecs.in_steps(levels, steps, blocks)
    assert torch.equal(blocks, whole)


def test_large_matrices_are_multiplied_block_by_block_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = torch.Generator().manual_seed(0)
    tall, wide = torch.randn(11, 3, generator=drawn), torch.randn(6, 3, generator=drawn)
    whole, blocks, rows = torch.empty(11, 6), torch.full((11, 6), 7.0), torch.full((11, 6), 7.0)
    codecs.multiply(tall, wide, into=whole)
    torch.testing.assert_close(whole, tall @ wide.T)
    monkeypatch.setattr(codecs, "BLOCK", 4 * 6)
    codecs.multiply(tall, wide, into=blocks)
    monkeypatch.setattr(codecs, "BLOCK", 1)
    codecs.multiply(tall, wide, into=rows)
    assert torch.equal(blocks, whole)
    assert torch.equal(rows, whole)


def test_what_lies_between_matrices_is_found_in_any_order_and_never_empty() -> None:
    found = [Matrix(10, 2, 5), Matrix(0, 2, 3), Matrix(20, 1, 4)]
    assert codecs.between(found, 30) == [(6, 10), (24, 30)]
    assert codecs.between(found, 24) == [(6, 10)]
    assert codecs.between([], 3) == [(0, 3)]
    assert codecs.between([], 0) == []


def test_low_rank_takes_what_was_left_out_before_along() -> None:
    matrix, flat, left_out = Matrix(1, 5, 4), torch.randn(25), torch.randn(25)
    on = [(matrix, first_basis(matrix, 2, 0, flat))]
    encoded = encode_low_rank(flat, on, left_out)
    torch.testing.assert_close(encoded.decoded + encoded.residual, flat + left_out)
    torch.testing.assert_close(encoded.decoded, encode_low_rank(flat + left_out, on).decoded)
