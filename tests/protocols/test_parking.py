"""Who may be left out of a run."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.protocols.rules.parking import check_parked


def test_everybody_but_the_lead_may_be_parked() -> None:
    check_parked([1, 2, 3], 4, "shared")
    check_parked([], 4, "equal")


@pytest.mark.parametrize(
    ("rank", "why"), [(0, "leads the run"), (-1, "does not exist"), (4, "does not exist")]
)
def test_who_leads_or_is_not_there_is_refused(rank: int, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"rank {rank} cannot be parked because it {why}.* ranks 1 to 3"):
        check_parked([1, rank], 4, "shared")


def test_a_share_that_nobody_else_would_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="--shards equal gives every worker a share"):
        check_parked([1], 4, "equal")
