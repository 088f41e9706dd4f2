"""Pods that asked for a cache: what became of each, and telling the people who run them."""
