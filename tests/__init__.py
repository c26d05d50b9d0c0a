"""Examples: each test states one claim in its docstring."""
