# %% [markdown]
# # Your table, with error bars
#
# Five estate agents each keep a table of the houses they have sold, and none of them
# may show it to the others. We train one model of all five tables, ask it for prices
# with error bars, and check whether these bars keep what they promise. Then we ask
# which columns matter, save the model, load it, and see how it tells us that a house is
# unlike any it has learnt from. All of this takes about half a minute.

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
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedbnr_jax as fb

# %% [markdown]
# ## A table with sites
#
# We make the table ourselves, so that we know the truth behind it. A price, in
# thousands of euros, depends on the living area, on the distance to the centre, which
# makes area cheaper, on the age, since houses of the sixties are out of fashion, and on
# the heating. It does not depend on the house number, which stands in the table
# nevertheless, as useless columns do. Prices scatter by a tenth of their size, so that
# dear houses scatter more.


# %%
def value(houses):
  """The price that the law gives, before it scatters."""
  near = np.exp(-houses["distance_km"] / 12)
  fashion = -90 * np.exp(-(((houses["age"] - 55) / 22) ** 2))
  heating = houses["heating"].map({"gas": 0, "district": 15, "heat pump": 40})
  return 60 + 3.2 * houses["area_m2"] * near + fashion + heating


SITES = {  # The centre of a site's areas, of its distances, and its number of houses.
  "Aarhus": (95, 3, 400),
  "Bergen": (110, 5, 300),
  "Cork": (130, 8, 250),
  "Delft": (80, 4, 250),
  "Evora": (160, 12, 100),
}


def draw_houses(rng):
  """Draws the houses of all sites."""
  parts = []
  for site, (area, distance, number) in SITES.items():
    part = pd.DataFrame({"site": [site] * number})
    part["area_m2"] = area * rng.gamma(12, 1 / 12, number)
    part["distance_km"] = distance * rng.gamma(4, 1 / 4, number)
    part["age"] = rng.uniform(0, 100, number)
    part["heating"] = rng.choice(["gas", "district", "heat pump"], number)
    part["house_number"] = rng.integers(1, 200, number)
    parts.append(part)
  houses = pd.concat(parts, ignore_index=True)
  houses["price"] = value(houses) * (1 + 0.1 * rng.normal(size=len(houses)))
  return houses.round(1)


rng = np.random.default_rng(2)
sold = draw_houses(rng)
sold.groupby("site").head(1)

# %% [markdown]
# Why would an agent want a model of all five tables? Because each knows only a part of
# the market. The agent in Evora sells large houses far out, and few of them; the agent
# in Delft sells small ones close to the centre.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), dpi=90)
for site, part in sold.groupby("site"):
  for axis, column in zip(axes, ["area_m2", "distance_km"], strict=True):
    axis.scatter(part[column], part["price"], s=6, alpha=0.6, label=site)
axes[0].set(xlabel="living area (m²)", ylabel="price (thousand €)")
axes[1].set(xlabel="distance to the centre (km)", yticklabels=[])
axes[1].legend(frameon=False, markerscale=2)
figure.tight_layout()

# %% [markdown]
# ## One call
#
# `fb.fit` takes the frame, the column to predict and the column that says whose row it
# is. From here on the rows of a site are used at that site only: what leaves it are
# sums. We train for a single round here, to be quick; without `num_rounds` there would
# be another.

# %%
model = fb.fit(
  sold, target="price", client="site", seed=0, num_rounds=1, progress=False
)
model

# %% [markdown]
# Eight of ten rows were trained on. One in ten has chosen the best reading of the
# columns, and one in ten has tested the result; `model.summary` says how many rows each
# number rests on.

# %%
shown = ["train_rows", "test_rows", "test_rmse", "test_coverage95", "calibration_rows"]
pd.Series(model.summary)[shown].rename("summary").to_frame()

# %% [markdown]
# ## Prices with error bars
#
# Now 1,300 further houses are sold, which no model has seen. `predict` gives the mean
# and the standard deviation of each price, and two intervals that should hold 95 of 100
# prices. The first, `lower95` to `upper95`, follows from the Gaussian process. The
# second is *conformal*: some training rows were set aside, and it is as wide as their
# errors demand, whatever the model believes.

# %%
later = draw_houses(rng)
predicted = model.predict(later, warn=False)
predicted.head().round(1)

# %% [markdown]
# Are the bars as long as the errors, for cheap houses and for dear ones? Here are fifty
# of the new houses, from the cheapest to the dearest.

# %%
few = predicted.iloc[:: len(predicted) // 50].sort_values("mean")
places = np.arange(len(few))
figure, axis = plt.subplots(figsize=(9, 3.6), dpi=90)
for name, colour, width in [("_conformal", "C1", 5), ("", "C0", 2)]:
  label = "conformal interval" if name else "Gaussian interval"
  low, high = few[f"lower95{name}"], few[f"upper95{name}"]
  axis.vlines(places, low, high, color=colour, lw=width, alpha=0.55, label=label)
axis.plot(places, few["mean"], "_", color="C0", ms=6)
axis.plot(places, later["price"][few.index], "k.", ms=5, label="price paid")
axis.set(xlabel="fifty new houses, by predicted price", ylabel="price (thousand €)")
axis.legend(frameon=False, loc="upper left")
figure.tight_layout()

# %% [markdown]
# The bars grow with the price, as the scatter does: the model has learnt that, too.
#
# ## Do the error bars keep their promise?
#
# An interval of level 60 % should hold 60 of 100 prices, and so on for every level. We
# ask for nineteen levels at once and count. A curve below the diagonal would be a model
# that is too sure of itself. On the right is the same question for each site at 95 %,
# with the range in which a fair count would lie nine times out of ten.

# %%
levels = [round(0.05 * step, 2) for step in range(1, 20)]
wide = model.predict(later, levels=levels, warn=False)


def share_within(ending, rows=slice(None)):
  """The share of prices between the columns lower… and upper… of this ending."""
  low, high = wide[f"lower{ending}"][rows], wide[f"upper{ending}"][rows]
  return later["price"][rows].between(low, high).mean()


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), dpi=90)
left.plot([0, 1], [0, 1], color="0.7", lw=1)
for ending, label in [("", "Gaussian"), ("_conformal", "conformal")]:
  found = [share_within(f"{100 * level:g}{ending}") for level in levels]
  left.plot(levels, found, "o-", ms=3, label=label)
left.set(xlabel="promised share", ylabel="share of new prices inside", aspect="equal")
left.legend(frameon=False)

sizes = later.groupby("site").size()
chance = np.sqrt(0.95 * 0.05 / sizes)
for place, site in enumerate(sizes.index):
  fair = 0.95 + 1.645 * chance[site] * np.array([-1, 1])
  right.fill_between([place - 0.3, place + 0.3], *fair, color="0.88")
  for shift, ending in [(-0.1, ""), (0.1, "_conformal")]:
    found = share_within(f"95{ending}", later["site"] == site)
    right.plot(place + shift, found, "o", color="C1" if ending else "C0")
right.axhline(0.95, color="0.7", lw=1)
right.set(ylim=(0.85, 1.01), xticks=range(len(sizes)), xticklabels=sizes.index)
right.set(ylabel="share inside, level 95 %")
figure.tight_layout()

# %% [markdown]
# Both curves follow the diagonal, and the sites are served alike, although neither kind
# of interval promises anything for a single site. A hundred rows or so decide how wide
# the intervals are, and so there is luck in it: over four tables drawn from this law,
# the Gaussian intervals of level 95 % held between 92 and 98 % of the new prices, and
# the conformal ones between 95 and 98 %. `fb.fit` warns when its own test rows speak
# against the error bars.
#
# ## Which columns matter?
#
# The kernel has a length-scale for every input, in each of its parts. A long one says
# that the function hardly changes along that input.

# %%
model.length_scales().round(1)

# %% [markdown]
# There are several parts, whose weights differ, so that no single column of this table
# settles the matter. `model.relevance()` does. It draws rows that resemble the
# training's, but are nobody's, draws one column anew, and measures how far the
# predictions move, in thousands of euros. Because the table is our own we can do the
# same with the true law, and compare.


# %%
def true_relevance(column, houses, others):
  """How far the law moves when a column is drawn anew."""
  drawn = others[column].sample(frac=1, random_state=0).to_numpy()
  changed = houses.assign(**{column: drawn})
  return np.sqrt(0.5 * np.mean((value(changed) - value(houses)) ** 2))


relevance = model.relevance()[::-1]
truth = [true_relevance(column, later, sold) for column in relevance.index]
figure, axis = plt.subplots(figsize=(7, 2.8), dpi=90)
axis.barh(relevance.index, relevance, color="C0", alpha=0.7, label="model")
axis.plot(truth, relevance.index, "kD", ms=5, label="true law")
axis.set(xlabel="how far the price moves with the column (thousand €)")
axis.legend(frameon=False, loc="lower right")
figure.tight_layout()

# %% [markdown]
# The house number has no effect, and the model has found that out. It says what the
# model uses, and not what causes a price: of two columns that tell the same, it may use
# either.
#
# ## Save, load, predict
#
# A saved model is a folder. It holds the kernel, sums, figures and scores, and no row
# of anybody's table.

# %%
folder = tempfile.TemporaryDirectory()
model.save(f"{folder.name}/houses")
loaded = fb.load(f"{folder.name}/houses")
same = loaded.predict(later, warn=False).equals(predicted)
print("The loaded model predicts", "the same numbers." if same else "other numbers!")

# %% [markdown]
# ## What is a prediction worth where there were no rows?
#
# A house of 600 m² is unlike all that were sold. Error bars cannot be trusted there,
# and the column `outside` says so. A warning would say so as well; we have left it out
# by `warn=False`.

# %%
typical = {"distance_km": 5.0, "age": 20.0, "heating": "gas", "house_number": 10}
sweep = pd.DataFrame({"area_m2": np.linspace(20, 600, 117)}).assign(**typical)
answers = loaded.predict(sweep, warn=False)
answers["area_m2"] = sweep["area_m2"]

figure, axis = plt.subplots(figsize=(9, 3.6), dpi=90)
for outside, part in answers.groupby("outside"):
  colour, label = ("C3", "outside") if outside else ("C0", "inside")
  area = part["area_m2"]
  axis.fill_between(area, part["lower95"], part["upper95"], color=colour, alpha=0.2)
  axis.plot(area, part["mean"], color=colour, label=f"predicted, {label}")
axis.plot(sweep["area_m2"], value(sweep), "k--", lw=1, label="true law")
axis.plot(sold["area_m2"], np.full(len(sold), 40), "|", color="0.4", ms=6)
axis.set(xlabel="living area (m²); ticks are the houses sold")
axis.set(ylabel="price (thousand €)")
axis.legend(frameon=False, loc="upper left")
figure.tight_layout()

# %% [markdown]
# That is all there is to it on a table of your own: `pandas.read_csv`, `fb.fit`,
# `predict`. `docs/howto/own_table.md` says what becomes of missing cells, dates and
# categories, and the next notebook, `the_paper`, shows why sums are enough.
