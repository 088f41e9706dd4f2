"""GPUs: engine memory is imported here, and the agent copies between it and its own pinned pages."""
