"""Settings of the documentation site, which `make docs` builds with Sphinx. All of it is local."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "scripts"))

from site_pages import write_pages  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

import paceline  # noqa: E402

project = "Paceline"
author = "The Paceline developers"
copyright = "2026, The Paceline developers"
release = paceline.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
default_role = "code"
smartquotes = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
exclude_patterns = ["_build", "report.png"]
html_theme = "furo"
html_title = "Paceline"
html_static_path = ["made/timeline.css", "static"]
html_css_files = ["timeline.css", "site.css"]
html_theme_options = {"source_repository": "", "sidebar_hide_name": False}

write_pages(HERE.parent)

ELSEWHERE = {
    "](../benchmarks/": "](made/records/",
    "](../README.md": "](index.md",
    "](../CONTRIBUTING.md": "](made/contributing.md",
}
"""Where links out of docs/, which suit a checkout, lead on the site."""


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", lead_to_the_site)


def lead_to_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links to files outside docs/ lead to their copies."""
    depth = "](" + "../" * page.count("/")
    for there, here in ELSEWHERE.items():
        source[0] = source[0].replace(there.replace("](", depth), here.replace("](", depth))
