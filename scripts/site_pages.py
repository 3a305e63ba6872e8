"""Pages of the documentation site that are made, not written: protocols, commands, figures.

`docs/conf.py` calls `write_pages` before Sphinx reads the sources. A protocol's page comes from its
docstring, its settings and a simulation; a command's page comes from the command itself. They go to
docs/made/, which git ignores.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import typer

from paceline.cli.flags.host_options import GROUPS
from paceline.cli.main import app
from paceline.errors import ConfigError
from paceline.parallel.registry import PIPELINES, SPLITS, about_split, make_pipeline
from paceline.protocols import PACED, PEERS
from paceline.protocols.grid import Grid
from paceline.protocols.settings import About, about, make, make_peer
from paceline.sim import Cluster, Link, Lognormal, simulate, simulate_peers
from paceline.trace.events import AnyEvent
from paceline.view.palette import STATES, css
from paceline.view.report.gantt import timeline, windows
from paceline.view.report.record import RunRecord

WORKERS, ITERATIONS = 4, 30
CLUSTER = Cluster(
    workers=WORKERS,
    compute=Lognormal(0.1, 0.25),
    slow={3: 2.0},
    link=Link(bandwidth_bytes_per_s=1e9),
    model_bytes=20_000_000,
)
SCENE = "Four workers train; rank 3 computes twice as slowly, and iteration times vary by a quarter."
FAMILIES = {
    "paced": ("Paced protocols", "A store holds the weights, and the protocol decides who continues when."),
    "peer": ("Peer protocols", "Every worker has its own replica; workers average, mix or vote."),
    "split": ("Split protocols", "One copy of the model lies on several workers."),
}


def write_pages(root: Path) -> None:
    """All of them, anew, in the docs/made of a checkout or a copy."""
    folder = root / "docs" / "made"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "protocols").mkdir(parents=True)
    (folder / "commands").mkdir()
    entries = [*map(about, sorted(PACED)), *map(about, sorted(PEERS)), *map(about_split, sorted(SPLITS))]
    for entry in entries:
        (folder / "protocols" / f"{entry.name}.md").write_text(protocol_page(entry))
    (folder / "protocols" / "index.md").write_text(protocols_index(entries))
    (folder / "staleness.md").write_text(staleness_figures())
    (folder / "timeline.css").write_text(stylesheet())
    for name, command in commands():
        (folder / "commands" / f"{name.replace(' ', '-')}.md").write_text(command_page(name, command))
    (folder / "commands" / "index.md").write_text(commands_index())
    shutil.copytree(root / "benchmarks", folder / "records", ignore=shutil.ignore_patterns("*.json"))
    (folder / "records" / "index.md").write_text(records_index(folder / "records"))
    text = (root / "CONTRIBUTING.md").read_text()
    text = re.sub(r"\[([^]]+)\]\((LICENSE|CHANGELOG\.md)\)", r"\1", text)  # these two are not on the site
    (folder / "contributing.md").write_text(text.replace("](docs/", "](../"))


def records_index(folder: Path) -> str:
    """The records of the benchmarks, by name."""
    names = "\n".join(sorted(path.stem for path in folder.glob("*.md")))
    return f"# Records of the benchmarks\n\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"


def protocols_index(entries: list[About]) -> str:
    """Which there are, in three tables, and when each is the one to use."""
    parts = [
        "# Protocols\n\nA protocol is the rule by which workers keep step. Each has a page with its idea, a "
        "figure from the simulator, its settings and its paper.\n"
    ]
    for family, (title, idea) in FAMILIES.items():
        rows = [f"| [{e.name}]({e.name}.md) | {_sentence(e.when)} |" for e in entries if e.family == family]
        parts.append(
            f"## {title}\n\n{idea}\n\n| protocol | use it when |\n|---|---|\n" + "\n".join(rows) + "\n"
        )
    hidden = "\n".join(entry.name for entry in entries)
    parts.append(f"```{{toctree}}\n:hidden:\n\n{hidden}\n```\n")
    return "\n".join(parts)


def protocol_page(entry: About) -> str:
    """Idea, figure, promise, when to use it, settings, paper and details of one protocol."""
    title, _, idea = entry.title.partition(": ")
    parts = [f"# {entry.name}", f"**{title}**: {idea}" if idea else entry.title]
    figure = drawn(entry)
    if figure:
        parts += [figure]
    parts += [f"**Use it when** {entry.when}"] if entry.when else []
    parts += [f"**Promise**: {entry.promise}"] if entry.promise else []
    parts += [_run_it(entry)]
    if entry.settings:
        rows = [f"| `{s.name}` | `{s.default}` | {s.help} |" for s in entry.settings]
        parts += [
            "## Settings\n\nGive them with `--set NAME=VALUE`, or in `paceline.join`.",
            "| setting | default | meaning |\n|---|---|---|\n"
            + "\n".join(row.replace("\n", " ") for row in rows),
        ]
    parts += [f"## Paper\n\n{entry.paper}"] if entry.paper else []
    parts += [f"## Details\n\n{_paragraphs(entry.body)}"] if entry.body else []
    return "\n\n".join(parts) + "\n"


def _run_it(entry: About) -> str:
    if entry.family == "split":
        axis = {"row_split": "model", "dynamic_sequence": "sequence", "sparse_2d": "shard"}.get(
            entry.name, "stage"
        )
        return f"```text\npaceline train SCRIPT --mesh {axis}=2 --protocol {entry.name}\n```"
    first = next(
        (s for s in entry.settings if isinstance(s.default, int | float) and s.default is not False), None
    )
    setting = f" --set {first.name}={first.default}" if first else ""
    return f"```text\npaceline train SCRIPT --workers 4 --protocol {entry.name}{setting}\n```"


def drawn(entry: About) -> str:
    """The timeline of a simulation, as the report draws it; nothing for what has no simulation of its own."""
    record = simulated(entry)
    if record is None:
        return ""
    window = windows([record])[0]
    if window is None:
        return ""
    states = "".join(f'<span><i class="pl-{s}"></i>{s}</span>' for s in STATES)
    svg = str(timeline(record, window))
    scene = "Four stages on four workers, one batch after another." if entry.family == "split" else SCENE
    figure = f'<figure class="pl-timeline"><figcaption>{scene}<br>{states}</figcaption>{svg}</figure>'
    return f"```{{raw}} html\n{figure}\n```"


def staleness_figures() -> str:
    """Lockstep and no bound at all, for docs/explain-staleness.md, which includes them."""
    named = ((name, drawn(about(name))) for name in ("bsp", "asp"))
    return "\n\n".join(f"`{name}`:\n\n{figure}" for name, figure in named) + "\n"


def simulated(entry: About) -> RunRecord | None:
    """The record of a short simulated run with the protocol's default settings."""
    records: list[RunRecord] = []

    def keep(event: AnyEvent) -> None:
        if not records:
            records.append(RunRecord(event))  # type: ignore[arg-type]
        records[0].add(event)

    try:
        _simulate(entry, keep)
    except ConfigError:
        return None
    return records[0] if records else None


def _simulate(entry: About, trace: Callable[[AnyEvent], None]) -> None:
    if entry.family == "paced":
        simulate(make(entry.name), CLUSTER, iterations=ITERATIONS, trace=trace, run=entry.name)
    elif entry.family == "peer":
        simulate_peers(make_peer(entry.name), CLUSTER, iterations=ITERATIONS, trace=trace, run=entry.name)
    elif entry.name in PIPELINES:
        from paceline.parallel.pipeline.simulating import simulate_pipeline

        grid, pipeline = Grid({"stage": WORKERS}), make_pipeline(entry.name, {})
        simulate_pipeline(
            entry.name,
            pipeline,
            grid,
            Cluster(workers=WORKERS, compute=Lognormal(0.1, 0.1)),
            iterations=ITERATIONS,
            trace=trace,
            run=entry.name,
        )


def stylesheet() -> str:
    """The report's colours for its timelines, on light and on dark paper."""
    rules = css().replace(":root", "body")
    dark = rules[rules.index("@media") :].split("{", 2)[2].rstrip("}")
    classes = "".join(
        f".pl-timeline .{name}{{fill:var(--{name})}}.pl-timeline i.pl-{name}{{background:var(--{name})}}"
        for name in STATES
    )
    return rules + f'body[data-theme="dark"]{{{dark}}}' + classes


def _paragraphs(body: str) -> str:
    """A docstring's paragraphs as Markdown: lists whose lines are indented become preformatted text."""
    out = []
    for paragraph in body.split("\n\n"):
        lines = paragraph.split("\n")
        at = next((n for n, line in enumerate(lines) if line.startswith("  ")), len(lines))
        out.append(" ".join(lines[:at]))
        if at < len(lines):
            block = dedent("\n".join(lines[at:]))
            out.append(f"```text\n{block}\n```")
    return "\n\n".join(text for text in out if text)


def _sentence(text: str) -> str:
    return text or "—"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name, those inside groups as `plan osdp`."""
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {sub}", each) for sub, each in inner.items())


def commands_index() -> str:
    """All commands by what they are for."""
    group: Any = typer.main.get_command(app)
    sections: dict[str, list[str]] = {}
    for name, command in commands():
        top = group.commands[name.split()[0]]
        help_line = (command.help or "").split("\n")[0]
        row = f"| [paceline {name}]({name.replace(' ', '-')}.md) | {help_line} |"
        sections.setdefault(top.rich_help_panel or "Commands", []).append(row)
    parts = ["# Commands", "Every command has `--help`. Those with many flags also have `--help-all`."]
    parts += [
        f"## {title}\n\n| command | what it does |\n|---|---|\n" + "\n".join(rows)
        for title, rows in sections.items()
    ]
    hidden = "\n".join(name.replace(" ", "-") for name, _ in commands())
    return "\n\n".join([*parts, f"```{{toctree}}\n:hidden:\n\n{hidden}\n```"]) + "\n"


def command_page(name: str, command: Any) -> str:
    """What a command does, its arguments, and its flags in groups."""
    ctx = typer.Context(command, info_name=name)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join([f"paceline {name}", "[FLAGS]", *(_placeholder(each) for each in arguments)])
    parts = [f"# paceline {name}", _told(command.help or ""), f"```text\n{usage}\n```"]
    if arguments:
        parts.append(
            "## Arguments\n\n"
            + "\n".join(f"- `{_placeholder(a)}`: {getattr(a, 'help', '') or ''}" for a in arguments)
        )
    for title, flags in _grouped(options).items():
        parts.append(f"## {title}\n\n" + "\n\n".join(_flag(each, ctx) for each in flags))
    return "\n\n".join(parts) + "\n"


def _told(help_text: str) -> str:
    """A command's help; its example is code."""
    text, found, example = dedent(help_text).strip().partition("Example: ")
    return f"{text}Example:\n\n```text\n{' '.join(example.split())}\n```" if found else text


def _placeholder(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _grouped(options: list[Any]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {title: [] for title in GROUPS}
    for each in options:
        groups.setdefault(getattr(each, "rich_help_panel", None) or "Flags", []).append(each)
    return {title: flags for title, flags in groups.items() if flags}


def _flag(option: Any, ctx: Any) -> str:
    """A definition: the flag with its value, then its help and default, as --help-all has them."""
    names, text = option.get_help_record(ctx)
    return f"`{names}`\n: {' '.join(text.split())}"
