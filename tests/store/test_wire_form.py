"""Compressed vectors as bytes: what is read is what was decoded, bit for bit, and nothing else is read."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import RunError
from paceline.protocols.rules.compression import INT8_CHUNK, parse_compression
from paceline.store.compression.codecs import (
    Encoded,
    Form,
    Matrix,
    Wire,
    encode,
    encode_low_rank,
    first_basis,
)
from paceline.store.compression.wire_form import HEADER, Expected, read, write, written_bytes, zeros
from paceline.store.replicas import Summing, add_in_turn

WAYS = ["none", "fp16", "bf16", "int8", "topk:0.1", "topk:1"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MATRICES = [Matrix(3, 6, 5), Matrix(40, 4, 9)]
every_way = pytest.mark.parametrize("way", WAYS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
sizes = st.integers(0, 2 * INT8_CHUNK + 3)
seeds = st.integers(0, 10_000)


def numbers(seed: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of very different sizes, with zeros of both signs among them."""
    drawn = torch.Generator().manual_seed(seed)
    made = torch.randn(count, generator=drawn) * 10 ** (4 * torch.rand(count, generator=drawn) - 3)
    made[torch.rand(count, generator=drawn) < 0.2] *= 0.0
    return made.to(dtype)


def packed(*pieces: tuple[int, Wire]) -> Tensor:
    memory = torch.zeros(written_bytes(pieces), dtype=torch.uint8)
    write(pieces, memory)
    return memory


def arrived(data: Tensor, like: Tensor, matrices: list[Matrix] | None = None) -> Tensor:
    into = torch.full_like(like, 7.0)
    read(data, [Expected(into, matrices or [])])
    return into


def bits(flat: Tensor) -> Tensor:
    return flat.contiguous().view(torch.uint8)


def of(encoded: Encoded) -> tuple[int, Wire]:
    return encoded.decoded.numel(), encoded.wire


# -- there and back -----------------------------------------------------------------------------------


@every_way
@every_dtype
@given(seed=seeds, count=sizes)
def test_what_is_read_is_what_was_decoded_bit_for_bit(
    way: str, dtype: torch.dtype, seed: int, count: int
) -> None:
    encoded = encode(parse_compression(way), numbers(seed, count, dtype), wired=True)
    data = packed(of(encoded))
    assert torch.equal(bits(arrived(data, encoded.decoded)), bits(encoded.decoded))
    assert data.numel() <= encoded.size_bytes + HEADER.size + 2 * 7, "a header, and up to whole words"


@every_dtype
@given(seed=seeds, rank=st.integers(1, 3))
def test_matrices_are_multiplied_to_the_same_bits(dtype: torch.dtype, seed: int, rank: int) -> None:
    flat = numbers(seed, 90, dtype)
    wide = torch.empty(0, dtype=torch.promote_types(dtype, torch.float32))
    on = [(matrix, first_basis(matrix, rank, seed, wide)) for matrix in MATRICES]
    encoded = encode_low_rank(flat, on)
    data = packed(of(encoded))
    assert torch.equal(bits(arrived(data, flat, MATRICES)), bits(encoded.decoded))
    assert data.numel() <= encoded.size_bytes + HEADER.size + 7 * len(encoded.wire.tensors)


@every_way
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(way: str, bad: float) -> None:
    flat = numbers(1, 3000)
    flat[1500] = bad
    encoded = encode(parse_compression(way), flat, wired=True)
    got = arrived(packed(of(encoded)), flat)
    assert torch.equal(got.isnan(), encoded.decoded.isnan())
    assert torch.equal(got.nan_to_num(), encoded.decoded.nan_to_num())
    assert not bool(got.isfinite().all())


def test_a_vector_without_weight_is_a_header() -> None:
    data = packed((1000, zeros()))
    assert data.numel() == HEADER.size
    assert not bool(bits(arrived(data, torch.ones(1000))).any())


@every_way
def test_pieces_follow_each_other(way: str) -> None:
    flats = [numbers(1, 70), numbers(2, 33, torch.bfloat16), numbers(3, 0), numbers(4, 2000, torch.float64)]
    encoded = [encode(parse_compression(way), flat, wired=True) for flat in flats]
    into = [torch.ones_like(flat) for flat in flats]
    read(packed(*map(of, encoded)), [Expected(each) for each in into])
    for got, sent in zip(into, encoded, strict=True):
        assert torch.equal(bits(got), bits(sent.decoded))


# -- what is refused ----------------------------------------------------------------------------------


@every_way
@given(seed=seeds, count=st.integers(1, 200), data=st.data())
def test_what_is_cut_short_or_too_long_is_refused_and_nothing_is_written(
    way: str, seed: int, count: int, data: st.DataObject
) -> None:
    flat = numbers(seed, count)
    whole = packed(of(encode(parse_compression(way), flat, wired=True)))
    kept = data.draw(st.integers(0, whole.numel() - 1))
    for wrong in (whole[:kept], torch.cat([whole, torch.zeros(8, dtype=torch.uint8)])):
        into = torch.full_like(flat, 7.0)
        with pytest.raises(RunError):
            read(wrong, [Expected(into)])
        assert bool((into == 7).all())


@pytest.mark.parametrize(
    ("form", "count", "kept"),
    [
        (len(Form), 10, 0),
        (255, 10, 0),
        (Form.FP16, 11, 0),
        (Form.FP16, 9, 0),
        (Form.STEPS, 2**63, 0),
        (Form.PLACES, 10, 11),
        (Form.PLACES, 10, 2**63),
        (Form.FACTORS, 10, 2**40),
    ],
)
def test_headers_that_lie_are_refused_before_anything_is_made(form: int, count: int, kept: int) -> None:
    data = bytearray(HEADER.pack(form, count, kept) + bytes(64))
    with pytest.raises(RunError, match="where 10 are expected"):
        arrived(torch.frombuffer(data, dtype=torch.uint8), torch.ones(10))


@pytest.mark.parametrize("place", [-1, 10, 2**31 - 1])
def test_places_beyond_the_vector_are_refused(place: int) -> None:
    wire = Wire(Form.PLACES, 2, (torch.tensor([3, place], dtype=torch.int32), torch.ones(2)))
    with pytest.raises(RunError, match="in a vector of 10 numbers"):
        arrived(packed((10, wire)), torch.ones(10))


def test_factors_of_another_model_or_of_no_rank_are_refused() -> None:
    flat = numbers(5, 90)
    on = [(matrix, first_basis(matrix, 2, 0, flat)) for matrix in MATRICES]
    data = packed(of(encode_low_rank(flat, on)))
    with pytest.raises(RunError):
        arrived(data, flat, MATRICES[:1])
    rest = tuple(flat[start:stop] for start, stop in [(0, 3), (33, 40), (76, 90)])
    with pytest.raises(RunError, match="rank 0"):
        arrived(packed((90, Wire(Form.FACTORS, 0, (*[torch.empty(0)] * 4, *rest)))), flat, MATRICES)


@given(data=st.binary(max_size=200))
def test_whatever_bytes_come_they_are_read_or_refused(data: bytes) -> None:
    memory = torch.frombuffer(bytearray(data + b"0"), dtype=torch.uint8)[: len(data)]
    with contextlib.suppress(RunError):
        arrived(memory, torch.ones(12), [Matrix(0, 3, 4)])


# -- adding up ----------------------------------------------------------------------------------------


@every_dtype
@given(seed=seeds, workers=st.integers(1, 5), count=st.integers(0, 300))
def test_vectors_are_added_up_in_turn_to_the_bits_of_all_at_once(
    dtype: torch.dtype, seed: int, workers: int, count: int
) -> None:
    """Also where a part of a vector begins elsewhere: nothing depends on how registers are filled."""
    vectors = [numbers(seed + 7 * rank, count, dtype) for rank in range(workers)]
    shares = [(rank + 1) / 7 for rank in range(workers)]
    at_once, in_turn = torch.empty_like(vectors[0]), torch.empty(count + 3, dtype=dtype)[3:]
    Summing(fused=False).add_up([([v], s) for v, s in zip(vectors, shares, strict=True)], [[at_once]])
    add_in_turn((([v.clone()], s) for v, s in zip(vectors, shares, strict=True)), [in_turn])
    assert torch.equal(bits(at_once), bits(in_turn))
