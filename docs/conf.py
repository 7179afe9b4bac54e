# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration. `make docs` builds with warnings as errors."""

import importlib.metadata

project = "jax_ulysses"
author = "The jax_ulysses authors"
copyright = author
release = importlib.metadata.version("jax-ulysses")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Signatures show the names of the library's own types; what they stand for is in the
# table of letters and in each docstring's shapes.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "sphinx_book_theme"
html_title = f"jax_ulysses {release}"
html_static_path = ["_static"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}


def _escape_double_stars(app, what, name, obj, options, lines):
    """Docstrings show signatures in prose; reST would read `**features` as bold."""
    lines[:] = [line.replace(", **", r", \*\*") for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", _escape_double_stars)
