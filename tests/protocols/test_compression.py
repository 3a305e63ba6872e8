"""What may be compressed, and what it comes to: decided without a tensor."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Average, Mix
from paceline.protocols.core.peer import Me
from paceline.protocols.core.topology import Topology
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.rules.compression import Compression, Treatment, check_family, parse_compression
from paceline.protocols.settings import make_any
from paceline.sim.phantom import Phantom

ME = Me(0, 4, 0, Phantom(400), Phantom(40))
MIX = Mix(ME.parameters, Topology("ring", 0), 0)


@pytest.mark.parametrize(
    ("text", "name", "amount"),
    [
        ("none", "none", None),
        (" fp16 ", "fp16", None),
        ("topk", "topk", 0.01),
        ("topk:0.5", "topk", 0.5),
        ("topk:1", "topk", 1.0),
        ("powersgd", "powersgd", 4.0),
        ("powersgd:2", "powersgd", 2.0),
    ],
)
def test_a_way_to_compress_is_a_name_and_an_amount(text: str, name: str, amount: float | None) -> None:
    how = parse_compression(text)
    assert (how.name, how.amount) == (name, amount)
    assert parse_compression(str(how)) == how


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pf16", "Did you mean 'fp16'? Available: bf16, fp16, int8, none, powersgd, topk"),
        ("", "unknown --compress ''"),
        ("fp16:2", "fp16 takes no amount, got '2'"),
        ("topk:0", "topk got the amount '0'. Allowed: none, fp16, bf16, int8, topk:SHARE (0 < share <= 1)"),
        ("topk:1.5", "got the amount '1.5'"),
        ("topk:nan", "got the amount 'nan'"),
        ("topk:", "got the amount ''"),
        ("powersgd:0", "got the amount '0'"),
        ("powersgd:2.5", "got the amount '2.5'"),
        ("powersgd:inf", "got the amount 'inf'"),
        ("powersgd:four", "got the amount 'four'"),
    ],
)
def test_a_wrong_value_is_told_with_those_allowed(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_compression(text)
    assert words in str(caught.value)


def test_a_paced_protocol_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"for peer protocols, and 'bsp' is paced: .* Use a peer protocol"):
        check_family("fp16", "bsp", BSP())
    with pytest.raises(ConfigError, match="exchanges one-sidedly"):
        check_family("fp16", "ad_psgd", make_any("ad_psgd", {}))
    check_family("none", "bsp", BSP())
    check_family("fp16", "allreduce", make_any("allreduce", {}))


@pytest.mark.parametrize("how", [Compression("fp16"), Compression("int8"), Compression("topk", 0.1)])
def test_changes_are_compressed_models_as_differences_and_buffers_not_at_all(how: Compression) -> None:
    assert how.treatment(Average(Phantom(400)), ME) is Treatment.CHANGE
    assert how.treatment(Average(Phantom(400), group=(0, 1)), ME) is Treatment.CHANGE
    assert how.treatment(Average(ME.parameters), ME) is Treatment.MODEL
    assert how.treatment(Average(ME.buffers), ME) is Treatment.WHOLE
    assert Compression().treatment(MIX, ME) is Treatment.WHOLE


@pytest.mark.parametrize("operation", [MIX, Average(ME.parameters, group=(0, 1))])
def test_models_without_a_common_one_are_rounded_or_refused(operation: Average | Mix) -> None:
    assert Compression("bf16").treatment(operation, ME) is Treatment.ROUNDED
    for how in (Compression("int8"), Compression("topk", 0.1), Compression("powersgd", 2)):
        with pytest.raises(ConfigError, match=r"no last common model.*Use fp16 or bf16"):
            how.treatment(operation, ME)
