"""What is done with CUDA's answers, with a runtime in its place: there is no GPU here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from paceline.fabric import gpu
from paceline.fabric.segment import Segment
from paceline.runtime.checkpoints.random_state import RandomState
from paceline.runtime.seat import Seat
from paceline.runtime.worker.environment import place_on_host


class FakeRuntime:
    """Two devices, with a generator each."""

    def __init__(self, count: int = 2, used: bool = False, answers: dict[int, int] | None = None) -> None:
        self.count, self.used, self.answers = count, used, answers or {}
        self.device, self.forgotten = 0, 0
        self.registered: list[tuple[int, int, int]] = []
        self.generators = [torch.Generator().manual_seed(number) for number in range(count)]
        self.waiting: list[Callable[[], None]] = []

    def devices(self) -> int:
        return self.count

    def in_use(self) -> bool:
        return self.used

    def current(self) -> int:
        return self.device

    def when_used(self, what: Callable[[], None]) -> None:
        if self.used:
            what()
        else:
            self.waiting.append(what)

    def use(self) -> None:
        self.used = True
        for each in self.waiting:
            each()

    def choose(self, device: int) -> None:
        self.device = device

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        self.registered.append((address, size_bytes, flags))
        return self.answers.get(flags, 0)

    def forget_error(self) -> None:
        self.forgotten += 1

    def random_states(self) -> list[bytes]:
        return [each.get_state().numpy().tobytes() for each in self.generators]

    def set_random_state(self, device: int, state: bytes) -> None:
        self.generators[device].set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def given(monkeypatch: pytest.MonkeyPatch, **how: Any) -> FakeRuntime:
    fake = FakeRuntime(**how)
    monkeypatch.setattr(gpu, "RUNTIME", fake)
    return fake


def test_what_is_asked_of_torch_is_there() -> None:
    """As far as that can be seen without CUDA, which this starts nowhere."""
    mine = {name for name in vars(gpu.CudaRuntime) if not name.startswith("_")}
    assert mine <= set(dir(FakeRuntime))
    assert callable(torch.cuda._lazy_call)
    if not torch.cuda.is_available():
        assert gpu.CudaRuntime().devices() == 0
        gpu.choose_device(3)
        gpu.restore_random_states([b"of a machine with a GPU"])
        assert gpu.random_states() == ()
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("used", [False, True])
def test_workers_of_a_host_get_devices_in_turn_once_cuda_is_used(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: int, used: bool
) -> None:
    fake = given(monkeypatch, count=count, used=used)
    gpu.choose_device(3)
    assert fake.device == (expected if used else 0)
    fake.use()
    assert fake.device == expected


def test_a_device_that_the_script_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = given(monkeypatch, count=4, used=True)
    fake.choose(2)
    gpu.choose_device(3)
    assert fake.device == 2


def test_the_place_on_a_host_is_that_of_torchrun_or_of_the_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    config: Any = None
    assert place_on_host(Seat(5, config, None)) == 5
    assert place_on_host(Seat(5, config, None, local=(1, 4))) == 1
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert place_on_host(Seat(5, config, None)) == 2


@pytest.mark.parametrize("writable", [True, False])
def test_memory_is_locked_as_it_may_be_used(monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    fake = given(monkeypatch)
    memory = Segment.create(4096, "a test")
    mapped = memory if writable else Segment(memory.fd, 4096, writable=False)
    assert gpu.page_lock(mapped) == ""
    assert fake.registered == [(mapped.bytes.data_ptr(), 4096, 0 if writable else gpu.READ_ONLY)]
    assert fake.forgotten == 0
    memory.close_fd()


@pytest.mark.parametrize(("answer", "said"), [(801, True), (712, False)])
def test_memory_that_cannot_be_locked_is_told_of_and_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, answer: int, said: bool
) -> None:
    fake = given(monkeypatch, answers={gpu.READ_ONLY: answer})
    memory = Segment.create(4096, "a test")
    why = gpu.page_lock(Segment(memory.fd, 4096, writable=False))
    assert (f"(cudaError {answer})" in why) == said
    assert fake.forgotten == 1, "or the next thing that CUDA does would fail with this error"
    memory.close_fd()


def test_random_numbers_of_devices_go_on_after_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = given(monkeypatch, used=True)
    taken = msgspec.json.encode(RandomState.now())
    first = [torch.rand(3, generator=each).tolist() for each in fake.generators]
    msgspec.json.decode(taken, type=RandomState).restore()
    assert [torch.rand(3, generator=each).tolist() for each in fake.generators] == first


def test_states_of_more_devices_than_there_are_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, count=3, used=True)
    taken = RandomState.now()
    assert len(taken.cuda) == 3
    fewer = given(monkeypatch, count=1, used=True)
    taken.restore()
    assert fewer.random_states() == [taken.cuda[0]]


def test_a_checkpoint_of_before_knows_no_devices() -> None:
    plain = msgspec.to_builtins(RandomState.now())
    del plain["cuda"]
    assert msgspec.convert(plain, RandomState).cuda == ()
