"""Peers that never meet while they train say so: their replicas were trained apart."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.trace.events import Note
from support.runs import Lab

NEVER = "the workers never exchanged anything"


@pytest.mark.parametrize(
    ("protocol", "rarely", "often"),
    [
        ("local_sgd", {"period": 100}, {"period": 4}),
        ("diloco", {"period": 100}, {"period": 4}),
    ],
)
@pytest.mark.parametrize("fabric", ["shared", "gloo"])
def test_peers_that_never_meet_say_so_with_their_period(
    lab: Lab, protocol: str, rarely: dict[str, Any], often: dict[str, Any], fabric: str
) -> None:
    dials: dict[str, Any] = {"workers": 2, "protocol": protocol, "fabric": fabric}
    notes = [note.text for note in lab.trained("passes.py", settings=rarely, **dials).of(Note)]
    (text,) = [text for text in notes if NEVER in text]
    assert f"{protocol} averages less often (period=100)" in text
    met = lab.trained("passes.py", settings=often, **dials)
    assert not [note.text for note in met.of(Note) if NEVER in note.text]
