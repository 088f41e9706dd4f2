"""Saves and restores: what the agent grants, and what it learns about the copies."""
