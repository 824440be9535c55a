"""How Sphinx makes a site of these pages; `make docs` runs it."""

import slivertune

project = "slivertune"
version = release = slivertune.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "slivertune"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
# A dataclass lists its fields once, each with its meaning.
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

myst_heading_anchors = 4
# Pages also point at scripts and presets of the checkout, which are no part of the site.
suppress_warnings = ["myst.xref_missing"]
