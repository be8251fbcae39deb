"""How Sphinx builds these pages."""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

import holdfast
from holdfast.cli import all_verbs, parser_of

project = "Holdfast"
author = "The Holdfast developers"
version = release = holdfast.__version__
project_copyright = "2026, the Holdfast developers"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
copybutton_prompt_text = "$ "
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

man_pages = [("reference/commands", "holdfast", "shared, tiered memory for KV caches", author, 1)]

html_theme = "furo"
html_title = f"Holdfast {release}"
html_copy_source = False
html_show_sphinx = False


def write_command_pages(_app: Sphinx) -> None:
    """Write a page with the help of every verb, as `--help` prints it."""
    os.environ["COLUMNS"] = "100"
    parts = ["# Commands\n\nThe output of `--help` of every verb.\n"]
    for name, verb in all_verbs().items():
        parts.append(f"## {name}\n\n```text\n{parser_of(name, verb).format_help()}```\n")
    (Path(__file__).parent / "reference" / "commands.md").write_text("\n".join(parts))


def anchor_keys(_app: Sphinx, page: str, source: list[str]) -> None:
    """Give every key of the configuration's tables an anchor, such as `#http.listen`."""
    if page == "reference/config":
        source[0] = re.sub(r"^\| `[^|]*", _with_anchors, source[0], flags=re.MULTILINE)


def _with_anchors(cell: re.Match[str]) -> str:
    return re.sub(r"`([\w.]+)`", r'<a id="\1"></a>`\1`', cell[0])


def setup(app: Sphinx) -> None:
    """Register what is generated."""
    app.connect("builder-inited", write_command_pages)
    app.connect("source-read", anchor_keys)
