# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What leaves a client
#
# Rows never leave a client; sums of them do. You will see every message of a round,
# byte by byte, read a patient's row out of one of them, watch a sum over many rows hide
# it, release a model with a promise about every row, and let a hospital join and leave
# exactly. It takes about a quarter of a minute on one core, and twice that the first
# time.

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

# %% [markdown]
# ## Ten hospitals
#
# They measure the level of a drug in patients of given age, weight and dose. What each
# column may hold is declared beforehand, and standardisation uses nothing else: means
# and deviations of the rows would tell something of them.

# %%
import tempfile
import textwrap

import jax
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import scipy.optimize
from flax import serialization

import fedbnr_jax as fb
from fedbnr_jax import blr, posterior, precision, privacy
from fedbnr_jax.federated import wire
from fedbnr_jax.release import folder as released
from fedbnr_jax.release import trained
from fedbnr_jax.release.publish import publish
from fedbnr_jax.studies import privacy as study

BOUNDS = {"age": [0, 100], "weight": [30, 150], "dose": [0, 10], "level": [-5, 15]}
rng = np.random.default_rng(0)


# %%
def level(table):
  by_dose = table.dose * (60 / table.weight) ** 0.7
  return by_dose + 5 * np.exp(-table.age / 20)


def patients(count, hospital, age):
  table = pd.DataFrame(
    {
      "age": np.clip(age, 3, 97).round(1),
      "weight": np.clip(rng.normal(75, 15, count), 35, 140).round(1),
      "dose": rng.uniform(0.5, 8, count).round(1),
      "hospital": hospital,
    }
  )
  return table.assign(level=(level(table) + 0.5 * rng.normal(size=count)).round(2))


tables = []
for number in range(10):
  ages = rng.normal(60, 12, 400)
  ages[:2] = rng.uniform(3, 97, 2)  # Children are rare here.
  tables.append(patients(400, f"hospital {number}", ages))
frame = pd.concat(tables, ignore_index=True)
frame.head(3)

# %%
folder = f"{tempfile.mkdtemp()}/run"
model = fb.fit(
  frame,
  target="level",
  client="hospital",
  bounds=BOUNDS,
  method="fedbnr-ev",
  kernel="gaussian",
  num_samples=20,
  num_rounds=8,
  num_local_steps=10,
  learning_rate=0.1,
  data__calibration=0,
  data__calibration_folds=0,
  folder=folder,
  progress=False,
)
print(model)

# %% [markdown]
# ## The messages of a round
#
# `fedbnr-ev` has four exchanges. In each, the server broadcasts one message and every
# hospital answers with one. `wire.Site` is a hospital: it holds rows, takes bytes and
# returns bytes, and nothing else connects it with the server. What is in these bytes?

# %%
run = trained.load_run(folder, frame)
method, clients = run.experiment.algorithm, run.experiment.federation.clients
mine = jax.tree.map(lambda leaf: leaf[0], clients)
messages = {}
with precision.float64():
  site = wire.Site(method, run.experiment.key_init, 0, 10, mine)
  for number, exchange in enumerate(method.exchanges):
    down = wire.encode(exchange.broadcast(model.state.server, None))
    messages[exchange.name] = {"down": down, "up": site.answer(number, down)}

# %%
lines = []
for name, both in messages.items():
  for way, data in both.items():
    tree = serialization.msgpack_restore(data)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      array = "/".join(str(key.key) for key in path) or "value"
      kind = f"{leaf.dtype} {list(leaf.shape)}"
      lines.append((name, way, array, kind, leaf.size, leaf.nbytes))
columns = ["exchange", "way", "array", "what", "floats", "bytes"]
pd.DataFrame(lines, columns=columns).set_index(["exchange", "way"])

# %% [markdown]
# Up go parameters after local steps (`kernel`), and sums over rows (`statistics`, and
# two for noise that varies with the input). The frequencies of the kernel are not among
# them: a seed stands for them. How large is that beside the rows themselves?

# %%
figure, axis = plt.subplots(figsize=(7.5, 3.0), layout="constrained", dpi=90)
names = [*messages, "the rows themselves"]
own_bytes = sum(leaf[mine.mask].nbytes for leaf in (mine.x, mine.y))
for offset, way in ((-0.2, "down"), (0.2, "up")):
  sizes = [len(both[way]) for both in messages.values()]
  axis.barh(
    np.arange(4) + offset, np.divide(sizes, 1e3), 0.4, label=f"{way}, one client"
  )
axis.barh(4, own_bytes / 1e3, 0.4, color="grey", label="never sent")
axis.set_yticks(range(5), names)
axis.invert_yaxis()
axis.set_xlabel("kB")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# The Gram matrix ΦᵀΦ is the longest of them: its length grows with the square of the
# number of features, and not with the rows.
#
# ## What an attacker reads
#
# Say a hospital had a single row. Its Gram matrix is then φφᵀ, and whoever sees it has
# φ up to its sign. The attacker knows the kernel, as every client does, and looks for
# the row that has these features: first among many, then downhill from the nearest.

# %%
server = model.state.server
omega = np.asarray(server.omega, np.float64)
scale = np.exp(-np.asarray(server.params.theta["log_length_scale"], np.float64))


def features(x):
  phase = (x * scale) @ omega.T
  return np.concatenate([np.cos(phase), np.sin(phase)], 1) / np.sqrt(len(omega) - 1)


x, y = run.training_rows()
gram, moment = features(x[:1]).T @ features(x[:1]), features(x[:1]).T @ y[:1]
secret = privacy.recovered_features(gram, num_rows=1)[0]
tried = rng.uniform(x.min(0), x.max(0), (100_000, 3))
nearest = tried[np.argmax(np.abs(features(tried) @ secret))]
found = scipy.optimize.minimize(
  lambda row: -privacy.similarity(secret, features(row[None])[0]),
  nearest,
  method="Nelder-Mead",
  options={"xatol": 1e-9, "fatol": 1e-15, "maxiter": 2000},
).x

# %% [markdown]
# And Φᵀy then gives away the level. In the patient's own units:

# %%
low, high = np.array([BOUNDS[name] for name in ("age", "weight", "dose")]).T
ends = pd.DataFrame([low, high], columns=["age", "weight", "dose"]).astype(float)
start, end = model.preprocessor.transform(ends)


def readable(row, target):
  raw = low + (row - start) / (end - start) * (high - low)
  return [*raw, *model.preprocessor.unstandardise_mean(np.atleast_1d(target))]


guess = features(found[None])[0]
rows = [readable(x[0], y[0]), readable(found, guess @ moment / (guess @ guess))]
pd.DataFrame(rows, index=["the row", "read by the attacker"], columns=[*BOUNDS]).round(
  3
)

# %% [markdown]
# ## A sum hides a row
#
# With more rows in the matrix, the attacker has their features only up to a rotation
# among them, but may still ask: is this patient, whose data I have, in it? Rows that
# are in lie in its span. How often does a row that is in fit better than one that is
# not?

# %%
num_features = features(x[:1]).shape[1]
shuffled = features(x[rng.permutation(len(x))])
inside, outside = shuffled[: len(x) // 2], shuffled[len(x) // 2 :][:1000]
counts = [1, 3, 10, 20, 30, 40, 60, 100, 200, 400, 800, 1600]


def advantage(count, num_draws=10):
  """The mean over draws; one half means that the matrix tells nothing."""
  chosen = [inside[rng.permutation(len(inside))[:count]] for _ in range(num_draws)]
  return np.mean(
    [privacy.membership_advantage(some.T @ some, some, outside) for some in chosen]
  )


bare = [advantage(count) for count in counts]

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained", dpi=90)
axis.semilogx(counts, bare, "o-", label="the attacker")
axis.axhline(0.5, color="grey", lw=1, label="a coin")
axis.axvline(num_features, color="C3", ls=":", label=f"{num_features} features")
axis.axvline(mine.mask.sum(), color="C2", ls="--", label="rows of one hospital")
axis.set(
  xlabel="rows in the sum", ylabel="probability that a row\nthat is in fits better"
)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# With few rows the attacker is never wrong. With more of them than features, a row
# drowns among the others, and in the sum over ten hospitals sooner than in its own. The
# server needs nothing but that sum. That nobody sees its parts takes more than this
# simulation; the last section comes back to it.
#
# ## A private release
#
# A promise for every row, whatever an attacker knows, takes noise. It needs two more
# packages, which are installed here where they are missing.

# %%
missing = [
  package
  for package, module in (("dp-accounting", "dp_accounting"), ("opendp", "opendp"))
  if importlib.util.find_spec(module) is None
]
if missing:
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", *missing], check=True)

# %% [markdown]
# The promise is (ε, δ): with or without a row, no outcome of the release becomes more
# probable than by a factor of about exp(ε), but for a probability of δ. What does that
# cost? With *central* noise, one noise is added to the sum; otherwise each client adds
# its own, and needs to trust nobody.

# %%
epsilons = [0.3, 1.0, 3.0, 10.0]
with precision.float64():
  cost = study.cost_curve(run, [*epsilons, np.inf], study.Promise(), num_draws=20)

figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained", dpi=90)
for noise, some in cost.groupby("noise"):
  by_epsilon = some.groupby("epsilon").test_rmse
  middle, least, most = (by_epsilon.quantile(q)[epsilons] for q in (0.5, 0.1, 0.9))
  label = "one noise on the sum" if noise == "central" else "a noise of each client"
  axis.semilogx(epsilons, middle, "o-", label=label)
  axis.fill_between(epsilons, least, most, alpha=0.2)
axis.axhline(by_epsilon.median()[np.inf], color="k", ls=":", label="without noise")
axis.set(xlabel="ε", ylabel="test RMSE of the level", xticks=epsilons)
axis.set_ylim(bottom=0)
axis.set_xticklabels([f"{epsilon:g}" for epsilon in epsilons])
axis.minorticks_off()
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# The curve has fast noise that is nobody's release. A release has discrete noise on
# integers, from OpenDP, notes what it spends before anyone sees it, and leaves a folder
# that can be handed over. A second one adds to what is spent.

# %%
first = publish(folder, epsilon=1.0, frame=frame)
handed_over = released.load(folder)
second = publish(folder, epsilon=1.0, budget=2.0, frame=frame)
fresh = patients(2000, "elsewhere", rng.normal(60, 12, 2000))
for name, one in (("without noise", model), ("released, ε = 1", handed_over)):
  error = one.predict(fresh, warn=False)["mean"] - level(fresh)
  print(f"{name:16} RMSE to the true level: {np.sqrt(np.mean(error**2)):.3f}")
print(f"spent by one release: ε = {first.total_epsilon:.2f}")
print(f"spent by two:         ε = {second.total_epsilon:.2f}")

# %% [markdown]
# ## Join and leave
#
# A children's hospital wants to join, and later to leave. The posterior is a function
# of sums, so its sums are added, or subtracted; the kernel stays as it was learnt. The
# check is a model from scratch: all rows anew, in NumPy.

# %%
children = patients(300, "children's", rng.uniform(3, 18, 300))
its_rows = model.rows(children)


def compare(name, changed, x, y):
  """Prints how far a changed model is from one of these rows, computed anew."""
  fitted, phi = changed.state.server.posterior, features(x)
  gram, moment = phi.T @ phi, phi.T @ y
  by_sums = np.abs(changed.state.server.stats.gram / gram.max() - gram / gram.max())
  ratio = fitted.noise_std / fitted.prior_std
  weights = np.linalg.solve(gram + ratio**2 * np.eye(len(gram)), moment)
  apart = features(model.rows(fresh).x) @ (fitted.mean - weights)
  with precision.float64():
    stats = blr.SufficientStats(gram, moment, y @ y, np.float64(len(y)))
    noise_std, prior_std = jax.jit(blr.fit_evidence)(stats)
  by_scales = abs(float(noise_std / prior_std) / ratio - 1)
  print(f"{name}, beside a model from scratch: sums differ by {by_sums.max():.0e},")
  print(f"  predictions by {np.abs(apart).max():.0e}, σ/λ by {by_scales:.0e}")


# %%
posterior.change_rows(folder, add=[("children", children)])
joined = fb.load(folder)
both = np.concatenate([x, its_rows.x]), np.concatenate([y, its_rows.y])
compare("joined", joined, *both)
posterior.change_rows(folder, remove=[("children", children)])
left = fb.load(folder)
compare("left", left, x, y)
difference = left.predict(fresh)["mean"] - model.predict(fresh)["mean"]
print(f"before, and after it left: at most {np.abs(difference).max():.0e} apart")

# %% [markdown]
# The sums agree to the last digits of float64. Solving with them costs some digits, and
# so does σ/λ, because the evidence is flat at its top. The model before had features in
# float32, hence the difference in the last line.
#
# What did the model know of children before, and what while they were there? The line
# is the predicted level for 70 kg and a dose of 4, with its 95 % band.

# %%
line = pd.DataFrame({"age": np.linspace(3, 97, 95), "weight": 70.0, "dose": 4.0})
figure, axes = plt.subplots(
  1, 3, figsize=(9.5, 3.0), sharey=True, layout="constrained", dpi=90
)
stages = {"before": model, "joined": joined, "left again": left}
for axis, (title, one) in zip(axes, stages.items(), strict=True):
  predicted = one.predict(line, warn=False)
  axis.fill_between(line.age, predicted.lower95, predicted.upper95, alpha=0.2)
  axis.plot(line.age, predicted["mean"], label="predicted")
  axis.plot(line.age, level(line), "k:", label="true")
  axis.set(title=title, xlabel="age")
axes[0].set_ylabel("level")
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# Before, there were hardly any children, and the band is too sure of the youngest. With
# the new hospital's rows it covers them, and without them it is as it was.
#
# ## What is not protected
#
# Of a release, its own folder says what the promise leaves out:

# %%
for sentence in released.NOT_COVERED:
  print(textwrap.fill(f"- {sentence}", 80, subsequent_indent="  "))

# %% [markdown]
# Without a release, nothing is promised. This is a simulation: the server computes
# with sums only, but whoever runs it could look at every message, and a message of one
# client tells what you have seen. Parameters after local steps tell something of the
# rows, too. Rows that left the posterior are still in a kernel that they helped to
# train, and in the files of the run until they are erased (`erase=True`).
#
# In a federation over a network, clients can add masks to their messages that cancel in
# the sum, so that nobody sees a part. That will be described here once it is there.
