"""What gradient descent cannot learn, tried on validation rows: μ, ρ, α, rates.

python -m launch.sweep --config=configs/grid_search.py:fedprox --workdir=runs/search
python -m launch.tables --results=runs/search/results.csv --validation

After the colon a method of `GRIDS`. Every dataset, 10 and 100 clients, with a seed that
no table reports. Where the best is at an edge, go on beyond it, as by
--config.grid.pfedgp.learning_rate="(3e-4,)" --config.arguments="('sml',)"; what came of
it is in results/grid_search/. Minutes (fedloc) to hours; configs/uci.py has what is
used.
"""

import ml_collections

from configs import uci
from fedbnr_jax.names import require_choice
from fedbnr_jax.sweep import grid

_RATES = (1e-3, 3e-3, 1e-2)
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
  "fedavg": {"fedprox.learning_rate": _RATES},
  "fedprox": {"fedprox.mu": (1e-3, 1e-2, 0.1, 1.0)},
  "pfedgp": {"pfedgp.learning_rate": _RATES},
  # One to about the square root of the number of inputs, which rows are apart.
  "fedloc": {"fedloc.rho": (30.0, 300.0, 3e3), "fedloc.length_scale": (1.0, 4.0)},
  "fedbnr-kd": {"kd.alpha": (0.5, 2.0, 10.0)},
  "fedbnr": {"learning_rate": _RATES},
}


def get_config(method: str = "fedprox") -> ml_collections.ConfigDict:
  require_choice("the method after 'configs/grid_search.py:'", method, tuple(GRIDS))
  cells = {"method": (method,), "num_clients": (10, 100), "seed": (100,)}
  return grid.config("configs/uci.py", uci.PAPER, {**cells, **GRIDS[method]})
