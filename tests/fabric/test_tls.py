"""Over TLS a session is what it is without, and only who knows the secret is at the other end."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engines.logs import LogBook, call_home
from paceline.errors import ConfigError
from paceline.fabric.dialer import Dialer
from paceline.fabric.door import Enter
from paceline.fabric.tls import CHUNK, Seal, SealedSocket, Trust
from paceline.fabric.wire import PIECE_BYTES, TLS_MAGIC
from support.certificates import Authority
from support.hosts import Wire
from support.sessions import SECRET, Ends, Notebook

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def seal() -> Seal:
    return Seal()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def ends(seal: Seal) -> Iterator[Ends]:
    both = Ends(5 * PIECE_BYTES // 2, seal, Trust())
    yield both
    both.close()


def caller(address: tuple[str, int], trust: Trust | None, secret: bytes = SECRET) -> Dialer:
    return Dialer(address, secret, Enter("x", "y"), Notebook(8), print, 0.3, trust)


def refused(ends: Ends, trust: Trust | None, why: str, secret: bytes = SECRET) -> None:
    """Whoever comes so is told why, and the others go on."""
    dialer = caller(ends.door.address, trust, secret)
    with pytest.raises(ConfigError, match=why):
        dialer.open()
    dialer.close()
    ends.dialer.session.send(0, b"unharmed")
    ends.here.wait(1)


def test_memory_arrives_before_the_message_that_speaks_of_it(ends: Ends) -> None:
    ends.check_a_push()


@settings(max_examples=10, deadline=None)
@given(script=st.lists(st.sampled_from(["here", "there", "cut", "tensor"]), min_size=4, max_size=30))
def test_every_frame_arrives_exactly_once_and_in_order_whatever_is_cut(seal: Seal, script: list[str]) -> None:
    with closing(Ends(3 * PIECE_BYTES, seal, Trust())) as ends:
        ends.check_a_conversation(script)


def test_both_directions_at_once_are_read_as_they_were_written(ends: Ends) -> None:
    """One thread seals while another one opens, all the time."""
    size = len(ends.here.memory[1])
    data = [memoryview(bytes((i * k) % 251 for i in range(size))) for k in (3, 7)]
    for _ in range(10):
        for session, bytes_ in zip((ends.session, ends.dialer.session), data, strict=True):
            session.send_memory(1, 0, bytes_, 0, size)
            session.send(1, b"more")
    ends.here.wait(10)
    ends.there.wait(10)
    assert ends.there.memory[1] == data[0]
    assert ends.here.memory[1] == data[1]


def test_nobody_on_the_wire_can_read_along(seal: Seal) -> None:
    seen: list[bytes] = []
    plain = b"gradients that nobody else is to see"

    class Tapped(Wire):
        def _pump(self, source: socket.socket, sink: socket.socket, there: bool) -> None:
            while data := source.recv(1 << 16):
                seen.append(data)
                sink.sendall(data)

    ends = Ends(8, seal, Trust())
    ends.dialer.close()
    tap = Tapped(ends.door.address)
    dialer = Dialer(tap.address, SECRET, Enter("tapped", "test"), Notebook(8), print, 10, Trust())
    dialer.open()
    dialer.session.send(1, plain)
    ends.here.wait(1)
    assert ends.here.messages == [(1, plain)]
    assert plain not in b"".join(seen)
    assert len(b"".join(seen)) > len(plain)
    dialer.close()
    ends.close()
    tap.close()


def test_a_wrong_secret_is_refused_over_tls_too(ends: Ends) -> None:
    refused(ends, Trust(), "the secret is wrong", b"another secret, long enough")


def test_who_does_not_speak_tls_is_told_to(ends: Ends) -> None:
    refused(ends, None, "speaks TLS only. Add --tls")


def test_who_asks_for_tls_in_vain_is_told_so_and_says_nothing() -> None:
    ends = Ends(8)
    refused(ends, Trust(), "does not use TLS")
    ends.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_over_loopback_a_host_may_take_the_way_of_the_run(seal: Seal, sealed: bool) -> None:
    ends = Ends(8, seal if sealed else None, Trust(or_plain=True))
    assert isinstance(ends.dialer.session._sock, SealedSocket) == sealed
    ends.close()


def test_an_older_tls_is_refused(ends: Ends) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(ends.door.address, timeout=10) as sock:
        assert sock.recv(len(TLS_MAGIC), socket.MSG_WAITALL) == TLS_MAGIC
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(sock)


def test_somebody_in_between_who_does_not_know_the_secret_gets_nothing(ends: Ends) -> None:
    """He ends TLS with a certificate of his own, and passes on every word between the two."""
    between = Between(ends.door.address)
    dialer = caller(between.address, Trust())
    with pytest.raises(ConfigError, match="something in between"):
        dialer.open()
    dialer.close()
    between.join()
    assert between.said_yes is False


class Between:
    """Two connections under TLS, and everything from one of them handed to the other."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.said_yes: bool | None = None
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(20)
        self._listener.close()

    def _pass_on(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target, timeout=10)
        near.sendall(far.recv(len(TLS_MAGIC), socket.MSG_WAITALL))
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with SealedSocket(near, Seal().context) as guest, context.wrap_socket(far) as house:
            guest.shake_hands(1e9)
            guest.settimeout(10)
            guest.sendall(house.recv(48))
            house.sendall(guest.recv(64))
            answer = house.recv(32)
            self.said_yes = any(answer)
            guest.sendall(answer)


def test_a_certificate_of_the_users_own_is_checked_against_his_ca(authority: Authority) -> None:
    certificate, key = authority.sign("good", "IP:127.0.0.1")
    ends = Ends(8, Seal(certificate, key), Trust(authority.file))
    ends.dialer.session.send(0, b"hello")
    ends.here.wait(1)
    ends.close()


@pytest.mark.parametrize(
    ("name", "subject", "days", "why"),
    [
        ("elsewhere", "IP:10.1.2.3", 1, "IP address mismatch"),
        ("expired", "IP:127.0.0.1", -1, "certificate has expired"),
    ],
)
def test_a_certificate_that_is_not_right_is_refused_and_the_others_go_on(
    authority: Authority, name: str, subject: str, days: int, why: str
) -> None:
    ends = Ends(8, Seal(*authority.sign(name, subject, days)), Trust())
    refused(ends, Trust(authority.file), why)
    ends.close()


def test_a_certificate_that_the_ca_did_not_sign_is_refused(ends: Ends, authority: Authority) -> None:
    refused(ends, Trust(authority.file), "refused: self.signed certificate")


def test_a_ca_that_is_none_is_named(ends: Ends, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("not a certificate")
    refused(ends, Trust(str(file)), f"cannot use --tls-ca {file}")


def test_files_that_do_not_fit_are_named(authority: Authority) -> None:
    certificate, key = authority.sign("one", "IP:127.0.0.1")
    _, other = authority.sign("two", "IP:127.0.0.1")
    with pytest.raises(ConfigError, match=r"one\.pem with the key .*two\.key: key values mismatch"):
        Seal(certificate, other)
    with pytest.raises(ConfigError, match=r"cannot use the certificate nowhere\.pem.*No such file"):
        Seal("nowhere.pem", key)


def test_without_the_command_openssl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"Install it.*bring your own \(--tls-cert.*: --plain"):
        Seal()


def test_what_workers_print_comes_home_over_tls(seal: Seal, tmp_path: Path) -> None:
    secret, text = SECRET.decode(), b"epoch 1\n" * (CHUNK // 4)
    book = LogBook("127.0.0.1", secret, tmp_path, 2, seal)
    with pytest.raises(ConfigError, match="Add --tls"):
        call_home(book.address, secret, 0)
    with call_home(book.address, secret, 1, Trust()) as home:
        home.sendall(text)
    book.settle()
    book.close()
    assert (tmp_path / "logs" / "rank1.log").read_bytes() == text
