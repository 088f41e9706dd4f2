"""`make demo-k8s`: a real engine on a real Kubernetes gets its cache by one annotation."""
