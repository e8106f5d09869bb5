"""A federation of real sites: sums of which nobody sees the parts.

What needs the package `cryptography` imports it when it is called, so that everything
else works without it: see `fedbnr_jax.network.primitives`.
"""
