"""Sites join and leave a trained model; nobody is seen who has not agreed to it."""

import dataclasses

import jax
import numpy as np
import pandas as pd
import pytest

from fedbnr_jax import membership, model, posterior, precision
from fedbnr_jax.errors import InputError
from fedbnr_jax.network import changes, site, site_rows
from fedbnr_jax.network import schema as schema_lib
from fedbnr_jax.network.group_sum import Group
from fedbnr_jax.network.transport import InProcess
from tests import site_federation
from tests.faulty_transport import FaultyTransport, Rule
from tests.test_network_faults import Run

COMERS = ("fjord", "hill", "lake")
NEW = pd.concat([site_federation.table(name) for name in COMERS], ignore_index=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A finished run of four sites under masks."""
  run = Run(tmp_path_factory.mktemp("trained"), num_rounds=1, masking=True)
  run.go()
  return run


@pytest.fixture
def run(trained):
  """The same, without changes since its training."""
  yield trained
  for name in ("posterior.npz", "posterior.before.npz", "network/sums_read.json"):
    (trained.folder.path / name).unlink(missing_ok=True)


def _group(run, names, rules=(), **options):
  """Some sites with an agreement of their own, of the config of a run."""
  config = site_federation.config(num_rounds=1, patience=1)
  made = site_federation.Federation(
    run.federation.folder, config, names=names, **options
  )
  return Group(made.agreement, FaultyTransport(made.starts(), rules))


def _change(run, **given):
  agreement = run.federation.agreement
  return changes.change_sites(agreement, run.folder.path, pause=0.0, **given)


def _predicted(run):
  return (
    model.load(run.folder.path).predict(NEW, warn=False)[["mean", "std"]].to_numpy()
  )


def _pooled(run, add=(), remove=()):
  """Predictions by the statistics of pooled rows, which nobody could have."""
  fitted = model.load(run.folder.path)
  stats = fitted.state.server.stats
  for sign, names in ((1.0, add), (-1.0, remove)):
    for name in names:
      folder = run.federation.folder / name
      table = site_federation.table(name)
      rows = schema_lib.read_table(site_federation.SCHEMA, table)
      seed = site_rows.kept_seed(folder / "split.json")
      share = fitted.config.data.calibration
      train = fitted.rows(table.iloc[site_rows.split(seed, rows, share).train])
      own = fitted.statistics(train, jax.jit)
      stats = jax.tree.map(lambda a, b: a + sign * b, stats, own)  # noqa: B023
  with precision.float64():
    none = np.zeros(0, np.uint64)
    ledger = membership.opened(stats, fitted.state, none, none)
    state = membership.with_posterior(fitted.state, ledger)
  fitted = dataclasses.replace(fitted, state=state)
  return fitted.predict(NEW, warn=False)[["mean", "std"]].to_numpy()


def test_three_join_under_masks_and_leave_as_they_came(run):
  before, group = _pooled(run), _group(run, COMERS)
  done = _change(run, add=[group])
  assert done.sites == tuple(sorted((*site_federation.SIZES, *COMERS)))
  with_three = _predicted(run)
  assert not np.allclose(with_three, before, rtol=1e-3)
  left = _change(run, remove=[Group(group.agreement)])  # Nobody is asked.
  assert left.sites == tuple(site_federation.SIZES)
  assert left.num_rows == done.num_rows - done.changes[0]["rows"]
  assert _predicted(run).tolist() == before.tolist()  # To the bit.
  run.folder.posterior.unlink()
  np.testing.assert_allclose(with_three, _pooled(run, add=COMERS), rtol=1e-9)


def test_who_leaves_alone_or_leaves_few_behind_must_agree_to_be_seen(run):
  alone = _group(run, ["south"], masking=False)
  with pytest.raises(InputError, match="see what 'south' adds up to, alone or with"):
    _change(run, remove=[alone])
  three = _group(run, ["east", "north", "west"])
  with pytest.raises(InputError, match="see what 'south' adds up to, alone or with"):
    _change(run, remove=[three])
  assert not run.folder.posterior.exists()
  expected = _pooled(run, remove=["south"])
  done = _change(run, remove=[alone], seen=["south"])
  assert done.sites == ("east", "north", "west")
  np.testing.assert_allclose(_predicted(run), expected, rtol=1e-7)
  with pytest.raises(InputError, match="'south' are not in the model as one group"):
    _change(run, remove=[alone], seen=["south"])


def test_who_joins_alone_must_agree_to_be_seen(run):
  alone = _group(run, ["moor"], masking=False)
  with pytest.raises(InputError, match="see what 'moor' adds up to, alone or with"):
    _change(run, add=[alone])
  done = _change(run, add=[alone], seen=["moor"])
  assert "moor" in done.sites
  with pytest.raises(InputError, match="'moor', or one of the same identity, is in"):
    _change(run, add=[alone], seen=["moor"])


def test_a_group_of_which_a_site_does_not_answer_changes_nothing(run):
  wrong = _group(run, (*COMERS, "moor"), min_sites=3)
  with pytest.raises(InputError, match="two tries at it would show a part"):
    _change(run, add=[wrong])
  rules = [Rule("hill", "lose", question="exchange")]
  with pytest.raises(InputError, match="site 'hill' does not answer"):
    _change(run, add=[_group(run, COMERS, rules)])
  # With one more, the sum of these three and of the four would show it.
  with pytest.raises(InputError, match="see what 'moor' adds up to, alone or with"):
    _change(run, add=[_group(run, (*COMERS, "moor"))])
  members = _group(run, ["east", "fjord", "hill"])
  with pytest.raises(InputError, match="'east', or one of the same identity, is in"):
    _change(run, add=[members])
  assert not run.folder.posterior.exists()


def test_statistics_that_cannot_be_right_do_not_join(run):
  group = _group(run, COMERS)
  made = site_federation.Federation(
    run.federation.folder, site_federation.config(num_rounds=1, patience=1), COMERS
  )
  made.lies["lake"] = lambda asked, tree: (
    tree.replace(gram=1e6 * tree.gram) if asked.name == "exchange" else tree
  )
  lying = Group(group.agreement, InProcess({n: made.start(n) for n in COMERS}))
  with pytest.raises(InputError, match="it has a Gram matrix with a trace of"):
    _change(run, add=[lying])
  assert not run.folder.posterior.exists()


def test_the_changed_model_goes_to_old_and_new_sites(run):
  group = _group(run, COMERS)
  _change(run, add=[group])
  old = Group(run.federation.agreement, run.transport)
  for receivers in (old, group):
    changes.deliver(receivers, run.folder.path)
  expected = _predicted(run)
  for name in (*site_federation.SIZES, *COMERS):
    received = model.load(run.federation.folder / name / site.MODEL)
    got = received.predict(NEW, warn=False)[["mean", "std"]].to_numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_another_agreement_and_tables_are_refused(run):
  other = _group(run, COMERS).agreement
  with pytest.raises(InputError, match="holds no run of this agreement"):
    changes.change_sites(other, run.folder.path)
  with pytest.raises(InputError, match="holds a model of real sites"):
    posterior.change_rows(run.folder.path, add=[("new", NEW)])
