"""Generated from `proto/custody/v1` by `make proto`; edit the schema, never these files."""
