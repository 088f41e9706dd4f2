"""A real Kubernetes of two nodes on this machine: `python -m e2e.cluster up`, `down`, `status`."""
