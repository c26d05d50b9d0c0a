"""Examples that run: each has a folder, a make target, and tests of what it shows."""
