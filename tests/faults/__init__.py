"""Faults at moments: real parts whose shells a harness holds, cuts, stops and kills."""
