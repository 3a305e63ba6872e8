"""HTML and SVG put together from elements, so that no text can reach a page unescaped.

Whatever is not `Markup` is escaped when it is put into an element; only `element` makes `Markup`.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_EMPTY = frozenset({"br", "circle", "line", "meta", "path", "rect"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """One element. `class_` stands for class, `stroke_width` for stroke-width; None leaves one out."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in _EMPTY:
        return Markup(f"<{tag}{words}/>")
    return Markup(f"<{tag}{words}>{join(children)}</{tag}>")


def join(children: Iterable[str]) -> Markup:
    """Several pieces one after the other."""
    return Markup("".join(map(_text, children)))


def _text(child: str) -> str:
    return child if isinstance(child, Markup) else escape(child, quote=False)


def _attribute(value: str | float) -> str:
    return short(value) if isinstance(value, float) else escape(str(value))


def short(value: float) -> str:
    """A coordinate: a tenth of a pixel is finer than anyone sees."""
    text = f"{value:.1f}"
    return text.removesuffix(".0")
