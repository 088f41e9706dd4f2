"""Tests of the Helm chart that need no nodes: what it renders, and what an apiserver makes of it."""
