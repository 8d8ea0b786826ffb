"""Integrations: configurations and trainers of other libraries. Importing this imports none of them."""
