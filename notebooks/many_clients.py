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
# # A hundred thousand clients
#
# A hundred thousand sensors have one to four noisy readings each. You will see them
# train one Gaussian process together in one jitted function, in bounded memory, with
# the result that all rows in one place would give; then only some of them take part,
# several seeds train at once, and the same code runs on whatever devices are there.
# It takes about a quarter of a minute on one core, and twice that the first time.

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
# ## Who they are
#
# Each sensor stands somewhere on a map and measures a field in the few steps around it.
# All sensors together are three arrays: `x [K, N, D]`, `y [K, N]`, and a mask that is
# false where a sensor has fewer than N rows. They stay NumPy's for now.

# %%
import time

import jax
import matplotlib.pyplot as plt
import numpy as np

from fedbnr_jax import algorithms, blr, federation, precision, urk
from fedbnr_jax.algorithms import proposals
from fedbnr_jax.federated import host_chunks, placement
from fedbnr_jax.federated.collectors import OnDevice
from fedbnr_jax.federated.optimizers import adam
from fedbnr_jax.federated.participation import Participation

# %%
NUM_CLIENTS, NUM_ROWS = 100_000, 4
rng = np.random.default_rng(0)


def field(x):
  east, north = x[..., 0], x[..., 1]
  return np.sin(2 * east) * np.cos(1.5 * north) + 0.5 * np.sin(2 * east * north)


homes = rng.uniform(-1.5, 1.5, (NUM_CLIENTS, 1, 2))
x = homes + 0.05 * rng.normal(size=(NUM_CLIENTS, NUM_ROWS, 2))
y = field(x) + 0.3 * rng.normal(size=(NUM_CLIENTS, NUM_ROWS))
mask = np.arange(NUM_ROWS) < rng.integers(1, NUM_ROWS + 1, (NUM_CLIENTS, 1))
rows = federation.Federation(
  federation.Rows(x.astype(np.float32), y.astype(np.float32), mask)
)
megabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(rows)) / 1e6
print(f"{rows.num_clients:,} clients, {mask.sum():,} rows, {megabytes:.1f} MB")

# %% [markdown]
# ## One jitted round
#
# The kernel has 20 random frequencies, so 40 features, and a length-scale for each of
# the two inputs, which is what is trained. The method is `fedbnr-exact`: every client
# sends its part of the gradient of the evidence of *all* rows, the server takes a step,
# and then every client sends its statistics under the new kernel. Two such steps are
# a round. `Placement(batch_size=100)` computes a hundred clients at a time.
#
# `precision.float64()` allows 64-bit types inside a block, and leaves your settings as
# they are. `fb.fit` does the same inside; who composes a method says it.

# %%
kernel = urk.random_fourier(20, length_scale=1.0, isotropic=False)
HUNDRED, EVERYBODY = placement.Placement(batch_size=100), Participation()


def make_method(where=HUNDRED, who=EVERYBODY):
  optimizer = adam(0.3)
  step = proposals.follow_gradient(kernel, optimizer, min_noise_std=1e-3)
  return algorithms.exact.exact(
    kernel, step, optimizer, num_steps=2, participation=who, placement=where
  )


# %%
def train(method, rows, num_rounds=3):
  """Returns the state after some rounds, what the last one tells, and seconds."""
  state, seconds = begun, []
  with precision.float64():
    step = jax.jit(method.round).lower(jax.random.key(0), state, rows).compile()
    for number in range(num_rounds):
      start = time.perf_counter()
      state, info = jax.block_until_ready(step(jax.random.key(number), state, rows))
      seconds.append(time.perf_counter() - start)
  return state, info, seconds


method, on_device = make_method(), jax.device_put(rows)
with precision.float64():
  begun = jax.jit(method.init)(jax.random.key(0), rows)
state, info, seconds = train(method, on_device)
print(f"seconds of the rounds: {', '.join(f'{one:.2f}' for one in seconds)}")
print(
  f"a client sends {info.floats_up:,} numbers a round, receives {info.floats_down:,}"
)

# %% [markdown]
# What does one sensor know of the map, and what do all of them know? The panel in the
# middle is the posterior of a single client's rows, under the same kernel, σ and λ; the
# one on the right is the posterior of the whole federation.

# %%
side = np.linspace(-1.5, 1.5, 61, dtype=np.float32)
places = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
truth = field(places.astype(np.float64))


@jax.jit
def predict_alone(server, client, inputs):
  """The mean by one client's rows, under the federation's kernel, σ and λ."""
  params = urk.FeatureParams(server.omega, server.params.theta)
  stats = blr.sufficient_stats(kernel.apply(params, client.x), client.y, client.mask)
  fitted = server.posterior
  posterior = blr.posterior(stats, fitted.noise_std, fitted.prior_std)
  return blr.predict(posterior, kernel.apply(params, inputs))[0]


one = jax.tree.map(lambda leaf: leaf[17], rows.clients)
predict = jax.jit(method.predict)
with precision.float64():
  by_one = np.asarray(predict_alone(state.server, one, places))
  by_all = np.asarray(predict(state, places)[0])

# %%
maps = {"the field": truth, "one sensor's map": by_one, "all sensors' map": by_all}
figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.2), layout="constrained", dpi=90)
for axis, (title, values) in zip(axes, maps.items(), strict=True):
  image = axis.imshow(
    values.reshape(61, 61),
    origin="lower",
    extent=(-1.5, 1.5, -1.5, 1.5),
    vmin=-1.5,
    vmax=1.5,
    cmap="RdBu_r",
  )
  error = np.sqrt(np.mean((values - truth) ** 2))
  axis.set(title=title, xlabel="east" if values is truth else f"east\nRMSE {error:.3f}")
axes[0].set_ylabel("north")
axes[1].plot(*one.x[one.mask].T, "k.", label="its rows")
axes[1].legend(loc="lower left")
figure.colorbar(image, ax=axes, shrink=0.8)
plt.show()

# %% [markdown]
# ## The same as pooled rows
#
# Sums over clients are sums over rows, so it must not matter who holds which rows.
# Here one client holds all of them, and trains alone by the same rounds.

# %%
pooled, _, _ = train(make_method(), jax.device_put(federation.pooled(rows)))


def length_scales(state):
  return np.exp(np.asarray(state.server.params.theta["log_length_scale"]))


with precision.float64():
  by_pooled = np.asarray(predict(pooled, places)[0])
print("length-scales, federated:", length_scales(state))
print("length-scales, pooled:   ", length_scales(pooled))
print(f"predictions differ by at most {np.abs(by_all - by_pooled).max():.0e}")

# %% [markdown]
# ## Time and memory
#
# How do seconds and memory grow with the number of clients? There are two ways to lay
# a round out. *On the device*, all rows lie on the device and one program does the
# whole round. *Streamed*, rows stay in host memory, or in files
# (`federation.map_from_disk`), and pass the device a thousand clients at a time; in a
# config that is `stream_clients=1000`.

# %%
streamed = host_chunks.streamed(make_method(), 1000, jax.jit)


def some(count):
  clients = jax.tree.map(lambda leaf: leaf[:count], rows.clients)
  return rows.replace(clients=clients)


# %%
def streamed_seconds(count):
  taken, repeats = [], 1 if count == NUM_CLIENTS else 3
  with precision.float64():
    for _ in range(repeats):
      start = time.perf_counter()
      after, _ = streamed(jax.random.key(0), state, some(count))
      jax.block_until_ready(after.server)
      taken.append(time.perf_counter() - start)
  return min(taken)


counts = [10, 1000, 10_000, 100_000]
by_chunks = [streamed_seconds(count) for count in counts]

# %% [markdown]
# Memory is asked of the compiler, which knows before anything runs: how many bytes does
# the exchange of statistics need beside the rows, if a hundred clients are computed at
# a time, and if all are?

# %%
statistics = method.exchanges[0]


def collecting(where):
  """Makes the function that sums the clients' statistics on some devices."""

  def collect(server, rows):
    down = statistics.broadcast(server, None)
    return OnDevice(rows, where)(statistics, down, (), None).total

  return collect


def work_bytes(count, batch_size):
  """Memory of the exchange of statistics, rows and result left out."""
  collect = collecting(placement.Placement(batch_size=batch_size))
  with precision.float64():
    compiled = jax.jit(collect).lower(state.server, some(count)).compile()
  return compiled.memory_analysis().temp_size_in_bytes


few = [100, 10_000, 100_000]
everyone = [work_bytes(count, count) for count in few]
hundred = [everyone[0], work_bytes(few[-1], 100)]

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained", dpi=90)
left, right = axes
left.loglog(counts, by_chunks, "o-", label="streamed, 1,000 at a time")
left.loglog(NUM_CLIENTS, min(seconds), "sC1", label="on the device")
left.set(xlabel="clients", ylabel="seconds a round")
shares = np.divide(few, NUM_CLIENTS)
right.loglog(few, np.divide(everyone, 1e6), "^-C3", label="all clients at once")
right.loglog(few[::2], np.divide(hundred, 1e6), "s-C1", label="100 clients at a time")
right.loglog(few, megabytes * shares, "k:", label="the rows themselves")
right.set(xlabel="clients", ylabel="MB on the device")
for axis in axes:
  axis.grid(alpha=0.3)
  axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Up to a thousand clients a streamed round is one chunk, and much of its time does not
# depend on how many they are. From there on, seconds grow as the number of clients
# does, and not faster. A hundred clients at a time need the same two megabytes, however
# many there are, while all clients at once would write every Gram matrix before they
# are added, two gigabytes. If you say nothing, the size is chosen by what fits a core's
# cache, or the memory of an accelerator; in a config it is `client_batch_size`. Results
# do not depend on it, but for rounding.

# %% [markdown]
# ## Not everybody takes part
#
# Batteries are empty and lines are down. `Participation` says which fraction of the
# clients is sampled in a round, and with which probability one of them does not answer.

# %%
rule = Participation(fraction=0.1, dropout=0.3)
draw = jax.jit(lambda key: rule.draw(key, NUM_CLIENTS))
answers = [np.asarray(draw(jax.random.key(number))) for number in range(3)]
print("clients that answer in three rounds:", [int(drawn.sum()) for drawn in answers])
print("clients that answer in all of them: ", int(np.all(answers, axis=0).sum()))

# %% [markdown]
# How much is lost if few take part? By default all clients send statistics, and the
# fraction only slows the kernel's training; with `statistics_from="answering"`, the
# posterior too is of those who answer. Here it is, and to see its part alone the kernel
# stays as it is at the start (`fedridge`: one exchange of statistics), with the
# length-scale that was learnt above. Each point is of several seeds, which draw other
# clients and other frequencies: `jax.vmap` over the key computes them in one program.
# In a config of `launch.train` that is `num_seeds=4`.

# %%
keys = jax.random.split(jax.random.key(1), 4)
learnt = urk.random_fourier(20, length_scale=float(length_scales(state).mean()))


def make_ridge(fraction):
  who = Participation(fraction, dropout=0.3, statistics_from="answering")
  return algorithms.fedridge.fedridge(learnt, participation=who, placement=HUNDRED)


def of_seeds(function, *axes):
  return jax.jit(jax.vmap(function, axes))


fractions, errors = [0.0003, 0.005, 0.1], []
with precision.float64():
  states = of_seeds(make_ridge(1.0).init, 0, None)(keys, on_device)
  predict_all = of_seeds(make_ridge(1.0).predict, 0, None)
  for fraction in fractions:
    one_round = of_seeds(make_ridge(fraction).round, 0, 0, None)
    after, _ = one_round(keys, states, on_device)
    wrong = np.asarray(predict_all(after, places)[0]) - truth
    errors.append(np.sqrt(np.mean(wrong**2, axis=1)))

# %%
figure, axis = plt.subplots(figsize=(6.0, 3.4), layout="constrained", dpi=90)
axis.loglog(fractions, errors, "o", color="C0", alpha=0.5)
axis.loglog(
  fractions, np.mean(errors, axis=1), "-", color="C0", label="mean of four seeds"
)
axis.axhline(0.3, color="grey", ls=":", label="noise of one reading")
axis.set(xlabel="fraction of the clients that is asked", ylabel="RMSE of the map")
axis.minorticks_off()
axis.set_yticks([0.03, 0.1, 0.3], ["0.03", "0.1", "0.3"])
axis.set_xticks(fractions, ["0.03 %", "0.5 %", "10 %"])
axis.grid(alpha=0.3)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Devices
#
# Which devices are there, and how do clients get to them? A mesh is a row of devices;
# `put_federation` gives each its share of the clients, and sums are added up over
# devices. `placement.client_mesh(0)` makes one of all devices, or `None` where there is
# one only; below it is made by hand, so that the code of a mesh runs here too, whatever
# you have. The statistics that it sums are those of the last round above. A method
# whose `Placement` has the mesh trains over it, with the same rounds.

# %%
mesh = jax.sharding.Mesh(np.array(jax.devices()), (placement.AXIS,))
print(f"{mesh.size} device(s), {jax.devices()[0].platform}")
shared = placement.put_federation(rows, mesh)
collect = jax.jit(collecting(placement.Placement(100, mesh)))
with precision.float64():
  total = collect(state.server, shared)
before = state.server.stats
print(
  f"rows in the sum: {float(total.count):,.0f}, and before {float(before.count):,.0f}"
)
gap = np.abs(np.asarray(total.moment) - np.asarray(before.moment)).max()
print(
  f"largest difference of Φᵀy: {gap / np.abs(before.moment).max():.0e} of the largest"
)

# %% [markdown]
# A CPU is one device, however many cores it has. To try a mesh without accelerators,
# set `XLA_FLAGS=--xla_force_host_platform_device_count=4` (and `NPROC=8`, without which
# XLA may hang) in the environment before Python starts; in a running notebook it is too
# late. To be fast on a CPU, take several processes with a core each instead:
# `launch.train --local_processes=auto`.
#
# ## What changes on a GPU or a TPU
#
# Which numbers are float64? The kernel and the rows are float32. Sums, the posterior
# and the factors behind it are float64:

# %%
kinds = {
  "rows": rows.clients.x,
  "kernel's parameters": state.server.params.log_noise_std,
  "Gram matrix": state.server.stats.gram,
  "posterior": state.server.posterior.mean,
}
for name, array in kinds.items():
  print(f"{name:20} {array.dtype!s:8} {array.shape}")

# %% [markdown]
# - **float64.** CPUs have it. So have GPUs; on consumer cards it is slow, but only sums
#   and small factors use it. TPUs have none in hardware: set `JAX_ENABLE_X64=0` before
#   Python starts, and all of a training is float32, which it warns of. A Gram matrix of
#   many rows then loses the digits in which they differ, and after a few rounds
#   predictions may be far from those in float64.
# - **Clients at a time**, if you leave it open: on a CPU what fits a core's cache, on
#   accelerators what fills the device.
# - **Memory** is the device's there, and not the host's. If the rows do not fit, stream
#   them.
# - **Several devices.** A training takes all of them as a mesh (`config.mesh=0`). On a
#   CPU, one process a core is faster.
# - **Several seeds.** On accelerators `vmap` fills the device; on a CPU, a sweep with a
#   process a core is faster.
#
# This project has been run on CPUs, with one device and with several. The program is
# the same on accelerators, but nobody has measured it there yet.
