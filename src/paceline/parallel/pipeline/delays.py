"""The delays of a pipeline: how many iterations lie between neighbouring stages, forward and backward.

Stage k forwards batch n - P_k in its iteration n, where P_k is the sum of p_j for j < k, and back-propagates
batch n - P_k - m_k. So p_k is the delay of activations between k and k+1, and q_k = m_k - m_{k+1} - p_k that
of gradients on their way back. Both are lengths of first-in-first-out queues, and so never negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Delays:
    """DSP(p_0, ..., p_{K-1}; m_0, ..., m_{K-1}) in the notation of Xu et al."""

    p: tuple[int, ...]
    m: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.p or len(self.p) != len(self.m):
            raise ConfigError(
                f"p and m have one number for each stage, got p={_text(self.p)} and m={_text(self.m)}."
            )
        if min(self.p) < 0 or self.p[-1] or self.m[-1]:
            raise ConfigError(
                f"p={_text(self.p)}, m={_text(self.m)}: no p is negative, and the last stage, which has the "
                "loss, has p=0 and m=0. End both with 0."
            )
        for stage, q in enumerate(self.q):
            if q < 0:
                raise ConfigError(
                    f"p={_text(self.p)}, m={_text(self.m)} would bring stage {stage} a gradient {-q} "
                    f"iterations before it was made: m_{stage} - m_{stage + 1} - p_{stage} = {q} is < 0. "
                    f"Use m_{stage} >= {self.m[stage] - q}."
                )

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.p)

    @property
    def q(self) -> tuple[int, ...]:
        """The delay of gradients from stage k+1 to k."""
        return tuple(m - after - p for (m, after), p in zip(pairwise(self.m), self.p[:-1], strict=True))

    @property
    def before(self) -> tuple[int, ...]:
        """P_k: how many iterations after stage 0 a batch is forwarded by stage k."""
        return (0, *accumulate(self.p[:-1]))

    @property
    def drain(self) -> int:
        """Iterations after the last batch until all stages have back-propagated it."""
        return self.m[0]

    @classmethod
    def uniform(cls, stages: int, p: int, q: int) -> Delays:
        """The same delays at every boundary."""
        forward = (*(p for _ in range(stages - 1)), 0)
        return cls(forward, tuple((p + q) * (stages - 1 - stage) for stage in range(stages)))


def parse_delays(p: str, m: str, stages: int) -> Delays:
    """`1,1,0` and `4,2,0`; empty: the smallest delays with which no stage waits for another."""
    if not p and not m:
        return Delays.uniform(stages, 1, 1)
    if not p or not m:
        raise ConfigError(f"p and m belong together, got p={p!r} and m={m!r}. Give both, or none.")
    delays = Delays(_numbers("p", p), _numbers("m", m))
    if delays.stages != stages:
        raise ConfigError(
            f"p={p} and m={m} are delays of {delays.stages} stages, but the mesh has {stages}. "
            f"Give {stages} numbers each, or use --mesh stage={delays.stages}."
        )
    return delays


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} takes whole numbers such as 1,1,0, got {text!r}.") from None


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
