"""σ and λ by the evidence of all rows: of the posterior, and fed back."""

import jax
import numpy as np
import pytest

from fedbnr_jax.gp import blr
from tests import methods
from tests.runs import assert_same_bits


@pytest.mark.parametrize("method", ["fedbnr", "fedbnr-kd"])
def test_posterior_has_the_scales_of_the_pooled_evidence(method):
  server = methods.two_rounds(f"{method}-ev").last.server
  np.testing.assert_allclose(
    jax.jit(blr.fit_evidence)(server.stats),
    (server.posterior.noise_std, server.posterior.prior_std),
    rtol=1e-9,
  )
  plain = methods.two_rounds(method).last.server
  nll = jax.jit(blr.negative_log_marginal_likelihood_from_stats)
  # As they are trained, and without the noise that varies: the same of both.
  constant = server.posterior.replace(noise_weights=None, noise_offset=None)
  assert nll(server.stats, constant) < nll(plain.stats, plain.posterior)


@pytest.mark.parametrize("method", ["fedbnr", "fedbnr-kd"])
def test_without_feedback_the_kernel_is_that_of_the_plain_method(method):
  server = methods.two_rounds(f"{method}-ev").last.server
  plain = methods.two_rounds(method).last.server
  assert_same_bits(server.params, plain.params)
  assert_same_bits(server.stats, plain.stats)


def test_with_feedback_training_goes_on_from_the_evidence():
  states, _ = methods.two_rounds("fedbnr-ev", evidence__feedback=True)
  first, second = states[1].server, states[2].server
  np.testing.assert_allclose(
    (first.params.noise_std, first.params.prior_std),
    (first.posterior.noise_std, first.posterior.prior_std),
    rtol=1e-12,
  )
  plain = methods.two_rounds("fedbnr-ev").states
  assert_same_bits(plain[1].server.params.theta, first.params.theta)
  gap = jax.tree.map(
    lambda a, b: np.max(np.abs(a - b)),
    second.params.theta,
    plain[2].server.params.theta,
  )
  assert max(jax.tree.leaves(gap)) > 1e-4
