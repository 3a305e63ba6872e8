"""What a model's loss looks like where training begins: sharpest curvature, gradient noise, slope.

All of it is measured, on batches of the recipe's own data:

- the largest eigenvalue of the Hessian, from Hessian-vector products (two backward passes each). Plain
  power iteration finds the largest in size, which may be a negative one, and needs long; so every
  step takes the best of the span of direction, residual and last move (LOBPCG, Knyazev 2001);
- the noise: the variance of a batch's gradient, in all and along the sharpest direction;
- the effective curvature |g|^2 / (2 loss), which is how fast the loss falls at first under small
  steps, taking 0 for the lowest loss. A network has no meaningful smallest eigenvalue (most are
  about zero, some negative), so this stands for the slow end of its spectrum.

They hold for these weights. Curvature usually rises while a network trains; `after` measures later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.plan.recipe import RecipeFile, blamed_on

Progress = Callable[[str, float], None]
"""Told what is being measured, and the share done."""

CURVATURE_BATCHES = 16
NOISE_BATCHES = 64
ITERATIONS = 30
TOLERANCE = 5e-4


@dataclass(frozen=True)
class Shape:
    """The loss around some weights."""

    sharpest: float
    """Largest eigenvalue of the Hessian; 0 when none is positive."""
    change: float
    """Its relative change in the last iteration: how far the figure is from settled."""
    noise: float
    """Variance of one batch's gradient, summed over all directions."""
    noise_sharpest: float
    """The same along the sharpest direction."""
    loss: float
    gradient_sq: float
    """Squared norm of the mean gradient, noise taken off."""
    gradient_sharpest: float
    """Mean gradient along the sharpest direction."""
    batch: int
    """Samples behind one gradient; 0 if unknown."""

    @property
    def effective(self) -> float:
        """How fast the loss falls at first, as a curvature; never above the sharpest."""
        if self.loss <= 0:
            return 0.0
        return min(max(self.gradient_sq, 0.0) / (2 * self.loss), self.sharpest)

    @property
    def excess_sharpest(self) -> float:
        """How much of the loss lies along the sharpest direction, were it a bowl."""
        return min(self.gradient_sharpest**2 / (2 * self.sharpest), self.loss) if self.sharpest > 0 else 0.0


def measure_shape(
    recipe: RecipeFile,
    *,
    after: int = 0,
    lr: float | None = None,
    momentum: float = 0.0,
    seed: int = 0,
    iterations: int = ITERATIONS,
    progress: Progress = lambda what, share: None,
) -> Shape:
    """Measure at the recipe's initial weights, or after some plain steps with one worker."""
    with torch.random.fork_rng(), blamed_on(recipe.path):
        torch.manual_seed(seed)
        model, loader = recipe.model(), recipe.data()
        surface = _Surface(recipe, model, seed)
        if after:
            _train(surface, loader, after, lr, momentum, progress)
        batches = list(islice(loader, NOISE_BATCHES))
        if len(batches) < 2:
            raise ConfigError(f"{recipe.path} gives {len(batches)} batches; noise needs at least 2.")
        value, change, direction = surface.sharpest(batches[:CURVATURE_BATCHES], iterations, progress)
        return surface.shape(batches, value, change, direction, progress)


class _Surface:
    """The loss as a function of one flat vector of weights."""

    def __init__(self, recipe: RecipeFile, model: nn.Module, seed: int) -> None:
        self._recipe, self._model, self._seed = recipe, model, seed
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ConfigError(f"the model of {recipe.path} has no parameter to train.")

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        return self._recipe.loss(self._model, batch)

    def gradient(self, batch: Any, create_graph: bool = False) -> tuple[Tensor, Tensor]:
        """The loss and its flat gradient; random layers draw the same each time."""
        torch.manual_seed(self._seed)
        loss = self.loss(batch)
        parts = torch.autograd.grad(loss, self.parameters, create_graph=create_graph, allow_unused=True)
        return loss.detach(), self._flat(parts)

    def curved(self, batches: list[Any], direction: Tensor) -> Tensor:
        """The mean over the batches of Hessian times direction."""
        total = torch.zeros_like(direction)
        for batch in batches:
            _, gradient = self.gradient(batch, create_graph=True)
            if gradient.requires_grad:  # a loss linear in the weights has no curvature
                parts = torch.autograd.grad(gradient @ direction, self.parameters, allow_unused=True)
                total += self._flat(parts) / len(batches)
        return total

    def sharpest(
        self, batches: list[Any], iterations: int, progress: Progress
    ) -> tuple[float, float, Tensor]:
        """The largest eigenvalue, its last relative change, and its direction."""
        span = _KrylovSpan(self._random_direction(), lambda direction: self.curved(batches, direction))
        change = 1.0
        for number in range(iterations):
            progress("curvature", number / iterations)
            change = span.improve()
            if not isfinite(span.value):
                raise ConfigError(f"the curvature of {self._recipe.path} is not finite. Fix its loss.")
            if change < TOLERANCE:
                break
        return max(span.value, 0.0), change, span.direction

    def _random_direction(self) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed)
        size = sum(p.numel() for p in self.parameters)
        first = self.parameters[0]
        return torch.randn(size, generator=generator).to(first.device, first.dtype)

    def shape(
        self, batches: list[Any], value: float, change: float, direction: Tensor, progress: Progress
    ) -> Shape:
        """Loss, mean gradient and noise over the batches."""
        count = len(batches)
        mean, squares, along, losses = torch.zeros_like(direction), 0.0, [], 0.0
        for number, batch in enumerate(batches):
            progress("gradient noise", number / count)
            loss, gradient = self.gradient(batch)
            mean += gradient / count
            squares += float(gradient @ gradient)
            along.append(float(gradient @ direction))
            losses += float(loss) / count
        noise = (squares - count * float(mean @ mean)) / (count - 1)
        middle = sum(along) / count
        return Shape(
            sharpest=value,
            change=change,
            noise=max(noise, 0.0),
            noise_sharpest=sum((a - middle) ** 2 for a in along) / (count - 1),
            loss=losses,
            gradient_sq=float(mean @ mean) - noise / count,
            gradient_sharpest=middle,
            batch=_size(batches[0]),
        )

    def _flat(self, parts: tuple[Tensor | None, ...]) -> Tensor:
        filled = (
            torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, parts, strict=True)
        )
        return torch.cat([part.reshape(-1) for part in filled])


class _KrylovSpan:
    """The best direction so far, with what it takes to improve it by one product at a time."""

    def __init__(self, start: Tensor, curved: Callable[[Tensor], Tensor]) -> None:
        self.direction = start / start.norm()
        self._curved = curved
        self._image = curved(self.direction)
        self.value = float(self._image @ self.direction)
        self._move: tuple[Tensor, Tensor] | None = None

    def improve(self) -> float:
        """Take the best of the span; how much the value changed, as a share."""
        residual = self._image - self.value * self.direction
        size = float(residual.norm())
        if size <= 1e-6 * float(self._image.norm()) or not isfinite(size):
            return 0.0
        pairs = [(self.direction, self._image)]
        fresh = _apart(residual / size, pairs)
        pairs.append((fresh, self._curved(fresh)))
        if self._move is not None:
            pairs += _orthogonal(*self._move, pairs)
        last = self.value
        largest = self._best_of(pairs)
        return abs(self.value - last) / max(abs(self.value), 1e-3 * largest, 1e-30)

    def _best_of(self, pairs: list[tuple[Tensor, Tensor]]) -> float:
        """Rayleigh and Ritz: the largest eigenvalue within the span of a few unit vectors."""
        small = torch.tensor(
            [[float(v @ image) for _, image in pairs] for v, _ in pairs], dtype=torch.float64
        )
        values, vectors = torch.linalg.eigh((small + small.T) / 2)
        shares = vectors[:, -1].tolist()
        move, image = torch.zeros_like(self.direction), torch.zeros_like(self.direction)
        for share, (other, other_image) in zip(shares[1:], pairs[1:], strict=True):
            move, image = move + share * other, image + share * other_image
        self.direction = shares[0] * self.direction + move
        self._image = shares[0] * self._image + image
        self._move = move, image
        self.value = float(values[-1])
        return float(values.abs().max())


def _apart(vector: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The unit vector that is left of one without its shares of others."""
    for other, _ in pairs:
        vector = torch.sub(vector, other, alpha=float(vector @ other))
    return torch.div(vector, vector.norm())


def _orthogonal(
    vector: Tensor, image: Tensor, pairs: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """The same for a vector whose image is known; nothing when nothing is left."""
    before = float(vector.norm())
    for other, other_image in pairs:
        share = float(vector @ other)
        vector, image = vector - share * other, image - share * other_image
    size = float(vector.norm())
    return [(vector / size, image / size)] if size > 1e-3 * before > 0 else []


def _train(
    surface: _Surface, loader: Any, steps: int, lr: float | None, momentum: float, progress: Progress
) -> None:
    """Some plain steps of one worker, as far as the measuring point."""
    if lr is None:
        raise ConfigError(f"--after {steps} trains first, which needs a learning rate. Give --lr.")
    optimizer = torch.optim.SGD(surface.parameters, lr=lr, momentum=momentum)
    for number, batch in enumerate(islice(_endless(loader), steps)):
        progress("training", number / steps)
        optimizer.zero_grad()
        surface.loss(batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _size(batch: Any) -> int:
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    return len(first) if isinstance(first, Tensor) and first.dim() else 0
