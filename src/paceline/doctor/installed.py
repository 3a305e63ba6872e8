"""What is installed, against what Paceline needs."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

from paceline.doctor.findings import Finding

PYTHON = (3, 11)
JAVA = 17


@dataclass(frozen=True, slots=True)
class Need:
    """A package, the least version that will do, and what it is for."""

    package: str
    least: str
    purpose: str = ""
    """Empty: Paceline does not work without it."""


NEEDS = (
    Need("msgspec", "0.19"),
    Need("numpy", "1.26"),
    Need("rich", "13"),
    Need("safetensors", "0.5"),
    Need("typer", "0.16"),
    Need("ray", "2.40", "running workers on Ray"),
    Need("pyspark", "4.0", "running workers on Spark"),
)
TORCH = Need("torch", "2.6")


def check_installed() -> list[Finding]:
    """Every package, and the programs they need."""
    return [check_system(), check_python(), check_torch(), *map(check_package, NEEDS), check_java()]


def check_system() -> Finding:
    """Linux, for its anonymous shared memory."""
    seen = f"{platform.system()} {platform.release()}"
    if sys.platform != "linux":
        return Finding(
            "system", "problem", seen, "Paceline shares memory in a way only Linux has. Use Linux."
        )
    return Finding("system", "ok", seen)


def check_python() -> Finding:
    """The interpreter that runs this."""
    least = ".".join(map(str, PYTHON))
    if sys.version_info < PYTHON:
        return Finding("python", "problem", platform.python_version(), f"Install Python {least} or newer.")
    return Finding("python", "ok", platform.python_version())


def check_package(need: Need) -> Finding:
    """Installed, and new enough."""
    version = installed_version(need.package)
    install = f"pip install '{need.package}>={need.least}'"
    if version is None:
        if need.purpose:
            return Finding(need.package, "ok", "not installed", f"Only for {need.purpose}: {install}.")
        return Finding(need.package, "problem", "not installed", f"Install it: {install}.")
    if _numbers(version) < _numbers(need.least):
        advice = f"Older than {need.least}, which is needed: {install}."
        return Finding(need.package, "warning" if need.purpose else "problem", version, advice)
    return Finding(need.package, "ok", version)


def check_torch() -> Finding:
    """Installed, new enough, and it really loads."""
    finding = check_package(TORCH)
    if finding.state != "ok":
        return finding
    try:
        import torch
        import torch.distributed as distributed
    except (ImportError, OSError) as error:
        advice = "It is installed and does not load. Install it anew, for this Python and this machine."
        return Finding("torch", "problem", f"{finding.seen}: {error}", advice)
    devices = torch.cuda.device_count()
    parts = [finding.seen, f"{devices} CUDA devices" if devices else "CPU only"]
    if not distributed.is_available() or not distributed.is_gloo_available():
        return Finding(
            "torch", "warning", ", ".join(parts), "This build has no gloo: no comparison with DDP."
        )
    return Finding("torch", "ok", ", ".join(parts))


def check_java() -> Finding:
    """Spark's own need."""
    spark = installed_version("pyspark") is not None
    version = java_version()
    if version is None:
        advice = f"Only for running workers on Spark: install Java {JAVA} or newer."
        return Finding("java", "problem" if spark else "ok", "not found", advice)
    if version < JAVA:
        return Finding(
            "java", "problem" if spark else "ok", str(version), f"Spark needs Java {JAVA} or newer."
        )
    return Finding("java", "ok", str(version))


def java_version() -> int | None:
    """The major version of the `java` on the path."""
    java = shutil.which("java")
    if java is None:
        return None
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return int(found[1]) if found else None


def installed_version(package: str) -> str | None:
    """None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
