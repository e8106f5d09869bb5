"""Who takes part in a round, and what a round of some clients is."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbnr_jax import aggregation, blr, clients, federation, training, urk
from fedbnr_jax import experiment as experiment_lib
from fedbnr_jax.algorithms import fedbnr
from fedbnr_jax.federation import Federation
from fedbnr_jax.optimizers import adam
from fedbnr_jax.participation import Participation
from tests import oracles
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


def _draws(rule, num_clients, num_keys=2000):
  """[keys, K] bool."""
  draw = jax.jit(jax.vmap(lambda key: rule.draw(key, num_clients)))
  return np.asarray(draw(KEYS[:num_keys]))


@given(st.floats(1e-6, 1.0), st.sampled_from([1, 2, 7, 30]), st.integers(0, 10**6))
def test_as_many_are_sampled_as_the_fraction_says(fraction, num_clients, seed):
  rule = Participation(fraction)
  drawn = rule.draw(jax.random.key(seed), num_clients)
  assert drawn.shape == (num_clients,)
  assert int(drawn.sum()) == rule.num_sampled(num_clients)
  assert 1 <= rule.num_sampled(num_clients) <= num_clients
  assert abs(rule.num_sampled(num_clients) - fraction * num_clients) < 1


def test_all_clients_are_equally_likely_and_independent_of_their_place():
  draws = _draws(Participation(0.3), 10)
  assert set(draws.sum(axis=1)) == {3}
  # Of a fair draw, the sum over clients is chi-square with 9 degrees of freedom.
  gaps = (draws.mean(axis=0) - 0.3) ** 2 / (0.3 * 0.7 / len(draws))
  assert gaps.sum() * 0.9 < 30
  # And every pair comes as often: 3 · 2 of 10 · 9.
  together = draws.T.astype(float) @ draws / len(draws)
  pairs = together[np.triu_indices(10, 1)]
  np.testing.assert_allclose(pairs, 6 / 90, atol=0.03)


def test_same_key_same_clients_other_key_others():
  rule = Participation(0.5, 0.3)
  draws = _draws(rule, 12, 50)
  np.testing.assert_array_equal(draws, _draws(rule, 12, 50))
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
  ],
)
def test_what_is_no_rule_is_refused(rule, part):
  assert_refused(rule.check, part)


# ------------------------------------------------------------------------ the round

NUM_CLIENTS = 5
FEATURE_MAP = urk.random_fourier(3)
OPTIMIZER = adam(0.05)
STEPS, FLOOR = 2, 1e-2


@functools.cache
def _federation() -> Federation:
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(40, 2))
  targets = np.sin(2 * inputs.sum(1)) + 0.1 * rng.normal(size=40)
  parts = np.split(rng.permutation(40), np.cumsum([3, 11, 7, 12])).copy()
  return federation.build(inputs, targets, parts, dtype=jnp.float64)


class _Jitted:
  """A method with its functions compiled."""

  def __init__(self, rule: Participation) -> None:
    built = fedbnr.fedbnr(
      FEATURE_MAP,
      OPTIMIZER,
      aggregation.mean(),
      num_local_steps=STEPS,
      min_noise_std=FLOOR,
      participation=rule,
    )
    self.draw = built.draw
    self.init, self.round = built.init, jax.jit(built.round)


_algorithm = functools.cache(_Jitted)


@functools.cache
def _local():
  """The steps of one client, compiled for speed alone."""
  loss = clients.evidence_loss(FEATURE_MAP)

  def local(params, omega, rows):
    return clients.descend(
      lambda params: loss(params, omega, rows),
      OPTIMIZER,
      STEPS,
      params,
      functools.partial(clients.keep_above, FLOOR),
    )

  return jax.jit(local)


def _loop(state, data, answered):
  """The mean of what exactly these clients make of the parameters."""
  results = {}
  for k in np.flatnonzero(answered):
    rows = jax.tree.map(lambda leaf, k=k: leaf[k], data.clients)
    results[k] = _local()(state.params, state.omega, rows)
  params = [params for params, _ in results.values()]
  natural = [
    p.replace(log_noise_std=p.noise_std, log_prior_std=p.prior_std) for p in params
  ]
  mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *natural)
  mean = mean.replace(
    log_noise_std=jnp.log(mean.log_noise_std),
    log_prior_std=jnp.log(mean.log_prior_std),
  )
  return mean, {k: losses[-1] for k, (_, losses) in results.items()}


def _dense_stats(state, data, chosen):
  """Statistics of the rows of these clients, and their posterior."""
  mask = np.asarray(data.clients.mask) & np.asarray(chosen)[:, None]
  x, y = np.asarray(data.clients.x)[mask], np.asarray(data.clients.y)[mask]
  features = FEATURE_MAP.apply(
    urk.FeatureParams(state.omega, state.params.theta), jnp.asarray(x)
  )
  return np.asarray(features), y


@pytest.mark.parametrize("statistics_too", [False, True], ids=["all", "answering"])
def test_round_is_that_of_exactly_the_clients_that_answered(statistics_too):
  data = _federation()
  algorithm = _algorithm(Participation(0.6, 0.3, statistics_too))
  state = algorithm.init(jax.random.key(1), data)
  counts = set()
  for number in range(4):
    key = jax.random.key(number)
    answered = np.asarray(algorithm.draw(key, NUM_CLIENTS))
    assert answered.any()
    expected, losses = _loop(state, data, answered)
    state, info = algorithm.round(key, state, data)
    counts.add(int(answered.sum()))

    np.testing.assert_array_equal(info.answered, answered)
    chex.assert_trees_all_close(state.params, expected, rtol=1e-9, atol=1e-11)
    for k in range(NUM_CLIENTS):
      np.testing.assert_allclose(info.client_loss[k], losses.get(k, 0.0), rtol=1e-9)

    chosen = answered if statistics_too else np.ones(NUM_CLIENTS, bool)
    assert int(state.num_clients) == chosen.sum()
    features, y = _dense_stats(state, data, chosen)
    assert int(state.stats.count) == len(y)
    scales = float(state.params.noise_std), float(state.params.prior_std)
    mean, covariance = oracles.weight_posterior(features, y, *scales)
    np.testing.assert_allclose(state.posterior.mean, mean, rtol=1e-8, atol=1e-10)
    spread = np.sum((features @ covariance) * features, axis=1) + scales[0] ** 2
    _, variance = blr.predict(state.posterior, jnp.asarray(features))
    np.testing.assert_allclose(variance, spread, rtol=1e-8)
    nll = oracles.gp_nll(features, y, *scales) / len(y)
    np.testing.assert_allclose(info.train_nll, nll, rtol=1e-8)
  assert len(counts) > 1


@pytest.mark.parametrize("statistics_too", [False, True], ids=["all", "answering"])
def test_round_without_an_answer_changes_no_bit(statistics_too):
  data = _federation()
  algorithm = _algorithm(Participation(0.6, 0.3, statistics_too))
  keys = [jax.random.key(n) for n in range(400)]
  nobody = next(k for k in keys if not algorithm.draw(k, NUM_CLIENTS).any())
  state = algorithm.init(jax.random.key(1), data)
  for number in range(3):  # Also in the first round, before any posterior.
    after, info = algorithm.round(nobody, state, data)
    assert_same_bits(after.replace(num_rounds=state.num_rounds), state)
    assert int(after.num_rounds) == int(state.num_rounds) + 1
    assert not np.any(info.answered)
    assert np.isfinite(info.train_nll)
    state, _ = algorithm.round(jax.random.key(number), after, data)
  assert int(state.num_rounds) == 6


def test_everyone_by_a_rule_is_the_round_without_one():
  """To the bit where nothing is drawn; a draw of all sums in another order."""
  data = _federation()
  states = []
  for rule in (Participation(), Participation(1.0, 0.0, True), Participation(0.95)):
    algorithm = _algorithm(rule)
    state = algorithm.init(jax.random.key(1), data)
    states.append(algorithm.round(jax.random.key(2), state, data))
  assert_same_bits(states[0], states[1])
  chex.assert_trees_all_close(states[2], states[0], rtol=1e-10, atol=1e-11)
  assert all(np.all(info.answered) for _, info in states)


def test_floats_are_told_for_a_client_that_answers():
  data = _federation()
  infos = []
  for rule in (Participation(), Participation(0.6, 0.3)):
    algorithm = _algorithm(rule)
    state = algorithm.init(jax.random.key(1), data)
    infos.append(algorithm.round(jax.random.key(0), state, data)[1])
  assert int(infos[0].floats_up) == int(infos[1].floats_up)


# --------------------------------------------------------------------- the training


def _training(**fields):
  sizes = {"num_clients": 5, "num_samples": 2, "kernel": "gaussian", "num_rounds": 4}
  experiment = experiment_lib.build(tiny(**(sizes | {"patience": 9} | fields)))
  return experiment, training.jit(training.make_program(experiment))


@pytest.fixture(scope="module")
def some():
  """Four rounds in which few answer, and in one nobody."""
  experiment, program = _training(
    participation=0.4, dropout=0.6, statistics="answering", seed=3
  )
  return experiment, program, training.train(experiment, program)


def test_records_tell_how_many_answered_and_whose_rows_are_in_the_posterior(some):
  experiment, _, result = some
  rule = experiment.algorithm.participation
  assert rule == Participation(0.4, 0.6, statistics_too=True)
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


def test_resuming_draws_the_same_clients(some, tmp_path):
  experiment, program, straight = some
  folder = claimed(tmp_path / "run", experiment)
  with pytest.raises(StopError):
    training.train(experiment, program, folder, stop_after(2))
  resumed = training.train(experiment, program, folder)
  assert timeless(resumed.history) == timeless(straight.history)
  assert_same_bits(resumed.state, straight.state)


def test_all_are_in_the_posterior_unless_the_config_says_otherwise():
  experiment = experiment_lib.build(tiny(participation=0.5))
  assert experiment.algorithm.participation == Participation(0.5, 0.0, False)
  assert experiment_lib.build(tiny()).algorithm.participation.is_full
