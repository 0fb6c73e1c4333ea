"""How fast hangup is, beside everything else that does something of the kind: ``python -m benchmarks all``."""
