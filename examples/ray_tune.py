"""Sweep protocols with Ray Tune: every trial is a Paceline run on the node that Tune gives it.

    pip install 'paceline[tune,demo]'
    python examples/ray_tune.py

Tune chooses what to try and when to stop; Paceline trains, and hands over its result. With a `ray start`ed
cluster the trials spread over its nodes; the workers of one trial stay together, on memory they share.
"""

import json
import subprocess
import sys
from pathlib import Path

from ray import tune

HERE = Path(__file__).resolve().parent
WORKERS, EPOCHS = 2, 2


def trial(dials: dict[str, str]) -> None:
    """One run. A protocol's settings stand behind its name: ssp staleness=5."""
    protocol, *settings = dials["protocol"].split()
    flags = ["--protocol", protocol, *(word for each in settings for word in ("--set", each))]
    command = [sys.executable, "-m", "paceline", "train", str(HERE / "digits.py"), *flags]
    command += ["--workers", str(WORKERS), "--runs", dials["runs"], "--json", "--", "--epochs", str(EPOCHS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    result = json.loads(done.stdout)
    tune.report({name: result[name] for name in ("accuracy", "loss", "seconds", "samples_per_s", "run")})


def main() -> None:
    """Two protocols, and the better one."""
    runs = str(Path("runs").resolve())  # a trial has a folder of its own, which Ray removes
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": WORKERS}),
        param_space={"protocol": tune.grid_search(["bsp", "ssp staleness=5"]), "runs": runs},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max"),
        run_config=tune.RunConfig(storage_path=runs, name="tune", verbose=0),
    )
    results = tuner.fit()
    for each in results:
        print(f"{each.config['protocol']}: accuracy {each.metrics['accuracy']:.3f}")
    print(f"best: {results.get_best_result().config['protocol']}")


if __name__ == "__main__":
    main()
