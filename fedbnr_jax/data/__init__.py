"""This room provides tables for regression: from files, by name, or synthetic.

Follow the data in this order: `reader`, `columns` and `tables` turn any file into a
`Dataset`; `uci` knows five public tables by name, which `archives` downloads;
`synthetic` draws tables from a known function; `preprocessing` standardises a dataset
by statistics of its training rows, or by `bounds` that were declared; `writer` writes a
table to a file.
"""

from fedbnr_jax.data import preprocessing, synthetic, tables, uci
from fedbnr_jax.data.bounds import Bounds, read_bounds
from fedbnr_jax.data.dataset import Dataset, Split, random_split
from fedbnr_jax.data.preprocessing import Preprocessor
from fedbnr_jax.data.tables import load_table, read_table
from fedbnr_jax.data.writer import write_table

__all__ = [
  "Bounds",
  "Dataset",
  "Preprocessor",
  "Split",
  "load_table",
  "preprocessing",
  "random_split",
  "read_bounds",
  "read_table",
  "synthetic",
  "tables",
  "uci",
  "write_table",
]
