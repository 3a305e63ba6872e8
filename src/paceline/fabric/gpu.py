"""CUDA devices as workers use them: which one each has, page-locked memory, random numbers.

Nothing here starts CUDA: a script that does not use it pays nothing. `RUNTIME` is all that is asked of torch,
so that tests can put another in its place. On a GPU none of this was ever run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.fabric.segment import Segment

READ_ONLY = 0x08
"""cudaHostRegisterReadOnly."""
REGISTERED_ALREADY = 712
"""cudaErrorHostMemoryAlreadyRegistered."""


class CudaRuntime:
    """What torch has of the CUDA runtime."""

    def devices(self) -> int:
        """How many there are; 0 also without CUDA."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def in_use(self) -> bool:
        """Whether this process has begun to use CUDA."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def current(self) -> int:
        """The device that "cuda" without a number means."""
        return torch.cuda.current_device()

    def when_used(self, what: Callable[[], None]) -> None:
        """Do this as soon as CUDA is used; now if it is."""
        torch.cuda._lazy_call(what)  # type: ignore[no-untyped-call]

    def choose(self, device: int) -> None:
        """Let "cuda" mean this one."""
        torch.cuda.set_device(device)

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        """Page-lock memory; answers a cudaError."""
        answer: Any = torch.cuda.cudart().cudaHostRegister(address, size_bytes, flags)  # type: ignore[no-untyped-call]
        return int(answer)

    def forget_error(self) -> None:
        """CUDA repeats its last error when something is begun next, whatever it is: let that be this."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")

    def random_states(self) -> list[bytes]:
        """Where the generators of all devices stand."""
        return [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]

    def set_random_state(self, device: int, state: bytes) -> None:
        """Put one back; before CUDA is used, torch keeps it until then."""
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), device)


RUNTIME = CudaRuntime()


def choose_device(place: int) -> None:
    """Give the worker at this place of its host a device of its own, as far as there are enough. A script
    that has chosen one before keeps it, and may choose another afterwards."""

    def choose() -> None:
        if RUNTIME.devices() > 1:
            RUNTIME.choose(place % RUNTIME.devices())

    if place and not (RUNTIME.in_use() and RUNTIME.current()):
        RUNTIME.when_used(choose)


def page_lock(memory: Segment) -> str:
    """Page-lock shared memory, so that copies to and from the device run at full speed. Why not, if so."""
    flags = 0 if memory.writable else READ_ONLY
    answer = RUNTIME.register(memory.bytes.data_ptr(), memory.size_bytes, flags)
    if answer == 0:
        return ""
    RUNTIME.forget_error()
    if answer == REGISTERED_ALREADY:
        return ""
    what = "shared memory" if memory.writable else "shared memory that this worker may only read"
    return f"CUDA does not page-lock {what} (cudaError {answer}): copies to the GPU take longer"


def random_states() -> tuple[bytes, ...]:
    """Of all devices; none where CUDA is not in use."""
    return tuple(RUNTIME.random_states()) if RUNTIME.in_use() else ()


def restore_random_states(states: Sequence[bytes]) -> None:
    """Put them back, on as many devices as there are."""
    for device, state in enumerate(states[: RUNTIME.devices() if states else 0]):
        RUNTIME.set_random_state(device, state)
