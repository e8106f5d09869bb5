"""Starts a module of the engine: it ends with its parent, and a site's has limits.

python -m fedbnr_jax.network.started MODULE ARGUMENTS
"""

import ctypes
import os
import runpy
import signal
import sys

_OF_A_SITE = "nvflare.private.fed.app.client."
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl.


def main() -> None:
  os.umask(0o077)  # What the engine writes is for nobody else on this machine.
  parent = os.getppid()
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # It has died in between.
      sys.exit(1)
  sys.argv = sys.argv[1:]
  if sys.argv[0].startswith(_OF_A_SITE):
    from fedbnr_jax.network import engine_limits

    engine_limits.restrict()
  runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
