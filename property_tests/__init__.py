"""Properties, exhaustive exploration of small worlds, and mutants that must be found."""
