"""What tests on a cluster share: kubectl, Helm, objects with unique names, and what is kept of a failure."""
