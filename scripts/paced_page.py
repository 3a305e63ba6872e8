"""Writes docs/paced-compared.md: every paced protocol on three simulated clusters.

    .venv/bin/python scripts/paced_page.py        # about ten minutes; the same figures every time

Exact simulation: real gradients of examples/digits.py under a virtual clock. Nothing in the page is
written by hand but the sentences around the figures, and each of those is chosen by the figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "paced-compared.md"
CLUSTERS = {
    "equal": "Eight equal workers",
    "straggler": "One of eight is always three times slower",
    "transient": "Each of eight is three times slower now and then, a sixth of the time",
}
ROWS = (
    "bsp",
    "bsp + balance",
    "backup_bsp",
    "elastic_bsp",
    "ssp",
    "dssp",
    "dssp:preset=figure2",
    "bounded_ps",
    "psp",
    "psp:staleness=3",
    "hybrid_sgd",
    "sync_switch",
    "asp",
)
TARGET, EPOCHS, SEEDS = 0.9, 10, (0, 1, 2)
OPENING = """# The paced protocols compared

`scripts/paced_page.py` makes this page from exact simulations: the gradients of `examples/digits.py`
are real, the time is virtual. All protocols train for {epochs} epochs with batches of 16, one learning
rate and their default settings. Stale gradients are not corrected (`--correct none`); by default a run
outside of lockstep corrects them.

- Times are medians over seeds {seeds}, with the smallest and the largest in brackets.
- *Waiting* is the mean share of a worker's time, *staleness* mean / max in optimizer steps, *gap* the
  largest lead at the start of an iteration.
- Accuracy is measured once per epoch, so times to the target are no finer than that, and differences of
  a tenth mean nothing.

"""
CLOSING = """
With a bound on the gap all workers are in the long run as slow as the slowest. What an *always* slow
worker costs can be won back in three ways only: give it less work (balance), leave its work out (backup
workers), or set no bound. Bounds help against slowness that comes and goes.

The rate of `backup_bsp` counts samples whose gradients came late and were dropped. The gaps of
`elastic_bsp` come from its monitored phase, in which no worker waits.
"""
Results = dict[str, list[dict[str, Any]]]


def command(cluster: str, protocols: str, seed: int, balance: bool) -> list[str]:
    """The command behind some rows of one table."""
    flags = ["--cluster", f"examples/clusters/{cluster}.toml", "--target", str(TARGET), "--seed", str(seed)]
    flags += ["--correct", "none"]
    if balance:
        flags.append("--balance")
    return ["simulate", "examples/digits.py", "--protocol", protocols, *flags, "--", "--epochs", str(EPOCHS)]


def simulated(cluster: str, rows: Sequence[str], seeds: Sequence[int]) -> Results:
    """What every row came to, a result for each seed."""
    results: Results = {row: [] for row in rows}
    for seed in seeds:
        for balance in (False, True):
            chosen = [row for row in rows if row.endswith("+ balance") == balance]
            if chosen:
                names = ",".join(row.removesuffix(" + balance") for row in chosen)
                print(f"{cluster}, seed {seed}: {names}", file=sys.stderr, flush=True)
                for row, result in zip(chosen, _run(command(cluster, names, seed, balance)), strict=True):
                    results[row].append(result)
    return results


def _run(arguments: list[str]) -> list[dict[str, Any]]:
    program = str(Path(sys.executable).parent / "paceline")
    script = arguments.index("--")
    full = [program, *arguments[:script], "--json", *arguments[script:]]
    done = subprocess.run(full, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(full)} ended with {done.returncode}:\n{done.stderr}")
    told = json.loads(done.stdout)
    return told if isinstance(told, list) else [told]


def to_target_s(results: list[dict[str, Any]]) -> float | None:
    """The median over the seeds; None if more than half did not get there."""
    reached = [r["time_to_target_s"] for r in results]
    seconds = median(float("inf") if s is None else s for s in reached)
    return None if seconds == float("inf") else seconds


def line(row: str, results: list[dict[str, Any]], baseline_s: float | None) -> str:
    """One row of a table."""
    reached = to_target_s(results)
    spread = [r["time_to_target_s"] for r in results if r["time_to_target_s"] is not None]
    faster = f"{baseline_s / reached:.2f}x" if reached and baseline_s else "-"
    stale = [r["staleness"] for r in results]
    cells = (
        f"`{row}`",
        "not reached" if reached is None else f"{reached:.1f} s ({min(spread):.1f}-{max(spread):.1f})",
        faster,
        f"{mean(r['samples_per_s'] for r in results):.0f}",
        f"{100 * mean(mean(r['waiting_share']) for r in results):.0f} %",
        f"{mean(s['mean'] for s in stale):.1f} / {max(s['max'] for s in stale)}",
        str(max(r["max_clock_gap"] for r in results)),
        f"{100 * mean(r['accuracy'] for r in results):.1f} %",
    )
    return "| " + " | ".join(cells) + " |"


def table(cluster: str, results: Results) -> list[str]:
    """One cluster: its table, and who won."""
    baseline_s = to_target_s(results["bsp"])
    head = (
        "protocol",
        f"to {100 * TARGET:.0f} %",
        "against bsp",
        "samples/s",
        "waiting",
        "staleness",
        "gap",
        "accuracy",
    )
    lines = [f"## {CLUSTERS[cluster]}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += [line(row, found, baseline_s) for row, found in results.items()]
    return [*lines, "", *verdicts(results), ""]


def verdicts(results: Results) -> list[str]:
    """Sentences that follow from the figures."""
    seconds = {row: s for row, found in results.items() if (s := to_target_s(found)) is not None}
    order = sorted(seconds, key=lambda row: seconds[row])
    rate = {row: mean(r["samples_per_s"] for r in found) for row, found in results.items()}
    best = ", ".join(f"`{row}` ({seconds[row]:.1f} s)" for row in order[:3])
    never = ", ".join(f"`{row}`" for row in results if row not in seconds)
    told = [f"- Soonest at {100 * TARGET:.0f} %: {best}."]
    if never:
        told.append(f"- Not there within {EPOCHS} epochs in most runs: {never}.")
    told += [f"- {text}" for text in claims(seconds, rate)]
    return told


def claims(seconds: dict[str, float], rate: dict[str, float]) -> list[str]:
    """What papers say, beside what is seen here."""
    told = []
    if "ssp" in rate and "dssp" in rate:
        told.append(
            f"`dssp` processed {rate['dssp'] / rate['ssp']:.2f} times as many samples per second as `ssp`, "
            f"and `asp` {rate['asp'] / rate['ssp']:.2f} times as many. (Its paper: level with ASP, 1.84 "
            "times as fast as the best SSP, on unequal GPUs. The unbounded preset `figure2`: "
            f"{rate['dssp:preset=figure2'] / rate['ssp']:.2f}.)"
        )
    told += _against("elastic_bsp", seconds, "its paper: 1.77 times as fast as BSP to BSP's accuracy")
    told += _against("sync_switch", seconds, "its paper: 1.66 to 5.1 times as fast as BSP, equally accurate")
    told += _against("hybrid_sgd", seconds, "its paper compares with ASP only", "asp")
    told += _against("bsp + balance", seconds, "no paper: each batch in proportion to its worker's speed")
    return told


def _against(row: str, seconds: dict[str, float], claim: str, other: str = "bsp") -> list[str]:
    if row not in seconds or other not in seconds:
        return []
    ratio = seconds[other] / seconds[row]
    how = "as soon as" if 0.95 < ratio < 1.05 else f"{ratio:.2f} times as fast as"
    return [f"`{row}` reached {100 * TARGET:.0f} % {how} `{other}` ({claim})."]


def page(tables: dict[str, Results], seeds: Sequence[int]) -> str:
    """The whole page."""
    opening = OPENING.format(epochs=EPOCHS, seeds=", ".join(map(str, seeds))).splitlines()
    body = [text for cluster, results in tables.items() for text in table(cluster, results)]
    return "\n".join([*opening, *body, *closing(tables)]) + "\n"


def closing(tables: dict[str, Results]) -> list[str]:
    """What all three together say."""
    equal, straggler = tables["equal"], tables["straggler"]
    lines = ["## All together", ""]
    for row in ROWS:
        lost = _rate(equal[row]) / _rate(straggler[row])
        lines.append(f"- `{row}` lost {100 * (1 - 1 / lost):.0f} % of its rate to the one slow worker.")
    lines += CLOSING.splitlines()
    return lines


def _rate(results: list[dict[str, Any]]) -> float:
    return mean(r["samples_per_s"] for r in results)


def main() -> None:
    """Simulate everything, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    options = parser.parse_args()
    seeds = SEEDS[: options.seeds]
    tables = {cluster: simulated(cluster, ROWS, seeds) for cluster in CLUSTERS}
    options.out.write_text(page(tables, seeds))


if __name__ == "__main__":
    main()
