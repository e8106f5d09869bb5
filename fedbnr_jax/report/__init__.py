"""What a reader sees of a run: figures and tables made from its records."""
