"""Compressed vectors are taken apart and added up to the bits of one host, whatever the way to compress."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import RunError
from paceline.protocols.core.parts import Part
from paceline.protocols.rules.compression import parse_compression
from paceline.store.compression.codecs import Encoded, encode, encode_low_rank, first_basis, matrices
from paceline.store.compression.unpack import Unpacker
from paceline.store.compression.wire_form import write, written_bytes
from paceline.store.cutting import cut_of
from paceline.store.layout import Layout, describe
from paceline.store.replicas import Summing

WAYS = ["none", "fp16", "int8", "topk:0.3", "powersgd:2"]
SOME = Part(tensors=(0, 2), size_bytes=0)


def two_types() -> Layout:
    """The matrix in the middle is too thin for rank 2."""
    model = nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 2), nn.Linear(8, 7).double())
    return describe(model, list(model.parameters()))


def vector(layout: Layout, seed: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    memory = torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    parts = Unpacker(layout, "none").parts(memoryview(memory.numpy()))
    for part in parts:
        part.copy_(torch.randn(part.numel(), generator=drawn))
    return parts


def packed(way: str, layout: Layout, pieces: list[Tensor], whole: bool) -> tuple[bytearray, list[Encoded]]:
    how = parse_compression(way)
    if how.name == "powersgd" and whole:
        found = matrices(layout, 2)
        assert all(found)
        bases = [[(m, first_basis(m, 2, 1, p)) for m in ms] for ms, p in zip(found, pieces, strict=True)]
        encoded = [encode_low_rank(piece, basis) for piece, basis in zip(pieces, bases, strict=True)]
    else:
        plain = parse_compression("none") if how.name == "powersgd" else how
        encoded = [encode(plain, piece, wired=True) for piece in pieces]
    wires = [(each.decoded.numel(), each.wire) for each in encoded]
    memory = torch.zeros(written_bytes(wires), dtype=torch.uint8)
    write(wires, memory)
    return bytearray(memory.numpy().tobytes()), encoded


@pytest.mark.parametrize("part", [None, SOME], ids=["whole", "some"])
@pytest.mark.parametrize("way", WAYS)
def test_a_vector_is_taken_apart_to_what_its_worker_decoded(way: str, part: Part | None) -> None:
    layout = two_types()
    cut, into = cut_of(layout), vector(layout, 0)
    data, encoded = packed(way, layout, cut.pieces(vector(layout, 1), part), part is None)
    Unpacker(layout, way).open(data, into, part)
    for piece, each in zip(cut.pieces(into, part), encoded, strict=True):
        assert torch.equal(piece, each.decoded)
    if part is not None:
        untouched = Part(tensors=(1, 3, 4, 5), size_bytes=0)
        for got, was in zip(
            cut.pieces(into, untouched), cut.pieces(vector(layout, 0), untouched), strict=True
        ):
            assert torch.equal(got, was)


@pytest.mark.parametrize("way", WAYS)
def test_compressed_vectors_are_added_up_to_the_bits_of_one_host(way: str) -> None:
    layout, shares = two_types(), [0.5, 0.3, 0.2]
    made = [packed(way, layout, vector(layout, seed), True) for seed in (1, 2, 3)]
    into, expected = vector(layout, 0), vector(layout, 0)
    terms = [
        ([each.decoded for each in encoded], share) for (_, encoded), share in zip(made, shares, strict=True)
    ]
    Summing(fused=False).add_up(terms, [expected])
    unpacker = Unpacker(layout, way)
    unpacker.add_up([(data, share) for (data, _), share in zip(made, shares, strict=True)], into, None)
    assert all(torch.equal(got, sent) for got, sent in zip(into, expected, strict=True))
    assert unpacker.longest_bytes == layout.gradient_bytes


def test_thin_matrices_are_refused_where_nobody_compresses_so() -> None:
    layout = two_types()
    data, _ = packed("powersgd:2", layout, vector(layout, 1), True)
    with pytest.raises(RunError):
        Unpacker(layout, "fp16").open(data, vector(layout, 0), None)
