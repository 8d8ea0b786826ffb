"""Telemetry: bytes, waits and seconds, as sums and as a timeline."""
