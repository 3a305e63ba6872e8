"""A flag is declared once: what the command shows, what it takes and what the run is told are the same."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from paceline.cli.compare import compare
from paceline.cli.flags import dials as d
from paceline.cli.flags.dials import Dials, dial_of, takes
from paceline.cli.train import train
from paceline.config import RunConfig
from paceline.errors import ConfigError

CONFIG = {field.name: field for field in msgspec.structs.fields(RunConfig)}
APART = {
    "run",
    "folder",
    "script",
    "args",
    "protocol",
    "protocol_sha256",
    "settings",
    "resume",
    "plain",
    "plan",
}
"""Fields that train takes in another way."""
NEVER = {"cluster", "replay", "until"}
"""Fields of other commands."""


@pytest.mark.parametrize("flag", sorted(d.fields()))
def test_a_flag_has_the_default_of_its_field(flag: str) -> None:
    dial, field = dial_of(flag), CONFIG[d.fields()[flag]]
    default = dial.default if dial.parse is None else dial.parse(dial.default)
    empty = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    assert default == empty


def test_train_has_a_flag_for_every_field_of_the_configuration() -> None:
    flags = set(inspect.signature(train).parameters)
    reached = {field for flag, field in d.fields().items() if flag in flags}
    assert reached | APART | NEVER == set(CONFIG)


def test_what_is_given_arrives_under_the_name_of_its_field() -> None:
    heard: list[dict[str, object]] = []

    @takes("workers", *d.EMULATION, "secret_file", "weighting", workers=4)
    def command(script: str, dials: Dials, json: bool = False) -> None:
        heard.append(dials.asked())
        assert dials["device_time"] == 0.5

    names = list(inspect.signature(command).parameters)
    assert names == ["script", "workers", *d.EMULATION, "secret_file", "weighting", "json"]
    assert inspect.signature(command).parameters["workers"].default == 4
    given = {"slow": ["1:2.5"], "device_time": 0.5, "jitter": 0.1, "secret_file": "x", "weighting": "0.5"}
    command(script="s", workers=3, json=True, **given)
    told = {"workers": 3, "slow": {1: 2.5}, "device_time_s": 0.5, "jitter": 0.1, "weighting": 0.5}
    assert heard == [told], "the secret is no part of a configuration"


def test_a_value_that_cannot_be_read_is_refused_when_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--weighting takes mean, sum or a number, got 'heavy'"):
        Dials({"weighting": "heavy"}).asked()


def test_a_commands_own_flag_is_shown_among_the_others_and_stays_its_own() -> None:
    names = list(inspect.signature(compare).parameters)
    assert (
        names.index("fabric") < names.index("balance") < names.index("compress") < names.index("on_failure")
    )
    assert len(names) == len(set(names))
