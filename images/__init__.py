"""OrbitKV's container images: a Containerfile for each, and what builds them without a registry."""
