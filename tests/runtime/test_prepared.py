"""Prepared schedulers among several workers: whose steps they take, told by how the script steps them."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from paceline.errors import ConfigError
from paceline.runtime.worker.optimizer.prepared import PreparedSchedulers

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")


class Script:
    """A worker's script: what it does, and what is known of its passes."""

    def __init__(self, position: int = 0) -> None:
        self.passes, self.between = 0, True
        self.said: list[str] = []
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        self.schedulers = PreparedSchedulers(self, self.said.append)
        self.schedulers.position = position

    def prepare(self) -> ExponentialLR:
        made = ExponentialLR(self.optimizer, 0.5)
        self.schedulers.prepare(made)
        return made

    def steps(self, own: int, run: int) -> None:
        """So many steps of its own, while the run takes so many."""
        self.between = False
        for number in range(own):
            self.schedulers.begin()
            self.optimizer.step()
            self.schedulers.position += run // own + (number < run % own)

    def end_pass(self) -> None:
        self.between, self.passes = True, self.passes + 1

    def resumed(self) -> Script:
        """Started again where this one is stopped, within a step."""
        other = Script(self.schedulers.position)
        other.schedulers.go_on(*self.schedulers.standing())
        return other


def test_stepped_every_iteration_it_stands_where_the_run_does_whoever_did_the_work() -> None:
    script = Script()
    scheduler = script.prepare()
    for run in (1, 3, 0, 2):
        script.steps(1, run)
        scheduler.step()
    assert scheduler.last_epoch == 6


def test_a_loop_that_looks_for_the_next_batch_first_steps_it_every_iteration() -> None:
    script = Script()
    scheduler = script.prepare()
    script.steps(1, 2)
    scheduler.step()
    script.between = True  # the pass has ended before its last step
    script.schedulers.begin()
    script.schedulers.position += 2
    scheduler.step()
    assert scheduler.last_epoch == 4
    script.steps(1, 2)
    assert script.resumed().prepare().last_epoch == 6


@pytest.mark.parametrize("own", [0, 1, 5])
def test_stepped_once_per_epoch_it_counts_epochs_however_few_batches_this_worker_had(own: int) -> None:
    script = Script()
    scheduler = script.prepare()
    for epoch in range(3):
        script.steps(own, 20)
        script.end_pass()
        scheduler.step()
        assert scheduler.last_epoch == epoch + 1


def test_stepped_every_few_iterations_or_not_after_a_skipped_one_it_counts_calls() -> None:
    script = Script()
    scheduler = script.prepare()
    for own in (3, 3, 1, 2, 1):
        script.steps(own, own)
        scheduler.step()
    assert scheduler.last_epoch == 5


def test_stepped_with_an_optimizer_that_steps_more_rarely_it_counts_that_optimizer_s_steps() -> None:
    """A critic with five steps for one of the generator's, which has the data of the fifth."""
    script = Script()
    critic, generator = script.prepare(), script.prepare()
    for number in range(15):
        script.steps(1, 1)
        if number % 5 == 4:
            script.schedulers.begin(another=True)
            generator.step()
        critic.step()
    assert (critic.last_epoch, generator.last_epoch) == (15, 3)


def test_stepped_before_the_optimizer_it_is_ahead_as_in_plain_pytorch() -> None:
    script = Script()
    scheduler = script.prepare()
    script.between = False
    for _ in range(4):
        scheduler.step()
        script.steps(1, 1)
    assert scheduler.last_epoch == 4
    other = script.resumed()
    again = other.prepare()
    other.between = False
    again.step()
    assert again.last_epoch == 5


def test_prepared_in_the_middle_it_begins_at_its_beginning_and_so_after_a_resume() -> None:
    script = Script()
    first = script.prepare()
    script.steps(1, 1)
    first.step()
    script.steps(7, 7)
    second = script.prepare()
    assert second.last_epoch == 0
    for _ in range(3):
        script.steps(1, 1)
        second.step()
    assert (first.last_epoch, second.last_epoch) == (1, 3)
    script.steps(1, 1)  # within which it is stopped
    other = script.resumed()
    assert [other.prepare().last_epoch for _ in range(2)] == [1, 4]


def test_one_that_was_never_prepared_before_a_resume_begins_at_its_beginning() -> None:
    script = Script()
    script.prepare()
    script.steps(9, 9)
    other = script.resumed()
    other.prepare()
    assert other.prepare().last_epoch == 0


@pytest.mark.parametrize("own", [1, 4])
def test_a_resumed_script_repeats_the_epochs_that_were_done_and_counts_them_once(own: int) -> None:
    script = Script()
    scheduler = script.prepare()
    for _ in range(2):
        script.steps(4, 4)
        script.end_pass()
        scheduler.step()
    script.steps(own, own)
    other = script.resumed()
    again = other.prepare()
    for _ in range(2):
        other.end_pass()
        again.step()
    other.steps(1, 1)
    other.end_pass()
    again.step()
    assert again.last_epoch == 3


def test_a_worker_that_comes_later_takes_the_steps_of_the_run() -> None:
    script = Script(position=10)
    scheduler = script.prepare()
    script.steps(1, 1)
    assert scheduler.last_epoch == 10
    scheduler.step()
    assert scheduler.last_epoch == 11


def test_a_worker_that_comes_later_repeats_epochs_and_is_warned_if_there_was_none_to_repeat() -> None:
    script = Script(position=10)
    scheduler = script.prepare()
    for _ in range(2):
        script.end_pass()
        scheduler.step()
    script.steps(3, 3)
    assert scheduler.last_epoch == 2
    assert not script.said
    script = Script(position=3)
    scheduler = script.prepare()
    script.steps(2, 2)
    script.end_pass()
    scheduler.step()
    assert "took 3 steps of a ExponentialLR at once" in script.said[0]


def test_a_worker_that_comes_later_and_prepares_in_the_middle_is_warned() -> None:
    script = Script(position=10)
    script.end_pass()
    assert script.prepare().last_epoch == 0
    assert "it begins at 0 now" in script.said[0]


def test_told_where_it_stands_it_says_what_to_do() -> None:
    scheduler = Script().prepare()
    with pytest.raises(ConfigError, match=r"ExponentialLR.step\(1.5\).*Call step\(\) without"):
        scheduler.step(1.5)  # type: ignore[arg-type]
