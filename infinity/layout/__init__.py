"""Layout: which parameters travel together, and where each lies. Pure."""
