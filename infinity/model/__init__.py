"""Model: hooks, parameters that fetch their pages when they are used, and initialisation."""
