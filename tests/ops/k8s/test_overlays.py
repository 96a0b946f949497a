"""The files under k8s/: built as kustomize does, and held against schemas, KubeRay's rules and Ray's readers."""

import copy
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema

from rayspec.config import EngineConfig
from rayspec.ops.k8s.render import JOBS_FOLDER, stale_overlays
from rayspec.serve.options import ServeOptions, serve_options
from tests.cluster.commands import engine_of_job
from tests.ops.k8s.schemas import cluster_spec, has_ray_schemas, open_rules, pod_templates, problems, violations

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"
NAMES = [str(file.parent.relative_to(K8S / "overlays")) for file in sorted(K8S.glob("overlays/*/*/options.yaml"))]
IN_THE_TREE = re.findall(r"^!/k8s/overlays/(.*)/manifest.yaml$", (ROOT / ".gitignore").read_text("utf-8"), re.MULTILINE)
RAY_KINDS = {"RayCluster", "RayJob", "RayService"}

needs_ray_schemas = pytest.mark.skipif(not has_ray_schemas(), reason="no KubeRay definitions: set KUBERAY_CRDS")
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def overlays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """k8s/overlays as `make k8s` leaves it, from the options alone, in a copy of k8s/."""
    copied = tmp_path_factory.mktemp("k8s") / "k8s"
    shutil.copytree(K8S, copied, ignore=shutil.ignore_patterns("manifest.yaml"))
    for path, text in stale_overlays(copied / "overlays").items():
        path.write_text(text, encoding="utf-8")
    return copied / "overlays"


@pytest.fixture(params=NAMES)
def folder(overlays: Path, request: pytest.FixtureRequest) -> Path:
    return overlays / request.param


def only(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("folder", [name for name in NAMES if Path(name).name == kind], indirect=True)


@cache
def _built(folder: Path) -> list[Manifest]:
    """What a kustomization names; it adds nothing but a namespace and images."""
    content = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    found: list[Manifest] = []
    for name in content.get("resources", []) + content.get("components", []):
        path = folder / name
        if path.is_dir():
            found += _built(path.resolve())
        else:
            found += [one for one in yaml.safe_load_all(path.read_text("utf-8")) if one]
    return found


def built(folder: Path) -> list[Manifest]:
    return copy.deepcopy(_built(folder))


def ray_resource(folder: Path) -> Manifest:
    [found] = [one for one in built(folder) if one["kind"] in RAY_KINDS]
    return found


def test_manifests_in_the_tree_are_what_their_options_give(overlays: Path) -> None:
    for name in IN_THE_TREE:
        in_the_tree = K8S / "overlays" / name / "manifest.yaml"
        assert in_the_tree.read_text("utf-8") == (overlays / name / "manifest.yaml").read_text("utf-8")


def test_one_manifest_of_each_kind_is_in_the_tree_and_the_readme_applies_only_those() -> None:
    assert sorted(Path(name).name for name in IN_THE_TREE) == ["cluster", "job", "service"]
    applied = re.findall(r"^kubectl apply -k k8s/overlays/(\S+)$", (K8S / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(applied) == sorted(IN_THE_TREE)


@needs_ray_schemas
def test_every_field_is_one_that_kubernetes_and_kuberay_know(folder: Path) -> None:
    found = {f"{one['kind']} {one['metadata']['name']}": problems(one) for one in built(folder)}
    assert {name: errors for name, errors in found.items() if errors} == {}
    kinds = {one["kind"] for one in built(folder)}
    assert {"Namespace", "NetworkPolicy", "ServiceAccount"} <= kinds
    assert len(kinds & RAY_KINDS) == 1


def test_the_operator_takes_it(folder: Path) -> None:
    assert violations(ray_resource(folder)) == []


def test_pods_find_what_they_name(folder: Path) -> None:
    """Claims and service accounts of the same build, volumes of the same pod, the image of the kustomization."""
    names = {(one["kind"], one["metadata"]["name"]) for one in built(folder)}
    for template in pod_templates(ray_resource(folder)):
        pod = template["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["name"] for part in _containers(pod) for mount in part["volumeMounts"]}
        assert mounted == volumes.keys()
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
        if "serviceAccountName" in pod:
            assert ("ServiceAccount", pod["serviceAccountName"]) in names


def test_the_network_policy_is_about_its_pods(folder: Path) -> None:
    resource = ray_resource(folder)
    [policy] = [
        one for one in built(folder) if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == _name(resource)
    ]
    selected = policy["spec"]["podSelector"]["matchLabels"]
    templates = pod_templates(resource)
    assert all(selected.items() <= template["metadata"]["labels"].items() for template in templates)
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    containers = [part for template in templates for part in _containers(template["spec"])]
    open_ports = {port["name"] for part in containers for port in part.get("ports", [])}
    rules = policy["spec"]["ingress"] + policy["spec"]["egress"]
    named = {port["port"] for rule in rules for port in rule["ports"] if isinstance(port["port"], str)}
    assert named <= open_ports
    assert open_rules(policy) == []


def test_only_the_autoscaler_may_ask_kubernetes(folder: Path) -> None:
    spec = cluster_spec(ray_resource(folder))
    head, *others = pod_templates(ray_resource(folder))
    assert head["spec"]["automountServiceAccountToken"] == spec["enableInTreeAutoscaling"]
    assert not any(template["spec"]["automountServiceAccountToken"] for template in others)
    assert spec["authOptions"] == {"mode": "token"}


def test_workers_have_what_the_engine_asks_for(folder: Path) -> None:
    """CPUs and GPUs of all workers, when all are there, against bundles of shards, engines and ingress."""
    resource = ray_resource(folder)
    if resource["kind"] == "RayCluster":
        pytest.skip("it has no engine of its own")
    engine, num_replicas = _engine(resource)
    parallel = engine.parallel
    shards = parallel.stages * parallel.tensor * parallel.replicas if parallel is not None else 0
    cpus_per_shard = parallel.cpus_per_shard if parallel is not None else 0
    own_cpus = 1 if parallel is not None else engine.num_threads or 1
    groups = cluster_spec(resource)["workerGroupSpecs"]
    cpus = sum(group["maxReplicas"] * int(_limits(group)["cpu"]) for group in groups)
    gpus = sum(group["maxReplicas"] * int(_limits(group).get("nvidia.com/gpu", 0)) for group in groups)
    beside = 2 if resource["kind"] == "RayJob" else 0.5  # Ray Data reads with one and wants one free; or the ingress
    assert num_replicas * (shards * cpus_per_shard + own_cpus) + beside <= cpus
    assert gpus == (num_replicas * shards if engine.device == "cuda" else 0)
    assert gpus == 0 or engine.max_model_len == 16384


@only("service")
def test_the_serve_config_is_one_that_ray_and_we_read(folder: Path) -> None:
    config = yaml.safe_load(ray_resource(folder)["spec"]["serveConfigV2"])
    schema = ServeDeploySchema.model_validate(config)
    assert _unknown_keys(config, schema.model_dump(exclude_unset=True)) == []
    [application] = schema.applications
    assert callable(import_attr(application.import_path))
    options: ServeOptions = serve_options(application.args, environment={})
    assert options.llm_configs[0].engine.model
    assert schema.http_options.port == 8000


@only("job")
def test_the_entrypoint_is_a_job_that_takes_these_options(folder: Path) -> None:
    entrypoint = ray_resource(folder)["spec"]["entrypoint"]
    assert shlex.join(shlex.split(entrypoint)) == entrypoint, "two shells read it"
    python, script, *_ = shlex.split(entrypoint)
    assert python == "python"
    assert (ROOT / "jobs" / Path(script).relative_to(JOBS_FOLDER)).is_file()
    assert _engine(ray_resource(folder))[0].max_model_len


def test_metrics_and_dashboard(overlays: Path) -> None:
    content = yaml.safe_load((K8S / "grafana" / "kustomization.yaml").read_text("utf-8"))
    assert all((K8S / "grafana" / name).is_file() for one in content["configMapGenerator"] for name in one["files"])
    [monitor] = built(K8S / "grafana")
    assert problems(monitor) == []
    pods = [template for name in NAMES for template in pod_templates(ray_resource(overlays / name))[:2]]
    selected = monitor["spec"]["selector"]["matchLabels"]
    assert all(selected.items() <= pod["metadata"]["labels"].items() for pod in pods)
    ports = {port["name"] for pod in pods for port in pod["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


def _name(manifest: Manifest) -> str:
    name: str = manifest["metadata"]["name"]
    return name


def _containers(pod: Manifest) -> Iterator[Manifest]:
    yield from pod.get("initContainers", [])
    yield from pod["containers"]


def _limits(group: Manifest) -> dict[str, str]:
    limits: dict[str, str] = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return limits


def _engine(resource: Manifest) -> tuple[EngineConfig, int]:
    """The options of an engine, and how many of it there may be."""
    if resource["kind"] == "RayJob":
        return engine_of_job(shlex.split(resource["spec"]["entrypoint"])[2:]), 1
    [application] = yaml.safe_load(resource["spec"]["serveConfigV2"])["applications"]
    [config] = serve_options(application["args"], environment={}).llm_configs
    return config.engine, config.num_replicas


def _unknown_keys(given: Any, known: Any, where: str = "") -> list[str]:
    """Keys that a schema passed over in silence; what is below `args` is ours."""
    if not isinstance(given, dict) or where.endswith(".args"):
        pairs = zip(given, known, strict=True) if isinstance(given, list) else ()
        return [key for number, (a, b) in enumerate(pairs) for key in _unknown_keys(a, b, f"{where}[{number}]")]
    unknown = [f"{where}.{key}" for key in given.keys() - known.keys()]
    inside = (_unknown_keys(given[key], known[key], f"{where}.{key}") for key in given.keys() & known.keys())
    return unknown + [key for keys in inside for key in keys]
