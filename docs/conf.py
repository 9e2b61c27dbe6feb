"""Sphinx's configuration: the API reference from the docstrings, beside the pages of this folder (``make docs``)."""

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import hpcgpu

project = "hpcgpu"
author = "The hpcgpu developers"
copyright = f"2026, {author}"  # noqa: A001 - Sphinx's name
version = release = hpcgpu.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
exclude_patterns = ["pictures"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = f"hpcgpu {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the Parameters sections have them
numpydoc_show_class_members = False
# unknown sections, sections in another order, missing docstrings and summaries, parameters that do not exist, types
numpydoc_validation_checks = {"GL06", "GL07", "GL08", "SS01", "PR02", "PR05", "PR06", "PR10", "RT03"}
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # pages of tables go from the second level to the fourth

# Types in docstrings are words for people ("int or str"); classes of other projects are not looked up in the network.
nitpick_ignore_regex = [("py:class", r"(?!hpcgpu\.).*")]


def leave_as_text(app: Sphinx, doctree: nodes.document) -> None:
    """Show a link to a Markdown file of the repository that is no page, such as tests/README.md, as its text.

    A link that leads nowhere stays a warning, and so an error.
    """
    for link in list(doctree.findall(addnodes.pending_xref)):
        target = Path(f"{link['reftarget']}.md")
        if target.is_absolute() and target.is_file() and not target.is_relative_to(app.srcdir):
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("doctree-read", leave_as_text)
