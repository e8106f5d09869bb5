"""Several seeds side by side on the device: as if each were trained alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from fedbnr_jax import model
from fedbnr_jax.progress import ProgressBar
from fedbnr_jax.run import experiment as experiment_lib
from fedbnr_jax.run import training
from fedbnr_jax.run.checkpoints import Checkpoints
from fedbnr_jax.run.journal import NonFiniteError
from fedbnr_jax.run.program import make_batched_program, make_program
from fedbnr_jax.run.records import RunFolder
from tests.runs import (
  StopError,
  assert_refused,
  assert_same_bits,
  claimed,
  stop_after,
  timeless,
  tiny,
)

SEEDS = (4, 5, 6)


def _config(**fields):
  sizes = {"kernel": "gaussian", "num_rounds": 4, "patience": 2, "dtype": "float64"}
  return tiny(**(sizes | {"seed": SEEDS[0], "num_seeds": len(SEEDS)} | fields))


@pytest.fixture(scope="module")
def side_by_side():
  """Three experiments, the program of all of them, and their results."""
  experiments = experiment_lib.build_seeds(_config())
  program = make_batched_program(experiments[0].algorithm, transform=jax.jit)
  folders = [None] * len(SEEDS)
  results = training.train_batch(experiments, program, folders)
  return experiments, program, results


def _assert_close(records, others):
  """Equal but for rounding: a batch may sum in another order than one alone."""
  assert len(records) == len(others)
  for record, other in zip(timeless(records), timeless(others), strict=True):
    assert record.keys() == other.keys()
    np.testing.assert_allclose(
      list(record.values()), list(other.values()), rtol=1e-6, atol=1e-9
    )


def _with_val_rmse(program, errors):
  """The program with made-up validation errors [rounds][seeds]."""
  made_up = iter(errors)

  def step(*arguments):
    state, info, validation, test = program.step(*arguments)
    return state, info, validation | {"rmse": jnp.asarray(next(made_up))}, test

  return program._replace(step=step)


# --------------------------------------------------------------------- as one alone


def test_seeds_are_those_of_single_runs(side_by_side):
  experiments, _, results = side_by_side
  single = None
  for seed, one, result in zip(SEEDS, experiments, results, strict=True):
    alone = experiment_lib.build(_config(seed=seed, num_seeds=1))
    assert one.config.to_dict() == alone.config.to_dict()
    # Rows beyond a seed's largest client are padding: one program for all.
    alone = dataclasses.replace(alone, federation=one.federation)
    single = single or make_program(alone.algorithm, transform=jax.jit)
    expected = training.train(alone, single)
    _assert_close(result.history, expected.history)
    for a, b in zip(
      jax.tree.leaves(result.state), jax.tree.leaves(expected.state), strict=True
    ):
      np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
  rmse = [result.history[0]["test_rmse"] for result in results]
  assert len(set(rmse)) == len(SEEDS)


def test_padding_to_the_largest_keeps_every_row():
  experiments = experiment_lib.build_seeds(_config())
  shapes = {one.federation.clients.x.shape for one in experiments}
  assert len(shapes) == 1
  for seed, one in zip(SEEDS, experiments, strict=True):
    alone = experiment_lib.build(_config(seed=seed, num_seeds=1)).federation.clients
    got, rows = one.federation.clients, alone.y.shape[1]
    assert_same_bits(jax.tree.map(lambda leaf, n=rows: leaf[:, :n], got), alone)
    assert not got.mask[:, rows:].any()


# ------------------------------------------------------------------------- stopping


ERRORS = [  # Of rounds and seeds, patience 2: the first stops after 3, the second
  [1.0, 2.0, 4.0],  # after all 4, and so does the third.
  [2.0, 1.5, 3.0],
  [2.0, 1.6, 2.0],
  [0.1, 1.7, 1.0],
]


def test_finished_seed_keeps_its_state_while_others_go_on(side_by_side, tmp_path):
  experiments, program, straight = side_by_side
  folders = [claimed(tmp_path / str(s), one) for s, one in enumerate(experiments)]
  active = []

  def step(*arguments):
    active.append(np.asarray(arguments[-1]).tolist())
    return program.step(*arguments)

  watched = _with_val_rmse(program._replace(step=step), ERRORS)
  results = training.train_batch(experiments, watched, folders)
  assert [len(r.history) for r in results] == [3, 4, 4]
  assert [len(f.metrics()) for f in folders] == [3, 4, 4]
  assert [r.best_round for r in results] == [1, 2, 4]
  assert [int(r.state.server.num_rounds) for r in results] == [1, 2, 4]
  assert active == [[True] * 3] * 3 + [[False, True, True]]
  for result, one in zip(results, straight, strict=True):
    common = min(len(result.history), len(one.history))
    for record, other in zip(result.history[:common], one.history, strict=False):
      assert record["test_rmse"] == other["test_rmse"]


def test_what_is_not_active_does_not_change(side_by_side):
  experiments, program, _ = side_by_side
  one = experiments[0]
  stacked = jax.tree.map(
    lambda *leaves: jnp.stack(leaves),
    *[(e.federation, e.validation, e.test) for e in experiments],
  )
  keys = jnp.stack([jax.random.key(seed) for seed in SEEDS])
  before = program.init(keys, stacked[0])
  kept = jax.tree.map(np.array, before)
  after, *_ = program.step(keys, before, *stacked, jnp.asarray([True, False, True]))
  assert np.asarray(after.server.num_rounds).tolist() == [1, 0, 1]
  assert_same_bits(
    jax.tree.map(lambda leaf: np.asarray(leaf)[1], after),
    jax.tree.map(lambda leaf: leaf[1], kept),
  )
  assert not np.array_equal(
    after.server.posterior.mean[0], kept.server.posterior.mean[0]
  )
  assert one.config.num_seeds == 1


def test_resuming_is_not_stopping(side_by_side, tmp_path):
  experiments, program, _ = side_by_side
  whole = [claimed(tmp_path / f"whole{s}", e) for s, e in enumerate(experiments)]
  straight = training.train_batch(experiments, _with_val_rmse(program, ERRORS), whole)
  stopped = [claimed(tmp_path / f"stopped{s}", e) for s, e in enumerate(experiments)]
  seen = []

  def stop(record):
    seen.append(record)
    if len(seen) == 8:  # In the third round, after two of the three seeds.
      raise StopError

  with pytest.raises(StopError):
    training.train_batch(experiments, _with_val_rmse(program, ERRORS), stopped, stop)
  lengths = [len(folder.metrics()) for folder in stopped]
  assert lengths == [3, 3, 2]
  # The third seed is a round behind: told by the number of its own round.
  behind = [[0.0, 1.7, 2.0], [0.0, 0.0, 1.0]]
  resumed = training.train_batch(experiments, _with_val_rmse(program, behind), stopped)
  for one, other, folder in zip(resumed, straight, stopped, strict=True):
    assert timeless(one.history) == timeless(other.history)
    assert timeless(folder.metrics()) == timeless(other.history)
    assert_same_bits(one.state, other.state)


def test_diverging_seed_does_not_stop_the_others(side_by_side, tmp_path):
  experiments, program, straight = side_by_side
  folders = [claimed(tmp_path / str(s), one) for s, one in enumerate(experiments)]

  def step(keys, states, *rest):
    state, info, validation, test = program.step(keys, states, *rest)
    bad = (jnp.arange(3) == 1) & (state.server.num_rounds >= 2)
    loss = jnp.where(bad[:, None], jnp.nan, info.client_loss)
    return state, info.replace(client_loss=loss), validation, test

  results = training.train_batch(experiments, program._replace(step=step), folders)
  assert isinstance(results[1], NonFiniteError)
  assert "round 2" in str(results[1])
  lengths = [len(folder.metrics()) for folder in folders]
  assert lengths == [len(straight[0].history), 1, len(straight[2].history)]
  for index in (0, 2):
    history = straight[index].history
    assert timeless(folders[index].metrics()) == timeless(history)
    assert_same_bits(results[index].state, straight[index].state)
  saved = Checkpoints(folders[1].checkpoints).restore(straight[1].state)
  assert int(saved.best.server.num_rounds) == 1


# ---------------------------------------------------------------------- the program


def test_launched_seeds_stop_and_go_on_and_leave_a_folder_each(
  side_by_side, tmp_path, monkeypatch, capsys
):
  from launch import train as launch_train

  _, _, results = side_by_side
  config, path = _config(), tmp_path / "run"
  with monkeypatch.context() as patched:
    stop, update = stop_after(2), ProgressBar.update
    patched.setattr(ProgressBar, "update", lambda bar, r: (update(bar, r), stop(r)))
    with pytest.raises(StopError):
      launch_train.train(config, str(path))
  assert not (path / "summary.json").exists()
  launch_train.train(config, str(path))
  summaries = []
  for seed, result in zip(SEEDS, results, strict=True):
    folder = RunFolder(path / f"seed_{seed}")
    _assert_close(folder.metrics(), result.history)
    assert folder.config().seed == seed
    assert (folder.figures / "learning_curve.png").exists()
    summaries.append(folder.summary())
    assert summaries[-1]["seed"] == seed
    assert model.load(folder.path).predict(pd.DataFrame({"x": [0.0]})).shape[0] == 1
  whole = json.loads((path / "summary.json").read_text())
  assert whole["seeds"] == list(SEEDS)
  mean = np.mean([summary["test_rmse"] for summary in summaries])
  np.testing.assert_allclose(whole["test_rmse"], mean, rtol=1e-12)
  said = capsys.readouterr().out
  assert all(f"seed {seed}:" in said for seed in SEEDS)

  launch_train.train(config, str(path))
  assert "this run is finished" in capsys.readouterr().out


# ------------------------------------------------------------------------- refusals


@pytest.mark.filterwarnings("ignore:column 'kind' has values that no training row")
def test_seeds_of_other_shapes_are_refused(tmp_path):
  """A category that is in the training rows of some seeds only."""
  rng = np.random.default_rng(0)
  num_rows = 40
  table = pd.DataFrame({"a": rng.normal(size=num_rows), "y": rng.normal(size=num_rows)})
  table["kind"] = ["rare", *("even", "odd") * 19, "odd"]
  table.to_csv(tmp_path / "t.csv", index=False)
  config = _config(
    data__source="table", data__path=str(tmp_path / "t.csv"), data__target="y"
  )
  config.num_seeds = 12
  assert_refused(
    lambda: experiment_lib.build_seeds(config),
    f"seeds {SEEDS[0]} and",
    "other shapes",
    "config.num_seeds=1",
  )


@pytest.mark.parametrize(
  "fields", [{"stream_clients": 2}, {"compare_clients": True}, {"num_seeds": 0}]
)
def test_what_does_not_go_with_several_seeds_is_refused(fields):
  name = next(iter(fields))
  assert_refused(lambda: experiment_lib.build_seeds(_config(**fields)), name)
