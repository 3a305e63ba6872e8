"""What `--apply increments` does not go with is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.protocols import PACED, Flush, Pacer, Verdict
from paceline.protocols.core.base import Fate
from paceline.protocols.core.clocks import Clocks
from paceline.protocols.rules.increments import ADDING, check_decision, check_rule


class Fixed:
    """A rule of one's own that always says the same."""

    lockstep = False

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        return self.verdict


@pytest.mark.parametrize(
    "dials",
    [
        {"store_hosts": 2},
        {"weighting": 0.5},
        {"damping": "inverse"},
        {"balance": True},
        {"drop_staler": 3},
        {"lr_cap": 0.1},
        {"trigger": 0.5},
        {"park_slow": 2.0},
        {"mesh": {"data": 2}},
    ],
    ids=str,
)
def test_what_increments_have_no_use_for_is_refused(dials: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not go with --apply increments") as refusal:
        RunConfig(run="r", folder="f", workers=2, apply="increments", **dials)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("weighting", ["mean", "sum", 1.0])
def test_a_weighting_that_counts_in_full_or_is_the_default_is_not(weighting: Any) -> None:
    RunConfig(run="r", folder="f", workers=2, apply="increments", weighting=weighting)


@pytest.mark.parametrize("name", sorted(PACED))
def test_only_rules_that_apply_every_push_at_once_are_let_in(name: str) -> None:
    if name in ADDING:
        check_rule(name, PACED[name].lockstep, own=False)
    else:
        with pytest.raises(ConfigError, match=f"{name!r} makes one step of several"):
            check_rule(name, PACED[name].lockstep, own=False)


@pytest.mark.parametrize(
    ("verdict", "what"),
    [
        (Verdict(fate=Fate.HOLD), "adds pushes up"),
        (Verdict(fate=Fate.HOLD, flush=Flush.MEAN), "adds pushes up"),
        (Verdict(lr_scale=0.5), "how much a push counts"),
        (Verdict(adjust={"momentum": 0.5}), "settings of the store's optimizer"),
    ],
    ids=["hold", "flush", "scale", "adjust"],
)
def test_a_rule_of_one_s_own_is_found_out_by_its_verdict(verdict: Verdict, what: str) -> None:
    pacer = Pacer(Fixed(verdict))
    pacer.join(0, 0.0)
    with pytest.raises(ConfigError, match=what):
        check_decision("mine.py:Rule", pacer.push(0, 1.0, 4))


def test_a_share_that_a_script_names_for_its_pushes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trigger 0\.5 keeps gradients back"):
        check_rule("asp", False, own=False, trigger=0.5)
