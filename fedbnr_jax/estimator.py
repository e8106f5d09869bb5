"""The front door behind scikit-learn's interface; needs the extra `sklearn`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

try:
  from sklearn.base import BaseEstimator, RegressorMixin
  from sklearn.utils import check_random_state, column_or_1d
  from sklearn.utils.validation import (
    check_consistent_length,
    check_is_fitted,
    validate_data,
  )
except ImportError as error:
  raise ImportError(
    "FederatedGPRegressor needs scikit-learn 1.6 or newer: pip install "
    "'fedbnr-jax[sklearn]'."
  ) from error

from fedbnr_jax.fitting import fit_arrays
from fedbnr_jax.run.coverage import warn_of_coverage


class FederatedGPRegressor(RegressorMixin, BaseEstimator):
  """One global Gaussian process for regression, of rows that several clients hold.

  Parameters are fields of a config; see `fedbnr_jax.fit`, which does the work.

  Args:
    method: "auto", which tries `fedbnr-ard` in a few ways and trains the best; or one
      of `fedbnr_jax.algorithms.METHODS` with one model for all clients.
    num_clients: Clients that rows are dealt to where `fit` is given no labels.
    num_rounds: Rounds at most.
    num_local_steps: Optimiser steps of a client in a round.
    learning_rate: Of these steps.
    patience: Rounds without a better validation score before stopping; 0: the
      method's own.
    kernel: "deep", or one without a network, such as "gaussian"; not for "auto", which
      reads `options={"auto.kernels": ...}`.
    hidden_size: Width of the network.
    num_samples: Random draws of the kernel's features; not for "auto".
    inputs: "standard", or "scores" where columns have long tails; "auto" for what
      `fedbnr_jax.fit` does.
    missing: "error", or "impute" where X may have NaN.
    random_state: The seed; or, drawn from a generator, one that differs by call.
    options: Any other fields of a config, such as `{"fedloc.rho": 10.0}`.

  Attributes:
    model_: The trained `fedbnr_jax.Model`, without its training's rows.
    n_features_in_: Columns of X in `fit`.
    feature_names_in_: Their names, where X was a frame.
  """

  def __init__(
    self,
    method: str = "auto",
    *,
    num_clients: int = 10,
    num_rounds: int = 100,
    num_local_steps: int = 50,
    learning_rate: float = 1e-2,
    patience: int = 0,
    kernel: str = "deep",
    hidden_size: int = 200,
    num_samples: int = 50,
    inputs: str = "auto",
    missing: str = "error",
    random_state: Any = 0,
    options: Mapping[str, Any] | None = None,
  ) -> None:
    self.method = method
    self.num_clients = num_clients
    self.num_rounds = num_rounds
    self.num_local_steps = num_local_steps
    self.learning_rate = learning_rate
    self.patience = patience
    self.kernel = kernel
    self.hidden_size = hidden_size
    self.num_samples = num_samples
    self.inputs = inputs
    self.missing = missing
    self.random_state = random_state
    self.options = options

  def fit(self, X: Any, y: Any, clients: Any = None) -> "FederatedGPRegressor":
    """Trains on rows X [N, D] and targets y [N].

    Args:
      X: Numbers, an array or a frame.
      y: Numbers.
      clients: Labels [N] that say whose row it is; None to deal rows out.
    """
    X, y = validate_data(
      self,
      X,
      y,
      dtype=np.float64,
      ensure_min_samples=2,
      ensure_all_finite=self._finite,
      y_numeric=True,
    )
    y = column_or_1d(y, warn=True)
    if clients is not None:
      clients = column_or_1d(clients)
      check_consistent_length(X, clients)
    parameters = self.get_params(deep=False)
    options = parameters.pop("options") or {}
    parameters["seed"] = _seed(parameters.pop("random_state"))
    for name in ("inputs", "missing"):
      parameters[f"data.{name}"] = parameters.pop(name)
    trained = fit_arrays(X, y, clients, {**parameters, **options})
    # Without the rows, which a pickle of the estimator would carry along.
    self.model_ = dataclasses.replace(trained, source=None)
    return self

  def predict(self, X: Any, return_std: bool = False) -> Any:
    """Predicts the mean [N] of rows X [N, D].

    Args:
      X: Numbers, with the columns of `fit`.
      return_std: Whether to return the standard deviation [N] of y too. A warning then
        says if the training's test rows speak against it, and how many rows lie
        outside what was trained on.
    """
    check_is_fitted(self)
    X = validate_data(
      self, X, dtype=np.float64, reset=False, ensure_all_finite=self._finite
    )
    if return_std:
      warn_of_coverage(self.model_.summary)
    predicted = self.model_.predict(X, warn=return_std)
    mean = predicted["mean"].to_numpy()
    return (mean, predicted["std"].to_numpy()) if return_std else mean

  @property
  def _finite(self) -> bool | str:
    """What scikit-learn is to check of X."""
    return "allow-nan" if self.missing == "impute" else True

  def __sklearn_tags__(self) -> Any:
    tags = super().__sklearn_tags__()
    tags.input_tags.allow_nan = self.missing == "impute"
    return tags


def _seed(random_state: Any) -> int:
  """A seed for `fit`: an integer is one already, generators draw one."""
  if isinstance(random_state, int | np.integer):
    return int(random_state)
  return int(check_random_state(random_state).randint(2**31))
