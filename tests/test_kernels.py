"""How fast random features reach their kernels: exact forms, errors, slopes, files."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from absl.testing import flagsaver

from fedbnr_jax.gp import urk
from fedbnr_jax.studies import kernels
from launch import common
from launch import kernels as launch_kernels
from tests import oracles
from tests.drawings import png_size
from tests.runs import assert_refused

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(5, 3)), RNG.normal(size=(4, 3))
# Values of S, seeds, and the shape of the inputs.
TINY = ([8, 512], 20, (12, 3))


def _sum(x, y):
  return np.exp(sum((a + b) ** 2 for a, b in zip(x, y, strict=True)) / 2)


DIRECT = {
  **{
    name: lambda x, y, profile=profile: profile((x - y)[None])[0]
    for name, profile in oracles.STATIONARY.items()
  },
  "polynomial": lambda x, y: (1 + sum(x * y)) ** 2,
  "exponential": _sum,
  "exponential, x/4": _sum,
}


@pytest.mark.parametrize("name", kernels.CONSTRUCTIONS)
def test_exact_kernels_pair_by_pair(name):
  got = kernels.CONSTRUCTIONS[name].kernel(jnp.asarray(X), jnp.asarray(Y))
  expected = [[DIRECT[name](x, y) for y in Y] for x in X]
  np.testing.assert_allclose(got, expected, rtol=1e-10)


def test_every_construction_is_there_and_drawn():
  assert set(kernels.CONSTRUCTIONS) >= {*urk.SPECTRA, "exponential", "polynomial"}
  drawn = [name for names in kernels.PANELS.values() for name in names]
  assert sorted(drawn) == sorted(kernels.CONSTRUCTIONS)


def _parse_flags():
  """Leaves flags at their defaults, which only the programs parse."""
  if not launch_kernels.flags.FLAGS.is_parsed():
    launch_kernels.flags.FLAGS.mark_as_parsed()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The folder of a comparison of three kernels, and what it measured."""
  names = ("gaussian", "exponential", "exponential, x/4")
  folder = tmp_path_factory.mktemp("kernels") / "made" / "run"
  few = {name: kernels.CONSTRUCTIONS[name] for name in names}
  panels = {"one": names[:1], "two": names[1:]}
  return folder, kernels.compare(*TINY, folder, few, panels)


def test_files(run):
  folder, measured = run
  errors, slopes = (pd.read_csv(folder / f"{n}.csv") for n in ("errors", "slopes"))
  pd.testing.assert_frame_equal(errors, measured.errors)
  pd.testing.assert_frame_equal(slopes, measured.slopes)
  counts, num_seeds, _ = TINY
  assert len(errors) == 3 * num_seeds * len(counts)
  for (_, count), group in errors.groupby(["kernel", "num_samples"]):
    assert count in counts
    assert group.seed.tolist() == list(range(num_seeds))
  pd.testing.assert_frame_equal(slopes, kernels.slopes(errors))
  width, height = png_size(folder / "kernels.png")
  assert width > height > 500


def test_the_command_hands_its_flags_on_and_prints_the_slopes(
  run, tmp_path, capsys, monkeypatch
):
  calls = []

  def compare(*arguments):
    calls.append(arguments)
    return run[1]

  monkeypatch.setattr(launch_kernels.study, "compare", compare)
  _parse_flags()
  changes = {"fewest_samples": 3, "most_samples": 50, "num_points": 7, "seeds": 4}
  with flagsaver.flagsaver(workdir=str(tmp_path), **changes):
    launch_kernels.main()
  assert calls == [([3, 12, 48], 4, (7, 3), tmp_path)]
  _, _, *lines, last = capsys.readouterr().out.splitlines()
  for line, row in zip(lines, run[1].slopes.itertuples(), strict=True):
    assert line.startswith(f"| {row.kernel} | {row.slope:.3f} |")
  assert last == f"written to {tmp_path}"


def test_a_bounded_kernel_converges_at_the_rate_of_monte_carlo(run):
  slope = pd.read_csv(run[0] / "slopes.csv", index_col="kernel").slope
  assert slope["gaussian"] == pytest.approx(-0.5, abs=0.05)


def test_the_exponential_kernel_does_not_on_standard_inputs_but_on_small_ones(run):
  slope = pd.read_csv(run[0] / "slopes.csv", index_col="kernel").slope
  assert slope["exponential"] > -0.3
  assert slope["exponential, x/4"] == pytest.approx(-0.5, abs=0.12)


def test_error_is_of_the_rescaled_gram_over_pairs_of_different_inputs():
  """A map without randomness: its Gram is S/(S−1) times the linear kernel.

  Beside twice that kernel, the rescaled Gram is wrong by half, whatever the diagonal.
  """
  linear = kernels.Construction(
    lambda s: urk.from_function(
      lambda theta, omega, x: x, lambda key, x: jnp.zeros_like(x), s
    ),
    lambda x, y: 2.0 * x @ y.T + 7.0 * jnp.eye(x.shape[0]),
  )
  np.testing.assert_allclose(kernels.errors(linear, [2, 5], 3, (6, 2)), 0.5)


def test_draws_of_one_number_are_no_draws_of_another():
  seen = []

  def feature_map(num_samples):
    plain = urk.random_fourier(num_samples)

    def apply(params, x):
      jax.debug.callback(lambda omega: seen.append(np.asarray(omega)), params.omega)
      return plain.apply(params, x)

    return plain._replace(apply=apply)

  construction = kernels.CONSTRUCTIONS["gaussian"]._replace(feature_map=feature_map)
  kernels.errors(construction, [2, 4], 2, (3, 1))
  jax.effects_barrier()
  assert sorted(len(omega) for omega in seen) == [2, 2, 4, 4]
  assert np.unique(np.concatenate(seen)).size == 12


def test_slope_is_of_the_mean_over_seeds():
  table = pd.DataFrame(
    [
      {"kernel": "k", "num_samples": count, "error": share / count}
      for count in (2, 8, 32)
      for share in (0.5, 1.5)
    ]
  )
  (row,) = kernels.slopes(table).itertuples()
  assert row.slope == pytest.approx(-1)
  assert (row.error_at_2, row.error_at_32) == pytest.approx((1 / 2, 1 / 32))


def test_sample_counts_are_a_geometric_range():
  assert launch_kernels.sample_counts(3, 50, 4) == [3, 12, 48]
  assert launch_kernels.sample_counts(2, 4, 2) == [2, 4]


@pytest.mark.parametrize(
  "changes, part",
  [
    ({"most_samples": 31}, "give at least 32"),
    ({"workdir": None}, "--workdir is missing"),
  ],
)
def test_bad_values_are_refused(tmp_path, changes, part):
  _parse_flags()
  with flagsaver.flagsaver(**({"workdir": str(tmp_path / "run")} | changes)):
    assert_refused(launch_kernels.main, part)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "flag", ["fewest_samples=1", "sample_factor=1", "seeds=1", "num_points=1"]
)
def test_values_out_of_range_are_no_flags(flag, capsys):
  with pytest.raises(SystemExit) as caught, flagsaver.flagsaver():
    common._parse(["kernels", f"--{flag}"])
  assert caught.value.code == 2
  message = capsys.readouterr().err
  assert message.count("\n") == 1
  assert flag in message
