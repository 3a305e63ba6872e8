"""A protocol by its name and settings."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.protocols import PACED
from paceline.protocols.paced.dssp import DSSP
from paceline.protocols.settings import about, make, make_any, resolved


def test_strings_are_converted_as_set_on_the_command_line() -> None:
    made = make("dssp", {"lower": "2", "upper": "5", "preset": "figure2"})
    assert made == DSSP(lower=2, upper=5, preset="figure2")


def test_typed_values_are_taken_as_they_are() -> None:
    assert make("dssp", {"lower": 2, "upper": 5}) == DSSP(lower=2, upper=5)


@pytest.mark.parametrize("name", sorted(PACED))
def test_no_settings_means_the_defaults(name: str) -> None:
    assert make(name) == make(name, {}) == PACED[name]()


def test_resolved_tells_the_defaults_too_and_no_memory() -> None:
    assert resolved(make("dssp", {"lower": "4"})) == {"lower": 4, "upper": 15, "preset": "bounded"}


@pytest.mark.parametrize(("wrong", "meant"), [("spp", "ssp"), ("dsp", "dssp"), ("BSP", "bsp")])
def test_an_unknown_protocol_is_named_with_what_it_may_have_meant(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(wrong)
    assert repr(wrong) in str(caught.value)
    if wrong.islower():
        assert f"Did you mean {meant!r}?" in str(caught.value)
    assert all(name in str(caught.value) for name in PACED)


def test_an_unknown_setting_is_named_with_what_it_may_have_meant() -> None:
    with pytest.raises(ConfigError, match=r"'dssp'.*'lowr'.*Did you mean 'lower'\?.*preset, upper"):
        make("dssp", {"lowr": 3})


def test_a_setting_of_a_protocol_without_settings_says_so() -> None:
    with pytest.raises(ConfigError, match="'bsp' has no settings, got staleness='3'"):
        make("bsp", {"staleness": "3"})


def test_memory_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="'grants'"):
        make("dssp", {"grants": {0: 99}})


@pytest.mark.parametrize(
    ("name", "settings", "shown"),
    [
        ("ssp", {"staleness": "three"}, "three"),
        ("ssp", {"staleness": "2.5"}, "2.5"),
        ("ssp", {"staleness": None}, "None"),
        ("ssp", {"staleness": "-4"}, "-4"),
        ("dssp", {"lower": ""}, "''"),
        ("dssp", {"preset": "fast"}, "fast"),
        ("dssp", {"lower": 5, "upper": 4}, "lower=5, upper=4"),
        ("dssp", {"lower": -1}, "lower=-1"),
    ],
)
def test_a_bad_value_is_shown(name: str, settings: dict[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(name, settings)
    assert shown in str(caught.value)


def test_a_preset_that_does_not_exist_is_refused_by_the_class_too() -> None:
    with pytest.raises(ConfigError, match="'fast'"):
        DSSP(preset="fast")  # type: ignore[arg-type]


def test_about_tells_type_default_and_help_of_a_setting() -> None:
    lower, upper, preset = about("dssp").settings
    assert (lower.name, lower.type, lower.default) == ("lower", "int", 3)
    assert (upper.name, upper.type, upper.default) == ("upper", "int", 15)
    assert preset.type == "Literal['bounded', 'bounded_eager', 'figure2', 'printed']"
    assert "ahead of the slowest" in lower.help


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("dssp", "preset", "bouded", "Did you mean 'bounded'? Available: bounded, bounded_eager"),
        ("ssp", "staleness", "1.5", "takes a whole number, got '1.5'"),
        ("bounded_ps", "buffered", "perhaps", "takes true or false, got 'perhaps'"),
        ("diloco", "lr", "fast", "takes a number, got 'fast'"),
        ("diloco", "lr", "nan", "takes a number, got 'nan'"),
        ("diloco", "lr", "inf", "a finite lr > 0"),
        ("diloco", "momentum", float("inf"), "momentum in [0, 1), got lr=0.7, momentum=inf"),
    ],
)
def test_a_value_that_is_no_such_setting_is_refused_with_what_it_takes(
    name: str, key: str, value: object, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_any(name, {key: value})
    assert words in str(refused.value)
