"""Recipes for protocols that exchange rarely or with few, with real gradients."""

from __future__ import annotations

from typing import Any

from paceline_bench.papers.recipe import Recipe, as_good, better, beyond, close, shown_only
from paceline_bench.papers.trained.paced import DIGITS, EXACT, on_digits
from paceline_bench.papers.trained.peers import linked
from paceline_bench.papers.trial import Courses, Side, Trial, points

RATES = (1.0, 2.0, 3.0)
LARGE = 64
"""Images of a worker in a batch, where the batch is to be large."""
TRAINS = 0.7
"""From this accuracy on a rate counts as one at which training works."""


def _diloco(runs: Courses) -> dict[str, float]:
    together = runs["synchronous"]
    return {
        "period 500: DiLoCo - synchronous": points(runs["diloco 500"].final, together.final),
        "bytes: synchronous / DiLoCo": together.sent_bytes / max(1, runs["diloco 500"].sent_bytes),
        "period 50: DiLoCo - synchronous": points(runs["diloco 50"].final, together.final),
        "period 50: local SGD - synchronous": points(runs["local 50"].final, together.final),
        "one worker, as many steps - synchronous": points(runs["one worker"].final, together.final),
    }


def _deepspark(runs: Courses) -> dict[str, float]:
    together = runs["allreduce"]
    return {
        "EASGD, period 10: - all-reduce": points(runs["easgd 10"].final, together.final),
        "DeepSpark (asynchronous), period 10: - all-reduce": points(
            runs["deepspark 10"].final, together.final
        ),
        "EASGD - DOWNPOUR, period 10": points(runs["easgd 10"].final, runs["downpour 10"].final),
        "EASGD - DOWNPOUR at a quarter of the rate": points(
            runs["easgd 10"].final, runs["downpour 10, rate / 4"].final
        ),
        "EASGD - DOWNPOUR at a quarter of the rate, without momentum": points(
            runs["easgd 10"].final, runs["downpour 10, plain"].final
        ),
        "bytes: all-reduce / EASGD, period 10": together.sent_bytes / max(1, runs["easgd 10"].sent_bytes),
        "EASGD, period 50: - all-reduce": points(runs["easgd 50"].final, together.final),
    }


def _large_rate(runs: Courses) -> dict[str, float]:
    def largest(name: str, more: str = "") -> float:
        return max((rate for rate in RATES if runs[f"{name} {rate:g}{more}"].final >= TRAINS), default=0.5)

    ssgd, ours = largest("ssgd"), largest("dpsgd")
    more = f", {LARGE} each"
    next_rate = next((rate for rate in RATES if rate > ssgd), RATES[-1])
    return {
        "largest rate that trains: DPSGD / SSGD": ours / ssgd,
        "largest rate that trains, SSGD": ssgd,
        "largest rate that trains, DPSGD": ours,
        "at the next rate: DPSGD - SSGD": points(
            runs[f"dpsgd {next_rate:g}"].final, runs[f"ssgd {next_rate:g}"].final
        ),
        "at rate 1: DPSGD - SSGD": points(runs["dpsgd 1"].final, runs["ssgd 1"].final),
        f"batches of {LARGE} each: largest rate that trains, DPSGD / SSGD": (
            largest("dpsgd", more) / largest("ssgd", more)
        ),
        f"batches of {LARGE} each, at rate 2: DPSGD - SSGD": points(
            runs[f"dpsgd 2{more}"].final, runs[f"ssgd 2{more}"].final
        ),
    }


def _rated(protocol: str, settings: dict[str, Any], title: str) -> dict[str, Side]:
    """At every rate, with small batches and with large ones; the same number of steps."""
    small = {f"{title} {rate:g}": Side(protocol=protocol, settings=settings, lr=rate) for rate in RATES}
    large = {
        f"{title} {rate:g}, {LARGE} each": Side(
            protocol=protocol, settings=settings, lr=rate, batch=LARGE, epochs=75
        )
        for rate in RATES
    }
    return small | large


TRAINED_LOCAL = (
    Recipe(
        name="diloco_quality",
        paper="DiLoCo (Douillard et al., 2023)",
        claim="As good as fully synchronous training, although workers exchange 500 times less often.",
        source="abstract",
        setup=f"{on_digits('8 epochs (one worker: 1)')} No language model: a classifier. 8 workers, "
        "AdamW at rate 0.003, outer Nesterov at rate 0.7 and momentum 0.9, batch 16, 100 epochs (1,000 steps "
        "each), so two outer steps at period 500 and 20 at period 50. One worker alone makes 972 steps. "
        "Accuracy is that of the mean of all replicas in the end. Three seeds.",
        evidence="trained",
        how=EXACT,
        figures=(
            as_good("period 500: DiLoCo - synchronous", "as good"),
            close("bytes: synchronous / DiLoCo", 500, computed=True),
            shown_only("period 50: DiLoCo - synchronous", unit="points"),
            shown_only("period 50: local SGD - synchronous", unit="points"),
            shown_only("one worker, as many steps - synchronous", unit="points"),
        ),
        trial=Trial(
            cluster=linked(8, 1),
            workers=8,
            lr=0.003,
            adamw=True,
            epochs=100,
            image_epochs=8,
            every=25,
            sides={
                "synchronous": Side(protocol="allreduce"),
                "diloco 500": Side(protocol="diloco", settings={"period": 500}),
                "diloco 50": Side(protocol="diloco", settings={"period": 50}),
                "local 50": Side(protocol="local_sgd", settings={"period": 50}),
                "one worker": Side(protocol="bsp", workers=1, epochs=12),
            },
        ),
        judged=_diloco,
        explained="Equal quality says little here: one worker that makes about as many steps alone, with an "
        "eighth of the samples, is as good as eight together, so there is nothing to lose. At period 500 "
        "there are two outer steps, hardly more than averaging models that were trained apart. With 20 of "
        "them (period 50) DiLoCo is 1.5 points behind, and plain averages at the same times (local SGD) are "
        "2 ahead: what costs is the outer Nesterov, with the paper's settings and far fewer outer steps "
        "than there, and not that exchanges are rare. That bytes are 500 times fewer is the period.",
        about_s=120,
    ),
    Recipe(
        name="deepspark",
        paper="DeepSpark and EASGD (Kim et al., 2016; Zhang et al., 2015)",
        claim="Fewer exchanges at equal quality; better than DOWNPOUR.",
        source="abstracts; no figure could be checked",
        setup=f"{DIGITS} 4 workers, batch 16, 12 epochs, rate 0.05, momentum 0.9; an exchange with the "
        "centre every 10 iterations (beta 0.9; DeepSpark: asynchronous, alpha 0.1), then every 50. On no "
        "Spark: the engine only places processes. DOWNPOUR at the same rate, at a quarter of it, and at a "
        "quarter of it without momentum. Accuracy of what each would save: the centre. Three seeds.",
        evidence="trained",
        how=EXACT,
        figures=(
            as_good("EASGD, period 10: - all-reduce", "equal quality"),
            as_good("DeepSpark (asynchronous), period 10: - all-reduce", "equal quality"),
            better("EASGD - DOWNPOUR, period 10"),
            shown_only("EASGD - DOWNPOUR at a quarter of the rate", unit="points"),
            shown_only("EASGD - DOWNPOUR at a quarter of the rate, without momentum", unit="points"),
            shown_only("bytes: all-reduce / EASGD, period 10"),
            shown_only("EASGD, period 50: - all-reduce", unit="points"),
        ),
        trial=Trial(
            cluster=linked(4, 1, 'kind = "lognormal"\nmean_s = 0.1\nspread = 0.1'),
            workers=4,
            lr=0.05,
            epochs=12,
            sides={
                "allreduce": Side(protocol="allreduce"),
                "easgd 10": Side(protocol="easgd", settings={"period": 10}),
                "easgd 50": Side(protocol="easgd", settings={"period": 50}),
                "deepspark 10": Side(
                    protocol="easgd", settings={"period": 10, "mode": "asynchronous", "alpha": 0.1}
                ),
                "downpour 10": Side(protocol="easgd", settings={"period": 10, "mode": "downpour"}),
                "downpour 10, rate / 4": Side(
                    protocol="easgd", settings={"period": 10, "mode": "downpour"}, lr=0.0125
                ),
                "downpour 10, plain": Side(
                    protocol="easgd", settings={"period": 10, "mode": "downpour"}, lr=0.0125, momentum=0.0
                ),
            },
        ),
        judged=_deepspark,
        explained="With a tenth of the exchanges, and with a fiftieth, quality is equal, on a task where "
        "workers that never exchange anything do as well (`ds_sync_accuracy`). What is won over DOWNPOUR is "
        "mostly how weak that baseline is: it adds up what four workers did, each with momentum and from "
        "weights that the others have moved since, and trains neither at this rate nor at a quarter of it. "
        "Without momentum, at a quarter of the rate, it does train, and EASGD is 11 points ahead instead of "
        "76. That figure was added after a first result. Only the centre is measured.",
        about_s=60,
    ),
    Recipe(
        name="dpsgd_large_rate",
        paper="DPSGD and large rates (Zhang et al., 2021)",
        claim="Trains at learning rates at which synchronous SGD (SSGD) diverges.",
        source="abstract",
        setup=f"{on_digits('3 epochs (large batches: 15)')} 16 workers, batch 16 each (256 in all), plain "
        "SGD at rates 1, 2 and 3 without warm-up, 15 epochs (75 steps), random pairs. A rate trains if "
        "accuracy is 70 % or more in the end; if none does, 0.5 is counted. Then batches of 64 each (1,024 "
        "in all), 75 epochs (75 steps). Three seeds.",
        evidence="trained",
        how=EXACT,
        figures=(
            beyond("largest rate that trains: DPSGD / SSGD", "above 1"),
            shown_only("largest rate that trains, SSGD", unit="count"),
            shown_only("largest rate that trains, DPSGD", unit="count"),
            shown_only("at the next rate: DPSGD - SSGD", unit="points"),
            shown_only("at rate 1: DPSGD - SSGD", unit="points"),
            shown_only(f"batches of {LARGE} each: largest rate that trains, DPSGD / SSGD"),
            shown_only(f"batches of {LARGE} each, at rate 2: DPSGD - SSGD", unit="points"),
        ),
        trial=Trial(
            cluster=linked(16, 1),
            workers=16,
            lr=1.0,
            momentum=0.0,
            epochs=15,
            sides={
                **_rated("allreduce", {}, "ssgd"),
                **_rated("dpsgd", {"topology": "matching"}, "dpsgd"),
            },
        ),
        judged=_large_rate,
        explained="With 16 images for each worker DPSGD trains at no larger rate than SSGD, and is worse "
        "than it where both fail: a worker steps along the noise of its own few images, which SSGD has "
        "averaged away before it steps. The published claim is about large batches. With 64 images each "
        "(1,024 in all), added after a first result and so not judged, DPSGD does train at rate 2 with all "
        "three seeds, SSGD with one of them. So there is such an effect where batches are large. Why it is "
        "there (the paper: while replicas differ, the mean moves as if the rate were smaller where the loss "
        "is rough) was not looked into, and neither was a warm-up for SSGD.",
        about_s=140,
    ),
)
