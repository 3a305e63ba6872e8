"""The report's paper: style sheet, script and the shell of the document. Nothing is fetched from anywhere."""

from __future__ import annotations

from pathlib import Path

from paceline.view.palette import SLOTS, STATES, css
from paceline.view.report.markup import Markup, element, join


def document(title: str, *body: Markup) -> str:
    """A whole page."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width,initial-scale=1"),
        element("title", title),
        element("style", Markup(css() + _classes() + _file("report.css"))),
    )
    script = element("script", Markup(_file("report.js")))
    page = element("html", head, element("body", element("main", *body), script), lang="en")
    return f"<!doctype html>\n{page}\n"


def section(heading: str, *body: Markup) -> Markup:
    """A part of the report under its heading."""
    return element("section", element("h2", heading), *body)


def paragraph(text: str, css_class: str = "soft") -> Markup:
    """A sentence or two."""
    return element("p", text, class_=css_class)


def figure(body: Markup, heading: Markup | None = None, caption: str = "", wide: bool = False) -> Markup:
    """A chart with its heading and caption; a wide one scrolls on a narrow screen instead of shrinking."""
    parts = [] if heading is None else [element("h3", heading)]
    if caption:
        parts.append(element("figcaption", caption))
    return element("figure", *parts, element("div", body, class_="wide") if wide else body)


def swatch(css_class: str, text: str) -> Markup:
    """A colour and what it stands for."""
    return join([element("i", class_=f"swatch {css_class}"), text])


def _classes() -> str:
    colours = "".join(f".c-{name}{{--c:var(--{name})}}" for name in (*SLOTS, *STATES))
    return colours + "".join(f".{name}{{fill:var(--{name})}}" for name in STATES)


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
