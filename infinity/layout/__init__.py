"""Layout: the units of parameters that move together, and each parameter's place in them. Pure."""
