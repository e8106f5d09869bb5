"""Who takes part in a round, and what a round of some clients is."""

import functools

import chex
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbnr_jax.federated.local_steps import descend, keep_above
from fedbnr_jax.federated.optimizers import adam
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import evidence_loss, features_of
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from tests import methods, oracles
from tests.methods import KEY, NUM_CLIENTS
from tests.runs import (
  StopError,
  assert_refused,
  assert_same_bits,
  claimed,
  stop_after,
  timeless,
  tiny,
)

KEYS = jax.random.split(jax.random.key(0), 2000)

# ------------------------------------------------------------------------- the draw


@functools.cache
def _drawing(rule, num_clients):
  return jax.jit(jax.vmap(lambda key: rule.draw(key, num_clients)))


def _draws(rule, num_clients, num_keys=2000):
  """[keys, K] bool."""
  return np.asarray(_drawing(rule, num_clients)(KEYS))[:num_keys]


@given(st.floats(1e-6, 1.0), st.sampled_from([1, 2, 7, 30]), st.integers(0, 10**6))
def test_as_many_are_sampled_as_the_fraction_says(fraction, num_clients, seed):
  rule = Participation(fraction)
  drawn = np.asarray(rule.draw(jax.random.key(seed), num_clients))
  assert drawn.shape == (num_clients,)
  assert int(drawn.sum()) == rule.num_sampled(num_clients)
  assert 1 <= rule.num_sampled(num_clients) <= num_clients
  assert abs(rule.num_sampled(num_clients) - fraction * num_clients) < 1


def test_all_clients_are_equally_likely_and_independent_of_their_place():
  draws = _draws(Participation(0.5), 10)
  assert set(draws.sum(axis=1)) == {5}
  # Of a fair draw, the sum over clients is chi-square with 9 degrees of freedom.
  gaps = (draws.mean(axis=0) - 0.5) ** 2 / (0.5 * 0.5 / len(draws))
  assert gaps.sum() * 0.9 < 30
  # And every pair comes as often: 5 · 4 of 10 · 9.
  together = draws.T.astype(float) @ draws / len(draws)
  pairs = together[np.triu_indices(10, 1)]
  np.testing.assert_allclose(pairs, 20 / 90, atol=0.04)


def test_same_key_same_clients_other_key_others():
  rule = Participation(0.5, 0.2)
  draws = _draws(rule, 10, 50)
  np.testing.assert_array_equal(draws, _draws(rule, 10, 50))
  assert len(np.unique(draws, axis=0)) > 40


@pytest.mark.parametrize("dropout", [0.2, 0.9])
def test_sampled_clients_drop_out_at_their_rate(dropout):
  draws = _draws(Participation(0.5, dropout), 10)
  np.testing.assert_allclose(draws.mean(), 0.5 * (1 - dropout), atol=0.02)
  np.testing.assert_allclose(draws.mean(axis=0), 0.5 * (1 - dropout), atol=0.06)
  assert draws.sum(axis=1).max() <= 5
  without = _draws(Participation(0.5), 10)
  assert np.all(without | ~draws)  # Only of those that were sampled.


def test_rule_of_everyone():
  assert Participation().is_full
  assert not Participation(0.5).is_full
  assert not Participation(1.0, 0.1).is_full


@pytest.mark.parametrize(
  "rule, part",
  [
    (Participation(0.0), "participation"),
    (Participation(1.5), "participation"),
    (Participation(float("nan")), "participation"),
    (Participation(0.5, 1.0), "dropout"),
    (Participation(0.5, -0.1), "dropout"),
    (Participation(0.5, 0.1, "answring"), "did you mean 'answering'"),
  ],
)
def test_what_is_no_rule_is_refused(rule, part):
  assert_refused(rule.check, part)


# ------------------------------------------------------------------------ the round

FEATURE_MAP = urk.random_fourier(3)
SOME = {"participation": 0.6, "dropout": 0.3}
RULES = {
  "all": SOME,
  "answering": SOME | {"statistics_from": "answering"},
}


def _program(name):
  return methods.compiled("fedbnr", **RULES[name])


@functools.cache
def _local():
  """The two local steps of one client, and its features, compiled for speed alone."""
  config = methods.config("fedbnr")

  def local(params, omega, rows):
    return descend(
      lambda params: evidence_loss(
        FEATURE_MAP, params, omega, rows.x, rows.y, rows.mask
      ),
      adam(config.learning_rate),
      config.num_local_steps,
      params,
      functools.partial(keep_above, config.min_noise_std),
    )

  return jax.jit(local)


def _loop(server, data, answered):
  """The mean of what exactly these clients make of the parameters."""
  results = {
    k: jax.device_get(_local()(server.params, server.omega, methods.rows_of(data, k)))
    for k in np.flatnonzero(answered)
  }
  params = [params for params, _ in results.values()]
  mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *params)
  mean = mean.replace(
    **{
      name: np.log(np.mean([np.exp(getattr(p, name)) for p in params]))
      for name in ("log_noise_std", "log_prior_std")
    }
  )
  return mean, {k: losses[-1] for k, (_, losses) in results.items()}


@functools.cache
def _features():
  return jax.jit(lambda *kernel_and_rows: features_of(FEATURE_MAP, *kernel_and_rows))


def _dense(server, data, chosen):
  """Features and targets of the rows of these clients."""
  x = data.clients.x.reshape(-1, 2)
  features = np.asarray(_features()(server.params.theta, server.omega, x))
  mask = data.clients.mask & np.asarray(chosen)[:, None]
  return features[mask.ravel()], data.clients.y[mask]


@pytest.mark.parametrize("name", RULES)
def test_round_is_that_of_exactly_the_clients_that_answered(name):
  data, program = methods.small(), _program(name)
  states, infos = methods.run(program, data, 4)
  predict = jax.jit(blr.predict)
  for number, info in enumerate(infos):
    before, after = states[number].server, states[number + 1].server
    answered = np.asarray(program.algorithm.draw(jax.random.key(number), NUM_CLIENTS))
    assert answered.any()
    np.testing.assert_array_equal(info.answered, answered)
    expected, losses = _loop(before, data, answered)
    chex.assert_trees_all_close(after.params, expected, rtol=1e-9, atol=1e-11)
    for k in range(NUM_CLIENTS):
      np.testing.assert_allclose(info.client_loss[k], losses.get(k, 0.0), rtol=1e-9)

    chosen = answered if name == "answering" else np.ones(NUM_CLIENTS, bool)
    assert int(after.num_clients) == chosen.sum()
    features, y = _dense(after, data, chosen)
    assert int(after.stats.count) == len(y)
    scales = float(after.params.noise_std), float(after.params.prior_std)
    mean, covariance = oracles.weight_posterior(features, y, *scales)
    np.testing.assert_allclose(after.posterior.mean, mean, rtol=1e-8, atol=1e-10)
    everything, _ = _dense(after, data, np.ones(NUM_CLIENTS, bool))
    spread = np.sum((everything @ covariance) * everything, axis=1) + scales[0] ** 2
    _, variance = predict(after.posterior, everything)
    np.testing.assert_allclose(variance, spread, rtol=1e-8)
    nll = oracles.gp_nll(features, y, *scales) / len(y)
    np.testing.assert_allclose(info.train_nll, nll, rtol=1e-8)
  assert len({int(info.answered.sum()) for info in infos}) > 1


@pytest.mark.parametrize("name", RULES)
def test_round_without_an_answer_changes_no_bit(name):
  data, program = methods.small(), _program(name)
  rule = program.algorithm.participation
  nobody = KEYS[int(np.flatnonzero(~_draws(rule, NUM_CLIENTS).any(axis=1))[0])]
  state = jax.device_get(program.init(KEY, data))
  for number in range(3):  # Also in the first round, before any posterior.
    after, info = jax.device_get(program.round(nobody, state, data))
    server = after.server.replace(num_rounds=state.server.num_rounds)
    assert_same_bits(after.replace(server=server), state)
    assert int(after.server.num_rounds) == int(state.server.num_rounds) + 1
    assert not np.any(info.answered)
    assert np.isfinite(info.train_nll)
    state, _ = jax.device_get(program.round(jax.random.key(number), after, data))
  assert int(state.server.num_rounds) == 6


def test_everyone_by_a_rule_is_the_round_without_one():
  """To the bit where nothing is drawn; a draw of all sums in another order."""
  plain = methods.two_rounds("fedbnr")
  for fields in ({"statistics_from": "answering"}, {"participation": 0.95}):
    states, infos = methods.two_rounds("fedbnr", **fields)
    assert all(np.all(info.answered) for info in infos)
    if "participation" in fields:
      chex.assert_trees_all_close((states, infos), tuple(plain), rtol=1e-9, atol=1e-10)
    else:
      assert_same_bits((states, infos), tuple(plain))


def test_floats_are_those_of_a_client_that_answers():
  infos = [methods.two_rounds("fedbnr", **fields).infos[0] for fields in ({}, SOME)]
  assert int(infos[0].floats_up) == int(infos[1].floats_up)


def test_rounds_of_some_are_one_trace():
  methods.two_rounds("fedbnr", **SOME)
  traces = methods.compiled("fedbnr", **SOME).traces
  assert len(traces) == len(set(traces)) > 0


# --------------------------------------------------------------------- the training


def test_records_say_how_many_answered_and_whose_rows_are_in_the_posterior():
  experiment, _, result = methods.some_rounds()
  rule = experiment.algorithm.participation
  assert rule == Participation(0.4, 0.6, "answering")
  answered = []
  for number in range(1, 5):
    key = jax.random.fold_in(experiment.key_rounds, number)
    answered.append(int(rule.draw(key, 5).sum()))
  assert [r["clients_answered"] for r in result.history] == answered
  assert min(answered) == 0
  assert max(answered) > 0
  last = 0  # Where nobody answers, what was there before stays.
  for record in result.history:
    last = record["clients_answered"] or last
    assert record["clients_in_posterior"] == last
    assert all(np.isfinite(value) for value in record.values())


def test_resuming_draws_the_same_clients(tmp_path):
  experiment, program, straight = methods.some_rounds()
  folder = claimed(tmp_path / "run", experiment)
  with pytest.raises(StopError):
    training.train(experiment, program, folder, stop_after(2))
  resumed = training.train(experiment, program, folder)
  assert timeless(resumed.history) == timeless(straight.history)
  assert_same_bits(resumed.state, straight.state)


def test_all_are_in_the_posterior_unless_the_config_says_otherwise():
  experiment = experiment_lib.build(tiny(participation=0.5))
  assert experiment.algorithm.participation == Participation(0.5, 0.0, "all")
  assert experiment_lib.build(tiny()).algorithm.participation.is_full
