"""What is known of columns, made of sums, is what the pooled rows would say."""

import dataclasses

import ml_collections
import numpy as np
import pytest

from fedbnr_jax.data import Preprocessor
from fedbnr_jax.gp import conformal
from fedbnr_jax.network import finish, preparation, rounds
from fedbnr_jax.network.members import Members
from fedbnr_jax.network.question import Question
from fedbnr_jax.network.schema import Quantity, Schema
from fedbnr_jax.network.sums import Sums
from fedbnr_jax.network.transport import InProcess
from fedbnr_jax.prediction import predict
from fedbnr_jax.run import training
from tests import network_runs as runs
from tests.runs import assert_refused

RUN = "0" * 64
MIXED = Schema(
  "mixed",
  Quantity("y", 100.0),
  (Quantity("a", 0.1), Quantity("b", 1.0), Quantity("c", 1000.0)),
  (("kind", ("u", "v", "w", "x")),),
  "impute",
)
# One site is too small to be split.
UNLIKE = {"north": 30, "south": 30, "west": 5}


def _sums(some) -> Sums:
  members = Members(some.agreement, some.transport(), RUN)
  members.greet()
  return Sums(members, some.folder.parent / "network")


def _prepared(some, sums=None) -> preparation.NetworkTask:
  config = ml_collections.ConfigDict(some.agreement.config.to_dict())
  return preparation.prepare(config, sums or _sums(some))


@pytest.mark.parametrize("inputs", ["standard", "scores"])
def test_preprocessing_is_that_of_the_pooled_rows(inputs, tmp_path):
  some = runs.federation(
    tmp_path, MIXED, UNLIKE, method="fedridge", data__inputs=inputs
  )
  found = _prepared(some).preprocessor
  dataset = runs.pooled(some).dataset
  train = dataset.split.train
  wanted = Preprocessor.fit(
    dataset.features.iloc[train], dataset.targets[train], "y", inputs, "impute"
  )
  assert found.numeric_columns == wanted.numeric_columns
  # Nobody has category "x", which was agreed on.
  assert found.categories == wanted.categories == (("kind", ("u", "v", "w")),)
  assert found.imputation.marked == wanted.imputation.marked == ("c",)
  for name in ("input_mean", "input_std", "target_mean", "target_std"):
    mine, theirs = getattr(found, name), getattr(wanted, name)
    np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)
  mine, theirs = (p.imputation.medians for p in (found, wanted))
  np.testing.assert_allclose(mine, theirs, rtol=1e-12)
  features = dataset.features
  np.testing.assert_allclose(
    found.transform(features), wanted.transform(features), rtol=1e-9, atol=1e-9
  )


def test_scores_with_all_kinds_of_columns_and_a_tiny_site(tmp_path):
  some = runs.federation(
    tmp_path, MIXED, UNLIKE, method="fedridge", data__inputs="scores"
  )
  wanted = runs.simulated(some).history
  runs.assert_same_scores(runs.trained(some).history, wanted)


def test_counts_and_names_are_those_of_the_sites(tmp_path):
  some = runs.federation(
    tmp_path, sizes=UNLIKE, method="fedridge", data__calibration=0.25
  )
  task = _prepared(some)
  splits = some.splits().values()
  assert task.counts.train == sum(len(split.train) for split in splits)
  assert task.counts.validation == sum(len(split.validation) for split in splits)
  assert task.counts.test == sum(len(split.test) for split in splits)
  assert task.num_calibration_rows == sum(len(split.calibration) for split in splits)
  assert task.table.rows == sum(UNLIKE.values())
  assert task.client_names == runs.NAMES


def test_rows_that_were_set_aside_are_counted(tmp_path):
  some = runs.federation(
    tmp_path, sizes=UNLIKE, method="fedridge", data__calibration=0.25
  )
  sums = _sums(some)
  task = _prepared(some, sums)
  result = training.train(task, rounds.program_of(task, sums))
  found = finish.ask(task, sums, result)
  pooled, experiment = runs.pooled(some), runs.simulation(some)
  state = runs.simulated(some).state

  def counts(rows):
    dataset, scaler = pooled.dataset, experiment.preprocessor
    x = scaler.transform(dataset.features.iloc[rows])
    mean, variance = predict(experiment.config, state, x)
    targets = scaler.standardise(dataset.targets[rows])
    return conformal.count(conformal.scores(mean, variance, targets))

  assert found.calibrated.by == "rows"
  assert found.calibrated.counts.tolist() == counts(pooled.calibration).tolist()
  assert found.test_counts.tolist() == counts(pooled.dataset.split.test).tolist()


def test_sites_without_held_out_rows_are_refused(tmp_path):
  some = runs.federation(tmp_path, sizes=dict.fromkeys(runs.NAMES, 5), method="fedavg")
  assert_refused(lambda: _prepared(some), "no site has a row for validation", "6 rows")


def test_a_site_that_has_approved_something_else_is_named(tmp_path):
  some = runs.federation(tmp_path, method="fedridge")
  other = some._replace(agreement=runs.agreement(method="fedridge", seed=1))
  answers = {name: some.site(name).answer for name in runs.NAMES}
  transport = InProcess(answers | {"south": other.site("south").answer})
  members = Members(some.agreement, transport, RUN)
  assert_refused(members.greet, "site 'south' has not approved this federation")


def test_nothing_that_was_not_agreed_on_is_trained(tmp_path):
  some = runs.federation(tmp_path, method="fedridge")
  config = ml_collections.ConfigDict(some.agreement.config.to_dict())
  config.ridge.num_samples = 5
  assert_refused(
    lambda: preparation.prepare(config, _sums(some)), "'north'", "was not agreed on"
  )


def test_a_site_that_draws_another_kernel_says_so(tmp_path):
  """As on a machine whose random numbers are others."""
  some = runs.federation(tmp_path, method="fedridge")
  sums = _sums(some)
  task = _prepared(some, sums)
  state = rounds.program_of(task, sums).init(task.key_init, task.inputs)
  codes = []
  seed = state.server.seed
  for server in (state.server.replace(seed=seed + 1), state.server):
    arrays = rounds.model_arrays(task, state.replace(server=server))
    question = Question("scores", task.name, 0, (), arrays)
    message = sums.members.message({"kind": "ask", **question.head()}, arrays)
    reply = sums.members.ask({"west": message}, task.name)["west"]
    codes.append(getattr(reply, "code", "answered"))
  assert codes == ["other-draws", "answered"]


def test_preprocessing_is_asked_for_once(tmp_path):
  some = runs.federation(tmp_path, method="fedridge")
  first = _prepared(some)
  log = some.folder / "north" / "sent.csv"
  num_sent = log.read_text().count(",sum,")
  again = _prepared(some)
  assert dataclasses.asdict(again.preprocessor) == dataclasses.asdict(
    first.preprocessor
  )
  assert again.name == first.name
  assert log.read_text().count(",sum,") == num_sent > 0
