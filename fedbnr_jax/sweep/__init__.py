"""Grids of trainings on pinned worker processes, into one table.

`grid` says which trainings there are, `run_grid` has them done: `schedule` hands them
to `workers`, which are processes that do `jobs`, and `table` holds the results.
"""
