"""What Sphinx needs to know of the gallery.

In: scripts in jupytext's percent format. Out: notebooks, for myst-nb; and links to scripts that are no page
stay links to files.
"""

import os
from typing import Any

import jupytext
from sphinx.project import Project

LANGUAGE = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python", "pygments_lexer": "python"},
}


def read(text: str) -> Any:
    """The notebook of a script."""
    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.metadata.update(LANGUAGE)
    return notebook


class Pages(Project):
    """Scripts outside of the gallery are no pages, though their names end as those of pages do."""

    def path2doc(self, filename: str | os.PathLike[str]) -> str | None:
        name = super().path2doc(filename)
        return name if name in self.docnames or not str(filename).endswith(".py") else None
