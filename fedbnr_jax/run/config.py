"""Every field of a run, its default, and what is left open by it."""

import contextlib
from typing import Any

import ml_collections

from fedbnr_jax import algorithms
from fedbnr_jax.data import scores

AUTO = algorithms.CHOICE  # A method, and a reading of inputs, that are left open.
_SCORED = ("fedbnr-ard",)  # Methods that read the paper's data as scores, too.
# Fields of `data` for people's own tables, whose intervals are calibrated: that costs a
# tenth of the training rows, or, of a small table, the time of five more trainings.
CALIBRATED = {"calibration": 0.1, "calibration_folds": 5}


def base() -> ml_collections.ConfigDict:
  """A config with every field; the files in `configs/` change some."""
  config = ml_collections.ConfigDict()
  config.method = "fedbnr"
  config.seed = 0
  config.num_clients = 10
  # "column": by the client column; "sorted": the paper's; "iid"; "target": by quantile
  # of the target; "auto": by column where the data has one, else sorted.
  config.partition = "auto"

  config.num_rounds = 100  # At most; method auto takes two unless this is changed.
  # Rounds without a better validation score before stopping; 0: the method's own.
  config.patience = 0
  config.stop_on = "rmse"  # The validation score that chooses a round; or "nll".
  config.num_local_steps = 50
  config.learning_rate = 1e-2

  # Clients that take part in a round, drawn anew each time by the seed.
  config.participation = 1.0  # Fraction that is sampled.
  config.dropout = 0.0  # Probability that a sampled one does not answer.
  # Whose rows are in the posterior: of all clients, or of those "answering".
  config.statistics_from = "all"

  # How the work is laid out. Results do not depend on it, but for rounding.
  config.client_batch_size = 0  # Clients batched at a time; 0: by shape and device.
  config.mesh = 0  # Devices that share the clients; 0: all there are.
  # Clients on the devices at a time, the others in host memory; 0: all of them.
  config.stream_clients = 0
  config.num_seeds = 1  # Trainings with seed, seed + 1, ... batched on the device.
  config.dtype = "float32"  # Type of the network; the linear algebra is float64.

  # "deep", "replicate", "polynomial", "exponential", "linear", "additive" (functions of
  # one input each), a stationary kernel such as "gaussian" or "matern32", "blend" (of
  # several of these, for ard.basis "inducing"), or a sum, such as "matern32+linear".
  config.kernel = "deep"
  config.num_samples = 50  # S, draws of ω.
  config.posterior_samples = 0  # Draws of the last layer; 0: as many as in training.
  config.hidden_size = 200  # s, width of the extractor.
  config.num_hidden_layers = 1
  config.latent_size = 5
  config.shifter_size = 10
  config.length_scale = 10.0  # Initial, in the latent space.
  config.initial_noise_std = 0.5  # σ, in units of the target's std.
  config.initial_prior_std = 1.0  # λ
  config.min_noise_std = 1e-3
  # Noise of predictions: "constant"; "varying" with the input, by residuals of training
  # rows; "rescaled", which varies too, with all error bars scaled to errors of
  # validation rows; or "held-out", by residuals of validation rows. The last two are
  # for kernels that learn their own rows by heart. Of fedbnr, fedbnr-kd and central;
  # others have a field of their own.
  config.noise = "constant"

  config.replicate = ml_collections.ConfigDict()  # For kernel "replicate".
  config.replicate.policy = "multiply"  # Or "add".
  config.replicate.noise_scale = 0.5

  config.ard = ml_collections.ConfigDict()  # For stationary kernels.
  # Initial, of every input, in units of √D; of a Laplacian by inducing inputs, of D.
  config.ard.length_scale = 1.0
  # Features: "fourier", by random frequencies; "inducing", by inputs that are drawn
  # from what sums over the clients say of theirs.
  config.ard.basis = "fourier"
  config.ard.isotropic = False  # One length-scale for all inputs.
  config.ard.orthogonal = False  # Frequencies that are orthogonal in blocks.
  # Deviation of log length-scales under their prior, around the start, where a method
  # follows the exact evidence; 0: no prior.
  config.ard.spread = 0.0

  config.additive = ml_collections.ConfigDict()  # For kernel "additive".
  config.additive.num_knots = 16  # Of each input, at most.
  config.additive.spectrum = "matern32"  # Or "matern12", "matern52", "gaussian".
  config.additive.length_scale = 1.0  # Initial, of every input.
  config.additive.spread = 0.0  # As config.ard.spread.

  config.polynomial = ml_collections.ConfigDict()  # For kernel "polynomial".
  config.polynomial.degree = 2
  config.polynomial.offset = 1.0

  config.mean = ml_collections.ConfigDict()
  config.mean.scales = "arithmetic"  # How σ and λ are averaged; or "log".
  config.mean.by_rows = False  # Weight clients by their rows.

  config.kd = ml_collections.ConfigDict()
  config.kd.num_steps = 20
  config.kd.learning_rate = 1e-3
  config.kd.alpha = 1.0
  # Start from the mean of the clients' parameters, or, as the paper prints it, from
  # the parameters of the round before.
  config.kd.warm_start = True
  config.kd.fraction = 0.8  # Share of the validation rows that the server holds.

  # The pooled reference, and fedbnr-exact, which takes the same steps. Without
  # the averaging of clients, whose steps partly cancel, what suits them may overshoot.
  config.central = ml_collections.ConfigDict()
  config.central.learning_rate = 0.0  # 0: as `learning_rate`.
  config.central.num_steps = 0  # In a round; 0: as `num_local_steps`.

  config.fedprox = ml_collections.ConfigDict()  # For fedprox and, but for μ, fedavg.
  config.fedprox.mu = 0.1  # Pull towards the broadcast parameters.
  config.fedprox.learning_rate = 0.0  # 0: as `learning_rate`.

  config.pfedgp = ml_collections.ConfigDict()
  config.pfedgp.num_inducing = 50  # Shared, in the latent space.
  config.pfedgp.normalise = True  # Latent vectors to norm one, as its authors do.
  config.pfedgp.train_scales = True  # Length-scale, output scale and σ too.
  config.pfedgp.learning_rate = 0.0  # 0: as `learning_rate`.
  # What local steps raise: the "evidence" of all rows; or, "predictive", the
  # likelihood of a random half of them, given the other, drawn anew each round.
  config.pfedgp.objective = "evidence"

  config.fedloc = ml_collections.ConfigDict()  # For fedloc and, but for `rule`, -poe.
  config.fedloc.num_inducing = 50  # Inducing inputs of each client.
  config.fedloc.rho = 1e3  # ρ of ADMM, for sums over a client's rows.
  config.fedloc.proximity = 10.0  # L/ρ.
  config.fedloc.num_iterations = 50  # In a round.
  config.fedloc.ard = True  # A length-scale for each input.
  config.fedloc.length_scale = 1.0  # Initial, in standard deviations of an input.
  # Fusion: "rbcm", "poe", "gpoe", "gpoe-entropy" or "bcm"; see experts.py.
  config.fedloc.rule = "rbcm"

  config.evidence = ml_collections.ConfigDict()  # For fedbnr-ev and fedbnr-kd-ev.
  # Whether the next round's local steps start from the re-estimated σ and λ.
  config.evidence.feedback = False
  config.evidence.noise = "varying"  # As config.noise.

  # For fedbnr-ard, whose kernel, draws and steps are these.
  config.sparse = ml_collections.ConfigDict()
  config.sparse.kernel = "blend+additive+linear"
  config.sparse.basis = "inducing"  # Or "fourier".
  # Inducing inputs, or frequencies, of the first round, and its steps of L-BFGS; 0:
  # the first round is like the others.
  config.sparse.start_samples = 200
  config.sparse.start_steps = 50
  config.sparse.num_samples = 800  # In the rounds after it.
  config.sparse.num_steps = 20
  config.sparse.posterior_samples = 2000  # Of the last layer; 0: as `num_samples`.
  config.sparse.spread = 1.7  # As config.ard.spread.
  # Whether the objective charges for the variance that inducing features lose.
  config.sparse.trace = False
  config.sparse.noise = "rescaled"  # As config.noise.

  # For fedridge, whose kernel and draws are these; config.ard has its length-scale.
  config.ridge = ml_collections.ConfigDict()
  config.ridge.kernel = "matern32+linear"
  config.ridge.basis = "fourier"  # Or "inducing".
  config.ridge.num_samples = 500  # Frequencies, or inducing inputs.

  # For method "auto", which tries fedbnr-ard in several ways, and trains the best.
  config.auto = ml_collections.ConfigDict()
  # Kernels to try: the first with every reading of the inputs that config.data.inputs
  # allows, the others with the better one.
  config.auto.kernels = "blend+additive+linear"
  config.auto.seconds = 0.0  # After which no further trial begins; 0: no limit.

  config.exact = ml_collections.ConfigDict()  # For fedbnr-exact: fewer messages.
  config.exact.optimizer = "adam"  # Or "lbfgs".
  # Local steps on the majoriser of the global evidence in each exchange; 0: none, the
  # server follows the exact gradient.
  config.exact.local_steps = 0
  # Whether the objective charges for the variance that inducing features lose.
  config.exact.trace = False
  config.exact.warm_start_rounds = 0  # Rounds of fedbnr before the first exact one.
  config.exact.noise = "constant"  # As config.noise.

  config.data = ml_collections.ConfigDict()
  config.data.source = "synthetic"  # Or "uci", "table".
  config.data.name = "two-ranges"  # Name of a synthetic task or a UCI dataset.
  config.data.num_rows = 200  # Synthetic: training rows.
  config.data.noise_std = 0.5  # Synthetic.
  config.data.directory = ""  # UCI: where the files are; "" as FEDBNR_DATA_DIR says.
  config.data.path = ""  # Table: CSV or Parquet file.
  config.data.target = ""  # Table: column to predict.
  config.data.client = ""  # Table: column that says whose row it is.
  config.data.features = ""  # Table: comma-separated; "" for all other columns.
  # Whether targets are left in their own unit, as in the paper's runs of FedLoc, it
  # seems. Where errors are reported in standard deviations, they never are.
  config.data.raw_target = False
  config.data.categorical = ""  # Table: comma-separated, even if they look numeric.
  # What columns may hold, which a private release needs: a JSON file, or its text, such
  # as {"age": [0, 120], "sex": ["f", "m"]}, the target included. They take the place of
  # the training rows' means and deviations; values outside are clipped.
  config.data.bounds = ""
  # Numeric inputs: "standard", of mean zero and deviation one; "scores", the normal
  # quantiles of their ranks among the training rows, for columns with long tails; or
  # "auto": method auto compares both, and for the others see `inputs_of`.
  config.data.inputs = "auto"
  # Table: what becomes of missing cells of features; an "error"; or "impute": training
  # medians, an input that says where, and a category of their own.
  config.data.missing = "error"
  # Share of the training rows, from every client in proportion, that is set aside to
  # calibrate conformal intervals, 2,000 at most; 0: none. Methods with a model for each
  # client have no such intervals.
  config.data.calibration = 0.0
  # Where that share is less than 100 rows, none is set aside, and every training row is
  # scored by another training, without its fold, one of so many; 0: no folds.
  config.data.calibration_folds = 0

  # Whether scored error bars are of the target, or, as in the paper's formula of a
  # Gaussian process, of the function.
  config.with_noise = True

  config.compare_clients = False  # Also train each client alone, and compare.
  return config


def inputs_of(config: ml_collections.ConfigDict) -> str:
  """Says how numeric inputs are read, one of `preprocessing.INPUTS`.

  Where the config leaves it open, people's own tables are read as scores, and the
  paper's data as the paper has them, but for methods that do better with scores. With
  declared bounds nothing may be read of the rows, and so no quantile.
  """
  if config.data.inputs != AUTO:
    return config.data.inputs
  if config.data.bounds:
    return "standard"
  own_table = config.data.source == "table"
  return "scores" if own_table or config.method in _SCORED else "standard"


def left_open(
  config: ml_collections.ConfigDict,
) -> contextlib.AbstractContextManager[None]:
  """Leaves out warnings about a reading of inputs that the config does not ask for."""
  asked = config.data.inputs != AUTO
  return contextlib.nullcontext() if asked else scores.unasked()


def get(config: ml_collections.ConfigDict, path: str) -> Any:
  """The value at a dotted path."""
  for part in path.split("."):
    config = config[part]
  return config


def field_names(config: ml_collections.ConfigDict, prefix: str = "") -> list[str]:
  """Dotted paths of all values."""
  names: list[str] = []
  for name in config:
    value = config[name]
    nested = isinstance(value, ml_collections.ConfigDict)
    path = f"{prefix}{name}"
    names += field_names(value, f"{path}.") if nested else [path]
  return names


def differences(
  config: dict[str, Any], other: dict[str, Any], prefix: str = ""
) -> list[str]:
  """Dotted names of the fields in which two configs, as dicts, differ."""
  names: list[str] = []
  for key in sorted(config.keys() | other.keys()):
    mine, theirs = config.get(key), other.get(key)
    if isinstance(mine, dict) and isinstance(theirs, dict):
      names += differences(mine, theirs, f"{prefix}{key}.")
    elif mine != theirs:
      names.append(f"{prefix}{key}")
  return names
