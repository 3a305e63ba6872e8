"""Where a lone worker's prepared schedulers stand, and where a resumed run brings them."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, LRScheduler

from paceline.runtime.lone.schedules import LoneSchedules
from paceline.runtime.worker.optimizer.schedules import catch_up, steps_of

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")


def scheduler(kind: str = "plain") -> LRScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    made = ExponentialLR(optimizer, 0.5)
    return made if kind == "plain" else ChainedScheduler([made, ConstantLR(optimizer, 0.5, 3)])  # type: ignore[return-value]


def brought(
    kept: LoneSchedules, steps: int, due: bool, kind: str = "plain"
) -> tuple[LoneSchedules, LRScheduler]:
    resumed, again = LoneSchedules(), scheduler(kind)
    resumed.go_on(kept.standing(steps, due), kept.origins, steps)
    resumed.prepare(again, steps)
    return resumed, again


@pytest.mark.parametrize("kind", ["plain", "chained"])
def test_steps_within_passes_are_taken_again_and_those_between_are_left_to_the_script(kind: str) -> None:
    schedules, made = LoneSchedules(), scheduler(kind)
    schedules.prepare(made, 0)
    for epoch in range(2):
        schedules.pass_begins(3 * epoch)
        catch_up(made, 3)
        schedules.pass_ends(3 * epoch + 3)
        made.step()
    schedules.pass_begins(6)
    catch_up(made, 1)
    resumed, again = brought(schedules, 7, False, kind)
    assert steps_of(again) == 7
    for _ in range(2):
        resumed.pass_begins(7)
        resumed.pass_ends(7)
        again.step()
    assert steps_of(again) == steps_of(made) == 9
    assert resumed.standing(7, False) == schedules.standing(7, False) == (7,)


@pytest.mark.parametrize(("taken", "stands"), [(4, 5), (5, 5), (0, 0)])
def test_a_step_that_the_script_will_not_come_to_is_taken_if_it_takes_all(taken: int, stands: int) -> None:
    schedules, made = LoneSchedules(), scheduler()
    schedules.prepare(made, 10)
    schedules.pass_begins(10)
    catch_up(made, taken)
    assert steps_of(brought(schedules, 15, True)[1]) == stands


def test_the_last_step_of_a_loop_that_looks_for_the_next_batch_first_is_within_the_pass() -> None:
    schedules, made = LoneSchedules(), scheduler()
    schedules.prepare(made, 0)
    schedules.pass_begins(0)
    catch_up(made, 3)
    schedules.pass_ends(3)
    made.step()
    schedules.pass_begins(4)
    assert schedules.standing(4, False) == (4,)


def test_prepared_in_the_middle_of_a_run_it_begins_at_its_beginning() -> None:
    schedules, made = LoneSchedules(), scheduler()
    schedules.prepare(made, 10)
    assert steps_of(made) == 0
    schedules.go_on((), (), 12)
    late = scheduler()
    schedules.prepare(late, 12)
    assert steps_of(late) == 0


def test_a_checkpoint_that_does_not_tell_has_one_that_took_all_steps() -> None:
    schedules, made = LoneSchedules(), scheduler()
    schedules.go_on(None, (), 12)
    schedules.prepare(made, 12)
    assert steps_of(made) == 12
