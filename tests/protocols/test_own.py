"""A protocol of one's own is found where it stands, and what cannot work is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.protocols import Pacing, Peer, own
from paceline.protocols.paced.ssp import SSP
from paceline.protocols.settings import about, make, make_any, resolved, spelled_out
from paceline.sim import Cluster, Fixed, simulate, simulate_peers
from paceline.trace.events import RunStarted
from support import own_rules

RULES = Path(own_rules.__file__)
HALF_WAY = f"{RULES}:HalfWay"


def test_a_class_in_a_file_is_a_protocol_with_settings_as_written_on_a_command_line() -> None:
    rule, peer = make_any(HALF_WAY, {"near": "3"}), make_any(f"{RULES}:Belt", {"every": "7"})
    assert isinstance(rule, Pacing)
    assert isinstance(peer, Peer)
    assert (resolved(rule), resolved(peer)) == ({"near": 3}, {"every": 7})
    assert isinstance(make_any(f"{RULES}:Remembers"), Pacing), "memory may change, so it is not frozen"


def test_it_tells_of_itself_what_its_class_says() -> None:
    told = about(HALF_WAY)
    assert (told.name, told.family) == (HALF_WAY, "paced")
    assert told.title == "Go on when near the slowest, or when more than half of all wait."
    assert (told.promise, told.body) == ("at most half of the workers wait.", "Made up for the tests.")
    assert told.source == str(RULES)
    (near,) = told.settings
    assert (near.name, near.default) == ("near", 2)
    assert near.help == "Iterations a worker may always be ahead of the slowest."


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        ("HalfWai", "no class 'HalfWai' in"),
        ("dataclass", "is not a class, but of type function"),
        ("Nothing", "neither decide(self, clocks, pushed), as a paced protocol, nor iteration(self, me)"),
        ("NoLockstep", "it has decide(), but no `lockstep: ClassVar[bool]`"),
        ("NoIteration", "derives from Peer but has no iteration(self, me)"),
        ("NotDerived", "has iteration(self, me), but does not derive from paceline.protocols.Peer"),
        ("NoDataclass", "is not a dataclass. Write @dataclass(frozen=True)"),
        ("Unfrozen", "its dataclass is not frozen, and it remembers nothing"),
        ("UnfrozenPeer", "its dataclass is not frozen, and a peer protocol keeps its state in `me`"),
        ("OddSetting", "setting thing of class"),
        ("Demanding", "needs its setting near. Add --set near=VALUE"),
    ],
)
def test_what_is_no_protocol_is_refused_with_what_is_missing(cls: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_any(f"{RULES}:{cls}")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class HalfWay(:\n", "line 1: invalid syntax. Fix the file."),
        ("import no_such_module\n", "raised ModuleNotFoundError when it was loaded: No module named"),
        ("x = 1 / 0\n", "raised ZeroDivisionError when it was loaded: division by zero"),
        ("import sys\nsys.exit(3)\n", "raised SystemExit when it was loaded: 3"),
        ("import paceline\npaceline.join()\n", "or the training under `if __name__ == '__main__'`."),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "rules.py").write_text(text)
    with pytest.raises(ConfigError) as refused:
        make_any(f"{tmp_path}/rules.py:HalfWay")
    assert words in str(refused.value)
    assert "rules.py" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_missing_or_named_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no file nowhere.py for protocol 'nowhere.py:HalfWay', seen from"):
        make_any("nowhere.py:HalfWay")
    with pytest.raises(ConfigError, match=r"is a file; name a class in it, as .*own_rules.py:HalfWay"):
        make_any(str(RULES))


def test_one_class_has_one_name_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.py").write_text(RULES.read_text())
    (tmp_path / "link.py").symlink_to("rules.py")
    monkeypatch.chdir(tmp_path)
    spellings = (
        "rules.py",
        "./rules.py",
        f"{tmp_path}/rules.py",
        "../" + f"{tmp_path.name}/rules.py",
        "link.py",
    )
    assert {own.canonical(f"{path}:HalfWay") for path in spellings} == {"rules.py:HalfWay"}
    assert {type(make(f"{path}:HalfWay")) for path in spellings} == {type(make("rules.py:HalfWay"))}
    assert own.canonical(HALF_WAY) == HALF_WAY
    assert own.canonical("ssp") == "ssp"


def test_a_changed_file_is_loaded_anew_and_has_another_digest(tmp_path: Path) -> None:
    file, name = tmp_path / "rules.py", f"{tmp_path}/rules.py:HalfWay"
    file.write_text(RULES.read_text())
    make(name)
    before = own.digest(name)
    file.write_text(RULES.read_text().replace("near: int = 2", "near: int = 5"))
    assert resolved(make(name)) == {"near": 5}
    assert own.digest(name) != before
    with pytest.raises(ConfigError, match="is not the same everywhere"):
        own.check_same_file(name, before, "elsewhere")


def test_a_file_of_a_package_finds_its_neighbours(tmp_path: Path) -> None:
    package = tmp_path / "grove"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "root.py").write_text(RULES.read_text())
    (package / "leaf.py").write_text("from .root import HalfWay as Half\n")
    assert resolved(make(f"{package}/leaf.py:Half")) == {"near": 2}
    assert str(tmp_path) not in sys.path


def test_an_object_is_spelled_out_so_that_others_can_build_it() -> None:
    assert spelled_out(own_rules.HalfWay(near=4)) == (own.canonical(HALF_WAY), {"near": 4})
    assert spelled_out(SSP(staleness=1)) == ("ssp", {"staleness": 1})
    with pytest.raises(ConfigError, match="got the class HalfWay"):
        spelled_out(own_rules.HalfWay)
    with pytest.raises(ConfigError, match=r"join takes a protocol's name or object, .* got 42"):
        spelled_out(42)
    with pytest.raises(ConfigError, match="is not a protocol: it has decide"):
        spelled_out(own_rules.NoLockstep())
    with pytest.raises(ConfigError, match=r"cannot find the class .*it must be at the top level of a file"):
        spelled_out(type("Made", (own_rules.Belt,), {"__qualname__": "test.Made"})())


def test_a_simulation_is_the_same_whether_the_class_is_named_or_given() -> None:
    cluster = Cluster(workers=4, compute=Fixed(0.1), slow={1: 3.0})
    named, given = [], []
    simulate(make(HALF_WAY), cluster, iterations=30, trace=named.append)
    simulate(own_rules.HalfWay(), cluster, iterations=30, trace=given.append)
    assert named[1:] == given[1:]
    assert len(named) > 30
    assert isinstance(named[0], RunStarted)
    assert (named[0].protocol, named[0].protocol_sha256) == (own.canonical(HALF_WAY), own.digest(HALF_WAY))
    peers: list[object] = []
    simulate_peers(make_any(f"{RULES}:Belt"), cluster, iterations=5, trace=peers.append)
    assert isinstance(peers[0], RunStarted)
    assert peers[0].protocol_sha256 == own.digest(HALF_WAY), "it stands in the same file"


# -- installed packages ---------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that offers protocols, as pip would leave it."""
    (tmp_path / "halves.py").write_text(RULES.read_text())
    _offer(tmp_path, "halves", "half_way = halves:HalfWay\nssp = halves:Belt\nbroken = halves:Gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def _offer(site: Path, package: str, entries: str) -> None:
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[paceline.protocols]\n{entries}")


def test_a_protocol_that_a_package_offers_is_found_by_its_name(installed: Path) -> None:
    assert resolved(make("half_way", {"near": "9"})) == {"near": 9}
    assert about("half_way").source == str(installed / "halves.py")
    make(HALF_WAY)
    assert own.digest("half_way") == own.digest(HALF_WAY), "it is a copy of that file"
    assert isinstance(make("ssp"), SSP), "a package does not replace what Paceline has"
    with pytest.raises(ConfigError, match=r"unknown protocol 'half_wai'. Did you mean 'half_way'"):
        make("half_wai")
    with pytest.raises(ConfigError, match=r"the installed protocol 'broken' \(halves:Gone\) raised Attr"):
        make("broken")


def test_two_packages_that_offer_one_name_are_refused(installed: Path) -> None:
    _offer(installed, "others", "half_way = others:HalfWay\n")
    with pytest.raises(ConfigError, match=r"offer a protocol 'half_way': halves:HalfWay, others:HalfWay"):
        make("half_way")


def test_the_list_has_what_packages_offer_and_says_what_is_wrong_with_some(installed: Path) -> None:
    command = Path(sys.executable).with_name("paceline")
    environment = os.environ | {"PYTHONPATH": str(installed)}
    listed = subprocess.run(
        [command, "protocols"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "half_way (paced)  Go on when near the slowest" in listed.stdout
    assert "warning: halves:Belt is offered as 'ssp', which is Paceline's own." in listed.stderr
    assert "warning: the installed protocol 'broken'" in listed.stderr
