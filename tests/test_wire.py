"""Every exchange of every method through bytes, with clients in other processes.

A client's process is given the config, the seed in it and the client's rows; whatever
else a client function read would be missing there.
"""

import jax
import numpy as np
import pytest

from benchmarks import wire as study
from fedbnr_jax import algorithms
from fedbnr_jax.federated import wire
from tests.runs import tiny

NUM_CLIENTS = 2
# Every method, and options of theirs that have messages of their own.
CASES = {
  **{name: {"method": name} for name in algorithms.METHODS},
  "fedbnr-exact, local": {"method": "fedbnr-exact", "exact__local_steps": 2},
  "pfedgp, predictive": {"method": "pfedgp", "pfedgp__objective": "predictive"},
}


def _config(case: str):
  fields = CASES[case]
  features = algorithms.method(fields["method"]).random_features
  config = tiny(
    num_clients=NUM_CLIENTS,
    kernel="gaussian" if features else "deep",
    seed=3,
    kd__num_steps=2,
    pfedgp__num_inducing=3,
    fedloc__num_inducing=4,
    **fields,
  )
  return study.once_each(config)


@pytest.fixture(scope="module")
def sites():
  processes = study.Sites(NUM_CLIENTS)
  yield processes
  processes.close()


@pytest.mark.parametrize("case", [name for name in CASES if name != "central"])
def test_messages_through_bytes_are_those_of_the_simulation(case, sites):
  found = study.compare(_config(case), sites)
  assert found.message_gap < 1e-12
  assert found.state_gap < 1e-9
  for row in found.rows:
    # Eight bytes a number, four for a seed or a count, and the arrays' names.
    for way in ("down", "up"):
      floats, length = row[f"floats {way}"], row[f"bytes {way}"]
      assert 4 * floats <= length <= 8 * floats + 2500


def test_bytes_hold_types_shapes_and_every_bit():
  message = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": (np.asarray(np.pi), np.zeros((0, 2)), ()),
    "seed": np.asarray([1, 2**32 - 1], np.uint32),
  }
  like = jax.tree.map(lambda leaf: leaf * 0, message)
  got = wire.decode(wire.encode(message), like)
  assert jax.tree.structure(got) == jax.tree.structure(message)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(message), strict=True):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == b.tobytes()


def test_message_of_another_tree_is_refused():
  data = wire.encode({"a": np.zeros(2)})
  with pytest.raises(ValueError, match="b"):
    wire.decode(data, {"a": np.zeros(2), "b": np.zeros(2)})
