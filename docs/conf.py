"""How Sphinx makes a site of these pages; `make docs` runs it."""

import slivertune

project = "slivertune"
version = release = slivertune.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "slivertune"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_copyright = False

# Docstrings write code in single backticks, as Markdown does.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# One argument per line, or a signature with types is as wide as five of a phone.
maximum_signature_line_length = 80
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False

myst_heading_anchors = 4
# Pages also point at scripts and presets of the checkout, which are no part of the site.
suppress_warnings = ["myst.xref_missing"]
