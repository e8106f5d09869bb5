"""How much each column of a table matters to a trained model, by the model alone.

A model keeps no rows. It keeps what sums say of its inputs, though, and rows that are
nobody's can be drawn from that; the predictions of these show what each column does.
"""

from typing import Any

import jax
import ml_collections
import numpy as np
import pandas as pd

from fedbnr_jax import precision, prediction
from fedbnr_jax.algorithms import kernels
from fedbnr_jax.data import Preprocessor
from fedbnr_jax.errors import InputError
from fedbnr_jax.gp import urk
from fedbnr_jax.gp.urk.inducing_inputs import draw_inputs
from fedbnr_jax.run import input_summary

_SEED = 0
# As one program: dozens of small ones would take seconds to compile.
_draw = jax.jit(draw_inputs, static_argnums=(1, 3))
# The names that kernels give the logarithms of their length-scales, and what is added
# to the name of a part that has two kinds of them.
_SCALES = {"log_length_scale": "", "log_laplacian_scale": " (laplacian)"}


def relevance(
  config: ml_collections.ConfigDict,
  preprocessor: Preprocessor,
  state: Any,
  num_rows: int = 512,
) -> pd.Series:
  """Measures how far predictions move when a single column is drawn anew.

  It is √(½ E (f(x) − f(x'))²), where f is the predicted mean, x a row that is drawn,
  and x' the same row but for the column in question, which comes from another draw:
  the square root of what sensitivity analysis calls a total effect. Where f is a sum of
  functions of one column each, it is the standard deviation of that column's function.
  It says what the model uses, not what causes the target: of two columns that tell the
  same, a model may use either.

  Args:
    config: Of the model's run.
    preprocessor: Of the model.
    state: Of the method; where that has a model for each client, of one client.
    num_rows: Rows that are drawn; the result has an error of a few per cent with 512.

  Returns:
    A number for each column of the table that varied in training, in the target's unit,
    the largest first. The inputs of a column, such as its categories, are drawn anew
    together.
  """
  with precision.float64():
    known = state.server.inputs
    if not isinstance(known, urk.InputSummary):
      known = input_summary.of_preprocessor(preprocessor)
    dtype = np.dtype(config.dtype)
    drawn = _draw(jax.random.key(_SEED), 2 * num_rows, known, dtype)
    rows, others = np.split(np.asarray(drawn), 2)
  places = _places(preprocessor)
  changed = np.tile(rows, (1 + len(places), 1, 1))
  for number, own in enumerate(places.values(), start=1):
    changed[number][:, own] = others[:, own]
  # At once: every call factors the kernel of all inducing inputs anew.
  mean, _ = prediction.predict(config, state, changed.reshape(-1, rows.shape[1]))
  mean = mean.reshape(len(changed), num_rows)
  found = np.sqrt(0.5 * np.mean(np.square(mean[1:] - mean[:1]), axis=1))
  series = pd.Series(found * preprocessor.target_std, list(places), name="relevance")
  return series.sort_values(ascending=False, kind="stable")


def length_scales(
  config: ml_collections.ConfigDict, preprocessor: Preprocessor, state: Any
) -> pd.DataFrame:
  """Reads the length-scales of a kernel that has one for each input.

  A length-scale says how far an input must move, in its standard deviations or scores,
  before the function has changed: a long one is that of an input which hardly matters
  to this part of the kernel. Parts of a sum have amplitudes too, so that only
  `relevance` compares inputs over all parts.

  Args:
    config: Of the model's run.
    preprocessor: Of the model.
    state: Of the method; where that has a model for each client, of one client.

  Returns:
    A row for each input, a column for each part of the kernel that has length-scales.

  Raises:
    InputError: If the kernel has no length-scale for each input.
  """
  names, label = preprocessor.input_names, kernels.name_of(config)
  theta = getattr(state.server.params, "theta", None)
  parts = {label: theta}
  if isinstance(theta, dict) and "parts" in theta:
    parts = dict(zip(urk.parts(label), theta["parts"], strict=True))
  found = {}
  for part, own in parts.items():
    for name, suffix in _SCALES.items():
      value = own.get(name) if isinstance(own, dict) else None
      if value is not None and np.shape(value) == (len(names),):
        found[f"{part}{suffix}"] = np.exp(np.asarray(value, np.float64))
  if not found:
    raise InputError(
      f"method {config.method!r} with kernel {label!r} has no length-scale for each "
      "input: ask for the relevance of columns."
    )
  return pd.DataFrame(found, index=pd.Index(names, name="input"))


def _places(preprocessor: Preprocessor) -> dict[str, list[int]]:
  """Finds the inputs that each column of the table has."""
  indicators = [c for c, values in preprocessor.categories for _ in values]
  marked = () if preprocessor.imputation is None else preprocessor.imputation.marked
  places: dict[str, list[int]] = {}
  owners = (*preprocessor.numeric_columns, *marked, *indicators)
  for place, column in enumerate(owners):
    places.setdefault(column, []).append(place)
  return places
