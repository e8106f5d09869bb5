"""The five shapes beside the PyTorch loop, in turns, with nothing else running.

pip install -e '.[benchmark]'   # PyTorch
python -m benchmarks.side_by_side

Ours is a whole round of 50 steps on one pinned process a core; PyTorch's a round of
`--torch_steps` steps, by one and by two threads. Each is the best of several rounds in
each of `--turns` turns.
"""

import argparse

from benchmarks import tools
from launch.benchmark import TABLE, Shape


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shapes", default="1,2,3,4,5")
  parser.add_argument("--turns", type=int, default=2)
  parser.add_argument("--torch_steps", type=int, default=5)
  parser.add_argument("--threads", default="1,2")
  options = parser.parse_args()
  threads = [int(number) for number in options.threads.split(",")]
  rows = []
  for number in (int(text) for text in options.shapes.split(",")):
    row = compare(TABLE[number - 1], options.turns, options.torch_steps, threads)
    rows.append({"shape": number} | row)
    print(tools.markdown(rows[-1:]), flush=True)
  tools.write("side_by_side", rows)
  print(tools.markdown(rows))


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
