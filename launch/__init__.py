"""Command-line programs; importing the package prepares the process for JAX.

All of this must happen before NumPy and JAX are imported.
"""

import os
import sys

from launch import interruption

if sys.argv[:1] == ["-m"]:  # While Python looks for the program that it is to run.
  interruption.ends_at_once()

# The many small Cholesky factors of a round are BLAS calls, and threads that wait
# for one another cost more than they bring.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Several host devices on few cores hang when factors of matrices wait for one another
# in a thread pool of as many threads as cores.
if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
  os.environ.setdefault("NPROC", "8")
