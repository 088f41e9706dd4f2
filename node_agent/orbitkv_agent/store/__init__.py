"""The page pool, the index and retention."""
