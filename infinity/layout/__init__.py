"""Layout: how parameters are grouped into units, and where each parameter lies in its unit's page."""
