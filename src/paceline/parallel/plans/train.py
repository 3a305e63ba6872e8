"""Trains a script under a plan: starts the ranks, and puts what was measured beside what was predicted."""

from __future__ import annotations

import random
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import RunConfig
from paceline.errors import ConfigError, RunError, RunStopped
from paceline.parallel.plans.host import available_bytes, this_host
from paceline.parallel.plans.processes import run_ranks
from paceline.plan.files import read_plan
from paceline.plan.osdp.plan import OsdpPlan
from paceline.plan.profile import ClusterProfile
from paceline.plan.profile.changes import check_cluster, check_here
from paceline.plan.profile.files import write_json
from paceline.runtime.script import find_modules_of
from paceline.store.work.due import LoaderPasses, shortfall

TASK = f"{__name__}:on_rank"
NOTHING_KEPT = "A run under a plan keeps no checkpoint, so nothing of it is saved: start it again."


def train_with_plan(config: RunConfig, file: Path, now: ClusterProfile | None = None) -> dict[str, Any]:
    """Run to the end; the result, which is also kept in the run's folder. `now`: the cluster as it is."""
    planner, plan = read_plan(file)
    if plan.workers != config.workers:
        raise ConfigError(
            f"the plan {file} is for {plan.workers} workers, not {config.workers}. Use --workers "
            f"{plan.workers}, or plan again with --workers {config.workers}."
        )
    _check_cluster(config, plan, now)
    write_json(config.path / "config.json", config)
    write_json(config.path / "plan.json", plan)
    request = {"config": config, "planner": planner, "plan": plan}
    try:
        answers = run_ranks(TASK, config.workers, request, logs=config.path / "logs")
    except RunError as error:
        raise RunError(f"{error} Read {config.path}/logs/. {NOTHING_KEPT}") from None
    except KeyboardInterrupt as error:
        how = str(error) or "Ctrl-C"
        raise RunStopped(f"ended by {how}. {NOTHING_KEPT}") from None
    result = _result(config, planner, plan, answers)
    write_json(config.path / "result.json", result)
    return result


def _check_cluster(config: RunConfig, plan: Any, now: ClusterProfile | None) -> None:
    """The cluster has to be the one that was planned for, as far as one can know."""
    if now is not None:
        check_cluster(plan.cluster, now)
    peak = plan.predicted.memory_bytes - plan.cluster.overhead_bytes
    left = available_bytes() // config.workers
    check_here(plan.cluster, this_host(), config.slow, peak, left)


def planned_elsewhere(plan: Any) -> str | None:
    """A warning for plans of clusters that are not this machine."""
    if plan.cluster.host:
        return None
    kinds = Counter(device.name for device in plan.cluster.devices)
    devices = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    return (
        f"the plan is for {devices} as described in a file, and is carried out by processes on this machine: "
        "weights are the same, predicted times are not to be expected"
    )


def _undone(answers: list[dict[str, Any]]) -> list[str]:
    """A warning if the script's passes should have trained on more data."""
    done, due = answers[0]["samples"], answers[0]["samples_due"]
    if due is None or done >= due:
        return []
    passes = {rank: msgspec.convert(answer["passes"], LoaderPasses) for rank, answer in enumerate(answers)}
    return [shortfall(done, due, passes)]


def _result(config: RunConfig, planner: str, plan: Any, answers: list[dict[str, Any]]) -> dict[str, Any]:
    lead = answers[0]
    seconds = max(answer["seconds"] for answer in answers)
    steps = [answer["step_s"] for answer in answers if answer["step_s"] is not None]
    step_s = max(steps, default=None)
    return {
        "run": config.run,
        "protocol": planner,
        "workers": config.workers,
        "simulated": False,
        "seed": config.seed,
        "status": "finished",
        "seconds": seconds,
        "samples": lead["samples"],
        "samples_due": lead["samples_due"],
        "samples_per_s": lead["samples"] / seconds if seconds else None,
        "loss": lead["loss"],
        "accuracy": lead["accuracy"],
        "plan": plan.digest(),
        "emulated": config.emulated,
        "predicted": {"step_s": plan.predicted.seconds, "peak_bytes": plan.predicted.memory_bytes},
        "warnings": _undone(answers),
        "measured": {"step_s": step_s, "peak_bytes": [answer["peak_bytes"] for answer in answers]},
    }


def on_rank(rank: int, size: int, request: Any) -> dict[str, Any]:
    """One worker: run the script with the plan in place of a protocol."""
    import numpy as np
    import torch

    from paceline.parallel.plans.clipping import stand_in_for_clipping
    from paceline.parallel.plans.planned_pace import OsdpPace, PlannedPace, same_for_all
    from paceline.runtime import seat
    from paceline.store.disk.checkpoint import save_weights

    config = msgspec.convert(request["config"], RunConfig, str_keys=True)
    assert config.script is not None
    made: list[PlannedPace] = []

    def take_part() -> PlannedPace:
        if request["planner"] == "hap":
            from paceline.parallel.plans.hap.pace import HapPace
            from paceline.plan.hap.plan import HapPlan

            program = msgspec.convert(request["plan"], HapPlan, str_keys=True)
            same_for_all(program.digest())
            made.append(HapPace(rank, size, config, program))
        else:
            plan = msgspec.convert(request["plan"], OsdpPlan, str_keys=True)
            same_for_all(plan.digest())
            made.append(OsdpPace(rank, size, config, plan))
        return made[0]

    random.seed(config.seed)  # all ranks alike, so that they split and make the same data
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    seat.take(seat.Seat(rank, config, None, stand_in=take_part))
    stand_in_for_clipping(made)
    _run(config)
    if not made:
        raise ConfigError(f"{config.script} never called paceline.join(), so the plan was not carried out.")
    summary = made[0].summary()
    state = made[0].whole_state()
    if rank == 0:
        save_weights(config.path / "weights.safetensors", state)
    return summary


def _run(config: RunConfig) -> None:
    sys.argv = [str(config.script), *config.args]
    find_modules_of(str(config.script))
    try:
        runpy.run_path(str(config.script), run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise RunError(f"the script exited with {stop.code}") from None
