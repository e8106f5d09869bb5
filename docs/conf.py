"""How Sphinx builds the pages: `make docs`, into docs/_build/html."""

import importlib.metadata
import pathlib
import shutil
import sys

_HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))  # For `fields`.

project = "fedbnr_jax"
author = "The fedbnr_jax authors"
version = release = importlib.metadata.version("fedbnr-jax")

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "fields",
]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
html_title = "fedbnr_jax"
# The sidebar and, on a phone, the page have a field to search already.
html_theme_options = {"show_toc_level": 2, "navbar_persistent": []}
html_static_path = ["_static"]
html_css_files = ["pages.css"]

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
# Sections that links name by their titles.
myst_heading_anchors = 3
# Notebooks are executed by their tests, and shown as these left them.
nb_execution_mode = "off"

# Names in docstrings stand in single backquotes.
default_role = "code"
# Names that lead nowhere are errors too, but for those of other libraries, whose pages
# a build would have to download, and for a few types that are nobody's business.
nitpicky = True
nitpick_ignore_regex = [
  (r"py:.*", r"(chex|collections|flax|jax|ml_collections|numpy|optax|os|pandas)\..*"),
  (r"py:.*", r"pathlib\.Path"),
  (r"py:.*", r"fedbnr_jax\.federated\.local_steps\.Params"),  # A type variable.
  (r"py:.*", r"fedbnr_jax\.(model\.Source|data\.(scores|missing_cells)\..*)"),
]

# Sphinx reads nothing outside this folder, and the notebooks lie beside it.
_TUTORIALS = _HERE / "tutorials"
shutil.rmtree(_TUTORIALS, ignore_errors=True)
_TUTORIALS.mkdir()
for _notebook in sorted((_HERE.parent / "notebooks").glob("*.ipynb")):
  shutil.copyfile(_notebook, _TUTORIALS / _notebook.name)

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Fields of tuples are there already, and would be there twice if docstrings have them.
napoleon_use_ivar = True
