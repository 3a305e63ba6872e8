"""Recipes for protocols with a store in the middle that need real gradients: accuracy, and time to it."""

from __future__ import annotations

from paceline_bench.papers.recipe import (
    Recipe,
    as_good,
    beyond,
    close,
    gains,
    level,
    shown_only,
)
from paceline_bench.papers.trial import Courses, Side, Trial, points, sooner, times

EXACT = "exact simulation: real gradients, virtual time"


def on_digits(images: str = "3 epochs") -> str:
    """What is trained on, and how long with CIFAR-10."""
    return (
        "The digits with noise (1,300 images of 8 x 8), one hidden layer of 64 (19 kB); with --data, a CNN "
        f"on 20,000 images of CIFAR-10, {images}."
    )


DIGITS = on_digits()
JITTER = '[compute]\nkind = "lognormal"\nmean_s = 0.1\nspread = 0.05\n'
BEHIND = 0.01
"""Accuracy to reach is a little below what the baseline ends with: that is reached or not by chance."""


def _dssp(runs: Courses) -> dict[str, float]:
    target = runs["bsp"].final - BEHIND
    figures = {}
    for how in ("updates", "samples"):
        ours, title = runs[f"dssp printed, {how}"], "" if how == "updates" else "by samples: "
        figures[f"{title}BSP / DSSP"] = sooner(runs["bsp"], ours, target)
        figures[f"{title}best SSP / DSSP"] = sooner(runs[f"ssp 15, {how}"], ours, target)
        figures[f"{title}ASP / DSSP"] = sooner(runs[f"asp, {how}"], ours, target)
        figures[f"{title}BSP / DSSP, figure2"] = sooner(runs["bsp"], runs[f"dssp figure2, {how}"], target)
        figures[f"{title}DSSP - BSP in the end"] = points(ours.final, runs["bsp"].final)
    return figures


def _as_published(name: str) -> dict[str, Side]:
    """Every push a whole step, the rate by updates; and the fair way beside it."""
    kinds: dict[str, tuple[str, dict[str, object]]] = {
        "asp": ("asp", {}),
        "ssp 15": ("ssp", {"staleness": 15}),
        "dssp printed": ("dssp", {"lower": 3, "upper": 15, "preset": "printed"}),
        "dssp figure2": ("dssp", {"lower": 3, "upper": 15, "preset": "figure2"}),
    }
    if name == "updates":
        return {
            f"{title}, updates": Side(
                protocol=protocol, settings=settings, weighting="sum", schedule="updates"
            )
            for title, (protocol, settings) in kinds.items()
        }
    return {
        f"{title}, samples": Side(protocol=protocol, settings=settings)
        for title, (protocol, settings) in kinds.items()
    }


DSSP_TRIAL = Trial(
    cluster=f"workers = 2\n{JITTER}[slow]\n1 = 2.8\n",
    workers=2,
    lr=0.2,
    rates=(0.05, 0.2),
    epochs=9,
    falls=True,
    sides={"bsp": Side(protocol="bsp"), **_as_published("updates"), **_as_published("samples")},
)


def _elastic(runs: Courses) -> dict[str, float]:
    bsp, ours = runs["bsp"], runs["elastic_bsp, whole steps"]
    fair, scaled = runs["elastic_bsp"], runs["bsp, rate x 4"]
    target = bsp.final - BEHIND
    return {
        "BSP / ElasticBSP to BSP's accuracy": sooner(bsp, ours, target),
        "ElasticBSP - BSP in the end": points(ours.final, bsp.final),
        "BSP / BSP with 4 times the rate": sooner(bsp, scaled, target),
        "BSP / ElasticBSP, as far per sample": sooner(bsp, fair, target),
        "BSP / ASP, whole steps": sooner(bsp, runs["asp, whole steps"], target),
    }


ELASTIC_TRIAL = Trial(
    cluster=f"workers = 4\n{JITTER}",
    workers=4,
    lr=0.02,
    epochs=10,
    sides={
        "bsp": Side(protocol="bsp"),
        "bsp, rate x 4": Side(protocol="bsp", lr=0.08),
        "elastic_bsp": Side(protocol="elastic_bsp"),
        "elastic_bsp, whole steps": Side(protocol="elastic_bsp", weighting="sum"),
        "asp, whole steps": Side(protocol="asp", weighting="sum"),
    },
)


def _sync_switch(runs: Courses) -> dict[str, float]:
    bsp, ours = runs["bsp"], runs["after 6.25 %"]
    figures = {
        "BSP / Sync-Switch, all the work": bsp.seconds / ours.seconds,
        "Sync-Switch - BSP": points(ours.final, bsp.final),
        "ASP - BSP": points(runs["asp"].final, bsp.final),
        "BSP / Sync-Switch to BSP's accuracy": sooner(bsp, ours, bsp.final - BEHIND),
        "BSP / ASP to BSP's accuracy": sooner(bsp, runs["asp"], bsp.final - BEHIND),
    }
    return figures | {
        f"switch after {share}: - BSP": points(runs[f"after {share}"].final, bsp.final)
        for share in ("25 %", "50 %")
    }


SWITCH_TRIAL = Trial(
    cluster='workers = 8\n[compute]\nkind = "lognormal"\nmean_s = 0.1\nspread = 0.01\n[slow]\n7 = 7.376\n',
    workers=8,
    lr=0.4,
    rates=(0.05, 0.4),
    epochs=15,
    every=2,
    falls=True,
    sides={
        "bsp": Side(protocol="bsp"),
        "asp": Side(protocol="asp"),
        "after 6.25 %": Side(protocol="sync_switch", settings={"phases": "bsp@0.0625,asp"}),
        "after 25 %": Side(protocol="sync_switch", settings={"phases": "bsp@0.25,asp"}),
        "after 50 %": Side(protocol="sync_switch", settings={"phases": "bsp@0.5,asp"}),
    },
)


def _hybrid(runs: Courses) -> dict[str, float]:
    asp = runs["asp"]
    until = min(asp.seconds, runs["waits"].seconds, runs["never waits"].seconds)

    def ahead(name: str) -> float:
        return points(runs[name].mean_until(until), asp.mean_until(until))

    return {
        "Hybrid - asynchronous, over time": ahead("waits"),
        "Hybrid that never waits - asynchronous": ahead("never waits"),
        "Hybrid - asynchronous, at the end of that time": points(runs["waits"].at(until), asp.at(until)),
    }


HYBRID_TRIAL = Trial(
    cluster='[[group]]\ncount = 12\ncompute = {kind = "fixed", mean_s = 0.25}\n'
    '[[group]]\ncount = 13\ncompute = {kind = "halfnormal", mean_s = 0.4495, spread = 0.3353}\n',
    workers=25,
    lr=0.01,
    momentum=0.0,
    batch=32,
    epochs=75,
    sides={
        "asp": Side(protocol="asp", weighting="sum"),
        "waits": Side(protocol="hybrid_sgd", settings={"h": 300, "reduce": "sum"}, weighting="sum"),
        "never waits": Side(
            protocol="hybrid_sgd", settings={"h": 300, "reduce": "sum", "wait": "never"}, weighting="sum"
        ),
    },
)


def _sdde(runs: Courses) -> dict[str, float]:
    best = min(SDDE_WORKERS, key=lambda workers: runs[workers].to(SDDE_TARGET))
    most = SDDE_WORKERS[-1]

    def samples(few: str, one: str) -> float:
        return times(runs[few].samples_to(SDDE_TARGET), runs[one].samples_to(SDDE_TARGET))

    return {
        "time with the most workers / with the best number": sooner(runs[most], runs[best], SDDE_TARGET),
        "time with one worker / with the best number": sooner(runs["1"], runs[best], SDDE_TARGET),
        "samples to it: 2 workers / 1": samples("2", "1"),
        "the best number of workers": float(best),
        "at a quarter of the rate: samples, 2 workers / 1": samples("2, rate / 4", "1, rate / 4"),
    }


SDDE_TARGET, SDDE_WORKERS = 0.78, ("1", "2", "4", "8", "16", "32")
SDDE_TRIAL = Trial(
    cluster="workers = {workers}\napply_s = 0.008\n[compute]\n"
    'kind = "exponential"\nmean_s = 0.1\nspread = 0.5\n',
    workers=1,
    lr=0.2,
    momentum=0.0,
    epochs=24,
    every=1,
    sides={
        **{workers: Side(protocol="asp", weighting="sum", workers=int(workers)) for workers in SDDE_WORKERS},
        **{
            f"{workers}, rate / 4": Side(protocol="asp", weighting="sum", workers=int(workers), lr=0.05)
            for workers in SDDE_WORKERS[:2]
        },
    },
)


TRAINED_PACED = (
    Recipe(
        name="dssp_accuracy",
        paper="DSSP (Zhao et al., ICDCS 2019)",
        claim="On unequal GPUs DSSP reaches BSP's accuracy 2.04 times as fast as BSP, 1.84 times as fast as "
        "the best SSP, and as soon as ASP.",
        source="Table I: ResNet-110, CIFAR-100, seconds to 0.67, BSP's best",
        setup=f"{DIGITS} 2 workers, one 2.8 times slower, 5 % jitter, 9 epochs, batch 16, momentum 0.9; "
        "every side has the rate of 0.05 and 0.2 that ends best with the first seed; it falls to a tenth "
        "after 2/3 and 5/6. As published: every push is a whole step, and the rate counts updates, so it "
        "falls sooner for who updates more often. By samples: a push is 1/2 step and the rate counts "
        "samples, so all go equally far. Time to BSP's final accuracy less 1 point; SSP with 15, the best "
        "in the paper. Three seeds.",
        evidence="trained",
        how=EXACT,
        figures=(
            close("BSP / DSSP", 2.04),
            close("best SSP / DSSP", 1.84),
            level("ASP / DSSP", 0.99, "0.99x"),
            shown_only("BSP / DSSP, figure2"),
            shown_only("DSSP - BSP in the end", unit="points"),
            shown_only("by samples: BSP / DSSP"),
            shown_only("by samples: best SSP / DSSP"),
            shown_only("by samples: ASP / DSSP"),
            shown_only("by samples: BSP / DSSP, figure2"),
            shown_only("by samples: DSSP - BSP in the end", unit="points"),
        ),
        trial=DSSP_TRIAL,
        judged=_dssp,
        explained="Most of the gain over BSP is the confound: a rate that is "
        "counted in updates falls after half the samples with two workers that push one by one, and "
        "accuracy jumps when it falls. By samples, where all go equally far, next to nothing is left of the "
        "gain over BSP, and ASP is sooner than DSSP. Final accuracies are alike either way. This is the "
        "second set-up: in a first one all sides had rate 0.2, which suits BSP well, and as published every "
        "stale side ended 12 to 66 points below BSP; the rule is the same.",
        about_s=130,
    ),
    Recipe(
        name="elastic_bsp_accuracy",
        paper="ElasticBSP (Zhao et al., ICDM 2019 and 2021)",
        claim="1.77 times as fast to BSP's accuracy, and 12.6 points above it in the end.",
        source="stated for VGG-16 on ImageNet, 4 workers, 19 epochs",
        setup=f"{DIGITS} 4 equal workers, 5 % jitter, 10 epochs, batch 16, rate 0.02 (steady), momentum "
        "0.9, lookahead 15. ElasticBSP as in the paper's server: what is pushed within a superstep is a "
        "whole step each, at the rate of one BSP step. Time to BSP's final accuracy less 1 point. Three "
        "seeds.",
        evidence="trained",
        how=EXACT,
        figures=(
            close("BSP / ElasticBSP to BSP's accuracy", 1.77),
            gains("ElasticBSP - BSP in the end", 12.6),
            shown_only("BSP / BSP with 4 times the rate"),
            shown_only("BSP / ElasticBSP, as far per sample"),
            shown_only("BSP / ASP, whole steps"),
        ),
        trial=ELASTIC_TRIAL,
        judged=_elastic,
        explained="Machines are equal, so a superstep saves hardly any waiting: what is won is how far "
        "weights go per sample. ElasticBSP applies most gradients one by one, each as far as BSP goes with "
        "the mean of four. When it goes as far per sample as BSP, nothing is left of the gain; BSP with "
        "four times the rate (linear scaling) wins more than ElasticBSP does. BSP is nearly done here after "
        "ten epochs, which leaves little accuracy to gain; whether that is why the published gain is so "
        "much larger was not tried.",
        about_s=50,
    ),
    Recipe(
        name="sync_switch_accuracy",
        paper="Sync-Switch (Li et al., ICDCS 2021)",
        claim="As accurate as BSP (0.917 against 0.919), which ASP alone (0.892) is not.",
        source="the authors' summary plots, set-up 1: ResNet-32, CIFAR-10, 8 workers",
        setup=f"{DIGITS} 8 workers, one so slow (7.4 times) that ASP takes the published 15.2 % of BSP's "
        "time; 15 epochs, batch 16, momentum 0.9; every side has the rate of 0.05 and 0.4 that ends best "
        "with the first seed, an eighth of it for a push alone (linear scaling), falling after 2/3 and 5/6. "
        "Switch after 6.25, 25 and 50 % of the work. Accuracy is that of the end. Three seeds.",
        evidence="trained",
        how=EXACT,
        figures=(
            close("BSP / Sync-Switch, all the work", 5.13, computed=True),
            as_good("Sync-Switch - BSP", "-0.2 points"),
            gains("ASP - BSP", -2.7),
            shown_only("BSP / Sync-Switch to BSP's accuracy"),
            shown_only("BSP / ASP to BSP's accuracy"),
            shown_only("switch after 25 %: - BSP", unit="points"),
            shown_only("switch after 50 %: - BSP", unit="points"),
        ),
        trial=SWITCH_TRIAL,
        judged=_sync_switch,
        explained="The time follows from how much faster ASP is, which is an input, and from the share of "
        "BSP. The claim that counts is that ASP alone loses accuracy and a little BSP first wins it back. "
        "That is not seen here: at a rate that suits it, ASP loses no more than Sync-Switch does, and a "
        "later switch does not help; what differs is within the spread of seeds. This is the second set-up: "
        "in a first one all sides had rate 0.4, which suits BSP well, and both ASP and a switch after 6.25 % "
        "ended 66 points or more below BSP, that is, did not train; the rule is the same.",
        about_s=90,
    ),
    Recipe(
        name="hybrid_sgd",
        paper="Hybrid SGD (Vora et al., 2024)",
        claim="2.4 to 4.8 points over asynchronous SGD, averaged over 100 s.",
        source="table for CIFAR-10; MNIST has -0.5 to 1.4",
        setup=f"{DIGITS} 25 workers of 0.25 s, 13 of them delayed at every gradient by |N(0, 0.25 s)|; "
        "batch 32, plain SGD with rate 0.01 for every gradient, buffers summed, threshold one more every "
        "300 gradients, 3,000 gradients in all. Accuracy averaged over time until the first side has done "
        "them. The seconds of a gradient are not published. Three seeds.",
        evidence="trained",
        how=EXACT,
        figures=(
            gains("Hybrid - asynchronous, over time", 2.4, "+2.4 to +4.8 points", high=4.8),
            shown_only("Hybrid that never waits - asynchronous", unit="points"),
            shown_only("Hybrid - asynchronous, at the end of that time", unit="points"),
        ),
        trial=HYBRID_TRIAL,
        judged=_hybrid,
        explained="Buffers are summed, so a gradient moves the weights as far on either side. Waiting for a "
        "buffer to fill costs gradients per second; what it could win is that gradients are less stale. On "
        "digits at this rate staleness does no harm, so only the cost is seen: a threshold that never rises "
        "does as well as asynchronous SGD, one that rises half a point worse. The published gain is on "
        "CIFAR-10; on MNIST, which is nearer to this, it is -0.5 to 1.4.",
        about_s=110,
    ),
    Recipe(
        name="sdde",
        paper="SDDE (Yu et al., 2025)",
        claim="More workers do not always help: there is a best number, and a little staleness does no harm.",
        source="abstract; no figure could be read",
        setup=f"{DIGITS} ASP, every push a whole step of the rate that suits one worker best (0.2, of 0.05 "
        "to 0.8; plain SGD), batch 16, 24 epochs; 0.1 s per gradient, half of it random, and a store that "
        "takes 8 ms per push. 1, 2, 4, 8, 16 and 32 workers, time to 78 %. Three seeds.",
        evidence="trained",
        how=EXACT,
        figures=(
            beyond("time with the most workers / with the best number", "above 1"),
            beyond("time with one worker / with the best number", "above 1"),
            level("samples to it: 2 workers / 1", shown="no harm"),
            shown_only("the best number of workers", "between the ends", "count"),
            shown_only("at a quarter of the rate: samples, 2 workers / 1"),
        ),
        trial=SDDE_TRIAL,
        judged=_sdde,
        explained="There is a best number, 4: with 16 and 32 workers the target is never reached, since "
        "every push is a whole step at a rate that suits one worker, and pushes that are so late overshoot. "
        "How many times longer they would take is not known: with 32 all the work was done after 3.2 to 3.5 "
        "times what 4 need to get there. The store, which serves one push at a time, would stop about 13 "
        "workers from being faster anyway. That a little staleness does no harm is not so at this rate: two "
        "workers need 11 to 30 % more samples than one. At a quarter of the rate, where one worker ends as "
        "well, it is 1 % (median). So the claim holds as far as the rate leaves room, and the best number "
        "is one for a rate: a smaller one would move it up.",
        about_s=90,
    ),
)
