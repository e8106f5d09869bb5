"""Methods by which every site has a model of its own, and keeps a state of its own."""

import jax
import numpy as np
import pytest

import fedbnr_jax as fb
from fedbnr_jax import prediction, workflow
from fedbnr_jax.federated.algorithm import own_of_client
from fedbnr_jax.gp import metrics
from fedbnr_jax.network import coordinator
from fedbnr_jax.network.own_states import OwnStates, Place
from fedbnr_jax.run import journal, training
from fedbnr_jax.run.records import RunFolder
from tests import network_runs as runs
from tests.runs import StopError, assert_refused, timeless

CASES = {
  "pfedgp": {"pfedgp__num_inducing": 3},
  "fedloc": {"fedloc__num_inducing": 4, "fedloc__num_iterations": 3},
}


def _federation(folder, method, **options) -> runs.Federation:
  return runs.federation(
    folder, sizes=runs.FEW, method=method, num_rounds=2, **CASES[method], **options
  )


def _run(some, transport=None):
  reached = some.transport() if transport is None else transport
  return coordinator.run(some.agreement, reached, some.folder.parent / "run")


@pytest.fixture(scope="module", params=CASES)
def finished(request, tmp_path_factory):
  """A federation that has trained, and what came of it."""
  some = _federation(tmp_path_factory.mktemp("finished"), request.param)
  return some, _run(some).result


@pytest.fixture(scope="module")
def simulated(finished):
  """The simulation of the same, and what came of that."""
  experiment = runs.simulation(finished[0])
  return experiment, training.train(experiment, workflow.program_for(experiment))


def _scores_of_own_models(experiment, state, part):
  """Scores each client's rows by that client's model alone, and takes all together."""
  rows = getattr(experiment, part)
  owners = experiment.dataset.clients[getattr(experiment.split, part)]
  total = metrics.no_score_sums()
  for number, name in enumerate(experiment.client_names):
    own = own_of_client(state, number)
    x, y = (np.asarray(leaf)[owners == name] for leaf in (rows.x, rows.y))
    mean, variance = prediction.predict(experiment.config, own, x)
    total = total + metrics.score_sums(mean, variance, y)
  return journal.in_unit(metrics.scores(total), experiment.error_scale)


def test_states_and_scores_are_those_of_the_simulation(finished, simulated):
  """The simulation lets every model predict all rows; a site has but its own."""
  _, result = finished
  experiment, wanted = simulated
  for mine, theirs in zip(result.history, wanted.history, strict=True):
    for name, value in theirs.items():
      if not name.startswith(("val_", "test_", "seconds")):
        assert mine[name] == pytest.approx(value, rel=1e-9), name
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
    result.last.server,
    wanted.last.server,
  )
  for column, part in (("val", "validation"), ("test", "test")):
    scores = _scores_of_own_models(experiment, wanted.last, part)
    for name, value in scores.items():
      known = result.history[-1].get(f"{column}_{name}", value)
      assert known == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_each_site_predicts_with_its_own_model(finished, simulated):
  some, result = finished
  experiment, wanted = simulated
  new = runs.frame("west", 7)
  x = experiment.preprocessor.transform(new[["a", "b"]])
  # Of other rounds the simulation does not keep what clients had.
  assert result.best_round == len(result.history)
  for number, name in enumerate(runs.NAMES):
    model = fb.load(some.folder / name / "model")
    assert model.client_names == (name,)
    client = name if prediction.algorithm(model.config).one_model_each else None
    found = model.predict(new, client, warn=False)
    own = own_of_client(wanted.last, number)
    mean, variance = prediction.predict(experiment.config, own, x)
    mean = experiment.preprocessor.unstandardise_mean(mean)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-9)
    std = np.sqrt(variance) * experiment.preprocessor.target_std
    np.testing.assert_allclose(found["std"], std, rtol=1e-9)


def test_the_coordinator_has_no_model_to_predict_with(finished):
  some, _ = finished
  assert_refused(
    lambda: fb.load(some.folder.parent / "run"), "each site has a model of its own"
  )


def test_a_run_that_is_stopped_resumes_with_what_sites_have_kept(finished, tmp_path):
  whole, result = finished
  method = whole.agreement.config.method
  masking = method == "fedloc"  # One of each.
  some = _federation(tmp_path, method, masking=masking)
  num_stops = 0
  for number in (9, 10, 8, 12, 1000):
    try:
      _run(some, runs.StopsAt(some.transport(), number))
      break
    except StopError:
      num_stops += 1
  assert num_stops >= 2
  again = RunFolder(tmp_path / "run").metrics()
  if masking:
    runs.assert_same_scores(again, result.history)
  else:
    assert timeless(again) == timeless(result.history)
  new = runs.frame("west", 7)
  for name in runs.NAMES:
    client = name if method == "pfedgp" else None
    one, other = (
      fb.load(of.folder / name / "model").predict(new, client, warn=False)
      for of in (some, whole)
    )
    np.testing.assert_allclose(one["mean"], other["mean"], rtol=1e-9)


def test_a_step_that_is_asked_for_again_begins_where_it_began(tmp_path):
  states = OwnStates(tmp_path, lambda: (np.zeros(2), np.zeros(())))

  def keep(number, step):
    value = 10.0 * number + step
    states.keep(Place(number, step), (np.full(2, value), np.asarray(value)))

  def before(number, step):
    own = OwnStates(tmp_path, lambda: (np.zeros(2), np.zeros(())))
    vector, one = own.before(Place(number, step))
    assert vector.tolist() == [one, one]
    return float(one)

  assert before(1, 0) == 0.0
  for step in range(3):
    keep(1, step)
  assert before(1, 2) == 11.0  # What came of it is forgotten.
  keep(1, 2)
  assert before(2, 0) == 12.0
  assert [path.name for path in tmp_path.iterdir()] == ["1_2.npz"]
  keep(2, 0)
  keep(2, 1)
  # A site that was left out of the third round is back in the fourth.
  assert before(4, 0) == 21.0
  assert float(states.after(1)[1]) == 12.0
  assert float(states.after(3)[1]) == 21.0
  assert before(2, 0) == 12.0  # After a coordinator that has gone back a round.
  (tmp_path / "1_2.npz").write_bytes(b"")
  assert_refused(lambda: before(2, 0), "1_2.npz is damaged")
