"""Rounds against a plain loop over clients and the pooled process; every method."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbnr_jax import algorithms
from fedbnr_jax.algorithms import central, fedbnr, kernels
from fedbnr_jax.errors import InputError
from fedbnr_jax.federated import aggregation
from fedbnr_jax.federated.exchange import num_floats
from fedbnr_jax.federated.participation import Participation
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.gp import blr, urk
from fedbnr_jax.gp.kernel_model import evidence_loss, features_of
from tests import methods, oracles
from tests.methods import KEY, NUM_CLIENTS, NUM_ROWS, small
from tests.runs import assert_refused, assert_same_bits

STEPS, FLOOR = 3, 1e-2
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
KERNELS = {
  "network": urk.deep(3, 5, latent_size=2, shifter_size=3),
  "gaussian": urk.random_fourier(3),
}
DISTILLED = aggregation.distillation(
  KERNELS["network"], OPTIMIZER, num_steps=2, alpha=1.0, min_noise_std=FLOOR
)
# Kernel, aggregator, and clients at a time. How clients are batched is the subject of
# test_collectors.py.
CASES = {
  "fedbnr": (KERNELS["network"], aggregation.mean(), None),
  "fedbnr in chunks": (KERNELS["gaussian"], aggregation.mean(), 2),
  "fedbnr-kd singly": (KERNELS["network"], DISTILLED, 1),
}
QUERY = np.random.default_rng(3).normal(size=(5, 2))


def _algorithm(name):
  feature_map, aggregator, batch_size = CASES[name]
  return fedbnr.fedbnr(
    feature_map,
    OPTIMIZER,
    aggregator,
    num_local_steps=STEPS,
    min_noise_std=FLOOR,
    placement=Placement(batch_size),
  )


@functools.cache
def _program(name):
  return methods.compile_method(_algorithm(name))


@functools.cache
def _rounds(name):
  return methods.run(_program(name), small())


@functools.cache
def _apply(name):
  """Features under the kernel of a state, compiled."""
  feature_map = CASES[name][0]
  return jax.jit(lambda server, x: features_of(feature_map, *_kernel(server), x))


def _kernel(server):
  return server.params.theta, server.omega


def _pooled(data):
  mask = data.clients.mask
  return data.clients.x[mask], data.clients.y[mask]


# -------------------------------------------------------------------- the round


@functools.cache
def _slow_step(name):
  """One optimiser step of one client, jitted for speed alone."""
  feature_map = CASES[name][0]

  def step(params, state, omega, rows):
    value, gradient = jax.value_and_grad(
      lambda params: evidence_loss(
        feature_map, params, omega, rows.x, rows.y, rows.mask
      )
    )(params)
    updates, state = OPTIMIZER.update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    floor = jnp.maximum(params.log_noise_std, jnp.log(FLOOR))
    return params.replace(log_noise_std=floor), state, value

  return jax.jit(step)


@functools.cache
def _both_sides(name):
  aggregator = CASES[name][1]
  return jax.jit(aggregator.message), jax.jit(aggregator.combine)


def _slow_round(name, server, data):
  """A loop over clients, one at a time."""
  message, combine = _both_sides(name)
  inputs = data.server.x if CASES[name][1] is DISTILLED else ()
  messages, losses = [], []
  for k in range(NUM_CLIENTS):
    rows = methods.rows_of(data, k)
    params, optimizer_state = server.params, OPTIMIZER.init(server.params)
    for _ in range(STEPS):
      params, optimizer_state, loss = _slow_step(name)(
        params, optimizer_state, server.omega, rows
      )
    messages.append(jax.device_get(message(params, server.omega, rows, inputs)))
    losses.append(loss)
  total = jax.tree.map(lambda *leaves: sum(leaves), *messages)
  return combine(server.params, server.omega, total, data.server), losses


@pytest.mark.parametrize("name", CASES)
def test_round_is_a_plain_loop_over_clients(name):
  states, infos = _rounds(name)
  for before, after, info in zip(states[:-1], states[1:], infos, strict=True):
    params, losses = _slow_round(name, before.server, small())
    chex.assert_trees_all_close(after.server.params, params, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(info.client_loss, losses, rtol=1e-10)
    np.testing.assert_array_equal(info.answered, [True] * NUM_CLIENTS)
    assert int(after.server.num_clients) == NUM_CLIENTS
  assert int(states[-1].server.num_rounds) == 2


@pytest.mark.parametrize("name", CASES)
def test_last_layer_is_the_dense_process_on_the_pooled_rows(name):
  (*_, state), (*_, info) = _rounds(name)
  x, y = _pooled(small())
  features = np.asarray(_apply(name)(state.server, x))
  params = state.server.params
  scales = float(params.noise_std), float(params.prior_std)
  queried = np.asarray(_apply(name)(state.server, QUERY))
  mean, variance = _program(name).predict(state, QUERY)
  expected = oracles.gp_predict(features, y, queried, *scales)
  np.testing.assert_allclose(mean, expected[0], rtol=1e-9, atol=1e-10)
  np.testing.assert_allclose(variance, expected[1], rtol=1e-9)
  nll = oracles.gp_nll(features, y, *scales) / NUM_ROWS
  np.testing.assert_allclose(info.train_nll, nll, rtol=1e-9)
  expected = blr.SufficientStats(
    features.T @ features, features.T @ y, y @ y, np.asarray(float(NUM_ROWS))
  )
  chex.assert_trees_all_close(state.server.stats, expected, rtol=1e-10, atol=1e-11)


def test_training_lowers_the_global_evidence_loss():
  _, infos = methods.run(_program("fedbnr"), small(), 8)
  assert infos[-1].train_nll < infos[0].train_nll - 0.02


@pytest.mark.parametrize("name", ["fedbnr", "fedbnr-kd", "central"])
def test_padding_length_changes_at_most_the_last_digits(name):
  # 12 and 16 rows: both in the primal form, with more rows than the 6 features.
  longer = methods.run(methods.compiled(name), small(num_padded_rows=16), 1).last
  expected = methods.two_rounds(name).states[1]
  chex.assert_trees_all_close(longer, expected, rtol=1e-12, atol=1e-12)


def test_noise_stays_above_its_floor():
  """Targets that the kernel fits without noise pull σ down."""
  data = small()
  data = data.replace(clients=data.clients.replace(y=0 * data.clients.y))
  (*_, state), _ = methods.run(_program("fedbnr"), data, 60)
  np.testing.assert_allclose(state.server.params.noise_std, FLOOR, rtol=1e-6)


def test_initial_kernel_depends_on_the_key_alone():
  init = _program("fedbnr").init
  many = init(KEY, small())
  assert_same_bits(init(KEY, small([np.arange(NUM_ROWS)])), many)
  data = small()
  data = data.replace(clients=data.clients.replace(x=data.clients.x + 1))
  assert_same_bits(init(KEY, data), many)
  other = init(jax.random.key(1), small())
  assert not np.array_equal(other.server.omega, many.server.omega)


def test_central_is_fedbnr_with_one_client_for_any_deal():
  whole = methods.run(methods.compiled("fedbnr"), small([np.arange(NUM_ROWS)]))
  pooled = methods.two_rounds("central")
  chex.assert_trees_all_close(pooled.last, whole.last, rtol=1e-9, atol=1e-10)
  assert pooled.infos[0].client_loss.shape == pooled.infos[0].answered.shape == (1,)
  assert int(pooled.last.server.num_clients) == 1


# ------------------------------------------------------- what holds of every method


@pytest.fixture(scope="module", params=algorithms.METHODS)
def method(request):
  """A method's name; tests of one method run one after another, on one program."""
  return request.param


def test_method_runs_from_its_config(method):
  """Finite, in one trace for all rounds of a shape, of the types that it began with."""
  program = methods.compiled(method)
  states, infos = methods.two_rounds(method)
  assert len(program.traces) == len(set(program.traces)) > 0
  wanted = algorithms.METHODS[method]
  assert wanted.pooled == (method == "central")
  assert wanted.distils == ("kd" in method)
  for state, info in zip(states[1:], infos, strict=True):
    chex.assert_tree_all_finite((state, info))
    chex.assert_trees_all_equal_shapes_and_dtypes(state, states[0])
    assert info.client_loss.shape == ((1,) if wanted.pooled else (NUM_CLIENTS,))
  assert states[0].server.num_clients.dtype == np.int32
  assert [int(state.server.num_rounds) for state in states] == [0, 1, 2]


@pytest.mark.parametrize("held", [-7.0, 1e6, np.nan])
def test_what_padding_holds_changes_no_bit(method, held):
  data, program = small(), methods.compiled(method)
  rows = data.clients
  dirty = rows.replace(
    x=np.where(rows.mask[..., None], rows.x, held), y=np.where(rows.mask, rows.y, held)
  )
  start = methods.two_rounds(method).states[0]
  got = methods.run(program, data.replace(clients=dirty), 2, start)
  assert_same_bits(got, methods.two_rounds(method))


AVERAGED = ("fedbnr", "fedbnr-kd", "fedbnr-ev", "fedbnr-kd-ev", "avg+local", "kd+local")


def test_order_of_clients_does_not_matter(method):
  """Whoever is where among the clients has his rows, and what he keeps, with him."""
  data, (states, infos) = small(), methods.two_rounds(method)
  order = np.array([3, 0, 4, 2, 1])

  def shuffled(tree):
    return jax.tree.map(lambda leaf: leaf[order], tree)

  start = states[0].replace(own=shuffled(states[0].own))
  other = methods.run(
    methods.compiled(method), data.replace(clients=shuffled(data.clients)), 2, start
  )
  expected = states[-1].replace(own=shuffled(states[-1].own))
  # The others have more steps, or steps of systems that are worse conditioned.
  rtol, atol = (1e-10, 1e-11) if method in AVERAGED else (1e-7, 1e-8)
  chex.assert_trees_all_close(other.last, expected, rtol=rtol, atol=atol)
  if not algorithms.METHODS[method].pooled:
    np.testing.assert_allclose(
      other.infos[-1].client_loss, infos[-1].client_loss[order], rtol=rtol
    )


# Those in which a client's loss is found before any sum over all clients.
OWN_LOSS = [
  name
  for name in algorithms.METHODS
  if name not in ("central", "fedbnr-exact", "fedbnr-ard", "fedloc", "fedloc-poe")
]


@pytest.mark.parametrize("method", OWN_LOSS)
def test_loss_of_a_client_is_of_its_own_rows(method):
  """Others hold no numbers, nor does the server: this client computes the same bits.

  That of all methods is in test_exchange.py, by what a client function reads.
  """
  (start, clean, _), (info, _) = methods.two_rounds(method)
  data, k = small(), 3
  others = np.arange(NUM_CLIENTS) != k

  def spoil(leaf):
    spoilt = np.array(leaf)
    if np.issubdtype(spoilt.dtype, np.floating):
      spoilt[others] = np.nan
    return spoilt

  spoilt = data.replace(
    clients=jax.tree.map(spoil, data.clients),
    server=data.server.replace(y=np.full_like(data.server.y, np.nan)),
  )
  (_, state), (other,) = methods.run(
    methods.compiled(method),
    spoilt,
    1,
    start.replace(own=jax.tree.map(spoil, start.own)),
  )
  assert_same_bits(other.client_loss[k], info.client_loss[k])
  assert np.all(np.isnan(other.client_loss[others]))
  if method.startswith("local+"):  # The kernel that it trained for itself.
    own = [jax.tree.map(lambda leaf: leaf[k], s.own.params) for s in (state, clean)]
    assert_same_bits(*own)


def _sent(algorithm, state, data):
  """Floats up and down of one client in a round, from the messages themselves."""
  up = down = 0
  for stage in (*algorithm.stages, *algorithm.closing):
    for exchange in stage.exchanges:
      message = jax.eval_shape(exchange.broadcast, state.server, data.server)
      own = jax.tree.map(lambda leaf: leaf[0], state.own)
      answer, *_ = jax.eval_shape(
        exchange.answer, message, own, methods.rows_of(data, 0)
      )
      up += stage.times * sum(np.size(leaf) for leaf in jax.tree.leaves(answer))
      down += stage.times * sum(np.size(leaf) for leaf in jax.tree.leaves(message))
  return up, down


def test_floats_are_those_of_the_messages_of_one_client(method):
  (_, state, _), (_, info) = methods.two_rounds(method)
  algorithm, data = methods.built(method), small()
  up, down = _sent(algorithm, state, algorithm.view(data))
  assert up > 0
  assert down > 0
  if method == "central":  # Pooled rows need no messages.
    up = down = 0
  assert (int(info.floats_up), int(info.floats_down)) == (up, down)


# Of S = 3 samples, which give M = 6 features, and a θ of two length-scales.
THETA = 2
START = 2 + THETA + 2  # Down: the kernel to start from, of which ω is a seed; σ and λ.
KERNEL = 2 + THETA  # Down: a seed and θ.
MEAN = THETA + 2 + 1  # Up: θ, σ, λ and the weight.
STATISTICS = 6 * 7 // 2 + 6 + 3  # Up: the Gram's triangle, Φᵀy, yᵀy, N and a client.
GRAM = 6 * 7 // 2 + 1  # Up: the triangle on the server's 6 rows, and its count.
INPUTS = 6 * 2  # Down: those rows.
LAYER = 6 + 1  # Down: w̄ and σ.
OWN = 2  # Up: how likely a client's own rows are, and one for the client.
# A network 2 -> 5 -> 2 with one bias; pFedGP has 3 inducing inputs and 3 scales more,
# and FedAvg a head with its bias. FedLoc has 2 length-scales and 2 more.
NETWORK = 5 * 2 + 5 + 2 * 5
REGRESSOR, DEEP_KERNEL, SCALES = NETWORK + 3, NETWORK + 3 * 2 + 3, 2 + 2
# Noise that varies: its shape from moments, then its scale, a ratio.
SHAPE = (6 + 6 + 1 + 1, KERNEL + LAYER)
SCALE = (1, KERNEL + LAYER + 7)
EXPERTS = [(SCALES + 1, SCALES)] * 2 + [(OWN, SCALES)]
# Of `fedbnr-ard`, down: a seed, a summary of the two inputs (256 quantiles each, a
# correlation factor, five numbers each), and θ.
SPARSE = 2 + (256 * 2 + 4 + 4 * 2) + 4
# Up and down, trip by trip.
TRIPS = {
  "fedbnr": [(MEAN, START), (STATISTICS, KERNEL)],
  "fedbnr-kd": [(GRAM + MEAN, START + INPUTS), (STATISTICS, KERNEL)],
  "fedbnr-ev": [(MEAN, START), (STATISTICS, KERNEL), SHAPE, SCALE],
  "fedbnr-kd-ev": [
    *[(GRAM + MEAN, START + INPUTS), (STATISTICS, KERNEL)],
    *[SHAPE, SCALE],
  ],
  # Before the two steps, and in each: down A⁻¹, up the gradient and the residuals.
  "fedbnr-exact": [(STATISTICS, KERNEL)]
  + [(THETA + 1, KERNEL + LAYER + 21), (STATISTICS, KERNEL)] * 2,
  # The same, with statistics of 3 inducing features and of a constant and two inputs; θ
  # has two amplitudes more; what is known of the inputs goes down beside the seed. Then
  # statistics of 8 wider features, and noise that varies with them.
  "fedbnr-ard": [(STATISTICS, SPARSE)]
  + [(4 + 1, SPARSE + LAYER + 21), (STATISTICS, SPARSE)] * 2
  + [(8 * 9 // 2 + 8 + 3, SPARSE)]
  + [(8 + 8 + 1 + 1, SPARSE + 8 + 1), (1, SPARSE + 8 + 1 + 9)],
  # Of a constant, two inputs and 6 Fourier features; θ as above.
  "fedridge": [(9 * 10 // 2 + 9 + 3, 2 + 4)],
  "central": [],
  "local+local": [(0, 2), (OWN, 2)],  # Whose messages are seeds.
  # A client's kernel stands among zeros for the others; statistics under all five.
  "local+global": [(5 * MEAN, 2), (5 * STATISTICS, 2 + 5 * THETA)],
  "avg+local": [(MEAN, START), (OWN, START)],
  "kd+local": [(GRAM + MEAN, START + INPUTS), (OWN, START)],
  "fedavg": [(REGRESSOR + 1, REGRESSOR), (3, REGRESSOR)],  # And residuals.
  "fedprox": [(REGRESSOR + 1, REGRESSOR), (3, REGRESSOR)],
  "pfedgp": [(DEEP_KERNEL + 1, DEEP_KERNEL), (OWN, DEEP_KERNEL)],
  "fedloc": EXPERTS,  # Two iterations, and the processes.
  "fedloc-poe": EXPERTS,
}


# The first round of `fedbnr-ard`: 2 inducing features in place of 3.
FEWER = 5 * 6 // 2
FIRST = {
  "fedbnr-ard": [(FEWER + 5 + 3, SPARSE)]
  + [(4 + 1, SPARSE + 5 + 1 + FEWER), (FEWER + 5 + 3, SPARSE)] * 2
  + TRIPS["fedbnr-ard"][-3:]
}


def test_floats_are_those_of_every_trip_by_hand(method):
  infos = methods.two_rounds(method).infos
  trips = [FIRST.get(method, TRIPS[method]), TRIPS[method]]
  for info, of_round in zip(infos, trips, strict=True):
    up, down = (sum(trip[way] for trip in of_round) for way in (0, 1))
    assert (int(info.floats_up), int(info.floats_down)) == (up, down)


def test_a_seed_is_two_numbers_and_a_triangle_one_for_each_pair():
  message = (np.zeros(2, np.uint32), {"gram": np.zeros(10)}, (), np.zeros((), np.int32))
  assert num_floats(message) == 13


def test_before_the_first_round_predictions_are_the_priors(method):
  """σ = 0.5 and λ = 1; the features of S = 3 samples have norm S/(S − 1).

  Those of inducing inputs and of the linear kernel do not have the same norm.
  """
  state = methods.two_rounds(method).states[0]
  server = state.server
  assert int(server.num_clients) == int(server.num_rounds) == 0
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(server.stats))
  if not algorithms.METHODS[method].random_features:
    return
  mean, variance = methods.compiled(method).predict(state, QUERY)
  np.testing.assert_array_equal(mean, 0)
  norm = 1.5
  if method in ("fedbnr-ard", "fedridge"):
    kernel = kernels.of_last_layer(methods.config(method))
    params = urk.FeatureParams(server.omega, server.params.theta)
    norm = np.sum(np.asarray(kernel.apply(params, QUERY)) ** 2, axis=1)
  np.testing.assert_allclose(variance, 0.25 + norm, rtol=1e-12)
  assert mean.shape == variance.shape
  each = methods.built(method).one_model_each
  assert mean.shape == ((NUM_CLIENTS, 5) if each else (5,))


def test_error_bars_lose_the_noise_on_demand(method):
  if method in ("fedavg", "fedprox"):
    assert_refused(lambda: methods.built(method, with_noise=False), "config.with_noise")
    return
  program, (start, *_, end) = (
    methods.compiled(method),
    methods.two_rounds(method).states,
  )
  latent = jax.jit(methods.built(method, with_noise=False).predict)
  for state in (start, end):
    mean, variance = program.predict(state, QUERY)
    same, without = latent(state, QUERY)
    np.testing.assert_allclose(mean, same, rtol=1e-12)
    assert np.all(without > 0)
    noise, noise_std = variance - without, program.algorithm.scales(state)[0]
    assert np.all(noise > 1e-3)
    if state is start:  # Everywhere, and of every client.
      np.testing.assert_allclose(noise, noise_std**2, rtol=1e-9)
    elif "-ev" not in method:  # Whose noise varies with the input.
      np.testing.assert_allclose(np.mean(noise), noise_std**2, rtol=0.1)


# --------------------------------------------------------------- types of numbers


def _assert_types(name, before, after, info, wide):
  chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
  narrow = [*jax.tree.leaves(after.server.params), info.client_loss]
  chex.assert_type(narrow, np.float32)
  last_layer = (after.server.stats, after.server.posterior, info.train_nll)
  if name not in ("fedavg", "fedprox"):  # They have no last layer.
    chex.assert_type(jax.tree.leaves(last_layer), wide)


def _assert_runs_in_float32(name, wide):
  """One round, and predictions from it."""
  data, program = small(dtype=np.float32), methods.compiled(name, dtype="float32")
  (before, after), (info,) = methods.run(program, data, 1)
  _assert_types(name, before, after, info, wide)
  chex.assert_tree_all_finite((after, info))
  mean, variance = program.predict(after, data.clients.x[3])
  assert np.all(np.isfinite(mean))
  assert np.all(variance > 0)
  return after, info, mean, variance


@pytest.mark.parametrize("name", algorithms.METHODS)
def test_without_float64_everything_is_float32(name, x64_off):
  leaves = jax.tree.leaves(_assert_runs_in_float32(name, np.float32))
  floats = [leaf for leaf in leaves if np.issubdtype(leaf.dtype, np.floating)]
  chex.assert_type(floats, np.float32)


@pytest.mark.parametrize("name", algorithms.METHODS)
def test_float32_network_stays_beside_float64_statistics(name):
  """Traced only: strict promotion refuses a slip."""
  data, algorithm = small(dtype=np.float32), methods.built(name, dtype="float32")
  before = jax.eval_shape(algorithm.init, KEY, data)
  after, info = jax.eval_shape(algorithm.round, KEY, before, data)
  _assert_types(name, before, after, info, np.float64)


def test_kernels_that_all_see_run_in_float32_beside_float64_statistics():
  """Of the other methods, trainings of other tests do."""
  _assert_runs_in_float32("local+global", np.float64)


# ------------------------------------------------------------------- the registry


@pytest.mark.parametrize(
  "typo, meant", [("fedbrn", "fedbnr"), ("fedbnr-dk", "fedbnr-kd"), ("CENTRAL", "cent")]
)
def test_misspelt_method_is_answered_with_the_nearest(typo, meant):
  with pytest.raises(InputError, match=f"{typo}.*did you mean '{meant}"):
    algorithms.method(typo)


def test_config_reaches_the_method():
  fields = {"initial_noise_std": 0.25, "initial_prior_std": 2.0, "num_samples": 4}
  state = jax.jit(methods.built("fedbnr", **fields).init)(KEY, small())
  np.testing.assert_allclose(state.server.posterior.noise_std, 0.25, rtol=1e-6)
  np.testing.assert_allclose(state.server.posterior.prior_std, 2.0, rtol=1e-6)
  assert state.server.stats.moment.shape == (8,)


def test_pooling_keeps_the_rest_of_a_method():
  algorithm = methods.built("fedbnr")
  pooled = central.central(algorithm)
  assert (pooled.stages, pooled.predict) == (algorithm.stages, algorithm.predict)
  assert not pooled.sends


@pytest.mark.parametrize(
  "name, value",
  [("num_local_steps", 0), ("initial_noise_std", -1.0)]
  + [("initial_prior_std", float("nan")), ("min_noise_std", 0.0)]
  + [("batch_size", value) for value in (0, -1)]
  + [("participation", value) for value in (0.0, -1.0, 1.5, float("nan"))]
  + [("dropout", value) for value in (1.0, -0.1, float("nan"))],
)
def test_impossible_settings_are_refused_by_name(name, value):
  settings = {"num_local_steps": 1} | {
    "batch_size": {"placement": Placement(value)},
    "participation": {"participation": Participation(fraction=value)},
    "dropout": {"participation": Participation(dropout=value)},
  }.get(name, {name: value})
  with pytest.raises(InputError, match=name):
    fedbnr.fedbnr(KERNELS["gaussian"], OPTIMIZER, aggregation.mean(), **settings)
