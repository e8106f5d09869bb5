"""A private release of a run: integers with noise, a budget, a folder to hand over.

Follow a release in this order: `trained` opens the run; `grid` turns rows into
integers, on which the influence of one row has an exact bound; `noise` adds OpenDP's
discrete Gaussian; `budget` keeps what releases have spent; `folder` is what is handed
over; `publish` does all of it, under the lock of the run's folder.
"""
