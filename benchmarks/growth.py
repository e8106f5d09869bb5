"""Seconds and memory of a round as the number of clients grows, with a plot.

python -m benchmarks.growth

N = 34 rows, D = 18 inputs, width 64, 5 local steps; the federation on the devices, and
streamed through them from host memory.
"""

import argparse

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from benchmarks import tools

_MODES = {
  "on the device": {"local_processes": "auto"},
  "streamed": {"local_processes": 1, "stream_clients": 1000},
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--clients", default="10,100,1000,10000,100000")
  options = parser.parse_args()
  rows = []
  for mode, extra in _MODES.items():
    base = None
    for count in (int(text) for text in options.clients.split(",")):
      shape = {"clients": count, "rows": 34, "inputs": 18, "width": 64}
      repeats = 10 if count < 10_000 else 3 if count < 100_000 else 2
      settings = shape | {"local_steps": 5, "repeats": repeats} | extra
      result = tools.run_json(["launch.benchmark", "--json", *tools.flags(**settings)])
      base = result["peak_rss_mb"] if count == 100 else base
      over = result["peak_rss_mb"] - base if base is not None else float("nan")
      rows.append(
        {
          "mode": mode,
          "clients": count,
          "sec_per_round": result["sec_per_round"],
          "us_per_client_and_step": 2e5 * result["sec_per_round"] / count,
          "peak_rss_mb": result["peak_rss_mb"],
          "federation_mb": result["federation_mb"],
          "rss_over_100_clients_per_data": over / result["federation_mb"],
        }
      )
      print(tools.markdown(rows[-1:]), flush=True)
      tools.write("growth", rows)
  print(tools.markdown(rows))
  draw(rows)


def draw(rows: list[dict]) -> None:
  figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
  for mode in _MODES:
    own = [row for row in rows if row["mode"] == mode]
    clients = [row["clients"] for row in own]
    left.plot(clients, [row["us_per_client_and_step"] for row in own], "o-", label=mode)
    right.plot(clients, [row["peak_rss_mb"] for row in own], "o-", label=mode)
  right.plot(clients, [row["federation_mb"] for row in own], "k:", label="the data")
  left.set(xscale="log", xlabel="clients", ylabel="µs per client and local step")
  left.set_ylim(bottom=0)
  right.set(xscale="log", yscale="log", xlabel="clients", ylabel="peak memory, MB")
  for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.legend()
  figure.savefig(tools.RESULTS / "growth.png", dpi=120)


if __name__ == "__main__":
  main()
