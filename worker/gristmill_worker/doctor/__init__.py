"""Looks at what a worker will run on before it does: CPUs, kernel settings, Redis, model."""
