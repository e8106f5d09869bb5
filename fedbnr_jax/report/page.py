"""One self-contained HTML page: texts, tables and pictures, viewed without a network.

Colours follow the reader's light or dark mode, and a phone shows one column.
"""

import html
import importlib.resources
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from fedbnr_jax.files import replacing
from fedbnr_jax.report import figures

_SHORT = 40  # Letters of a text that stands in one line.
_POINTS = 72  # In an inch.


class Tile(NamedTuple):
  """A number that a reader should see first."""

  name: str
  value: str
  note: str = ""  # Such as the rows that it rests on.


class Section(NamedTuple):
  """A part of the page, whose body is HTML."""

  title: str
  body: str
  wide: bool = False  # Whether it takes the page's whole width.


def page(
  title: str, lead: str, tiles: Sequence[Tile], sections: Sequence[Section]
) -> str:
  """Puts a page together.

  Args:
    title: Its heading, as plain text.
    lead: The sentences below it, as plain text.
    tiles: Numbers that stand at the top.
    sections: In the order of reading.
  """
  shown = "".join(
    f'<div class="tile"><small>{escape(tile.name)}</small><b>{escape(tile.value)}</b>'
    f"<small>{escape(tile.note)}</small></div>"
    for tile in tiles
  )
  cards = "".join(
    f"<section{' class=wide' if section.wide else ''}>"
    f"<h2>{escape(section.title)}</h2>{section.body}</section>\n"
    for section in sections
  )
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{escape(title)}</title>\n<style>\n{_asset('page.css')}</style></head>\n"
    f'<body><main>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n'
    f'<div class="tiles">{shown}</div>\n<div class="cards">\n{cards}</div>\n'
    f"</main>\n<script>\n{_asset('page.js')}</script></body></html>\n"
  )


def write(path: str | os.PathLike[str], text: str) -> None:
  """Writes a page that is never seen half written."""
  target = pathlib.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  with replacing(target) as part:
    part.write_text(text, encoding="utf-8")


def escape(text: str) -> str:
  """Makes a text safe to stand in HTML."""
  return html.escape(str(text))


def paragraph(text: str, kind: str = "") -> str:
  """Makes a paragraph of plain text; `kind` may be "note" or "warn"."""
  return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def picture(figure: Figure, size: tuple[float, float] | None = None) -> str:
  """Embeds a figure that scales with the page and takes its colours.

  The title of a figure of one panel becomes a caption, which has room for it.

  Args:
    figure: It is changed, and should have been saved by now.
    size: Width and height in inches; the narrower, the larger the letters on a phone.
  """
  if size is not None:
    figure.set_size_inches(*size)
  titled = [ax for ax in figure.axes if ax.get_title(loc="left")]
  caption = ""
  if len(titled) == 1:
    caption = f"<figcaption>{escape(titled[0].get_title(loc='left'))}</figcaption>"
    titled[0].set_title("", loc="left")
  width = figure.get_size_inches()[0]
  # No letters get smaller than 8 pixels, and those of 10 points no larger than about
  # 15: on a phone, a wide picture is scrolled.
  drawn = figures.svg(figure)
  sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", drawn)]
  least, most = 8 * _POINTS / min(sizes, default=10.0) * width, 110 * width
  limits = f"min-width: {min(least, most):.0f}px; max-width: {most:.0f}px"
  drawn = f'<figure style="{limits}">{drawn}{caption}</figure>'
  return f'<div class="scroll">{drawn}</div>'


def table(
  frame: pd.DataFrame,
  formats: Mapping[str, Callable[[Any], str]] | None = None,
  *,
  sortable: bool = False,
) -> str:
  """Makes a table of a frame, whose index is left out.

  Args:
    frame: One row a row; a missing number becomes a dash.
    formats: How to write the values of some columns.
    sortable: Whether a click on a column's head sorts the rows by it.
  """
  formats = formats or {}
  names = list(frame.columns)
  records = frame.to_dict("records")
  # Heads stand over their columns: texts at the left, numbers at the right.
  texts = {name for name in names if any(isinstance(r[name], str) for r in records)}
  head = "".join(
    f"<th{' class=text' if name in texts else ''}>{escape(name)}</th>" for name in names
  )
  rows = ""
  for row in records:
    cells = "".join(_cell(row[name], formats.get(name)) for name in names)
    rows += f"<tr>{cells}</tr>\n"
  kind = ' class="sortable"' if sortable else ""
  return (
    f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead>\n'
    f"<tbody>{rows}</tbody></table></div>"
  )


def _cell(value: Any, write_value: Callable[[Any], str] | None) -> str:
  """Makes a cell; numbers keep their exact value for sorting."""
  if isinstance(value, str):
    kind = "text" if len(value) <= _SHORT else "long"
    return f'<td class="{kind}">{escape(value)}</td>'
  if value is None or (isinstance(value, float) and math.isnan(value)):
    return '<td data-value="">–</td>'
  shown = write_value(value) if write_value else number(value)
  return f'<td data-value="{escape(str(value))}">{escape(shown)}</td>'


def number(value: Any) -> str:
  """Writes a number with four digits, an integer with all of its own."""
  return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def facts(values: Mapping[str, Any]) -> str:
  """Makes a table of names and values."""
  rows = "".join(
    f'<tr><th scope="row">{escape(name)}</th>{_cell(value, None)}</tr>\n'
    for name, value in values.items()
  )
  shown = f'<table class="facts"><tbody>{rows}</tbody></table>'
  return f'<div class="scroll">{shown}</div>'


def unfold(summary: str, content: Any) -> str:
  """Makes a JSON text that is shown when the reader asks for it."""
  text = json.dumps(content, indent=2, ensure_ascii=False)
  return (
    f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
  )


def _asset(name: str) -> str:
  """Reads a file that lies beside this module."""
  return (importlib.resources.files("fedbnr_jax.report") / name).read_text("utf-8")
