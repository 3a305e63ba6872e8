"""Whether TLS works here, and whether a certificate of the user's own will do.

Nothing is looked up in files: both ends of a connection shake hands in memory, as those of a run would.
"""

from __future__ import annotations

import ssl
import time
from pathlib import Path
from typing import Any

from paceline.doctor.findings import Finding
from paceline.errors import ConfigError
from paceline.fabric.tls import Seal

DAY_S = 86_400.0
SOON_DAYS = 7
"""A certificate that ends so soon may end during a run."""


def check_tls() -> Finding:
    """Make a certificate as a run with --tls would, and shake hands over it."""
    seen = ssl.OPENSSL_VERSION
    if not ssl.HAS_TLSv1_3:
        advice = (
            "Runs over several hosts need --plain: this Python has no TLS 1.3. Use one that was built with "
            "OpenSSL 1.1.1 or newer."
        )
        return Finding("tls", "ok", seen, advice)
    try:
        tls = _shake_hands(Seal(), None)
    except (ConfigError, ssl.SSLError) as error:
        advice = f"Runs over several hosts need --plain: {error}"
        return Finding("tls", "ok", f"{seen}; it does not work", advice)
    return Finding("tls", "ok", f"{seen}, {tls.version()}")


def check_certificate(certificate: Path, key: Path) -> Finding:
    """Readable, with its own key, in date, and fit for who listens."""
    check = f"certificate {certificate}"
    try:
        shown: Any = _shake_hands(Seal(str(certificate), str(key)), str(certificate)).getpeercert()
    except ssl.SSLCertVerificationError as error:
        advice = (
            "Hosts that come with --tls-ca refuse it. Renew it, or leave --tls-cert out: one is made then."
        )
        return Finding(check, "problem", error.verify_message.rstrip("."), advice)
    except (ConfigError, ssl.SSLError) as error:
        return Finding(check, "problem", "of no use", f"Give files that belong together: {error}")
    names = ", ".join(name for _, name in shown.get("subjectAltName", ())) or "no address"
    seen = f"for {names}, until {shown['notAfter']}"
    if (ssl.cert_time_to_seconds(shown["notAfter"]) - time.time()) / DAY_S < SOON_DAYS:
        advice = "It ends soon: hosts with --tls-ca that lose their connection after that cannot come back."
        return Finding(check, "warning", seen, advice)
    return Finding(check, "ok", seen, "Hosts with --tls-ca have to call one of these addresses.")


def _shake_hands(seal: Seal, believed: str | None) -> ssl.SSLObject:
    """The end of who comes, which believes these certificates only; None: any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE if believed is None else ssl.CERT_REQUIRED
    if believed is not None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(believed)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    guest, host = context.wrap_bio(down, up), seal.context.wrap_bio(up, down, server_side=True)
    done = [False, False]
    while not all(done):
        done = [_step(guest), _step(host)]
    return guest


def _step(end: ssl.SSLObject) -> bool:
    """Whether its handshake is done; if not, it wants to hear more."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
