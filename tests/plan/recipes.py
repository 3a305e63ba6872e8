"""Small recipes whose curvature and noise are known."""

from __future__ import annotations

from pathlib import Path

BOWL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

curvatures = torch.tensor({curvatures})
offsets = torch.randn(4096, len(curvatures), generator=torch.Generator().manual_seed(0))


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((len(curvatures),), 2.0))


def model():
    return Point()


def data():
    return DataLoader(TensorDataset(offsets), batch_size={batch})


def loss(model, batch):
    return {loss}


{more}

if __name__ == "__main__":
    raise SystemExit("a recipe that is only read must not train")
"""
QUADRATIC = "((model.w - batch[0]) ** 2 * curvatures / 2).sum(1).mean()"


def bowl(folder: Path, *curvatures: float, batch: int = 16, loss: str = QUADRATIC, more: str = "") -> Path:
    """A recipe with a diagonal Hessian; its data has unit variance around zero."""
    path = folder / "bowl.py"
    path.write_text(BOWL.format(curvatures=list(map(float, curvatures)), batch=batch, loss=loss, more=more))
    return path
