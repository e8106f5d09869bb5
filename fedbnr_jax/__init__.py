"""Federated Bayesian neural regression: one global Gaussian process, data unshared.

Follow the data through the modules: `data` → `experiment` (split, standardise) →
`federation` → `algorithms` (with `urk`, `clients`, `aggregation`, `blr`) →
`training` → `model`, `metrics`, `report`.
"""

__version__ = "0.1.0"
