"""What a user who may pool would take: boosting in its kinds, and a dense process.

A model is a function of a run, whose splits and standardisation it shares, and returns
Gaussian predictions of its validation and test rows. All are single-threaded, stop or
choose on validation rows, and see nothing of the test rows but their inputs. Those that
predict no variance get that of their validation residuals.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbnr_jax.run.experiment import Experiment

_PATIENCE = 50  # Trees without a better validation score.
_MAX_TREES = 6000
# NGBoost's trees are slow: beyond this, each sees a sample of the rows and inputs.
_NGBOOST_ROWS, _NGBOOST_INPUTS = 4000, 50


class Gaussian(NamedTuple):
  """Means [N] and variances [N] of standardised targets."""

  mean: np.ndarray
  variance: np.ndarray


class Predictions(NamedTuple):
  """What a model says of the rows that it was not trained on."""

  validation: Gaussian
  test: Gaussian
  settings: dict[str, Any]  # What validation rows have chosen.


def boosting(run: Experiment) -> Predictions:
  """Scikit-learn's histogram boosting, as benchmarks/boosting.py tunes it."""
  from benchmarks import boosting as reference

  fitted = reference.fit(run)
  return _with_residual_variance(run, fitted.validation, fitted.test, fitted.settings)


def lightgbm(run: Experiment) -> Predictions:
  """LightGBM with its own treatment of categories, the best of six settings."""
  import lightgbm as package

  frames = _frames(run)
  data = package.Dataset(frames.train, frames.y)
  held_out = package.Dataset(frames.validation, np.asarray(run.validation.y), data)
  best, lowest = None, np.inf
  for leaves, share in itertools.product((15, 31, 63), (0.6, 1.0)):
    settings = {"num_leaves": leaves, "feature_fraction": share}
    trees = package.train(
      {
        **settings,
        **{"objective": "l2", "learning_rate": 0.05, "min_data_in_leaf": 5},
        **{"bagging_fraction": 0.8, "bagging_freq": 1, "num_threads": 1},
        **{"seed": run.config.seed, "deterministic": True, "verbosity": -1},
        "feature_pre_filter": False,
      },
      data,
      _MAX_TREES,
      valid_sets=[held_out],
      callbacks=[package.early_stopping(_PATIENCE, verbose=False)],
    )
    error = trees.best_score["valid_0"]["l2"]
    if error < lowest:
      best, lowest = (trees, settings | {"trees": trees.best_iteration}), error
  trees, settings = best
  return _with_residual_variance(
    run, trees.predict(frames.validation), trees.predict(frames.test), settings
  )


def catboost(run: Experiment) -> Predictions:
  """CatBoost that predicts mean and variance, the better of two depths."""
  trees, frames, settings = _best_catboost(run, "RMSEWithUncertainty")
  said = (trees.predict(rows) for rows in (frames.validation, frames.test))
  return Predictions(*(Gaussian(one[:, 0], one[:, 1]) for one in said), settings)


def catboost_rmse(run: Experiment) -> Predictions:
  """CatBoost that predicts a mean alone, the better of two depths."""
  trees, frames, settings = _best_catboost(run, "RMSE")
  return _with_residual_variance(
    run, trees.predict(frames.validation), trees.predict(frames.test), settings
  )


def ngboost(run: Experiment) -> Predictions:
  """NGBoost's Gaussian, with its default trees."""
  from ngboost import NGBRegressor

  from benchmarks.boosting import training_rows

  x, y = training_rows(run)
  held_out = np.asarray(run.validation.x), np.asarray(run.validation.y)
  trees = NGBRegressor(
    n_estimators=3000,
    learning_rate=0.03,
    minibatch_frac=min(1.0, _NGBOOST_ROWS / len(x)),
    col_sample=min(1.0, _NGBOOST_INPUTS / x.shape[1]),
    random_state=run.config.seed,
    verbose=False,
  ).fit(x, y, *held_out, early_stopping_rounds=_PATIENCE)

  def said(rows: np.ndarray) -> Gaussian:
    normal = trees.pred_dist(rows, max_iter=trees.best_val_loss_itr)
    return Gaussian(normal.loc, normal.scale**2)

  settings = {"trees": int(trees.best_val_loss_itr) + 1}
  return Predictions(said(held_out[0]), said(np.asarray(run.test.x)), settings)


def dense(run: Experiment) -> Predictions:
  """A dense ARD Gaussian process of some of the rows."""
  from benchmarks import dense_process
  from benchmarks.boosting import training_rows

  process = dense_process.fit(*training_rows(run), seed=run.config.seed)
  said = (process.predict(np.asarray(rows.x)) for rows in (run.validation, run.test))
  settings = {"rows": len(process.y), "evaluations": process.num_evaluations}
  return Predictions(*(Gaussian(*one) for one in said), settings)


class Model(NamedTuple):
  """A model, and the package that it needs."""

  predict: Callable[[Experiment], Predictions]
  package: str


MODELS: dict[str, Model] = {
  "boosting": Model(boosting, "sklearn"),
  "lightgbm": Model(lightgbm, "lightgbm"),
  "catboost": Model(catboost, "catboost"),
  "catboost-rmse": Model(catboost_rmse, "catboost"),
  "ngboost": Model(ngboost, "ngboost"),
  "dense": Model(dense, "jax"),
}


# ---------------------------------------------------------------- what they share


class _Frames(NamedTuple):
  """Raw columns, categories as such, with training targets that are standardised."""

  train: pd.DataFrame
  y: np.ndarray
  validation: pd.DataFrame
  test: pd.DataFrame
  categorical: list[str]


def _frames(run: Experiment) -> _Frames:
  features, split = run.dataset.features, run.split
  texts = [c for c in features if not pd.api.types.is_numeric_dtype(features[c])]
  # LightGBM knows categories by this type; those of held-out rows alone are missing.
  known = {c: sorted(features[c].iloc[split.train].unique()) for c in texts}
  frame = features.assign(
    **{c: pd.Categorical(features[c], categories=known[c]) for c in texts}
  )
  # JSON's special characters are not allowed in LightGBM's names.
  frame.columns = [f"c{number}" for number in range(frame.shape[1])]
  names = [frame.columns[features.columns.get_loc(c)] for c in texts]
  parts = (frame.iloc[rows] for rows in (split.train, split.validation, split.test))
  train, validation, test = parts
  y = run.preprocessor.standardise(run.dataset.targets)[split.train]
  return _Frames(train, y, validation, test, names)


def _best_catboost(run: Experiment, loss: str) -> tuple[Any, _Frames, dict[str, Any]]:
  """Trains CatBoost with early stopping on validation rows, which choose the depth."""
  from catboost import CatBoostRegressor

  frames = _frames(run)

  def as_texts(frame: pd.DataFrame) -> pd.DataFrame:
    columns = {
      c: frame[c].astype(object).fillna("unseen").astype(str)
      for c in frames.categorical
    }
    return frame.assign(**columns)

  frames = frames._replace(
    train=as_texts(frames.train),
    validation=as_texts(frames.validation),
    test=as_texts(frames.test),
  )
  held_out = frames.validation, np.asarray(run.validation.y)
  best, lowest, settings = None, np.inf, {}
  for depth in (4, 6):
    trees = CatBoostRegressor(
      loss_function=loss,
      iterations=_MAX_TREES,
      learning_rate=0.05,
      depth=depth,
      early_stopping_rounds=_PATIENCE,
      thread_count=1,
      random_seed=run.config.seed,
      cat_features=frames.categorical,
      allow_writing_files=False,
      verbose=False,
    ).fit(frames.train, frames.y, eval_set=held_out, use_best_model=True)
    score = trees.best_score_["validation"][loss]
    if score < lowest:
      best, lowest = trees, score
      settings = {"depth": depth, "trees": trees.tree_count_}
  return best, frames, settings


def _with_residual_variance(
  run: Experiment, validation: np.ndarray, test: np.ndarray, settings: dict[str, Any]
) -> Predictions:
  """Gives means the one variance that validation residuals have."""
  variance = float(np.mean(np.square(np.asarray(run.validation.y) - validation)))
  return Predictions(
    Gaussian(validation, np.full_like(validation, variance)),
    Gaussian(test, np.full_like(test, variance)),
    settings,
  )
