"""One training from its config to its folder: data, rounds, records, checkpoints."""
