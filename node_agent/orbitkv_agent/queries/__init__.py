"""Query operations, leases and budgets."""
