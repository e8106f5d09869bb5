"""Slow, obvious reference implementations, in NumPy and float64."""

import itertools

import jax
import numpy as np
import optax


def rows(num_rows, num_features, seed=0, noise_std=0.3):
  """Features [N, M] and targets [N] of a linear model."""
  rng = np.random.default_rng(seed)
  features = rng.normal(size=(num_rows, num_features)) / np.sqrt(num_features)
  weights = rng.normal(size=num_features)
  return features, features @ weights + noise_std * rng.normal(size=num_rows)


def gp_covariance(features, noise_std, prior_std):
  """Covariance [N, N] of the targets under the prior."""
  noise = noise_std**2 * np.eye(len(features))
  return prior_std**2 * features @ features.T + noise


def gp_nll(features, targets, noise_std, prior_std):
  """−log N(y | 0, λ²ΦΦᵀ + σ²I)."""
  features, targets = np.asarray(features, float), np.asarray(targets, float)
  dense = gp_covariance(features, noise_std, prior_std)
  sign, log_det = np.linalg.slogdet(dense)
  assert sign == 1
  quadratic = targets @ np.linalg.solve(dense, targets)
  return 0.5 * (len(targets) * np.log(2 * np.pi) + log_det + quadratic)


def gp_gradient(features, targets, noise_std, prior_std):
  """Derivatives of `gp_nll` in Φ, y, σ, λ, in the singular basis: no large inverse."""
  features, targets = np.asarray(features, float), np.asarray(targets, float)
  noise_std, prior_std = float(noise_std), float(prior_std)
  left, values, right = np.linalg.svd(features, full_matrices=False)
  spectrum = prior_std**2 * values**2 + noise_std**2
  inside = left.T @ targets
  outside = targets - left @ inside
  solved = left @ (inside / spectrum) + outside / noise_std**2
  weights = right.T @ (values * inside / spectrum)
  trace = np.sum(1 / spectrum) + (len(targets) - len(values)) / noise_std**2
  shrunk = (left * (values / spectrum)) @ right
  return (
    prior_std**2 * (shrunk - np.outer(solved, weights)),
    solved,
    noise_std * (trace - solved @ solved),
    prior_std * (np.sum(values**2 / spectrum) - weights @ weights),
  )


def gp_predict(features, targets, query, noise_std, prior_std):
  """Mean and variance of y at query features by conditioning the joint Gaussian."""
  features, targets = np.asarray(features, float), np.asarray(targets, float)
  query = np.asarray(query, float)
  dense = gp_covariance(features, noise_std, prior_std)
  cross = prior_std**2 * query @ features.T
  mean = cross @ np.linalg.solve(dense, targets)
  prior = prior_std**2 * np.sum(query**2, axis=1) + noise_std**2
  return mean, prior - np.sum(cross * np.linalg.solve(dense, cross.T).T, axis=1)


def weight_posterior(features, targets, noise_std, prior_std):
  """Mean [M] and covariance [M, M] of the weights, by an explicit inverse."""
  precision = features.T @ features / noise_std**2
  precision = precision + np.eye(features.shape[1]) / prior_std**2
  covariance = np.linalg.inv(precision)
  return covariance @ features.T @ targets / noise_std**2, covariance


def mackay(features, targets, num_steps=2000):
  """MacKay's fixed point for (σ, λ)."""
  noise_std, prior_std = 0.5, 1.0
  num_rows, num_features = features.shape
  for _ in range(num_steps):
    mean, covariance = weight_posterior(features, targets, noise_std, prior_std)
    effective = num_features - np.trace(covariance) / prior_std**2
    squares = np.sum((targets - features @ mean) ** 2)
    prior_std = np.sqrt(mean @ mean / effective)
    noise_std = np.sqrt(squares / (num_rows - effective))
  return noise_std, prior_std


def matern(order, distance):
  """Matérn kernel of order ν = p + 1/2 and unit length-scale."""
  scaled = np.sqrt(2 * order) * distance
  factor = {0.5: 1.0, 1.5: 1.0 + scaled, 2.5: 1.0 + scaled + scaled**2 / 3}[order]
  return factor * np.exp(-scaled)


STATIONARY = {
  "gaussian": lambda gap: np.exp(-np.sum(gap**2, -1) / 2),
  "laplacian": lambda gap: np.exp(-np.sum(np.abs(gap), -1)),
  "cauchy": lambda gap: np.prod(1 / (1 + gap**2), -1),
  "matern12": lambda gap: matern(0.5, np.linalg.norm(gap, axis=-1)),
  "matern32": lambda gap: matern(1.5, np.linalg.norm(gap, axis=-1)),
  "matern52": lambda gap: matern(2.5, np.linalg.norm(gap, axis=-1)),
}


def multinomial_trials(num_inputs, degree):
  """Every outcome of the trials of the polynomial kernel, with its probability."""
  probability = np.array([0.5] + [0.5 / num_inputs] * num_inputs)
  outcomes = itertools.product(range(num_inputs + 1), repeat=degree)
  return [(np.array(named), np.prod(probability[list(named)])) for named in outcomes]


def loose(optimizer):
  """The optimiser without strict promotion: Optax's Adam raises a float to an int32."""

  def update(gradient, state, params=None):
    with jax.numpy_dtype_promotion("standard"):
      return optimizer.update(gradient, state, params)

  return optax.GradientTransformation(optimizer.init, update)
