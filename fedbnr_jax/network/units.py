"""Numbers of columns in their agreed units, and what was learnt of them in raw numbers.

Sums in fixed point keep their digits if numbers are near one.
"""

import dataclasses

import numpy as np

from fedbnr_jax.data import Preprocessor
from fedbnr_jax.network.schema import Schema, SiteTable


def in_units(schema: Schema, table: SiteTable) -> SiteTable:
  """Divides the numbers of a table by their units."""
  features = table.features.copy()
  for column in schema.numeric:
    features[column.name] = features[column.name] / column.unit
  return SiteTable(features, table.targets / schema.target.unit)


def from_units(schema: Schema, fitted: Preprocessor) -> Preprocessor:
  """Returns the preprocessor of raw numbers, given that of numbers in units."""
  units = {column.name: column.unit for column in schema.numeric}
  own = np.array([units[name] for name in fitted.numeric_columns])
  scale = np.ones(fitted.num_inputs)
  scale[: len(own)] = own
  imputation = fitted.imputation
  if imputation is not None:
    medians = tuple(float(m) for m in np.array(imputation.medians) * own)
    imputation = imputation._replace(medians=medians)
  return dataclasses.replace(
    fitted,
    input_mean=tuple((np.array(fitted.input_mean) * scale).tolist()),
    input_std=tuple((np.array(fitted.input_std) * scale).tolist()),
    target_mean=fitted.target_mean * schema.target.unit,
    target_std=fitted.target_std * schema.target.unit,
    numeric_ranges=tuple(
      (low * unit, high * unit)
      for (low, high), unit in zip(fitted.numeric_ranges, own.tolist(), strict=True)
    ),
    imputation=imputation,
  )
