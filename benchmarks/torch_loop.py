"""FedBNR's round in plain PyTorch, the loop over clients that JAX is timed against.

Eager mode, autograd through the factor, `torch.optim.Adam` with its defaults, one
client after another: what an ordinary user would write, with no needless work. It
is phase 1 only, local steps and averaging, as is the JAX round it stands beside.

    python benchmarks/torch_loop.py --num_clients 100 --num_rows 34 --threads 1

prints one line of JSON. PyTorch is no dependency of the project; the CPU build of
2.13.0 was measured.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

# The defaults of fedbnr_jax/config.py.
LEARNING_RATE = 1e-2
LENGTH_SCALE = 10.0
SHIFTER_SIZE = 10
INITIAL_NOISE_STD = 0.5
INITIAL_PRIOR_STD = 1.0
MIN_NOISE_STD = 1e-3

# The command line's, by the names of `make_round`.
DEFAULTS = {
  "num_clients": 100,
  "num_rows": 34,
  "num_inputs": 18,
  "width": 200,
  "latent": 5,
  "samples": 50,
  "local_steps": 5,
  "seed": 0,
}

# The parameters of `DeepKernel` that are the leaves of θ in `fedbnr_jax.urk.deep`, in
# JAX's order, that of sorted keys: it holds whatever the layers of θ are called, as
# long as they sort alike.
THETA_LEAVES = (
  "extractor.0.bias",
  "extractor.0.weight",
  "extractor.2.weight",
  "shifter.0.bias",
  "shifter.0.weight",
  "shifter.2.bias",
  "shifter.2.weight",
  "scale",
)


def federation_rows(
  num_clients: int, num_rows: int, num_inputs: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
  """Rows of a synthetic federation: x [K, N, D] and y [K, N], both float32.

  It needs NumPy only, so that any program can make the same rows.
  """
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((num_clients, num_rows, num_inputs))
  noise = rng.standard_normal((num_clients, num_rows))
  y = np.sin(3.0 * x[..., 0]) + 0.3 * noise
  return x.astype(np.float32), y.astype(np.float32)


class DeepKernel(nn.Module):
  """Features [cos, sin](h(ω)ᵀ f(x)) / √(S−1), and σ and λ by their logarithms."""

  omega: torch.Tensor  # [S, latent]

  def __init__(
    self, num_inputs: int, width: int, omega: torch.Tensor, shifter_size: int
  ) -> None:
    super().__init__()
    _, latent = omega.shape
    self.extractor = nn.Sequential(
      nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, latent, bias=False)
    )
    self.shifter = nn.Sequential(
      nn.Linear(latent, shifter_size), nn.Tanh(), nn.Linear(shifter_size, latent)
    )
    self.scale = nn.Parameter(torch.tensor(1.0 / LENGTH_SCALE))
    self.log_noise_std = nn.Parameter(torch.tensor(math.log(INITIAL_NOISE_STD)))
    self.log_prior_std = nn.Parameter(torch.tensor(math.log(INITIAL_PRIOR_STD)))
    # The same for all clients and never trained, so it stays out of the average.
    self.register_buffer("omega", omega, persistent=False)

  def forward(self, x: torch.Tensor) -> torch.Tensor:  # [N, D] -> [N, 2S]
    frequencies = self.scale * (self.omega + self.shifter(self.omega))
    phases = self.extractor(x) @ frequencies.T
    features = torch.cat([torch.cos(phases), torch.sin(phases)], dim=-1)
    return features / math.sqrt(self.omega.shape[0] - 1)


def evidence_loss(model: DeepKernel, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
  """Negative log marginal likelihood per row, by the factor of I + ρΦᵀΦ."""
  features = model(x)
  num_rows, num_features = features.shape
  noise_variance = torch.exp(2.0 * model.log_noise_std)
  prior_variance = torch.exp(2.0 * model.log_prior_std)
  rho = prior_variance / noise_variance
  identity = torch.eye(num_features, dtype=x.dtype)
  lower = torch.linalg.cholesky(identity + rho * (features.T @ features))
  moment = rho * (features.T @ y)
  weights = torch.cholesky_solve(moment[:, None], lower)[:, 0]
  residual = y - features @ weights
  quadratic = residual @ residual / noise_variance + weights @ weights / prior_variance
  log_det = 2.0 * torch.sum(torch.log(torch.diagonal(lower)))
  log_noise = num_rows * torch.log(2.0 * math.pi * noise_variance)
  return 0.5 * (log_noise + log_det + quadratic) / num_rows


def descend(
  model: DeepKernel, x: torch.Tensor, y: torch.Tensor, num_steps: int
) -> torch.Tensor:
  """Full-batch Adam steps on `model` in place; the loss [] before the last of them."""
  optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
  for _ in range(num_steps):
    optimizer.zero_grad()
    loss = evidence_loss(model, x, y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
      model.log_noise_std.clamp_(min=math.log(MIN_NOISE_STD))
  return loss.detach()


def mean_of(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
  """The mean of the clients' state dicts, σ and λ by their logarithms."""
  return {
    name: torch.stack([state[name] for state in states]).mean(dim=0)
    for name in states[0]
  }


def make_round(
  num_clients: int,
  num_rows: int,
  num_inputs: int,
  width: int,
  latent: int,
  samples: int,
  local_steps: int,
  seed: int,
  threads: int | None = None,
) -> Callable[[], float]:
  """Makes a federation and its global model.

  Args:
    num_clients: K.
    num_rows: N, of every client.
    num_inputs: D.
    width: Of the extractor's hidden layer.
    latent: Size of f(x) and of ω.
    samples: S; there are M = 2S features.
    local_steps: Full-batch steps of each client in a round.
    seed: Of the rows, ω and the initial weights.
    threads: PyTorch's, of the whole process; as it finds them by default.

  Returns:
    A function that runs one round, each from where the last one ended, and returns
    the clients' mean loss before their last step.
  """
  if threads is not None:
    torch.set_num_threads(threads)
  torch.manual_seed(seed)
  x, y = map(torch.from_numpy, federation_rows(num_clients, num_rows, num_inputs, seed))
  omega = torch.randn(samples, latent)
  global_model = DeepKernel(num_inputs, width, omega, SHIFTER_SIZE)

  def run_round() -> float:
    states, losses = [], []
    for client_x, client_y in zip(x, y, strict=True):
      model = copy.deepcopy(global_model)
      losses.append(descend(model, client_x, client_y, local_steps))
      states.append(model.state_dict())
    global_model.load_state_dict(mean_of(states))
    return torch.stack(losses).mean().item()

  return run_round


def model_from_arrays(
  theta: Mapping[str, Any],
  omega: np.ndarray,
  log_noise_std: np.ndarray,
  log_prior_std: np.ndarray,
) -> DeepKernel:
  """A model with the parameters of a JAX server state, in the precision of `omega`.

  Args:
    theta: The θ of `fedbnr_jax.urk.deep` with one hidden layer.
    omega: [S, latent].
    log_noise_std: [].
    log_prior_std: [].
  """
  arrays = dict(zip(THETA_LEAVES, _leaves(theta), strict=True))
  arrays |= {"log_noise_std": log_noise_std, "log_prior_std": log_prior_std}
  (width,) = np.shape(arrays["extractor.0.bias"])
  num_inputs = np.size(arrays["extractor.0.weight"]) // width
  (shifter_size,) = np.shape(arrays["shifter.0.bias"])
  draws = torch.tensor(np.asarray(omega))
  model = DeepKernel(num_inputs, width, draws, shifter_size).to(draws.dtype)
  state = {
    name: torch.tensor(_like(arrays[name], parameter.shape))
    for name, parameter in model.named_parameters()
  }
  model.load_state_dict(state)
  return model


def arrays_like(
  tensors: Mapping[str, torch.Tensor], theta: Mapping[str, Any]
) -> dict[str, Any]:
  """Parameters or gradients by PyTorch's names, in the structure and layout of JAX.

  Returns:
    `theta`, structured as the argument is, `log_noise_std` and `log_prior_std`.
  """
  arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
  leaves = [
    _like(arrays[name], np.shape(leaf))
    for name, leaf in zip(THETA_LEAVES, _leaves(theta), strict=True)
  ]
  return {
    "theta": _unflatten(theta, iter(leaves)),
    "log_noise_std": arrays["log_noise_std"],
    "log_prior_std": arrays["log_prior_std"],
  }


def loss_and_gradient(
  theta: Mapping[str, Any],
  omega: np.ndarray,
  log_noise_std: np.ndarray,
  log_prior_std: np.ndarray,
  x: np.ndarray,
  y: np.ndarray,
) -> tuple[float, dict[str, Any]]:
  """The loss of a client's rows x [N, D], y [N] at a JAX server state, and gradient.

  The rows must come without padding, and in the precision of the parameters, which
  is that of the computation. The gradient is laid out as `arrays_like` says.
  """
  model = model_from_arrays(theta, omega, log_noise_std, log_prior_std)
  loss = evidence_loss(model, torch.tensor(np.asarray(x)), torch.tensor(np.asarray(y)))
  parameters = dict(model.named_parameters())
  gradient = torch.autograd.grad(loss, list(parameters.values()))
  gradients = dict(zip(parameters, gradient, strict=True))
  return loss.item(), arrays_like(gradients, theta)


def _leaves(tree: Any) -> list[Any]:
  if not isinstance(tree, Mapping):
    return [tree]
  return [leaf for key in sorted(tree) for leaf in _leaves(tree[key])]


def _unflatten(tree: Any, leaves: Iterator[np.ndarray]) -> Any:
  if not isinstance(tree, Mapping):
    return next(leaves)
  return {key: _unflatten(tree[key], leaves) for key in sorted(tree)}


def _like(array: Any, shape: tuple[int, ...]) -> np.ndarray:
  """Takes an array to the other library's layout, where its shape is `shape`.

  A kernel is [in, out] in Flax and [out, in] in PyTorch, unless JAX stores it as
  PyTorch does; a square one is taken for Flax's.
  """
  array = np.asarray(array)
  if array.T.shape == tuple(shape):
    return array.T
  if array.shape != tuple(shape):
    raise ValueError(f"an array {array.shape} does not fit {tuple(shape)}.")
  return array


def best_seconds(run: Callable[[], float], repeats: int) -> float:
  """The shortest of `repeats` runs, after one that warms up."""
  run()
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    run()
    seconds.append(time.perf_counter() - start)
  return min(seconds)


def main() -> None:
  """Times a round of the shape that the command line gives."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name, default in DEFAULTS.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--threads", type=int, help="PyTorch's default if not given")
  parser.add_argument("--repeats", type=int, default=5, help="the best one counts")
  args = vars(parser.parse_args())
  repeats = args.pop("repeats")
  seconds = best_seconds(make_round(**args), repeats)
  report = {
    "sec_per_round": seconds,
    "threads": torch.get_num_threads(),
    "torch": torch.__version__,
    "ms_per_epoch": 1e3 * seconds / args["local_steps"],
  }
  print(json.dumps(report))


if __name__ == "__main__":
  main()
