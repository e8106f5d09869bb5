"""Bayesian linear regression from statistics that add over clients.

Model: y = Φw + ε, w ~ N(0, λ²I), ε ~ N(0, σ²I), with features Φ [N, M], one row a
data row. Everything is expressed by ρ = λ²/σ² and the Cholesky factor of
B = I + ρ ΦᵀΦ (all eigenvalues ≥ 1), never by an inverse of A = B/λ². Quadratic
forms are written so that an error of the solution enters squared.
"""

from fedbnr_jax.gp.blr.evidence import fit_evidence, improve_evidence
from fedbnr_jax.gp.blr.held_out import (
  ErrorSums,
  error_sums,
  held_out_noise,
  rescaled,
  scale_held_out_noise,
)
from fedbnr_jax.gp.blr.likelihood import negative_log_marginal_likelihood
from fedbnr_jax.gp.blr.majoriser import majoriser, scale_gradient
from fedbnr_jax.gp.blr.noise import (
  NoiseMoments,
  fit_noise,
  noise_moments,
  noise_ratio,
  scale_noise,
)
from fedbnr_jax.gp.blr.posterior import (
  MeanAndNoise,
  Posterior,
  covariance,
  mean_and_noise,
  negative_log_marginal_likelihood_from_stats,
  noise_variance,
  num_determined,
  partial_mean,
  posterior,
  predict,
  sample_weights,
  weight_covariance,
)
from fedbnr_jax.gp.blr.statistics import (
  SufficientStats,
  augmented_gram,
  empty_stats,
  masked,
  statistics_dtype,
  sufficient_stats,
  sum_stats,
)
from fedbnr_jax.gp.blr.triangle import pack, unpack

__all__ = [
  "ErrorSums",
  "MeanAndNoise",
  "NoiseMoments",
  "Posterior",
  "SufficientStats",
  "augmented_gram",
  "covariance",
  "empty_stats",
  "error_sums",
  "fit_evidence",
  "fit_noise",
  "held_out_noise",
  "improve_evidence",
  "majoriser",
  "masked",
  "mean_and_noise",
  "negative_log_marginal_likelihood",
  "negative_log_marginal_likelihood_from_stats",
  "noise_moments",
  "noise_ratio",
  "noise_variance",
  "num_determined",
  "pack",
  "partial_mean",
  "posterior",
  "predict",
  "rescaled",
  "sample_weights",
  "scale_gradient",
  "scale_held_out_noise",
  "scale_noise",
  "statistics_dtype",
  "sufficient_stats",
  "sum_stats",
  "unpack",
  "weight_covariance",
]
