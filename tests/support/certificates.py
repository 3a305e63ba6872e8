"""Certificates for tests, made with the command openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


class Authority:
    """A CA of the tests' own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = str(folder / "ca.pem")
        (folder / "empty.cnf").write_text(
            "[req]\ndistinguished_name = dn\n[dn]\n[v3]\nbasicConstraints=CA:TRUE\n"
        )
        self._run(f"req -x509 {KEY} -keyout ca.key -out ca.pem -days 2 -subj /CN=ca -extensions v3")

    def sign(self, name: str, subject: str, days: int = 1) -> tuple[str, str]:
        """A certificate for a subject such as IP:127.0.0.1, and its key."""
        self._run(f"req {KEY} -keyout {name}.key -out {name}.csr -subj /CN={name}")
        (self._folder / f"{name}.ext").write_text(f"subjectAltName={subject}\n")
        signing = "-CA ca.pem -CAkey ca.key -CAcreateserial"
        self._run(f"x509 -req -in {name}.csr -out {name}.pem {signing} -days {days} -extfile {name}.ext", "")
        return str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key")

    def _run(self, command: str, config: str = "-config empty.cnf") -> None:
        words = ["openssl", *command.split(), *config.split()]
        subprocess.run(words, cwd=self._folder, check=True, capture_output=True, timeout=60)
