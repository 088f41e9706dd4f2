"""The command `orbitkv`: what a person asks about a cluster with OrbitKV, from wherever kubectl works."""
