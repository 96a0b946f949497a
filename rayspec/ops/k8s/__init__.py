"""Manifests for Kubernetes with KubeRay, computed from the placement of a model's layers."""
