"""The published incident as a log: an engine with its faults, and the truth beside it."""
