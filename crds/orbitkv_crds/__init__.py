"""The Kubernetes objects of OrbitKV: pydantic models that the schemas in `crds/*.yaml` are generated from."""
