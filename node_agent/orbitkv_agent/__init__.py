"""The node agent: owns the memory, the index, the leases and every budget of one node."""
