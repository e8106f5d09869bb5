# Installs fedbnr_jax where it is missing, as in Colab: from a wheel that lies beside
# this notebook, from a clone around it, or else by its name on the package index.
import importlib.util
import pathlib
import subprocess
import sys

if importlib.util.find_spec("fedbnr_jax") is None:
  wheels = sorted(pathlib.Path().glob("fedbnr_jax-*.whl"))
  clones = [path for path in (".", "..") if pathlib.Path(path, "fedbnr_jax").is_dir()]
  source = str([*clones[:1], *wheels][-1]) if clones or wheels else "fedbnr-jax"
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)
