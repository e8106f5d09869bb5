"""How each method predicts from given rows, under a kernel that was learnt beforehand.

The synthetic study fixes the kernels so that methods differ only in whose rows they
predict from: pFedGP from those of one client, FedLoc from each client's separately,
FedBNR from the sum over clients.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from fedbnr_jax.algorithms import kernels, pfedgp
from fedbnr_jax.gp import blr, experts, fitc, networks
from fedbnr_jax.gp.kernel_model import features_of
from fedbnr_jax.run import config as config_lib
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from fedbnr_jax.run.experiment import Experiment
from fedbnr_jax.run.program import make_program

# Methods, and the method whose training learns their kernel from all rows.
KERNEL_OF = {
  "pfedgp": "pfedgp",
  "fedloc": "fedloc",
  "fedloc-poe": "fedloc",
  "fedbnr": "central",
}
METHODS = tuple(KERNEL_OF)


class ClientRows(NamedTuple):
  """Standardised rows of one client, padded to N."""

  x: jax.Array  # [N, 1]
  y: jax.Array  # [N]
  mask: jax.Array  # [N] bool, False for padding.


Prediction = tuple[jax.Array, jax.Array]  # Mean [G], variance [G].
# Maps the rows of all clients, the client that predicts being the last, and inputs
# x [G, 1] to a prediction.
Predict = Callable[[tuple[ClientRows, ...], jax.Array], Prediction]
# The same for a trained state and a key, which come first.
_PredictUnder = Callable[
  [Any, jax.Array, tuple[ClientRows, ...], jax.Array], Prediction
]


def learn(
  base: ml_collections.ConfigDict, seeds: Iterable[int]
) -> Iterator[tuple[dict[str, Predict], Experiment]]:
  """Trains the kernels of each seed on all of its rows, as those of one client.

  Programs are compiled for the first seed and serve the others.

  Args:
    base: Config of every training, except for the method and the seed.
    seeds: Of rows and trainings.

  Yields:
    For each seed, a prediction function for each of `METHODS`, and the experiment,
    which holds the rows and their standardisation.
  """
  programs: dict[str, training.Program] = {}
  predictors = {
    "pfedgp": jax.jit(_pfedgp(base)),
    "fedloc": jax.jit(_fedloc(base, "rbcm")),
    "fedloc-poe": jax.jit(_fedloc(base, "poe")),
    "fedbnr": jax.jit(_fedbnr(base)),
  }
  for seed in seeds:
    states = {}
    for trained in dict.fromkeys(KERNEL_OF.values()):
      config = ml_collections.ConfigDict(base.to_dict())
      config.method, config.seed = trained, seed
      if trained != "central":
        config.kernel = config_lib.base().kernel  # They have kernels of their own.
      experiment = experiment_lib.build(config)
      if trained not in programs:
        programs[trained] = make_program(experiment.algorithm, transform=jax.jit)
      states[trained] = training.train(experiment, programs[trained]).state.server
    key = jax.random.key(seed)
    models: dict[str, Predict] = {
      method: functools.partial(predictors[method], states[trained], key)
      for method, trained in KERNEL_OF.items()
    }
    yield models, experiment


def _fedbnr(config: ml_collections.ConfigDict) -> _PredictUnder:
  """FedBNR predicts from the summed statistics of all clients."""
  feature_map = kernels.from_config(config)

  def predict(
    state: Any, key: jax.Array, clients: tuple[ClientRows, ...], x: jax.Array
  ) -> Prediction:
    del key
    params = state.params
    features = functools.partial(features_of, feature_map, params.theta, state.omega)
    parts = [
      blr.sufficient_stats(features(rows.x), rows.y, rows.mask) for rows in clients
    ]
    stats = functools.reduce(lambda a, b: a + b, parts)
    scales = (params.noise_std, params.prior_std)
    fitted = blr.posterior(stats, *(jnp.asarray(s, stats.gram.dtype) for s in scales))
    return blr.predict(fitted, features(x))

  return predict


def _pfedgp(config: ml_collections.ConfigDict) -> _PredictUnder:
  """pFedGP predicts from a Gaussian process of the last client's rows alone."""
  network = networks.Extractor(
    config.hidden_size,
    config.latent_size,
    config.num_hidden_layers,
    jnp.dtype(config.dtype),
  )

  def predict(
    state: Any, key: jax.Array, clients: tuple[ClientRows, ...], x: jax.Array
  ) -> Prediction:
    del key
    params, own = state.params, clients[-1]

    def embed(x: jax.Array) -> jax.Array:
      return pfedgp.embedding(
        network, params.network, x, normalise=config.pfedgp.normalise
      )

    fitted = fitc.fit(embed(own.x), own.y, params.inducing, params.scales, own.mask)
    mean, variance = fitc.predict(fitted, embed(x))
    return mean, variance + fitted.params.noise_variance

  return predict


def _fedloc(config: ml_collections.ConfigDict, rule: str) -> _PredictUnder:
  """FedLoc fuses the predictions of a Gaussian process of each client's rows."""

  def predict(
    state: Any, key: jax.Array, clients: tuple[ClientRows, ...], x: jax.Array
  ) -> Prediction:
    predictions = []
    for rows in clients:
      inducing = fitc.choose_inducing(
        key, rows.x, rows.mask, config.fedloc.num_inducing
      )
      fitted = fitc.fit(rows.x, rows.y, inducing, state.params, rows.mask)
      predictions.append(fitc.predict(fitted, x))
    means, variances = (jnp.stack(part) for part in zip(*predictions, strict=True))
    mean, variance = experts.fuse(rule, means, variances, fitted.params.prior_variance)
    return mean, variance + fitted.params.noise_variance

  return predict
