"""Three sites train what the simulation trains on the same rows, by every method."""

import jax
import numpy as np
import pytest

from fedbnr_jax import auto, workflow
from fedbnr_jax.network import coordinator, deployable
from tests import network_runs as runs
from tests import test_network_own_models

# With options of theirs that have exchanges of their own.
CASES = {
  "fedbnr": {},
  "fedbnr-ev": {},
  "fedbnr-exact": {},
  # A first round of few draws, a wider last layer, error bars by held-out rows.
  "fedbnr-ard": {"sparse__kernel": "linear"},
  "fedridge": {},
  "fedavg": {},
  "fedprox": {},
}


def test_every_method_that_can_be_deployed_is_tried():
  assert {*CASES, *test_network_own_models.CASES, "auto"} == {*deployable.METHODS}


@pytest.mark.parametrize("method", CASES)
def test_scores_are_those_of_the_simulation(method, tmp_path):
  some = runs.federation(tmp_path, method=method, num_rounds=2, **CASES[method])
  found, wanted = runs.trained(some), runs.simulated(some)
  runs.assert_same_scores(found.history, wanted.history)
  assert found.best_round == wanted.best_round


def test_masked_sums_give_the_same_model(tmp_path):
  plain, masked = (
    runs.trained(
      runs.federation(
        tmp_path / str(masking), method="fedbnr-ev", num_rounds=2, masking=masking
      )
    )
    for masking in (False, True)
  )
  runs.assert_same_scores(masked.history, plain.history)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9),
    masked.state,
    plain.state,
  )


def test_auto_chooses_and_trains_as_in_the_simulation(tmp_path):
  some = runs.federation(
    tmp_path, sizes=runs.FEW, method="auto", auto__kernels="linear"
  )
  # A run that was stopped after its choice does not choose again.
  transport = runs.StopsAt(some.transport(), 300)
  with pytest.raises(runs.StopError):
    coordinator.run(some.agreement, transport, tmp_path / "run")
  found = coordinator.run(some.agreement, some.transport(), tmp_path / "run")
  choice = auto.choose(
    runs.simulation_config(some),
    auto.of_rows(runs.pooled(some).dataset),
    workflow.program_for,
  )
  assert [t.name for t in found.trials] == [t.name for t in choice.trials]
  assert len(found.trials) == 2
  # Fifty steps of L-BFGS in a row make more of rounding than the others' do.
  for mine, theirs in zip(found.trials, choice.trials, strict=True):
    np.testing.assert_allclose(mine[1:5], theirs[1:5], rtol=1e-6)
  wanted = runs.simulated(some, choice.config)
  runs.assert_same_scores(found.result.history, wanted.history, 1e-6)
