"""σ and λ by the evidence of all rows: of the posterior, and fed back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbnr_jax import algorithms, blr, federation
from fedbnr_jax import config as config_lib
from tests.runs import assert_same_bits

KEY = jax.random.key(0)


@functools.cache
def _federation():
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(60, 3))
  targets = np.sin(2 * inputs.sum(1)) + 0.1 * rng.normal(size=60)
  parts = federation.partition("sorted", rng, inputs, targets, 4)
  built = federation.build(inputs, targets, parts)
  server = federation.ServerSet(
    jnp.asarray(rng.normal(size=(6, 3)), jnp.float32),
    jnp.asarray(rng.normal(size=6), jnp.float32),
  )
  return built.replace(server=server)


@functools.cache
def _rounds(method, feedback=False, num_rounds=2):
  config = config_lib.base()
  sizes = {"num_samples": 4, "hidden_size": 6, "latent_size": 2, "num_local_steps": 5}
  config.update({**sizes})
  config.kd.num_steps = 2
  config.evidence.feedback = feedback
  built = algorithms.method(method).build(config)
  round_ = jax.jit(built.round)
  states = [built.init(KEY, _federation())]
  for _ in range(num_rounds):
    states.append(round_(KEY, states[-1], _federation())[0])
  return states


@pytest.mark.parametrize("method", ["fedbnr", "fedbnr-kd"])
def test_posterior_has_the_scales_of_the_pooled_evidence(method):
  *_, state = _rounds(f"{method}-ev")
  np.testing.assert_allclose(
    blr.fit_evidence(state.stats),
    (state.posterior.noise_std, state.posterior.prior_std),
    rtol=1e-12,
  )
  *_, plain = _rounds(method)
  nll = blr.negative_log_marginal_likelihood_from_stats
  assert nll(state.stats, state.posterior) < nll(plain.stats, plain.posterior)


@pytest.mark.parametrize("method", ["fedbnr", "fedbnr-kd"])
def test_without_feedback_the_kernel_is_that_of_the_plain_method(method):
  *_, state = _rounds(f"{method}-ev")
  *_, plain = _rounds(method)
  assert_same_bits(state.params, plain.params)
  assert_same_bits(state.stats, plain.stats)


def test_with_feedback_training_goes_on_from_the_evidence():
  _, first, second = _rounds("fedbnr-ev", feedback=True)
  np.testing.assert_allclose(
    first.params.noise_std, first.posterior.noise_std, rtol=1e-6
  )
  np.testing.assert_allclose(
    first.params.prior_std, first.posterior.prior_std, rtol=1e-6
  )
  _, _, without = _rounds("fedbnr-ev")
  gap = jax.tree.map(
    lambda a, b: float(jnp.max(jnp.abs(a - b))), second.params, without.params
  )
  assert max(jax.tree.leaves(gap.theta)) > 1e-4
