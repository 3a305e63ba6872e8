"""Spark for tests: a standalone cluster on loopback, and an end that leaves no JVM behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyspark
from pyspark import SparkContext

HOME = Path(pyspark.__file__).parent
PATIENCE_S = 90.0


class Cluster:
    """A master and its workers, each in a JVM of its own, as `sbin/start-*.sh` would start them."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self._workers = folder, workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = {
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_HOME": str(HOME),
            "SPARK_SCALA_VERSION": "2.13",
            "PYSPARK_PYTHON": sys.executable,
        }

    def __enter__(self) -> Cluster:
        log = self._start(
            "master", "master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"
        )
        self.master = _wait_for(log, r"Starting Spark master at (spark://\S+)")
        ports = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0", "--cores", "1", "--memory", "1g")
        logs = [
            self._start(
                f"worker{n}",
                "worker.Worker",
                *ports,
                "--work-dir",
                str(self._folder / f"work{n}"),
                self.master,
            )
            for n in range(self._workers)
        ]
        for log in logs:
            _wait_for(log, r"Successfully registered with master (\S+)")
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(30)

    def _start(self, name: str, kind: str, *args: str) -> Path:
        log = self._folder / f"{name}.log"
        command = ["java", "-Xmx512m", "-cp", f"{HOME}/jars/*", f"org.apache.spark.deploy.{kind}", *args]
        opened = ["--add-opens=java.base/java.lang=ALL-UNNAMED", "--add-opens=java.base/java.nio=ALL-UNNAMED"]
        command[1:1] = [*opened, "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED"]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | self.environment)
        self._processes.append(process)
        return log


def end_spark(context: SparkContext) -> None:
    """Stop it, and its JVM, which would else stay as long as this process; with what it wrote to its home."""
    name, gateway = context.applicationId, SparkContext._gateway
    context.stop()
    assert gateway is not None
    gateway.shutdown()
    process: subprocess.Popen[bytes] = gateway.proc  # type: ignore[attr-defined]
    assert process.stdin is not None
    process.stdin.close()
    process.wait(60)
    SparkContext._gateway = SparkContext._jvm = None
    shutil.rmtree(HOME / "work" / name, ignore_errors=True)


def _wait_for(log: Path, pattern: str) -> str:
    until = time.monotonic() + PATIENCE_S
    while not (found := re.search(pattern, log.read_text())):
        assert time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.1)
    return found[1]
