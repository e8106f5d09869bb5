"""Tables for regression: read from files, known by name, or drawn from a function.

Follow the data in this order: `reader`, `columns` and `tables` turn any file into a
`Dataset`; `uci` knows five public ones by name, which `archives` fetches; `synthetic`
draws some; `preprocessing` puts a split dataset on one scale.
"""

from fedbnr_jax.data import preprocessing, synthetic, tables, uci
from fedbnr_jax.data.dataset import Dataset, Split, random_split
from fedbnr_jax.data.preprocessing import Preprocessor
from fedbnr_jax.data.tables import load_table, read_table
from fedbnr_jax.data.writer import write_table

__all__ = [
  "Dataset",
  "Preprocessor",
  "Split",
  "load_table",
  "preprocessing",
  "random_split",
  "read_table",
  "synthetic",
  "tables",
  "uci",
  "write_table",
]
