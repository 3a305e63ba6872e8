"""The one place where vectors are compressed: between a protocol's operation and whoever carries it out.

`pack` turns what a worker gives away into what the others would receive of it; `Packed.opened` turns the
answer back into what the protocol asked for. What has to last, residuals above all, is kept in
`me.private.compression`: with the rest of this worker's memory, so whoever saves that saves these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import BadGradient
from paceline.protocols.core.operations import Average, Mix
from paceline.protocols.core.parts import Part
from paceline.protocols.core.peer import Me
from paceline.protocols.rules.compression import Compression, Treatment
from paceline.store.compression.codecs import (
    Basis,
    Encoded,
    Matrix,
    Wire,
    encode,
    encode_low_rank,
    first_basis,
    next_basis,
)
from paceline.store.compression.wire_form import written_bytes, zeros
from paceline.store.cutting import Cut
from paceline.store.vector import FlatVector


class Packed(NamedTuple):
    """A vector as it travels."""

    vector: FlatVector
    size_bytes: int
    """On the wire."""
    opened: Callable[[FlatVector], FlatVector]
    """Makes of the answer to this vector the answer to the one that was packed."""
    pieces: tuple[tuple[int, Wire], ...] = ()
    """What travels between hosts, if that is not the vector itself: per piece its numbers and its form."""

    def written_bytes(self, operation: Average | Mix) -> int:
        """What those come to; 0 if nothing is gained by them."""
        size = written_bytes(self.pieces)
        return size if 0 < size < operation.size_bytes else 0


@dataclass(slots=True)
class KeptResidual:
    """What lasts from one exchange to the next."""

    common: FlatVector
    """The last model that was the same for all."""
    residuals: dict[str, list[Tensor]] = field(default_factory=dict)
    """What was left out, by kind of vector and part."""
    bases: dict[str, list[list[Basis]]] = field(default_factory=dict)
    """By kind of vector, part and matrix."""


class Packing:
    """One worker's."""

    def __init__(
        self, how: Compression, me: Me, matrices: Sequence[Sequence[Matrix]] = (), *, wired: bool = False
    ) -> None:
        """While all models are still equal. `matrices`: per part, those to be factorised; `wired`: whether
        vectors may travel to other hosts."""
        self._how, self._me, self._matrices, self._wired = how, me, matrices, wired
        if how.name != "none":
            assert isinstance(me.parameters, FlatVector)
            me.private.compression = KeptResidual(me.parameters.clone())

    @property
    def kept(self) -> KeptResidual:
        """What lasts."""
        kept: KeptResidual = self._me.private.compression
        return kept

    def pack(self, operation: Average | Mix) -> Packed:
        """What the others receive of the operation's vector."""
        vector = operation.vector
        assert isinstance(vector, FlatVector)
        match self._how.treatment(operation, self._me):
            case Treatment.CHANGE:
                assert isinstance(operation, Average)
                return self._change(operation, vector)
            case Treatment.MODEL:
                return self._model(vector)
            case Treatment.ROUNDED:
                return self._rounded(vector)
        return Packed(vector, operation.size_bytes, lambda answer: answer)

    def _change(self, operation: Average, vector: FlatVector) -> Packed:
        kind = operation.remainder or "lasting"
        if operation.part is not None:
            return self._some(operation, kind, vector, operation.part)
        before = self.kept.residuals.get(kind)
        packed = self._compressed(kind, vector)
        if operation.weight == 0:  # it has no part in the mean: what is left out has to stay left out
            nothing = FlatVector([torch.zeros_like(part) for part in vector.parts], vector.missing)
            packed = packed._replace(vector=nothing, pieces=_nothing(packed.pieces))
        if operation.weight == 0 or operation.remainder is None:
            self._remember(kind, before)
        return packed

    def _some(self, operation: Average, kind: str, vector: FlatVector, part: Part) -> Packed:
        """Some of the tensors; what is left out of them is remembered where it belongs in the whole."""
        arriving, size = FlatVector([torch.zeros_like(each) for each in vector.parts], vector.missing), 0
        sent: list[Encoded] = []
        kept = self.kept.residuals.get(kind) or [torch.zeros_like(each) for each in vector.parts]
        cut = self._me.tensors
        assert isinstance(cut, Cut)
        whole = (vector.parts, kept, arriving.parts)
        for piece, left, target in zip(*(cut.pieces(each, part) for each in whole), strict=True):
            encoded = encode(self._how, piece, None if self._how.is_rounding else left, wired=self._wired)
            self._check(piece, encoded.decoded)
            size += encoded.size_bytes
            sent.append(encoded)
            if operation.weight == 0:
                continue
            target.copy_(encoded.decoded)
            if not self._how.is_rounding:
                left.copy_(encoded.residual)
        if not self._how.is_rounding:
            self._remember(kind, kept)
        pieces = self._pieces(sent)
        return Packed(arriving, size, lambda answer: answer, pieces if operation.weight else _nothing(pieces))

    def _model(self, vector: FlatVector) -> Packed:
        common = self.kept.common
        packed = self._compressed("model", vector - common)

        def opened(answer: FlatVector) -> FlatVector:
            common[:] = common + packed.opened(answer)
            return common.clone()

        return packed._replace(opened=opened)

    def _rounded(self, vector: FlatVector) -> Packed:
        """x becomes mixture(rounded) + (x - rounded x): whatever the mixture, the mean of all stays."""
        encoded = [encode(self._how, part, wired=self._wired) for part in vector.parts]
        rounded = self._arriving(vector, encoded)
        error = vector - rounded
        size = sum(each.size_bytes for each in encoded)
        return Packed(rounded, size, lambda answer: answer + error, self._pieces(encoded))

    def _compressed(self, kind: str, vector: FlatVector) -> Packed:
        """With what was left out before; what is left out now is remembered."""
        kept, empty = self.kept, [None] * len(vector.parts)
        residuals: Sequence[Tensor | None] = kept.residuals.get(kind, empty)
        low_rank = self._how.name == "powersgd"
        bases = self._bases(kind, vector) if low_rank else []
        encoded = []
        for at, (part, residual) in enumerate(zip(vector.parts, residuals, strict=True)):
            if low_rank:
                on = list(zip(self._matrices[at], bases[at], strict=True))
                encoded.append(encode_low_rank(part, on, residual))
            else:
                encoded.append(encode(self._how, part, residual, wired=self._wired))
        arriving = self._arriving(vector, encoded)
        if not self._how.is_rounding:
            self._remember(kind, [each.residual for each in encoded])
        size = sum(each.size_bytes for each in encoded)
        return Packed(arriving, size, lambda answer: self._turned(kind, answer), self._pieces(encoded))

    def _pieces(self, encoded: Sequence[Encoded]) -> tuple[tuple[int, Wire], ...]:
        """What travels."""
        return tuple((each.decoded.numel(), each.wire) for each in encoded) if self._wired else ()

    def _arriving(self, vector: FlatVector, encoded: Sequence[Encoded]) -> FlatVector:
        for part, each in zip(vector.parts, encoded, strict=True):
            self._check(part, each.decoded)
        return FlatVector([each.decoded for each in encoded], vector.missing)

    def _check(self, part: Tensor, decoded: Tensor) -> None:
        """What was finite has to arrive so; what was not is found by those who look for it."""
        if bool(torch.isfinite(decoded).all()) or not bool(torch.isfinite(part).all()):
            return
        largest = float(part.abs().max())
        raise BadGradient(
            f"rank {self._me.rank} has to send {largest:.4g}, which is too large for --compress "
            f"{self._how}. Use bf16 or none, lower the learning rate, or scale the loss down."
        )

    def _remember(self, kind: str, residuals: list[Tensor] | None) -> None:
        if residuals is None:
            self.kept.residuals.pop(kind, None)
        else:
            self.kept.residuals[kind] = residuals

    def _bases(self, kind: str, vector: FlatVector) -> list[list[Basis]]:
        if kind not in self.kept.bases:
            rank, seed = int(self._how.amount or 1), self._me.seed
            widths = [torch.empty(0, dtype=torch.promote_types(p.dtype, torch.float32)) for p in vector.parts]
            self.kept.bases[kind] = [
                [first_basis(matrix, rank, seed, like) for matrix in part]
                for part, like in zip(self._matrices, widths, strict=True)
            ]
        return self.kept.bases[kind]

    def _turned(self, kind: str, answer: FlatVector) -> FlatVector:
        """Everybody takes the next basis from the same mean."""
        bases = self.kept.bases.get(kind)
        if bases is not None:
            self.kept.bases[kind] = [
                [next_basis(matrix, basis, mean) for matrix, basis in zip(found, part, strict=True)]
                for found, part, mean in zip(self._matrices, bases, answer.parts, strict=True)
            ]
        return answer


def _nothing(pieces: tuple[tuple[int, Wire], ...]) -> tuple[tuple[int, Wire], ...]:
    """What travels of a vector that has no part in the mean."""
    return tuple((count, zeros()) for count, _ in pieces)
