"""What makes fedbnr-ard accurate, on validation rows: its kernel, and its last layer.

python -m launch.sweep --config=configs/ard.py:kernels --workdir=runs/kernels
python -m launch.sweep --config=configs/ard.py:width --workdir=runs/width
python -m launch.tables --results=runs/kernels/results.csv --validation

`kernels` trains with and without functions of one input each, and with a blend or
Matérn 3/2 alone, on normal scores; `width` has last layers of 100 to 4,000 inducing
inputs. Two rounds each, seeds that no table reports; a quarter of an hour on two cores.
"""

from typing import Any

import ml_collections

from configs import uci
from fedbnr_jax.names import require_choice
from fedbnr_jax.sweep import grid

QUESTIONS = ("kernels", "width")


def get_config(question: str = "kernels") -> ml_collections.ConfigDict:
  require_choice("the question after 'configs/ard.py:'", question, QUESTIONS)
  fields: dict[str, tuple[Any, ...]] = {
    "method": ("fedbnr-ard",),
    "num_clients": (10,),
    "num_rounds": (2,),
    "data.inputs": ("scores",),
    "seed": (100,),
  }
  if question == "width":
    fields |= {"sparse.posterior_samples": (100, 200, 500, 1000, 2000, 4000)}
    return grid.config("configs/uci.py", ("bike", "ccpp"), fields)
  stationary, beside = ("matern32", "blend"), ("linear", "additive+linear")
  fields |= {"sparse.kernel": tuple(f"{a}+{b}" for a in stationary for b in beside)}
  return grid.config("configs/uci.py", uci.PAPER, fields)
