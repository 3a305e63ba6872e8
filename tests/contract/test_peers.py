"""What every peer protocol says about itself, and promises whatever its paper."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import PACED, PEERS, Peer
from paceline.protocols.settings import about, make, make_any, make_peer, resolved
from support.peers import Crew
from support.problems import large_batch, momentum, noisy
from support.tight import TIGHT

TIGHTER: dict[str, dict[str, Any]] = TIGHT | {
    "local_sgd": {"period": 3, "every_until": 2, "warmup": 3},
    "selsync": {"window": 2, "delta": 0.1},
}
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("topology", "graph"): {"graph": "0-1,1-2,2-3"},
    ("pattern", "given"): {"groups": "0,1|2,3;0,2|1,3"},
    ("pattern", "topology"): {"hosts": "0,1@0.5|2,3"},
}
every_name = pytest.mark.parametrize("name", sorted(PEERS))


def variants() -> list[tuple[str, dict[str, Any]]]:
    """The defaults, and each choice of a `Literal` setting, made tight if we can."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in sorted(PEERS):
        tight, hints = TIGHTER.get(name, {}), get_type_hints(PEERS[name])
        found += [(name, {}), (name, tight)] if tight else [(name, {})]
        for f in fields(PEERS[name]):  # type: ignore[arg-type]
            choices = get_args(hints[f.name]) if get_origin(hints[f.name]) is Literal else ()
            for choice in (c for c in choices if c != f.default):
                found.append((name, {**tight, f.name: choice, **NEEDS.get((f.name, choice), {})}))
    return found


every_variant = pytest.mark.parametrize(
    "variant", variants(), ids=lambda v: "-".join([v[0], *map(str, v[1].values())])
)
Variant = tuple[str, dict[str, Any]]


@every_name
def test_says_what_it_is_where_it_comes_from_and_what_it_promises(name: str) -> None:
    told = about(name)
    assert (told.name, told.family) == (name, "peer")
    assert told.title.endswith(".")
    assert len(told.paper) > 20
    assert told.promise.endswith(".")


@every_name
def test_every_setting_has_help_and_its_default(name: str) -> None:
    told, default = about(name), resolved(make_peer(name))
    assert {setting.name: setting.default for setting in told.settings} == default
    assert all(setting.help.endswith(".") and setting.type for setting in told.settings)


@every_name
def test_it_is_made_by_name_and_is_no_paced_protocol(name: str) -> None:
    assert isinstance(make_any(name), Peer)
    assert make_peer(name) == make_any(name, {}) == PEERS[name]()
    with pytest.raises(ConfigError, match=f"{name!r} is of the peer family.*bsp"):
        make(name)


def test_a_name_belongs_to_one_family_and_a_misspelt_one_is_told_both() -> None:
    assert not PEERS.keys() & PACED.keys()
    with pytest.raises(ConfigError, match=r"'local_sdg'\. Did you mean 'local_sgd'\?.*asp.*selsync.*ssp"):
        make_peer("local_sdg")


def test_settings_of_peers_come_as_strings_too() -> None:
    made = resolved(make_peer("diloco", {"period": "7", "lr": "0.5"}))
    assert (made["period"], made["lr"]) == (7, 0.5)
    assert made == resolved(make_peer("diloco")) | {"period": 7, "lr": 0.5}


@every_variant
def test_the_order_in_which_workers_come_does_not_change_a_bit(variant: Variant) -> None:
    def run(seed: int) -> list[torch.Tensor]:
        crew = Crew(make_peer(*variant), 4, noisy(0), seed=5, optimizer=momentum)
        crew.random.seed(seed)
        return crew.run(9).parameters()

    one, other = run(0), run(1)
    assert not make_peer(*variant).repeats or all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@every_variant
@given(seed=st.integers(0, 999), deaths=st.dictionaries(st.integers(0, 3), st.integers(0, 7), max_size=3))
def test_whoever_dies_whenever_the_others_finish(variant: Variant, seed: int, deaths: dict[int, int]) -> None:
    crew = Crew(make_peer(*variant), 4, noisy(seed), seed=seed).run(8, dies=deaths)
    assert {worker.me.rank for worker in crew.living} == set(range(4)) - set(deaths)
    assert all(worker.me.count == 8 for worker in crew.living)
    assert all(bool(torch.isfinite(x).all()) for x in crew.parameters())


@every_variant
def test_who_agrees_is_equal_after_every_iteration(variant: Variant) -> None:
    protocol = make_peer(*variant)
    crew = Crew(protocol, 4, noisy(1), optimizer=momentum)
    for _ in range(8):
        first, *others = crew.run(1).models()
        assert all(torch.equal(first, other) for other in others) or not protocol.agrees


@every_variant
def test_a_lone_worker_is_plain_pytorch_where_it_says_so(variant: Variant) -> None:
    protocol = make_peer(*variant)
    if variant[1].keys() & {"graph", "groups", "hosts"}:
        pytest.skip("names ranks that a lone worker has not")
    crew = Crew(protocol, 1, noisy(2), optimizer=momentum).run(8).settle()
    if protocol.plain_alone:
        torch.testing.assert_close(crew.models()[0], large_batch(1, 8, noisy(2), momentum))


@every_variant
def test_it_learns(variant: Variant) -> None:
    """From the same start, the mean of the models comes nearer to where all gradients vanish."""
    crew = Crew(make_peer(*variant), 4, noisy(3))
    best = large_batch(4, 400, noisy(3))
    begin = (crew.mean() - best).norm()
    crew.run(60)
    assert (torch.stack(crew.models()).mean(0) - best).norm() < 0.7 * begin
