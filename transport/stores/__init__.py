"""Stores of the event log: in memory, and in append-only segment files."""
