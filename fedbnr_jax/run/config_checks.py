"""Checks that every field of a config has a value that some run can have."""

import math

import ml_collections

from fedbnr_jax.algorithms import exact, noise, pfedgp
from fedbnr_jax.data import columns, preprocessing
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import aggregation
from fedbnr_jax.federated.participation import STATISTICS_FROM
from fedbnr_jax.federated.partition import PARTITIONERS
from fedbnr_jax.gp import experts, urk
from fedbnr_jax.names import require_choice
from fedbnr_jax.run.config import AUTO, get

_AT_LEAST_ONE = (
  "num_rounds",
  "num_local_steps",
  "hidden_size",
  "num_hidden_layers",
  "latent_size",
  "shifter_size",
  "num_seeds",
  "pfedgp.num_inducing",
  "fedloc.num_inducing",
  "fedloc.num_iterations",
  "sparse.num_steps",
  "sparse.start_steps",
)
_POSITIVE = (
  "learning_rate",
  "length_scale",
  "initial_noise_std",
  "initial_prior_std",
  "min_noise_std",
  "fedloc.rho",
  "fedloc.proximity",
  "fedloc.length_scale",
  "ard.length_scale",
  "additive.length_scale",
)
_CHOICES = {
  "dtype": ("float32", "float64"),
  "partition": ("auto", "column", *PARTITIONERS),
  "data.source": ("synthetic", "uci", "table"),
  "data.inputs": (AUTO, *preprocessing.INPUTS),
  "data.missing": columns.MISSING,
  "mean.scales": aggregation.SCALES,
  "statistics_from": STATISTICS_FROM,
  "stop_on": ("rmse", "nll"),
  "exact.optimizer": tuple(exact.OPTIMIZERS),
  "noise": noise.NOISES,
  "evidence.noise": noise.NOISES,
  "exact.noise": noise.NOISES,
  "sparse.noise": noise.NOISES,
  "ard.basis": urk.BASES,
  "sparse.basis": urk.BASES,
  "ridge.basis": urk.BASES,
  "additive.spectrum": tuple(urk.PROFILES),
  "pfedgp.objective": pfedgp.OBJECTIVES,
  "fedloc.rule": tuple(experts.RULES),
}


def validate(config: ml_collections.ConfigDict) -> None:
  """Raises InputError for a value that no run can have."""
  if "method" not in config:
    raise InputError(
      "this config has no field 'method', and so is none of a training: see "
      "configs/default.py; those of sweeps are for launch.sweep."
    )
  for name in _AT_LEAST_ONE:
    value = get(config, name)
    if value < 1:
      raise InputError(f"config.{name} must be at least 1, got {value}.")
  for name in _POSITIVE:
    value = get(config, name)
    if not 0 < value < math.inf:
      raise InputError(f"config.{name} must be a positive number, got {value}.")
  for name, choices in _CHOICES.items():
    require_choice(f"config.{name}", get(config, name), choices)
  if config.num_clients < 1:
    raise InputError(
      f"config.num_clients must be at least 1, got {config.num_clients}."
    )
  for name in ("num_samples", "sparse.num_samples", "ridge.num_samples"):
    if get(config, name) < 2:
      raise InputError(f"config.{name} must be at least 2, got {get(config, name)}.")
  for name, zero in (
    ("posterior_samples", "as many as in training"),
    ("sparse.posterior_samples", "as many as in training"),
    ("sparse.start_samples", "none before config.sparse.num_samples"),
  ):
    value = get(config, name)
    if value < 0 or value == 1:
      raise InputError(
        f"config.{name} must be at least 2, or 0 for {zero}, got {value}."
      )
  if config.min_noise_std > config.initial_noise_std:
    raise InputError(
      f"config.min_noise_std ({config.min_noise_std}) must not exceed "
      f"config.initial_noise_std ({config.initial_noise_std})."
    )
  if not 0 <= config.seed <= 2**32 - config.num_seeds:
    raise InputError(
      f"config.seed must be from 0 to 2**32 - {config.num_seeds}, got {config.seed}."
    )
  for name in (
    "central.learning_rate",
    "fedprox.learning_rate",
    "pfedgp.learning_rate",
  ):
    if not 0 <= get(config, name) < math.inf:
      raise InputError(
        f"config.{name} must be a positive number, or 0 for the common one, got "
        f"{get(config, name)}."
      )
  if not 0 <= config.fedprox.mu < math.inf:
    raise InputError(
      f"config.fedprox.mu must not be negative, got {config.fedprox.mu}."
    )
  for name in (
    "patience",
    "exact.local_steps",
    "exact.warm_start_rounds",
    "central.num_steps",
  ):
    if get(config, name) < 0:
      raise InputError(f"config.{name} must not be negative, got {get(config, name)}.")
  for name, private in (("data.inputs", "standard"), ("data.missing", "error")):
    if config.data.bounds and get(config, name) not in (private, AUTO):
      raise InputError(
        f"config.{name} is {get(config, name)!r}, but quantiles of the rows would give "
        f"away what config.data.bounds is to keep: choose {private!r}, or leave the "
        "bounds out."
      )
  _validate_calibration(config.data)
  _validate_distillation(config.kd)
  _validate_layout(config)


def _validate_layout(config: ml_collections.ConfigDict) -> None:
  """Who takes part in a round, and where and in what portions it is computed."""
  if not 0 < config.participation <= 1:
    raise InputError(
      "config.participation must lie above 0 and be at most 1, got "
      f"{config.participation}."
    )
  if not 0 <= config.dropout < 1:
    raise InputError(
      f"config.dropout must be at least 0 and below 1, got {config.dropout}."
    )
  for name, otherwise in (
    ("client_batch_size", "0 to choose by shape and device"),
    ("mesh", "0 for all devices"),
    ("stream_clients", "0 to keep all clients on the device"),
  ):
    if config[name] < 0:
      raise InputError(
        f"config.{name} must be at least 1, or {otherwise}, got {config[name]}."
      )
  if config.num_seeds > 1:
    for name in ("stream_clients", "compare_clients"):
      if config[name]:
        raise InputError(
          f"config.num_seeds and config.{name} do not go together: train the seeds one "
          "after another, as launch.sweep does."
        )


def _validate_calibration(data: ml_collections.ConfigDict) -> None:
  if not 0 <= data.calibration <= 0.5:
    raise InputError(
      "config.data.calibration is a share of the training rows and must be from 0 to "
      f"0.5, got {data.calibration}."
    )
  if data.calibration_folds < 0 or data.calibration_folds == 1:
    raise InputError(
      "config.data.calibration_folds must be at least 2, or 0 for none, got "
      f"{data.calibration_folds}."
    )


def _validate_distillation(kd: ml_collections.ConfigDict) -> None:
  if kd.num_steps < 1:
    raise InputError(f"config.kd.num_steps must be at least 1, got {kd.num_steps}.")
  if not 0 < kd.learning_rate < math.inf:
    raise InputError(
      f"config.kd.learning_rate must be a positive number, got {kd.learning_rate}."
    )
  if not 0 <= kd.alpha < math.inf:
    raise InputError(f"config.kd.alpha must not be negative, got {kd.alpha}.")
  if not 0 < kd.fraction < 1:
    raise InputError(f"config.kd.fraction must lie between 0 and 1, got {kd.fraction}.")
