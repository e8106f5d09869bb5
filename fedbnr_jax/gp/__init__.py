"""This room holds the model: kernels, Bayesian linear regression, experts, scores.

Every function is a pure function of arrays. Nothing here imports a federation, a
config or a file.
"""
