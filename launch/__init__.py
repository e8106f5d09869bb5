"""Command-line programs; importing the package prepares the process for JAX."""

import os

# Before NumPy is imported: the many small Cholesky factors of a round are BLAS
# calls, and threads that wait for one another cost more than they bring.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
