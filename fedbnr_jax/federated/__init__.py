"""Clients and a server that exchange messages: one round, and ways to collect sums."""
