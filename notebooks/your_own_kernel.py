# %% [markdown]
# # A kernel and a method of your own
#
# Everything in this package is made of small pure functions, and yours can stand beside
# them. We write a kernel in five lines, a message between clients and server, and a
# method that is not fooled by a broken sensor; we jit its round ourselves and train it
# on a federation. In the end one line lets `fb.fit` know the method by name. It takes
# less than half a minute.

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
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedbnr_jax as fb
from fedbnr_jax import algorithms, blr, federation, urk

# %% [markdown]
# ## Four weather stations
#
# Four stations measure the same valley for six days, each at its own hours. The
# temperature follows the day, with a short night and a long afternoon, and a slow
# weather front. The sensor of the station South is broken: of its readings, every third
# is some ten degrees too high.


# %%
def temperature(day):
  """The true temperature of the valley, in °C."""
  hour = 2 * np.pi * day
  cycle = 5 * np.sin(hour - 2) + 2 * np.sin(2 * hour - 1) + np.sin(3 * hour)
  return 12 + cycle + 3 * np.exp(-(((day - 3) / 1.2) ** 2))


rng = np.random.default_rng(0)
STATIONS = {"North": (0, 10), "East": (6, 16), "West": (14, 24), "South": (4, 20)}
parts = []
for station, (opens, closes) in STATIONS.items():
  day = np.sort(rng.integers(0, 6, 60) + rng.uniform(opens, closes, 60) / 24)
  part = pd.DataFrame({"station": station, "day": day})
  part["temperature"] = temperature(day) + rng.normal(0, 0.7, 60)
  part["broken"] = (station == "South") & (rng.uniform(size=60) < 1 / 3)
  part["temperature"] += part["broken"] * rng.normal(10, 2, 60)
  parts.append(part)
readings = pd.concat(parts, ignore_index=True)

figure, axis = plt.subplots(figsize=(9, 3), dpi=90)
days = np.linspace(0, 8, 800)
axis.plot(days[:600], temperature(days[:600]), "k--", lw=1, label="truth")
for station, part in readings.groupby("station", sort=False):
  axis.plot(part["day"], part["temperature"], ".", ms=5, label=station)
axis.set(xlabel="day", ylabel="temperature (°C)")
axis.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.17))
figure.tight_layout()

# %% [markdown]
# ## A kernel of your own
#
# A kernel is a function `g(theta, omega, x)` of trained parameters, one random draw and
# one row. `urk.from_function` lifts it to many draws and all rows. Ours knows that days
# repeat: it bends the time into a circle, one turn a day, and takes random cosines and
# sines of the point on that circle. The expectation over normal ω is the periodic
# kernel exp(−2 sin²(π(x − x')) / ℓ²).


# %%
def periodic(num_samples, length_scale):
  def sample_omega(key, x):
    return jax.random.normal(key, (2,), x.dtype)

  def g(theta, omega, x):
    turn = 2 * jnp.pi * x[0]
    point = jnp.stack([jnp.cos(turn), jnp.sin(turn)])
    phase = jnp.dot(omega, point / length_scale)
    return jnp.stack([jnp.cos(phase), jnp.sin(phase)])

  return urk.from_function(g, sample_omega, num_samples, unit_norm=True)


# %% [markdown]
# It adds to any other kernel. Beside it we put a Gaussian kernel of two days, for the
# weather front. What does such a kernel believe before it has seen a single row?
# Features times normal weights are functions drawn from its prior: three of the
# Gaussian kernel alone, and three of the sum.

# %%
ours = urk.add(periodic(60, length_scale=0.7), urk.random_fourier(20, length_scale=2.0))
plain = urk.random_fourier(80, length_scale=0.25)

grid = days[:, None].astype(np.float32)
figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), dpi=90, sharey=True)
for axis, (name, kernel) in zip(
  axes, [("Gaussian", plain), ("ours", ours)], strict=True
):
  features = kernel.apply(kernel.init(jax.random.key(1), grid), grid)
  weights = jax.random.normal(jax.random.key(2), (features.shape[1], 3))
  axis.plot(grid, features @ weights, lw=1)
  axis.set(title=f"prior, kernel: {name}", xlabel="day")
figure.tight_layout()

# %% [markdown]
# ## A round that you jit
#
# `federation.build` stacks the rows of all clients. The simplest method, `fedridge`,
# has a single exchange of messages: the server sends the seed of ω, every client
# answers with its sums, and the server makes one posterior of the total. A method is a
# set of pure functions, and nothing is compiled unless you say so.

# %%
mean, std = readings["temperature"].mean(), readings["temperature"].std()
x = readings[["day"]].to_numpy()
y = (readings["temperature"].to_numpy() - mean) / std
rows = federation.build(
  x, y, [np.flatnonzero(readings["station"] == station) for station in STATIONS]
)


def train(method, num_rounds):
  """Trains on the stations; returns predictions in °C and the last round's report."""
  step = jax.jit(method.round)
  state = jax.jit(method.init)(jax.random.key(0), rows)
  for number in range(num_rounds):
    state, info = step(jax.random.key(number), state, rows)
  centre, variance = jax.jit(method.predict)(state, grid)
  told = np.asarray(centre) * std + mean, np.sqrt(np.asarray(variance)) * std
  return told, state, info


ridge = {
  name: train(algorithms.fedridge.fedridge(kernel), num_rounds=1)
  for name, kernel in [("Gaussian", plain), ("ours", ours)]
}

# %% [markdown]
# What is the kernel worth? The readings end after six days. Beyond them the Gaussian
# kernel knows nothing, as its band admits, and the periodic one goes on.


# %%
def show(axis, told, title):
  centre, deviation = told
  band = centre - 1.96 * deviation, centre + 1.96 * deviation
  axis.fill_between(days, *band, color="C0", alpha=0.2)
  axis.plot(days, centre, color="C0", label="prediction")
  axis.plot(days, temperature(days), "k--", lw=1, label="truth")
  error = np.sqrt(np.mean((centre - temperature(days)) ** 2))
  axis.axvline(6, color="0.7", lw=1)
  axis.set(title=f"{title}: error {error:.1f} °C", xlabel="day")


figure, axes = plt.subplots(1, 2, figsize=(9, 3), dpi=90, sharey=True)
for axis, (name, (told, _, _)) in zip(axes, ridge.items(), strict=True):
  show(axis, told, f"fedridge, kernel: {name}")
axes[0].set(ylabel="temperature (°C)")
axes[0].legend(frameon=False, fontsize=8, loc="upper left")
figure.tight_layout()

# %% [markdown]
# The shape is right, but the broken sensor pulls the prediction up wherever South has
# measured, and makes the error bars wide for everybody.
#
# ## An exchange of your own
#
# A remedy is noise with heavy tails: under a Student distribution a reading that is far
# from the prediction counts less. That takes rounds, because what is far depends on the
# prediction. In each the server sends what it believes so far; every client weighs its
# own rows by it, and answers with weighted sums; the server makes the posterior of the
# total. An `Exchange` is just these three functions. None of them sees more than its
# arguments: the client not the server's state, the server no client's answer but the
# sum.


# %%
def weighing(kernel, freedom):
  def broadcast(state, server_set):
    return {
      "seed": state.seed,  # Stands for ω, which every client draws by itself.
      "theta": state.params.theta,
      "mean": state.posterior.mean,
      "noise_std": state.posterior.noise_std,
    }

  def client(down, own, rows):
    omega = urk.draw_omega(kernel, urk.Source(down["seed"]), rows.x)
    features = kernel.apply(urk.FeatureParams(omega, down["theta"]), rows.x)
    error = (rows.y - features @ down["mean"]) / down["noise_std"]
    weight = (freedom + 1) / (freedom + error**2)
    root = jnp.sqrt(weight)
    sums = blr.sufficient_stats(features * root[:, None], rows.y * root, rows.mask)
    # A symmetric matrix travels as its triangle.
    up = {"gram": blr.pack(sums.gram), "rest": sums.replace(gram=())}
    return up, own, {"loss": jnp.mean(error**2, where=rows.mask)}

  def server(state, server_set, total):
    sums = total["rest"].replace(gram=blr.unpack(total["gram"]))
    posterior = blr.posterior(sums, *blr.fit_evidence(sums))
    return state.replace(stats=sums, posterior=posterior)

  return algorithms.Exchange("weighing", broadcast, client, server)


# %% [markdown]
# ## A method of your own
#
# A method says how the server starts, which exchanges make up a round, and how to
# predict. The first and the last are as in every method with one last layer, and we
# take them from there.


# %%
def student(kernel, freedom=2.0):
  return algorithms.FederatedAlgorithm(
    init_server=algorithms.last_layer.initial_state(kernel, 0.5, 1.0),
    stages=(algorithms.Stage((weighing(kernel, freedom),)),),
    train_nll=algorithms.last_layer.train_nll,
    predict=algorithms.last_layer.prediction(kernel),
  )


told, state, info = train(student(ours), num_rounds=20)
print(f"In a round a client sends {info.floats_up} numbers, whatever its rows.")

# %% [markdown]
# Does it see through the broken sensor? On the left is its prediction. On the right are
# the readings of South, and how much each of them counts in the end, which only South
# itself can compute.

# %%
south = readings[readings["station"] == "South"]
spread = state.server.posterior.noise_std * std
error = (south["temperature"] - np.interp(south["day"], days, told[0])) / float(spread)
weight = 3 / (2 + error**2)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), dpi=90, sharey=True)
show(left, told, "student, our kernel")
left.set(ylabel="temperature (°C)")
right.plot(days[:600], temperature(days[:600]), "k--", lw=1)
points = right.scatter(
  south["day"], south["temperature"], c=weight, s=18, cmap="plasma"
)
figure.colorbar(points, label="weight of the reading")
right.set(title="station South", xlabel="day")
figure.tight_layout()

# %% [markdown]
# The broken readings count for next to nothing, although nobody has told the server or
# the other stations that there are any.
#
# ## One file, one line
#
# In the package a method is a file in `fedbnr_jax/algorithms/`, with a function that
# builds it from a config, and a line in `METHODS`. The line works from here as well.
# Then `fb.fit` trains the method on any table, with standardisation, validation,
# intervals, saving and all. The table has the hour and the day as columns of their own,
# and the kernel is one of the package's, by its name.


# %%
def from_config(config):
  return student(algorithms.kernels.from_config(config))


algorithms.METHODS["student"] = algorithms.Method(from_config)

table = pd.DataFrame({"day": readings["day"] // 1, "hour": readings["day"] % 1 * 24})
table["temperature"] = readings["temperature"]
table["station"] = readings["station"]
asked = pd.DataFrame({"day": days[:600] // 1, "hour": days[:600] % 1 * 24})

OPTIONS = {"target": "temperature", "client": "station", "progress": False}
OPTIONS |= {"num_rounds": 20, "data__calibration_folds": 0, "stop_on": "nll"}
KERNEL = {"kernel": "matern32+linear", "num_samples": 100}
models = {
  "student": fb.fit(table, method="student", **KERNEL, **OPTIONS),
  "fedridge": fb.fit(
    table, method="fedridge", **{f"ridge__{k}": v for k, v in KERNEL.items()}, **OPTIONS
  ),
}
told = {name: model.predict(asked) for name, model in models.items()}
truth = temperature(days[:600])
pd.DataFrame(
  {
    name: {
      "error against the truth (°C)": np.sqrt(np.mean((part["mean"] - truth) ** 2)),
      "length of 95 % intervals (°C)": np.mean(part["upper95"] - part["lower95"]),
    }
    for name, part in told.items()
  }
).round(2)

# %% [markdown]
# Both trainings warn that their intervals miss some of the test rows. They are right:
# broken readings of South are among these, and no interval around the truth holds them.
#
# A test that comes with the package sends the messages of every method in `METHODS`
# through bytes to another process, so that a method of yours is a deployable one from
# its first day. `CONTRIBUTING.md` has the three steps of adding it for good, and
# `docs/howto/compose.md` more to compose with.
