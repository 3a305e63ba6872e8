"""Parts of a split model: put together only if they are of one moment, and all there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.errors import RunError
from paceline.parallel.messages import MeshState
from paceline.parallel.parts import CheckpointPart, read_parts, write_part
from paceline.parallel.pieces import TensorPiece


def state(updates: int) -> MeshState:
    mesh = {"stage": 2}
    return MeshState(
        mesh=mesh, protocol="adl", passes=0, batches=0, updates=updates, samples=0, stepped_by="SGD"
    )


def part(updates: int, name: str, pieces: dict[str, TensorPiece] | None = None) -> CheckpointPart:
    return CheckpointPart({name: torch.full((2,), float(updates))}, {}, {}, state(updates), pieces or {})


def test_parts_of_one_moment_are_one_model(tmp_path: Path) -> None:
    write_part(tmp_path, 0, part(3, "a"))
    write_part(tmp_path, 1, part(3, "b"))
    assert read_parts(tmp_path).model.keys() == {"a", "b"}


def test_parts_of_different_moments_are_refused_and_the_moments_named(tmp_path: Path) -> None:
    """A model made of them would never have been trained by anybody."""
    write_part(tmp_path, 0, part(3, "a"))
    write_part(tmp_path, 1, part(4, "b"))
    with pytest.raises(RunError, match=r"from different moments: after 3, 4 updates"):
        read_parts(tmp_path)


def test_a_tensor_of_which_a_piece_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    write_part(tmp_path, 0, part(3, "a", {"a": TensorPiece(shape=(4,), dim=0, spans=((0, 2),))}))
    with pytest.raises(RunError, match="a piece of 'a' is missing"):
        read_parts(tmp_path)
