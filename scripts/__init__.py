"""Prepared one-off measurements, run by hand on machines that have what they need."""
