"""Local training: optimiser steps at a client, and checks of what they reached."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from fedbnr_jax.federated.exchange import Report

Params = TypeVar("Params")  # A pytree of parameters.


def descend(
  loss: Callable[[Params], jax.Array],
  optimizer: optax.GradientTransformation,
  num_steps: int,
  params: Params,
  project: Callable[[Params], Params] = lambda params: params,
) -> tuple[Params, jax.Array]:
  """Takes `num_steps` optimiser steps from `params` with a fresh optimiser state.

  Args:
    loss: Maps parameters to [].
    optimizer: The optimiser whose steps are taken.
    num_steps: How many steps.
    params: Where to start.
    project: Applied to the parameters after each step.

  Returns:
    The parameters, and the loss before each step [num_steps].
  """

  def step(carry: tuple[Params, Any], _: None) -> tuple[Any, jax.Array]:
    params, optimizer_state = carry
    value, gradient = jax.value_and_grad(loss)(params)
    # Optax raises floats to integer powers, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
      updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
    params = project(optax.apply_updates(params, updates))
    return (params, optimizer_state), value

  carry = (params, optimizer.init(params))
  (params, _), values = jax.lax.scan(step, carry, length=num_steps)
  return params, values


def keep_above(min_noise_std: float, params: Any) -> Any:
  """Projects parameters with a `log_noise_std` onto σ ≥ min_noise_std.

  A projection, unlike a transformed σ, lets σ rest on its floor and leave it again.
  """
  floor = jnp.log(jnp.asarray(min_noise_std, params.log_noise_std.dtype))
  return params.replace(log_noise_std=jnp.maximum(params.log_noise_std, floor))


def loss_report(loss: jax.Array, reached: Any, dtype: jnp.dtype) -> Report:
  """Reports a loss [], or NaN if anything in the tree `reached` is not finite.

  A divergence in the last step shows in the parameters only.
  """
  sound = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((reached, loss))]
  value = jnp.where(jnp.all(jnp.stack(sound)), loss, jnp.nan)
  return {"loss": value.astype(dtype)}
