"""How Sphinx builds the site; `scripts/docs` runs it.

In: the pages of the repository as they are on a host of code, from its root, so that their links to each
other and to files are those of the repository; and the scripts of the gallery, which are run for their
output. Out: build/site, which needs no network. README.md is the start page.
"""

import inspect
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sphinx.builders.html import StandaloneHTMLBuilder

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "site")]

import gallery  # noqa: E402

import tsfuser  # noqa: E402

project = "tsfuser"
author = "The maintainers of tsfuser"
release = version = tsfuser.__version__
html_title = f"tsfuser {release}"
html_show_copyright = False

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/site/*.md",
    "tests/README.md",
    "examples/libtorch/README.md",
    "examples/gallery/*",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# The gallery: scripts in jupytext's percent format, run again only after their code has changed.
nb_custom_formats = {".py": "gallery.read"}
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "site-cache" / "gallery")
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_output_stderr = "remove"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
highlight_language = "none"  # of blocks that name no language
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# Docstrings are plain text with `code`, not reStructuredText.
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_default_options = {"undoc-members": True, "exclude-members": "__init__, __new__"}
maximum_signature_line_length = 110
toc_object_entries_show_parents = "hide"
python_display_short_literal_types = True

#: What the start page has besides the README: the menu. A host shows the README without it.
MENU = """

```{toctree}
:hidden:

docs/guide
docs/troubleshooting
examples/gallery/README
docs/site/api
```

```{toctree}
:hidden:
:caption: Reference

docs/ops
docs/options
docs/parity
docs/performance
examples/libtorch/README
```

```{toctree}
:hidden:
:caption: Development

docs/architecture
CONTRIBUTING
docs/roadmap
tests/README
CHANGELOG
```
"""


class Pages(StandaloneHTMLBuilder):
    """The start page is index.html."""

    def get_target_uri(self, docname: str, typ: str | None = None) -> str:
        return quote("index" if docname == root_doc else docname) + self.link_suffix

    def get_output_path(self, page_name: str, /) -> Any:
        return super().get_output_path("index" if page_name == root_doc else page_name)


def add_menu(app: Any, docname: str, source: list[str]) -> None:
    """The menu behind the README."""
    if docname == root_doc:
        source[0] += MENU


def know_pages(app: Any, env: Any, docnames: list[str]) -> None:
    """What is a page is known now."""
    app.project.__class__ = gallery.Pages


def plain_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """`name` -> ``name``; a line that ends in ":" before an indented example opens a block of code."""
    text = inspect.cleandoc("\n".join(lines))
    lines[:] = text.replace("`", "``").replace(":\n\n    ", "::\n\n    ").splitlines()


def setup(app: Any) -> None:
    app.add_builder(Pages, override=True)
    app.connect("source-read", add_menu)
    app.connect("env-before-read-docs", know_pages)
    app.connect("autodoc-process-docstring", plain_docstring)
