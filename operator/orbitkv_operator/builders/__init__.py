"""From a pool's spec and the operator's settings to manifests: pure functions, nothing is looked up."""
