"""From a model and GPUs to pods: the numbers, what is refused and why, and the command."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig

from rayspec.config import EngineConfig
from rayspec.model.sizes import model_sizes
from rayspec.ops.doctor.machine import check_shared_memory
from rayspec.ops.k8s.options import RenderOptions
from rayspec.ops.k8s.render import GIB, ClusterPlan, manifests, plan_cluster, render
from rayspec.types import ConfigError
from tests.ops.k8s.schemas import cluster_spec, has_ray_schemas, open_rules, problems, violations
from tests.ops.plan.models import LLAMA_8B

MODELS = Path(__file__).parents[3] / "k8s" / "models"
LLAMA_70B = {"model": "meta-llama/Llama-3.1-70B-Instruct", "sizes_from": str(MODELS / "llama-3.1-70b.json")}
LLAMA_405B = {"model": "meta-llama/Llama-3.1-405B-Instruct", "sizes_from": str(MODELS / "llama-3.1-405b.json")}
BUCKET = {"inputs": ("s3://bucket/documents",), "output": "s3://bucket/out"}
DEMO = {"model": "demo", "cpus": 2, "context": 1024}
EIGHT_RANKS = {"gpus": "8xH100-80G", "stages": 1, "tensor": 8}  # named: the planner is tested elsewhere
ODD_GPUS = ("1xRTX_A6000-48G@768", "1xH100-PCIe")
Manifest = dict[str, Any]


def service(**options: Any) -> RenderOptions:
    return RenderOptions(**{"kind": "service"} | options)


def planned(**options: Any) -> ClusterPlan:
    return plan_cluster(service(**options))


def resource(options: RenderOptions) -> Manifest:
    return manifests(options, plan_cluster(options))[-1]


def entrypoint(**options: Any) -> list[str]:
    made = resource(RenderOptions(**{"kind": "job"} | BUCKET | options))
    return shlex.split(made["spec"]["entrypoint"])


def llm_config(**options: Any) -> Manifest:
    config = yaml.safe_load(resource(service(**options))["spec"]["serveConfigV2"])
    found: Manifest = config["applications"][0]["args"]["llm_configs"][0]
    return found


def workers(made: Manifest) -> list[Manifest]:
    found: list[Manifest] = cluster_spec(made)["workerGroupSpecs"]
    return found


def limits(group: Manifest) -> dict[str, str]:
    found: dict[str, str] = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return found


def test_pods_hold_the_stages_of_the_plan() -> None:
    plan = planned(**LLAMA_70B, gpus="8xH100-80G", stages=8, draft_weights="none")
    [pods] = plan.pods
    assert (pods.num_pods, pods.num_gpus, pods.cpus) == (1, 8, 12)
    weights = sum(stage.weight_bytes for stage in plan.placement.stages)
    assert weights == 2 * plan.placement.num_parameters == plan.checkpoint_bytes
    # Each shard reads its weights through memory; 4 GiB beside for each, 6 for the engine, and /dev/shm.
    assert pods.memory_bytes == weights + (8 * 4 + 6) * GIB + pods.shared_bytes
    assert pods.shared_bytes == (2 + 8) * GIB
    assert limits(workers(resource(service(**LLAMA_70B, gpus="8xH100-80G", stages=8)))[0]) == {
        "cpu": "12",
        "memory": "180Gi",
        "nvidia.com/gpu": "8",
    }


def test_copies_for_drafts_need_room_on_gpus() -> None:
    options = LLAMA_405B | {"gpus": "16xH100-80G", "stages": 2, "tensor": 8, "concurrency": 16}
    with pytest.raises(ConfigError, match=r"GiB are missing .* draft_weights none"):
        planned(**options)
    engine = llm_config(**options, draft_weights="none")["engine_kwargs"]
    assert EngineConfig(model="m", **engine).speculation.draft_weights == ()
    counted, without = (planned(**LLAMA_70B, **EIGHT_RANKS, draft_weights=copies) for copies in ("int4", "none"))
    assert counted.placement.stages[0].weight_bytes > without.placement.stages[0].weight_bytes
    assert counted.pods == without.pods, "copies are made on the GPUs"


def test_on_cpus_the_cache_gets_what_the_plan_says() -> None:
    plan, engine = planned(**DEMO, concurrency=64), llm_config(**DEMO, concurrency=64)["engine_kwargs"]
    left = plan.pods[0].memory_bytes - sum(stage.weight_bytes for stage in plan.placement.stages)
    assert engine["kv_cache_share"] * left > sum(stage.kv_bytes for stage in plan.placement.stages)


def test_gpus_of_amd_have_the_resource_that_is_named() -> None:
    [group] = workers(resource(service(**LLAMA_70B, gpus="8xMI300X", gpu_resource="amd.com/gpu")))
    assert limits(group).keys() == {"cpu", "memory", "amd.com/gpu"}


def test_ray_counts_gpus_of_any_resource() -> None:
    [group] = workers(resource(service(**LLAMA_70B, **EIGHT_RANKS, gpu_resource="nvidia.com/gpu.shared")))
    assert group["rayStartParams"]["num-gpus"] == limits(group)["nvidia.com/gpu.shared"] == "8"


def test_groups_have_names_that_pods_may_have() -> None:
    names = [workers(resource(service(**DEMO | {"cpus": None, "gpus": gpus})))[0]["groupName"] for gpus in ODD_GPUS]
    assert names == ["rtx-a6000-48g", "h100-pcie-80g"]


@pytest.mark.parametrize(("stages", "gpus_per_node", "pods", "gpus_of_a_pod"), [(14, 8, 2, 7), (16, 6, 3, 6)])
def test_stages_are_on_as_few_nodes_as_will_do(stages: int, gpus_per_node: int, pods: int, gpus_of_a_pod: int) -> None:
    plan = planned(**LLAMA_70B, gpus="16xH100-80G", stages=stages, gpus_per_node=gpus_per_node)
    [shape] = plan.pods
    assert (shape.num_pods, shape.num_gpus) == (pods, gpus_of_a_pod)


@pytest.mark.parametrize("options", [DEMO, DEMO | {"cpus": None, "gpus": "1xL4"}, LLAMA_70B | EIGHT_RANKS])
def test_rays_object_store_stays_in_memory(options: Manifest) -> None:
    spec = cluster_spec(resource(service(**options)))
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        [shared] = [one["emptyDir"] for one in group["template"]["spec"]["volumes"] if one["name"] == "shm"]
        sizes = [int(size.removesuffix("Gi")) * GIB for size in (shared["sizeLimit"], limits(group)["memory"])]
        assert check_shared_memory(*sizes).status == "ok", sizes


def test_ranks_of_a_stage_stay_in_a_pod() -> None:
    options = {"gpus": "12xH200-141G", "stages": 6, "gpus_per_node": 5, "draft_weights": "none"}
    plan = planned(**LLAMA_70B, **options, tensor=2)
    [pods] = plan.pods
    assert (pods.num_pods, pods.num_gpus) == (3, 4)
    # Its ranks map the same files.
    assert pods.memory_bytes - (4 * 4 + 6 + 2 + 4) * GIB == pytest.approx(plan.checkpoint_bytes / 3, rel=0.05)


def test_a_service_scales_pods_and_replicas_alike() -> None:
    options = {**LLAMA_70B, "gpus": "16xH100-80G", "stages": 16, "max_replicas": 3}
    [group] = workers(resource(service(**options)))
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 2, 6)
    deployment = llm_config(**options)["deployment_config"]
    assert deployment["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 32}
    assert llm_config(**options)["engine_kwargs"]["parallel"]["stages"] == 16
    gpus = {"gpus": "32xH100-80G", "stages": 16, "replicas": 2, "draft_weights": "none"}
    parallel = llm_config(**LLAMA_405B, **gpus)["engine_kwargs"]["parallel"]
    assert "replicas" not in parallel, "Serve makes them"
    assert parallel["start_timeout_s"] == pytest.approx(2 * 406e9 / 250e6, rel=0.01), "its files are read slowly"


def test_a_job_has_its_copies_in_the_engine() -> None:
    words = entrypoint(**LLAMA_70B, gpus="8xH100-80G", stages=8, replicas=2, dtype="bfloat16")
    pairs = [word for word in words[2:-1] if word != "--accept-failed-rows"]
    flags = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert "--accept-failed-rows" in words
    assert words[-1] == "s3://bucket/documents"
    assert flags["--output"] == "s3://bucket/out"
    assert (flags["--stages"], flags["--replicas"], flags["--dtype"]) == ("8", "2", "bfloat16")


def test_spot_workers_and_a_head_that_stays() -> None:
    made = resource(RenderOptions(kind="job", **BUCKET, **LLAMA_70B, **EIGHT_RANKS, spot=True))
    head = cluster_spec(made)["headGroupSpec"]["template"]["spec"]
    [worker] = [group["template"]["spec"] for group in workers(made)]
    terms = [
        pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        for pod in (head, worker)
    ]
    assert [len(one["matchExpressions"]) for one in terms[0]] == [4], "the head: none of the labels"
    assert [len(one["matchExpressions"]) for one in terms[1]] == [1, 1, 1, 1], "workers: one of them"
    assert {expression["operator"] for expression in terms[0][0]["matchExpressions"]} == {"NotIn"}
    assert {"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"} in worker["tolerations"]
    assert "tolerations" not in head


def test_the_claim_has_room_for_the_model() -> None:
    options = service(**LLAMA_70B, **EIGHT_RANKS, storage_class="shared", namespace="elsewhere")
    made = {one["kind"]: one for one in manifests(options, plan_cluster(options))}
    assert made["PersistentVolumeClaim"]["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "159Gi"}},  # 1.2 times 131.4 GiB, and one
        "storageClassName": "shared",
    }
    assert made["PersistentVolumeClaim"]["metadata"]["name"] == "rayspec-models"
    assert {one["metadata"]["namespace"] for one in made.values()} == {"elsewhere"}


def test_the_claim_is_for_the_files_whatever_becomes_of_the_weights(tmp_path: Path) -> None:
    config = LlamaConfig(**LLAMA_8B.to_dict() | {"dtype": "float32"})
    number = model_sizes(config, dtype=torch.float32).num_parameters
    packed = LlamaConfig(**LLAMA_8B.to_dict(), quantization_config={"quant_method": "gptq", "bits": 4})
    for own, bytes_each in ((config, 4), (packed, 0.75)):
        own.save_pretrained(tmp_path)
        plan = planned(model="a/b", sizes_from=str(tmp_path), gpus="1xH200", concurrency=1, dtype="bfloat16")
        assert plan.checkpoint_bytes == pytest.approx(bytes_each * number, rel=0.01)
        assert plan.pods[0].memory_bytes > 2 * number


def test_ranks_that_convert_the_files_need_memory_for_a_copy_each() -> None:
    own, converted = (planned(**LLAMA_70B, **EIGHT_RANKS, dtype=dtype).pods[0] for dtype in ("bfloat16", "float16"))
    assert converted.memory_bytes - own.memory_bytes > 900 * GIB


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.1.2.3:6380", {"ipBlock": {"cidr": "10.1.2.3/32"}}),
        ("redis:6380", {"podSelector": {}}),
        (
            "redis.state.svc.cluster.local:6380",
            {"podSelector": {}, "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "state"}}},
        ),
        ("cache.example.com:6380", {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}),
    ],
)
def test_pods_reach_redis_where_it_is(address: str, peer: Manifest) -> None:
    options = service(**DEMO, redis_address=address)
    [policy] = [one for one in manifests(options, plan_cluster(options)) if one["kind"] == "NetworkPolicy"]
    assert open_rules(policy) == []
    assert policy["spec"]["egress"][-1] == {"to": [peer], "ports": [{"port": 6380, "protocol": "TCP"}]}
    del policy["spec"]["egress"][-1]["to"]
    assert open_rules(policy)


@pytest.mark.skipif(not has_ray_schemas(), reason="no KubeRay definitions: set KUBERAY_CRDS")
@pytest.mark.parametrize(
    "options",
    [
        service(**LLAMA_70B, gpus="2xH200-141G,4xA100-80G", stages=6, node_selector={"pool": "gpus"}),
        service(**DEMO, replicas=2, image="registry.example/rayspec:1", namespace="other"),
        RenderOptions(kind="cluster", **DEMO, redis_address="redis:6379"),
        RenderOptions(
            kind="job", **LLAMA_70B, **BUCKET, gpus="16xNEW-96G@4000", stages=4, tensor=4, spot=True, gpus_per_node=4
        ),
    ],
    ids=["mixed", "replicas", "state", "unknown-gpu"],
)
def test_other_renders_are_valid_too(options: RenderOptions) -> None:
    made = manifests(options, plan_cluster(options))
    assert [problem for one in made for problem in problems(one)] == []
    assert violations(made[-1]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LLAMA_405B | {"gpus": "8xH100-80G"}, "option 'gpus' is '8xH100-80G'.*GiB are missing.*larger"),
        (
            LLAMA_405B
            | {"gpus": "160xNEW-12G@1000", "tensor": 8, "stages": 20, "concurrency": 1, "context": 256}
            | {"draft_weights": "none"},
            "option 'tensor' is 8.*a whole layer in addition to its share",
        ),
        (
            LLAMA_70B | {"gpus": "8xH200-141G", "tensor": 4, "gpus_per_node": 2, "stages": 2},
            "'tensor' is 4.*gpus_per_node",
        ),
        (LLAMA_70B | {"gpus": "2xH200-141G,4xA100-80G", "stages": 6, "replicas": 2}, "Ray would mix"),
        (LLAMA_70B | {"gpus": "2xA100-80G,2xH200-141G,2xA100-80G", "stages": 6}, "side by side"),
        (LLAMA_70B | {"gpus": "8xMI300X"}, "'gpu_resource' is 'nvidia.com/gpu', but MI300X is an AMD GPU.*amd.com/gpu"),
        (LLAMA_70B, "options 'gpus' and 'cpus' are None and None"),
        (DEMO | {"inputs": ("a",)}, "option 'inputs' is of a job, not of a service"),
        (DEMO | {"replicas": 2, "max_replicas": 1}, "option 'max_replicas' is 1"),
        (DEMO | {"name": "Rayspec"}, "option 'name' is 'Rayspec'"),
        (DEMO | {"namespace": 64 * "a"}, "option 'namespace'.*up to 63"),
        (DEMO | {"image": "a b"}, "option 'image' is 'a b': give a name without spaces"),
        (DEMO | {"redis_address": "redis:65536"}, "option 'redis_address' is 'redis:65536': give it as HOST:PORT"),
        (DEMO | {"hf_secret": "token."}, "option 'hf_secret' is 'token.'"),
        (DEMO | {"node_selector": ("gpus",)}, "NAME=VALUE"),
        (DEMO | {"kind": "job"}, "option 'output' is missing"),
        (LLAMA_70B | {"kind": "job", "gpus": "8xH100-80G", "output": "out"}, "option 'inputs' is missing"),
        (DEMO | {"kind": "job", "output": "s3://b/$(id)"}, "option 'output'.*shells"),
        (DEMO | {"kind": "job", "output": "out", "inputs": ("a b",)}, "option 'inputs'.*shells"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(options: Manifest, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        planned(**options)


COMMAND = ("k8s",)


def test_the_command_prints_what_render_makes(run: Any) -> None:
    words = ("--model", "demo", "--cpus", "2", "--context", "1024", "--node-selector", "disk=fast")
    made = run("render", "--kind", "service", *words)
    assert made.exit_code == 0, made.output
    assert made.stdout == render(service(**DEMO, node_selector={"disk": "fast"}))
    made = run("render", *words, "--output", "/shared/out", "/shared/a.parquet", "/shared/b")
    job = list(yaml.safe_load_all(made.stdout))[-1]
    assert job["kind"] == "RayJob"
    assert job["spec"]["entrypoint"].endswith("--output /shared/out /shared/a.parquet /shared/b")


def test_the_command_ends_with_a_line_and_code_2(run: Any) -> None:
    made = run("render", "--model", "demo", "--context", "1024", "--gpus", "1xH1000", "--kind", "service")
    assert (made.exit_code, made.stdout) == (2, "")
    assert made.stderr.startswith("error: option 'gpus' is '1xH1000'")
    assert "option 'model' is missing" in run("render").stderr
    assert "has no options.yaml below it: name a folder of overlays" in run("overlays", ".").stderr


def test_overlays_are_written_where_they_are_stale(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "overlays" / "mine"
    folder.mkdir(parents=True)
    (folder / "options.yaml").write_text("{kind: service, model: demo, cpus: 2, context: 1024}", encoding="utf-8")
    assert run("overlays", "overlays", "--check").exit_code == 1
    assert not (folder / "manifest.yaml").exists()
    assert run("overlays", "overlays").exit_code == 0
    assert (folder / "manifest.yaml").read_text(encoding="utf-8") == render(service(**DEMO))
    assert run("overlays", "overlays", "--check").exit_code == 0
    words = ("render", "--config", str(folder / "options.yaml"), "--context", "512", "--cpus", "3")
    assert run(*words).stdout == render(service(**DEMO | {"context": 512, "cpus": 3})), "flags win over the file"
