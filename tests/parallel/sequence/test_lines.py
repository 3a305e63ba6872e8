"""Cut, switch, gather, and four ways to compute a layer: on real processes, what one process computes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.parallel.sequence.ways import WAYS, backward_bytes, forward_bytes
from support.lines import Lines

SHORT = {"short": True}
workers = st.integers(1, 4)
lengths = st.integers(1, 9)
quickly = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SHAPES = [[2, 8, 8], [1, 6, 10], [2, 5, 7]]
ITEM = 8


@quickly
@given(
    workers,
    st.tuples(lengths, lengths, lengths),
    st.permutations([0, 1, 2]),
    st.sampled_from(["float32", "bool"]),
)
def test_gather_undoes_split_and_a_switch_back_undoes_a_switch_exactly(
    line: Lines, n: int, shape: tuple[int, ...], dims: list[int], dtype: str
) -> None:
    """For all lengths, those that the workers do not divide and those shorter than the line included."""
    asked = {"shape": list(shape), "one": dims[0], "other": dims[1], "dtype": dtype, "line": SHORT}
    for answer in line("round_trip", n, **asked):
        assert all(answer.values()), answer


@quickly
@given(workers, st.tuples(lengths, lengths, lengths), st.permutations([0, 1, 2]))
def test_the_backward_pass_of_a_switch_is_its_adjoint(
    line: Lines, n: int, shape: tuple[int, ...], dims: list[int]
) -> None:
    answers = line("adjoint", n, shape=list(shape), one=dims[0], other=dims[1], line=SHORT)
    ahead, back = (sum(side) for side in zip(*answers, strict=True))
    assert ahead == pytest.approx(back, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("n", "shape"), [(2, [2, 5, 7]), (3, [2, 5, 7]), *((4, each) for each in SHAPES)])
def test_every_way_computes_forward_and_gradients_of_one_process_with_the_bytes_of_its_formula(
    line: Lines, way: str, n: int, shape: list[int]
) -> None:
    whole = [*shape, 12]
    for answer in line("against_one_process", n, shape=shape, way=way):
        assert answer["forward"] < 1e-11
        assert answer["gradients"] < 1e-10
        assert answer["inside"]["bytes"] == 2 * forward_bytes(way, whole, n, ITEM)
        assert answer["backward_bytes"] == 2 * backward_bytes(way, whole, n, ITEM)


@pytest.mark.parametrize("way", WAYS[:3])  # Megatron's adds biases apart
def test_one_worker_computes_bit_for_bit_what_the_plain_model_does(line: Lines, way: str) -> None:
    [answer] = line("against_one_process", 1, shape=[2, 5, 7], way=way)
    assert (answer["forward"], answer["gradients"]) == (0.0, 0.0)
    assert not answer["backward_calls"]


def test_switching_needs_two_all_to_alls_per_layer_each_way_and_none_in_attention(line: Lines) -> None:
    for answer in line("against_one_process", 4, shape=[1, 8, 8], way="dynamic"):
        assert answer["inside"] == {"bytes": 2 * 2 * 8 * 8 * 12 * ITEM * 3 // 16, "all_to_all": 4}
        assert answer["backward_calls"]["all_to_all"] == 8


def test_gradients_are_wrong_without_scaling_when_averaged_and_right_when_summed(line: Lines) -> None:
    for answer in line("unscaled", 4, shape=[2, 5, 7], line={"scaled": False}):
        assert answer["outside"] < 1e-10
        assert answer["summed"] < 1e-10
        assert answer["averaged"] == pytest.approx(0.75, rel=1e-6)


@pytest.mark.parametrize("pad", [0.0, 1e4, float("nan")])
@pytest.mark.parametrize("way", WAYS)
def test_attention_never_sees_padding(line: Lines, way: str, pad: float) -> None:
    asked = {"shape": [1, 5, 7], "way": way, "line": {"pad": pad}, "average": pad == pad}
    for answer in line("against_one_process", 4, **asked):
        assert answer["forward"] < 1e-11
        assert not answer["nan"]
        assert pad != pad or answer["gradients"] < 1e-10


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_loss_on_parts_needs_no_gather(line: Lines, n: int) -> None:
    for answer in line("loss_on_parts", n, shape=[2, 5, 7]):
        assert answer["loss"] < 1e-12
        assert answer["gradients"] < 1e-10


def test_twice_the_workers_send_half_as_much_each_by_switching_and_as_much_around_a_ring() -> None:
    shape = [1, 64, 64, 12]

    def exact(way: str, n: int) -> float:
        return forward_bytes(way, shape, n, 4) / ((n - 1) / n)

    for n in (2, 4, 8, 16):
        assert exact("dynamic", 2 * n) * 2 == exact("dynamic", n)
        assert exact("ring", 2 * n) == exact("ring", n)
        assert exact("ulysses", n) == 2 * exact("dynamic", n)
        assert exact("megatron", n) == 4 * exact("ring", n)


def test_dropout_differs_between_workers_inside_and_is_equal_outside(line: Lines) -> None:
    answers = line("dropped", 4, steps=3)
    inside = [part for answer in answers for part in answer["inside"]]
    assert len({tuple(part) for part in inside}) == len(inside)
    assert all(answer["outside"] == answers[0]["outside"] for answer in answers)
    assert len({answer["next"] for answer in answers}) == 1


def test_dropout_is_a_function_of_the_generator_that_all_have_in_common(line: Lines) -> None:
    assert line("drawn_again", 4) == [True] * 4


@pytest.mark.long  # torch.utils.checkpoint imports a compiler, on every worker
def test_what_is_computed_once_more_draws_the_same_and_its_switches_are_counted(line: Lines) -> None:
    for answer in line("recomputed", 4):
        assert answer["same"]
        assert (answer["forward"], answer["all"]) == (1, 3)  # once, once more, and back


def test_a_gradient_that_some_workers_have_is_averaged_with_zeros_and_with_no_other(line: Lines) -> None:
    assert line("averaged_in_part", 2) == [[[0.5, 0.5], [1.0, 1.0], None]] * 2


def test_workers_of_a_line_that_are_given_different_samples_are_told(line: Lines) -> None:
    assert line("feeds", 3, odd=None) == ["", "", ""]
    for said in line("feeds", 3, odd=2):
        assert "workers 0 and 2 along sequence were given different batches" in said


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("short", "dimension 1 has length 3, less than the 4 workers along sequence"),
        ("short switch", "dimension 2 has length 2, less than the 4 workers"),
        ("ulysses", "6 heads cannot be shared out among 4 workers"),
        ("megatron", "6 heads cannot be shared out among 4 workers"),
        ("batch norm", "is a BatchNorm2d"),
        ("moved", "dimension 1 is split over the workers"),
        ("dimension", "has no dimension 5 to cut"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(line: Lines, what: str, said: str) -> None:
    for text in line("refused", 4, what=what):
        assert text.startswith("ConfigError: ")
        assert said in text
