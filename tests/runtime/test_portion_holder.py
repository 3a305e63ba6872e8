"""A holder of a portion: orders in their row, gradients in their places, and nothing else."""

from __future__ import annotations

import queue
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from paceline.errors import ConfigError, RunError
from paceline.fabric.dialer import Dialer
from paceline.fabric.door import Enter
from paceline.fabric.segment import Segment
from paceline.runtime.messages import portions as p
from paceline.runtime.messages.memories import SEGMENT, WEIGHTS
from paceline.runtime.portions.holder import Holder
from paceline.store.layout import describe
from paceline.store.optimizers import describe_optimizer
from paceline.store.spread.portions import Pushed, StepOrder, SumOrder, cut

SECRET = b"the secret of a run in the tests"
WAIT_S = 20.0
pytestmark = pytest.mark.timeout(60)


class Host:
    """Somebody who calls the holder; what it hears is kept."""

    def __init__(self, holder: Holder, number: int, plan: p.PortionPlan) -> None:
        self.heard: queue.Queue[p.FromHolder] = queue.Queue()
        self.memory = Segment.create(plan.layout.weights_bytes, "weights")
        self.gave_up = threading.Event()
        hello = Enter(secrets.token_hex(8), socket.gethostname(), number=number)
        self.dialer = Dialer(holder.address, SECRET, hello, self, lambda why: self.gave_up.set(), 5.0)
        self.dialer.open()

    def place(self, lane: int, what: int, offset: int, length: int) -> memoryview:
        assert what in (WEIGHTS, p.MASTER, p.STATE)
        return memoryview(self.memory.map)[offset : offset + length]

    def arrived(self, lane: int, what: int, data: bytes) -> None:
        self.heard.put(p.from_holder.decode(data))

    def say(self, message: msgspec.Struct, lane: int = 0) -> None:
        self.dialer.session.send(lane, msgspec.msgpack.encode(message))

    def hear(self) -> Any:
        return self.heard.get(timeout=WAIT_S)


@pytest.fixture
def clip_norm() -> float | None:
    """Most tests do not clip."""
    return None


@pytest.fixture
def plan(clip_norm: float | None) -> p.PortionPlan:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    parameters = list(model.parameters())
    layout = describe(model, parameters)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    spec = describe_optimizer(optimizer, {id(each): place for place, each in enumerate(parameters)})
    places = (p.HolderPlace(1, "there", ("127.0.0.1", 1)),)
    return p.PortionPlan(1, False, layout, spec, cut(layout, 2), places, clip_norm)


@pytest.fixture
def over() -> threading.Event:
    """Whether the holder has been let go."""
    return threading.Event()


@pytest.fixture
def holder(plan: p.PortionPlan, over: threading.Event) -> Iterator[Holder]:
    holder = Holder(("127.0.0.1", 0), SECRET)
    none = lambda lane: pytest.fail("nobody is here")  # noqa: E731
    holder.begin(plan, plan.portions[1], none, none, over.set)
    yield holder
    holder.close()


@pytest.fixture
def coordinator(holder: Holder, plan: p.PortionPlan) -> Iterator[Host]:
    host = Host(holder, p.COORDINATOR, plan)
    yield host
    host.dialer.close()


def push(host: Host, plan: p.PortionPlan, value: float, number: int) -> None:
    """A gradient whose elements are all the same."""
    segment = Segment.create(plan.layout.segment_bytes, "gradients")
    for view in plan.layout.gradient_views(segment.bytes):
        view.fill_(value)
    host.dialer.session.send_memory(0, SEGMENT, memoryview(segment.map), *plan.portions[1].gradients)
    host.say(p.GradientPiece(number))


def step(plan: p.PortionPlan, number: int) -> StepOrder:
    settings = [group.settings for group in plan.optimizer.groups]
    return StepOrder([(Pushed(p.COORDINATOR, 0, number), 1.0)], settings, 1.0, True)


def weights(host: Host, plan: p.PortionPlan) -> torch.Tensor:
    return plan.layout.weight_views(host.memory.bytes)[1]


def test_a_push_is_reported_and_applied_when_ordered(coordinator: Host, plan: p.PortionPlan) -> None:
    push(coordinator, plan, 2.0, 1)
    staged = coordinator.hear()
    assert (staged.host, staged.lane, staged.number, staged.squares) == (0, 0, 1, [64.0])
    coordinator.say(p.PortionOrder(1, [step(plan, 1), p.Wake(p.COORDINATOR, 0, 1)]))
    assert coordinator.hear() == p.Fresh()
    assert torch.equal(weights(coordinator, plan), torch.full((4, 4), -2.0))


@pytest.mark.parametrize("clip_norm", [4.0])
def test_what_was_added_up_is_stepped_once_and_clipped_to_the_norm_of_all_portions(
    coordinator: Host, plan: p.PortionPlan
) -> None:
    push(coordinator, plan, 2.0, 1)
    coordinator.hear()
    asked = msgspec.structs.replace(step(plan, 1), parts=[(Pushed(p.COORDINATOR, 0, 1), 0.5)], norm=16.0)
    coordinator.say(p.PortionOrder(1, [SumOrder(asked.parts)]))
    assert coordinator.hear() == p.Summed(1, [16.0])
    coordinator.say(p.PortionOrder(2, [asked, p.Wake(p.COORDINATOR, 0, 1)]))
    assert coordinator.hear() == p.Fresh()
    torch.testing.assert_close(weights(coordinator, plan), torch.full((4, 4), -0.25))


@pytest.mark.parametrize("number", [0, 2])
def test_an_order_out_of_its_row_breaks_the_portion(
    coordinator: Host, plan: p.PortionPlan, number: int
) -> None:
    coordinator.say(p.PortionOrder(number, []))
    assert coordinator.hear() == p.Broke(f"order {number} came after order 0.")


def test_a_push_that_never_came_is_not_applied(coordinator: Host, plan: p.PortionPlan) -> None:
    push(coordinator, plan, 1.0, 1)
    coordinator.hear()
    coordinator.say(p.PortionOrder(1, [step(plan, 2)]))
    assert "push 2 of worker (0, 0) is wanted, but is not here" in coordinator.hear().text


def test_what_is_not_finite_is_named(coordinator: Host, plan: p.PortionPlan) -> None:
    push(coordinator, plan, float("nan"), 1)
    assert coordinator.hear().bad == "1.weight"


def test_all_that_a_portion_holds_can_be_handed_over(coordinator: Host, plan: p.PortionPlan) -> None:
    push(coordinator, plan, 3.0, 1)
    coordinator.hear()
    coordinator.say(p.PortionOrder(1, [step(plan, 1)]))
    coordinator.say(p.Gather())
    assert coordinator.hear() == p.Contents(0, {})
    assert coordinator.hear() == p.Complete()
    assert torch.equal(weights(coordinator, plan), torch.full((4, 4), -3.0))


def test_a_holder_stays_until_it_is_let_go(
    coordinator: Host, plan: p.PortionPlan, over: threading.Event
) -> None:
    coordinator.say(p.Gather())
    assert coordinator.hear() == p.Contents(0, {})
    assert coordinator.hear() == p.Complete()
    assert not over.is_set()
    coordinator.say(p.OrdersDone())
    assert over.wait(WAIT_S)


@pytest.mark.parametrize("what", [SEGMENT, WEIGHTS, p.MASTER, p.STATE, 77])
def test_bytes_outside_of_the_portion_end_the_conversation(
    holder: Holder, plan: p.PortionPlan, what: int
) -> None:
    """The other portion's place, memory that no host may write, or one that there is not."""
    host = Host(holder, 2, plan)
    host.dialer.session.send_memory(0, what, memoryview(bytes(64)), 0, 64)
    assert host.gave_up.wait(WAIT_S)
    host.dialer.close()


def test_only_the_coordinator_gives_orders(holder: Holder, plan: p.PortionPlan) -> None:
    host = Host(holder, 2, plan)
    host.say(p.PortionOrder(1, []))
    assert host.gave_up.wait(WAIT_S)
    host.dialer.close()


def test_a_second_host_of_the_same_number_is_refused(
    coordinator: Host, holder: Holder, plan: p.PortionPlan
) -> None:
    with pytest.raises(ConfigError, match="is another one than the one that was here"):
        Host(holder, p.COORDINATOR, plan)


def test_weights_wait_for_a_host_that_has_not_come_yet(
    coordinator: Host, holder: Holder, plan: p.PortionPlan
) -> None:
    push(coordinator, plan, 5.0, 1)
    coordinator.hear()
    coordinator.say(p.PortionOrder(1, [step(plan, 1), p.Wake(7, 3, 1)]))
    late = Host(holder, 7, plan)
    assert late.hear() == p.Fresh()
    assert torch.equal(weights(late, plan), torch.full((4, 4), -5.0))
    late.dialer.close()


def test_a_stranger_is_refused(holder: Holder) -> None:
    with pytest.raises((ConfigError, RunError)):
        Dialer(
            holder.address, b"another secret, as long", Enter("x", "x"), Sinkless(), lambda why: None, 1.0
        ).open()


class Sinkless:
    """Receives nothing."""

    def place(self, lane: int, what: int, offset: int, length: int) -> memoryview:
        raise AssertionError

    def arrived(self, lane: int, what: int, data: bytes) -> None:
        raise AssertionError
