"""Configs of runs, one purpose each; a file's docstring is its command."""
