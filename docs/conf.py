"""How Sphinx builds these pages."""

import holdfast

project = "Holdfast"
author = "The Holdfast developers"
version = release = holdfast.__version__
project_copyright = "2026, the Holdfast developers"

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"Holdfast {release}"
html_copy_source = False
html_show_sphinx = False
