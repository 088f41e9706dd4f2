"""Metrics, logs and administration."""
