"""Manifests for Kubernetes with KubeRay, computed from where a model's layers go."""
