"""How Sphinx builds the pages: `make docs`, into docs/_build/html."""

import importlib.metadata
import pathlib
import shutil

project = "fedbnr_jax"
author = "The fedbnr_jax authors"
version = release = importlib.metadata.version("fedbnr-jax")

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
html_title = "fedbnr_jax"
html_theme_options = {"show_toc_level": 2}

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
# Sections that links name by their titles.
myst_heading_anchors = 3
# Notebooks are executed by their tests, and shown as these left them.
nb_execution_mode = "off"

# Sphinx reads nothing outside this folder, and the notebooks lie beside it.
_HERE = pathlib.Path(__file__).resolve().parent
_TUTORIALS = _HERE / "tutorials"
shutil.rmtree(_TUTORIALS, ignore_errors=True)
_TUTORIALS.mkdir()
for _notebook in sorted((_HERE.parent / "notebooks").glob("*.ipynb")):
  shutil.copyfile(_notebook, _TUTORIALS / _notebook.name)

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
