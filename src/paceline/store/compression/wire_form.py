"""Compressed vectors as bytes: what travels between hosts, and arrives at the very numbers of one host.

A vector is a row of pieces, each with a header of fixed size: its form, how many numbers it has, how many
of them are kept. The reader knows the pieces it expects, by the model's layout: what does not fit them is
refused by the headers alone, before anything is read or made. Sections begin on whole words of eight bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.protocols.rules.compression import INT8_CHUNK
from paceline.store.compression.codecs import Form, Matrix, Wire, between, in_steps, multiply

HEADER = struct.Struct("<B7xQQ")
WORD = 8


class Section(NamedTuple):
    """So many numbers of a type."""

    dtype: torch.dtype
    numbers: int

    @property
    def size_bytes(self) -> int:
        """Up to where the next one begins."""
        return _padded(self.numbers * self.dtype.itemsize)


class Expected(NamedTuple):
    """A piece that is to arrive."""

    into: Tensor
    matrices: Sequence[Matrix] = ()
    """Those of it that may come as factors."""


def zeros() -> Wire:
    """A vector that is all zeros."""
    return Wire(Form.PLACES, 0, (torch.empty(0, dtype=torch.int32), torch.empty(0)))


def written_bytes(pieces: Sequence[tuple[int, Wire]]) -> int:
    """What pieces of so many numbers come to."""
    tensors = [tensor for _, wire in pieces for tensor in wire.tensors]
    return len(pieces) * HEADER.size + sum(_padded(each.numel() * each.element_size()) for each in tensors)


def write(pieces: Sequence[tuple[int, Wire]], into: Tensor) -> None:
    """Write them to memory that has the room."""
    at = 0
    for count, (form, kept, tensors) in pieces:
        header = bytearray(HEADER.pack(form, count, kept))
        for tensor in (torch.frombuffer(header, dtype=torch.uint8), *tensors):
            size = tensor.numel() * tensor.element_size()
            into[at : at + size].view(tensor.dtype).copy_(tensor.reshape(-1))
            at += _padded(size)


def read(data: Tensor, expected: Sequence[Expected]) -> None:
    """Read the pieces that are expected, and refuse everything else. Nothing is written unless all fit."""
    found, at = [], 0
    for piece in expected:
        if data.numel() - at < HEADER.size:
            raise RunError(f"a vector ends after {at} bytes, within a header.")
        form, kept, sections = _announced(data[at : at + HEADER.size], piece)
        begins = at = at + HEADER.size
        at += sum(section.size_bytes for section in sections)
        if at > data.numel():
            raise RunError(f"a vector of {data.numel()} bytes is said to have {at} or more.")
        found.append((piece, form, kept, list(_cut(data[begins:at], sections))))
    if at != data.numel():
        raise RunError(f"a vector of {at} bytes is followed by {data.numel() - at} more.")
    for each in found:
        _check_places(*each)
    for each in found:
        _open(*each)


def _announced(header: Tensor, piece: Expected) -> tuple[Form, int, list[Section]]:
    """What a header says, if that can be."""
    number, count, kept = HEADER.unpack(bytes(header.tolist()))
    numbers = piece.into.numel()
    if number not in list(Form) or count != numbers or kept > numbers:
        raise RunError(f"{kept} of {count} numbers in form {number}, where {numbers} are expected.")
    form = Form(number)
    return form, kept, _sections(form, kept, piece)


def _sections(form: Form, kept: int, piece: Expected) -> list[Section]:
    native, count = piece.into.dtype, piece.into.numel()
    match form:
        case Form.FP16 | Form.BF16:
            return [Section(torch.float16 if form is Form.FP16 else torch.bfloat16, count)]
        case Form.STEPS:
            return [Section(torch.float32, -(-count // INT8_CHUNK)), Section(torch.int8, count)]
        case Form.PLACES:
            return [Section(torch.int32, kept), Section(native, kept)]
        case Form.FACTORS:
            wide = torch.promote_types(native, torch.float32)
            sides = [side for each in piece.matrices for side in (each.rows, each.columns)]
            rest = between(piece.matrices, count)
            factors = [Section(wide, side * kept) for side in sides]
            return factors + [Section(native, stop - start) for start, stop in rest]
    return [Section(native, count)]


def _cut(data: Tensor, sections: Sequence[Section]) -> Iterator[Tensor]:
    at = 0
    for section in sections:
        yield data[at : at + section.numbers * section.dtype.itemsize].view(section.dtype)
        at += section.size_bytes


def _check_places(piece: Expected, form: Form, kept: int, tensors: list[Tensor]) -> None:
    if form is Form.PLACES and kept:
        least, most = (int(each) for each in tensors[0].aminmax())
        if least < 0 or most >= piece.into.numel():
            raise RunError(f"places from {least} to {most} in a vector of {piece.into.numel()} numbers.")
    if form is Form.FACTORS and piece.matrices and not kept:
        raise RunError("matrices of rank 0.")


def _open(piece: Expected, form: Form, kept: int, tensors: list[Tensor]) -> None:
    into = piece.into
    match form:
        case Form.STEPS:
            in_steps(tensors[1], tensors[0], into)
        case Form.PLACES:
            into.zero_().index_copy_(0, tensors[0].long(), tensors[1])
        case Form.FACTORS:
            _multiply(piece, kept, tensors)
        case _:
            into.copy_(tensors[0])


def _multiply(piece: Expected, rank: int, tensors: list[Tensor]) -> None:
    factors, rest = tensors[: 2 * len(piece.matrices)], tensors[2 * len(piece.matrices) :]
    for matrix, tall, wide in zip(piece.matrices, factors[::2], factors[1::2], strict=True):
        sides = tall.view(matrix.rows, rank), wide.view(matrix.columns, rank)
        multiply(*sides, into=matrix.view(piece.into))
    for (start, stop), numbers in zip(between(piece.matrices, piece.into.numel()), rest, strict=True):
        piece.into[start:stop].copy_(numbers)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // WORD) * WORD
