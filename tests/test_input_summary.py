"""The summary of a table's inputs, and inducing inputs that are drawn from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbnr_jax.data import Preprocessor
from fedbnr_jax.gp.urk import inducing_inputs
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import input_summary
from tests.runs import assert_refused, tiny

RNG = np.random.default_rng(0)
SIZE = 2000
FRAME = pd.DataFrame(
  {
    "skewed": np.exp(RNG.normal(size=SIZE)),
    "colour": RNG.choice(["red", "green", "blue"], SIZE, p=[0.6, 0.3, 0.1]),
    "size": RNG.choice(["s", "l"], SIZE, p=[0.2, 0.8]),
  }
)
FRAME["related"] = np.log(FRAME["skewed"]) + 0.1 * RNG.normal(size=SIZE)
TRANSFORM = Preprocessor.fit(FRAME, RNG.normal(size=SIZE), "y")
INPUTS = TRANSFORM.transform(FRAME)


def _drawn() -> np.ndarray:
  summary = input_summary.summarise(INPUTS, TRANSFORM)
  return np.asarray(
    inducing_inputs.draw_inputs(jax.random.key(0), SIZE, summary, jnp.float64)
  )


def test_the_summary_is_the_same_whoever_holds_which_rows():
  sites = [input_summary.Site(part) for part in np.array_split(INPUTS, [3, 900])]

  def ask(question, arguments):
    first, *others = [site.answer(question, arguments) for site in sites]
    return {name: sum([o[name] for o in others], first[name]) for name in first}

  got = input_summary.from_sums(ask, TRANSFORM)
  whole = input_summary.summarise(INPUTS, TRANSFORM)
  for name, leaf in vars(whole).items():
    np.testing.assert_allclose(getattr(got, name), leaf, atol=1e-12, err_msg=name)
  assert_refused(lambda: sites[0].answer("rows", {}), "no question 'rows'")


def test_drawn_inputs_resemble_the_rows():
  drawn = _drawn()
  for d, name in enumerate(TRANSFORM.input_names):
    if "=" not in name:
      expected = np.quantile(INPUTS[:, d], [0.1, 0.5, 0.9])
      np.testing.assert_allclose(
        np.quantile(drawn[:, d], [0.1, 0.5, 0.9]), expected, atol=0.15
      )
  ranks = pd.DataFrame(drawn[:, :2]).corr(method="spearman").iloc[0, 1]
  expected = pd.DataFrame(INPUTS[:, :2]).corr(method="spearman").iloc[0, 1]
  np.testing.assert_allclose(ranks, expected, atol=0.02)


def test_drawn_categories_are_categories():
  drawn, names = _drawn(), TRANSFORM.input_names
  for column, categories in TRANSFORM.categories:
    places = [names.index(f"{column}={category}") for category in categories]
    rows = {tuple(row) for row in INPUTS[:, places]}
    assert {tuple(row) for row in drawn[:, places]} == rows
    np.testing.assert_allclose(
      drawn[:, places].mean(axis=0), INPUTS[:, places].mean(axis=0), atol=0.15
    )


def test_no_row_of_the_table_is_among_them():
  numeric = [d for d, name in enumerate(TRANSFORM.input_names) if "=" not in name]
  rows = {tuple(row) for row in INPUTS[:, numeric]}
  assert not rows & {tuple(row) for row in _drawn()[:, numeric]}


def test_only_kernels_that_draw_inputs_have_a_summary():
  fields = {"kernel": "matern32+linear", "method": "fedbnr-exact"}
  assert experiment_lib.build(tiny(**fields)).federation.inputs == ()
  built = experiment_lib.build(tiny(ard__basis="inducing", **fields))
  shapes = jax.tree.map(np.shape, built.federation.inputs)
  assert shapes == jax.tree.map(np.shape, input_summary.empty(1))
