"""Telemetry: measurements of transfers, waits and steps, as sums and as a timeline of events."""
