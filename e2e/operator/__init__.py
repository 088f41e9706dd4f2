"""Helpers for tests of the operator."""
