"""Figures, texts and tables, made from the records of runs and sweeps."""
