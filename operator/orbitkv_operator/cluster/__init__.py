"""The Kubernetes API as the operator uses it."""
