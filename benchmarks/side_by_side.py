"""The five shapes beside the PyTorch loop, in turns, with nothing else running.

pip install -e '.[benchmark]'   # PyTorch
python -m benchmarks.side_by_side

First it checks that both compute the same. Ours is a round of 50 steps on one pinned
process a core; PyTorch's of `--torch_steps` steps, by one and by two threads. Each is
the best of several rounds in each of `--turns` turns.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import tools
from fedbnr_jax.federated.federation import Federation, Rows
from fedbnr_jax.federated.placement import Placement
from fedbnr_jax.gp import urk
from fedbnr_jax.gp.kernel_model import ModelParams, evidence_loss
from launch.benchmark import TABLE, Shape, build


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shapes", default="1,2,3,4,5")
  parser.add_argument("--turns", type=int, default=2)
  parser.add_argument("--torch_steps", type=int, default=50)
  parser.add_argument("--threads", default="1,2")
  options = parser.parse_args()
  threads = [int(number) for number in options.threads.split(",")]
  check_same_loss()
  rows = []
  for number in (int(text) for text in options.shapes.split(",")):
    row = compare(TABLE[number - 1], options.turns, options.torch_steps, threads)
    rows.append({"shape": number} | row)
    print(tools.markdown(rows[-1:]), flush=True)
  tools.write("side_by_side", rows)
  print(tools.markdown(rows))


def check_same_loss() -> None:
  """Both programs must compute the same thing: loss and gradient, in float64."""
  from benchmarks import torch_loop

  jax.config.update("jax_enable_x64", True)
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(30, 4)), rng.normal(size=30)
  shape = Shape(1, 30, 4, 16)
  algorithm = build(shape, Placement())
  rows = Rows(jnp.asarray(x[None]), jnp.asarray(y[None]), jnp.ones((1, 30), bool))
  state = algorithm.init(jax.random.key(0), Federation(rows)).server
  kernel = urk.deep(shape.samples, shape.width, latent_size=shape.latent)

  def loss(params: ModelParams) -> jax.Array:
    mask = jnp.ones(30, bool)
    return evidence_loss(
      kernel, params, state.omega, jnp.asarray(x), jnp.asarray(y), mask
    )

  value, gradient = jax.value_and_grad(loss)(state.params)
  params = jax.tree.map(np.asarray, state.params)
  other, other_gradient = torch_loop.loss_and_gradient(
    params.theta, state.omega, params.log_noise_std, params.log_prior_std, x, y
  )
  np.testing.assert_allclose(other, value, rtol=1e-8)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
    other_gradient["theta"],
    jax.device_get(gradient.theta),
  )


def compare(
  shape: Shape, turns: int, torch_steps: int, threads: list[int]
) -> dict[str, object]:
  """Times of one shape, each program the best of its turns."""
  ours, torch = [], {count: [] for count in threads}
  for _ in range(turns):
    ours.append(
      tools.run_json(
        [
          *("launch.benchmark", "--json"),
          *tools.flags(
            clients=shape.clients,
            rows=shape.rows,
            inputs=shape.inputs,
            width=shape.width,
          ),
        ]
      )
    )
    for count in threads:
      torch[count].append(
        tools.run_json(
          [
            "benchmarks.torch_loop",
            *tools.flags(
              num_clients=shape.clients,
              num_rows=shape.rows,
              num_inputs=shape.inputs,
              width=shape.width,
              latent=shape.latent,
              samples=shape.samples,
              local_steps=torch_steps,
              threads=count,
              repeats=3,
            ),
          ]
        )["ms_per_epoch"]
      )
  best = min(ours, key=lambda result: result["sec_per_round"])
  by_threads = {count: min(times) for count, times in torch.items()}
  return {
    "K x N, D, s": f"{shape.clients} x {shape.rows}; {shape.inputs}; {shape.width}",
    "ms_per_epoch": best["ms_per_epoch"],
    "efficiency": best["efficiency"],
    "peak_gflops": best["peak_gflops"],
    "compile_sec": best["compile_sec"],
    **{f"torch_{count}_threads_ms": time for count, time in by_threads.items()},
    "ratio": min(by_threads.values()) / best["ms_per_epoch"],
  }


if __name__ == "__main__":
  main()
