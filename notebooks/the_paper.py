# %% [markdown]
# # The paper in one sitting
#
# This notebook follows the paper behind this package (Yu et al., 2022) from its kernel
# to a cell of its table. We see random features turn into kernels, two clients turn
# into one posterior to the last digit, two ways of agreeing on a kernel, and how the
# method stands among its baselines. It takes about half a minute.

# %%
# Installs fedbnr_jax where it is missing, as in Colab: from a wheel that lies beside
# this notebook, from a clone around it, or else by its name on the package index.
import importlib.util
import pathlib
import subprocess
import sys

if importlib.util.find_spec("fedbnr_jax") is None:
  wheels = sorted(pathlib.Path().glob("fedbnr_jax-*.whl"))
  clones = [path for path in (".", "..") if pathlib.Path(path, "fedbnr_jax").is_dir()]
  source = str([*clones[:1], *wheels][-1]) if clones or wheels else "fedbnr-jax"
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %%
import pathlib

import jax
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedbnr_jax as fb
from fedbnr_jax import blr, data, precision, urk
from fedbnr_jax.report.tables import paper_results

# %% [markdown]
# ## A kernel from random draws
#
# The paper's *unifying random kernel* is an expectation over random draws ω of a
# product of features, k(x, x') = E[g(ω, x)ᵀ g(ω, x')]. With S draws, which everybody
# makes from the same seed, the expectation becomes a mean, and a Gaussian process
# becomes linear regression on S features or 2S of them. That is what makes it federated
# later on.
#
# Which kernels can be had in this way? Cosines and sines with normal frequencies give
# the Gaussian kernel, other spectra give the Matérn family, products of randomly chosen
# inputs give the polynomial kernel, and exponentials a kernel that is not stationary.
# We compare each with its closed form.


# %%
def distance(a, b):
  return np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2))


def matern(r):
  return (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)


EXACT = {
  "Gaussian": lambda a, b: np.exp(-(distance(a, b) ** 2) / 2),
  "Matérn 3/2": lambda a, b: matern(distance(a, b)),
  "polynomial": lambda a, b: (a @ b.T + 1) ** 2,
  "exponential": lambda a, b: np.exp(((a[:, None] + b[None]) ** 2).sum(axis=2) / 2),
}
RANDOM = {
  "Gaussian": lambda size: urk.random_fourier(size, "gaussian"),
  "Matérn 3/2": lambda size: urk.random_fourier(size, "matern32"),
  "polynomial": lambda size: urk.polynomial(size, degree=2, offset=1.0),
  "exponential": lambda size: urk.exponential(size),
}


def grams(name, size, rows, num_seeds):
  """Kernel matrices [seeds, N, N] of S draws of ω."""
  kernel = RANDOM[name](size)

  def gram(key):
    features = kernel.apply(kernel.init(key, rows), rows)
    return features @ features.T

  keys = jax.random.split(jax.random.key(0), num_seeds)
  return np.asarray(jax.jit(jax.vmap(gram))(keys))


# %% [markdown]
# How many draws does it take? On the left is the Gaussian kernel between 0 and x, by
# twenty and by five hundred draws, three times each. On the right is the error of whole
# kernel matrices against S, with a dashed line of slope −½: four times the draws halve
# the error, whatever the kernel.

# %%
line = np.linspace(0, 4, 81, dtype=np.float32)[:, None]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), dpi=90)
for size, colour in [(20, "C1"), (500, "C0")]:
  curves = grams("Gaussian", size, line, 3)[:, 0]
  left.plot(line, curves.T, color=colour, lw=1, label=[f"S = {size}", *["_"] * 2])
left.plot(line, EXACT["Gaussian"](line[:1], line)[0], "k--", label="exact")
left.set(xlabel="x", ylabel="k(0, x)")
left.legend(frameon=False)

rows = np.random.default_rng(0).uniform(-0.8, 0.8, (40, 2)).astype(np.float32)
sizes = [16, 128, 1024]
for name in RANDOM:
  exact = EXACT[name](rows, rows)
  errors = [
    np.mean(np.linalg.norm(grams(name, size, rows, 10) - exact, axis=(1, 2)))
    for size in sizes
  ]
  right.loglog(sizes, errors / np.linalg.norm(exact), "o-", ms=4, label=name)
right.loglog(sizes, 2 / np.sqrt(sizes), "k--", lw=1)
right.set(xlabel="number of draws S", ylabel="relative error of the matrix")
right.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## One client, two clients, one posterior
#
# Two clients measure the same function on different ranges. Each has features Φ and
# targets y, and from these the sums ΦᵀΦ, Φᵀy, yᵀy and its number of rows. These
# *statistics* are all that the posterior of the regression depends on, and the sum over
# clients is that of the pooled rows. Does it hold in numbers, too?

# %%
task = data.synthetic.load("two-ranges", np.random.default_rng(1), num_rows=80)
first_rows = task.split.train
x, y = task.features.to_numpy()[first_rows], task.targets[first_rows]
is_first = task.clients[first_rows] == "client 1"
grid = np.linspace(-5, 5, 201)[:, None]
kernel = urk.random_fourier(200, "matern52", length_scale=1.0)

with precision.float64():
  params = kernel.init(jax.random.key(0), x)
  features = kernel.apply(params, x)
  one = blr.sufficient_stats(features[is_first], y[is_first])
  two = blr.sufficient_stats(features[~is_first], y[~is_first])
  pooled = blr.sufficient_stats(features, y)
  noise_std, prior_std = blr.fit_evidence(one + two)
  bands = {
    name: blr.predict(
      blr.posterior(stats, noise_std, prior_std), kernel.apply(params, grid)
    )
    for name, stats in [
      ("client 1 alone", one),
      ("client 2 alone", two),
      ("sum of both", one + two),
      ("pooled rows", pooled),
    ]
  }

apart = [
  np.max(np.abs(np.asarray(a) - np.asarray(b)))
  for a, b in zip(bands["sum of both"], bands["pooled rows"], strict=True)
]
print(f"σ = {noise_std:.3f} and λ = {prior_std:.3f}, by the evidence of the sums.")
print(f"Largest difference of means {apart[0]:.1e}, of variances {apart[1]:.1e}.")

# %% [markdown]
# The two agree to the last digits of a double. Even the noise σ and the scale λ of the
# prior follow from the sums alone, by maximising the evidence. What the sum knows more
# than a client does shows in a picture: each client's band opens where it has no rows.

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 3), dpi=90, sharey=True)
for axis, name in zip(axes, bands, strict=False):
  mean, variance = (np.asarray(part) for part in bands[name])
  half = 1.96 * np.sqrt(variance)
  axis.fill_between(grid[:, 0], mean - half, mean + half, color="C0", alpha=0.2)
  axis.plot(grid, mean, color="C0", label="posterior")
  axis.plot(grid, task.truth(grid), "k--", lw=1, label="truth")
  seen = {"client 1 alone": is_first, "client 2 alone": ~is_first}.get(name, y == y)
  axis.plot(x[seen], y[seen], ".", color="0.3", ms=4)
  axis.set(title=name, xlabel="x")
axes[0].legend(frameon=False, fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Who trains the kernel?
#
# In the paper the features come from a small network, so that there is a kernel to
# learn. A round has two phases. In the first, every client takes some steps on the
# evidence of its own rows, and the server makes one kernel of theirs; in the second,
# everybody sends statistics under that kernel, and the posterior is the pooled one.
#
# The server can make one kernel of many by averaging their parameters, which is
# `fedbnr`, or by distilling them: in `fedbnr-kd` it fits a kernel to the mean of the
# clients' kernel matrices on a few rows of its own. Which is better where clients see
# different ranges? And what does a client get that stays alone, `local+local`?

# %%
SMALL = {"hidden_size": 50, "num_samples": 30, "num_rounds": 12, "seed": 0}
SMALL |= {"data__calibration": 0, "data__calibration_folds": 0}
SMALL |= {"inputs": "standard", "progress": False}
more = data.synthetic.load("two-ranges", np.random.default_rng(2), num_rows=200)
table = more.features.assign(y=more.targets, owner=more.clients)
models = {
  name: fb.fit(table, target="y", client="owner", method=name, **SMALL)
  for name in ["local+local", "fedbnr", "fedbnr-kd"]
}

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 3), dpi=90, sharey=True)
for axis, (name, model) in zip(axes, models.items(), strict=True):
  own = {"client": "client 1"} if name == "local+local" else {}
  told = model.predict(pd.DataFrame({"x": grid[:, 0]}), warn=False, **own)
  axis.fill_between(grid[:, 0], told["lower95"], told["upper95"], color="C0", alpha=0.2)
  axis.plot(grid, told["mean"], color="C0")
  axis.plot(grid, more.truth(grid), "k--", lw=1)
  error = np.sqrt(np.mean((told["mean"] - more.truth(grid)) ** 2))
  whose = ", client 1" if own else ""
  axis.set(title=f"{name}{whose}: error {error:.2f}", xlabel="x", ylim=(-5, 5))
figure.tight_layout()

# %% [markdown]
# The titles have the error of the mean against the truth. Alone, client 1 guesses at
# the right half, and does not even know how badly; that is what the warning is about.
# Both federated kernels cover both halves, and the distilled one follows the truth more
# closely. Is that so from the first round on? Validation rows decide which round is
# kept, and stop the training when there has been none better for a while.

# %%
figure, axis = plt.subplots(figsize=(6, 2.8), dpi=90)
for name in ["fedbnr", "fedbnr-kd"]:
  history = models[name].history
  axis.plot(history["round"], history["val_rmse"], "o-", ms=4, label=name)
axis.axhline(0.5, color="0.7", lw=1, ls="--", label="the noise")
axis.set(xlabel="round", ylabel="validation RMSE")
axis.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# The mean of the two clients' parameters jumps about, and few of its rounds are better
# than the first: each client pulls the network towards its own range, and the mean of
# two good networks need not be one. The distilled kernel is a compromise between
# functions, not between parameters, and stays nearer to the noise.
#
# ## A cell of the table
#
# The paper's first table has the errors of all methods on five datasets, with ten and
# with a hundred clients. We train three of its rows here, on a synthetic table of five
# inputs and ten clients who own different ranges of the first, and a row that it does
# not have: `fedbnr-ev` is `fedbnr` with σ and λ by the evidence of the sums, as above.

# %%
made = data.synthetic.load(
  "additive", np.random.default_rng(3), num_rows=600, num_clients=10
)
table = made.features.assign(y=made.targets, owner=made.clients)
SHOWN = ["local+local", "fedbnr", "fedbnr-ev", "central"]
live = {
  name: fb.fit(table, target="y", client="owner", method=name, **SMALL).summary
  for name in SHOWN
}
pd.DataFrame(live).loc[["test_rmse", "test_coverage95"]].astype(float).round(2)

# %% [markdown]
# There is a warning for each of the first three. In `fedbnr` every client learns σ on a
# few rows, which its network knows by heart, and so the mean of these σ is far too
# small; the sums of all clients are fooled much less. How does this compare with real
# data? Beside our errors is a cell of the paper's table, Skillcraft with ten clients:
# the paper's figures, which come with the package, and ours, the means of five seeds,
# where this notebook lies in a clone of the project.

# %%
cell = {"dataset": "skillcraft", "num_clients": 10}
paper = paper_results().query("metric == 'rmse'")
columns = {"the paper": paper.rename(columns={"value": "test_rmse"})}
sweep = pathlib.Path("../results/paper_table.csv")
if sweep.exists():
  columns["ours"] = pd.read_csv(sweep)
else:
  print("Only a clone has our own figures: results/paper_table.csv.")
columns = {
  name: frame[(frame[list(cell)] == pd.Series(cell)).all(axis=1)]
  .groupby("method")["test_rmse"]
  .mean()
  .reindex(SHOWN)
  for name, frame in columns.items()
}

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), dpi=90)
errors = pd.Series({name: summary["test_rmse"] for name, summary in live.items()})
errors.plot.barh(ax=left, color="C2", width=0.4)
left.axvline(0.5, color="0.3", lw=1, ls="--")
left.set(title="here: synthetic, ten clients", xlabel="test RMSE; dashed: the noise")
pd.DataFrame(columns).plot.barh(ax=right, width=0.7)
right.set(
  title="Skillcraft, ten clients", xlabel="test RMSE", ylabel="", yticklabels=[]
)
right.set(xlim=(0.8, None))
right.legend(frameon=False, loc="upper right")
figure.tight_layout()

# %% [markdown]
# In both, a client alone is worst, and the federated process comes near the one that
# was trained on all rows at once, on the real data nearer than on ours. In a clone, the
# whole table is `python -m launch.sweep --config=configs/paper_table.py
# --workdir=runs/table`; the real data are downloaded on first use. `docs/results.md`
# has every method, and `docs/explanation` what this package does past the paper: for
# tables of one's own `fb.fit` takes a stronger kernel than the paper's.
