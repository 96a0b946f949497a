from pathlib import Path

import pytest

from rayspec.errors import ConfigError
from rayspec.ops.plan.gpus import KNOWN_GPUS, ask_torch, gpu_called, gpus_of_a_node, gpus_spec, parse_gpus


def test_gpus_are_listed_in_order() -> None:
    gpus = parse_gpus("2xH200-141G, A100-40G,3xNEW-X-96G@1234.5")
    assert [gpu.label for gpu in gpus] == ["H200-141G"] * 2 + ["A100-40G"] + ["NEW-X-96G"] * 3
    assert [gpu.bandwidth_gb_s for gpu in gpus[1:4]] == [4800, 1555, 1234.5]
    for gpu in KNOWN_GPUS:
        assert parse_gpus(gpu.label) == (gpu,)
    assert parse_gpus("H100-PCIe") != parse_gpus("H100")


@pytest.mark.parametrize(
    "spec", ["16xH100-80G", "2x8xH100-80G", "2x8xH100", " 2 x 8 x h100-80gb ", "8XH100,8xh100-80G", "2x4xH100,8xH100"]
)
def test_the_same_gpus_have_many_names(spec: str) -> None:
    assert parse_gpus(spec) == parse_gpus("H100-80G") * 16


@pytest.mark.parametrize(
    ("spec", "of_a_node"),
    [("16xH100", 8), ("4xH100", 8), ("4x4xH100", 4), ("2x8xH100,3x4xL4", 4), ("2x8xH100,4xL4", 8), ("1x16xH100", 16)],
)
def test_nodes_are_those_that_are_named(spec: str, of_a_node: int) -> None:
    assert gpus_of_a_node(spec) == of_a_node


@pytest.mark.parametrize(
    "spec",
    [
        *("H100-81G", "0xH100", "2x0xH100", "", "H100,", "NEW-96G", "NEW@100", "8x", "NEW-96G@0", "2x2x2xH100"),
        *("8xH100@", "-1xH100", "1.5xH100", "9" * 5000 + "xH100"),
    ],
)
def test_what_is_no_gpu_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"option 'gpus' is .*A100-40G.*MI300X-192G.*NAME-80G@3350"):
        parse_gpus(spec)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("8xH101-80G", "'8xH101-80G' is no GPU that is known, did you mean H100-80G?"),
        ("4xA100", "'4xA100' is A100-40G or A100-80G"),
        ("2x0xH100", "'2x0xH100' has a count of 0"),
        ("8xRTX4090", "'8xRTX4090' is no GPU that is known, did you mean RTX-4090-24G?"),
    ],
)
def test_a_near_name_is_suggested(spec: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gpus(spec)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("product", "gib", "label"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "H100-80G"),
        ("NVIDIA H100 PCIe", 79.6, "H100-PCIe-80G"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40G"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80G"),
        ("NVIDIA L4", 22.0, "L4-24G"),
        ("NVIDIA A10G", 22.0, "A10G-24G"),
        ("Tesla T4", 14.6, "T4-16G"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX-4090-24G"),
        ("NVIDIA GH200 480GB", 94.5, "GH200-96G"),
        ("AMD Instinct MI300X", 191.5, "MI300X-192G"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.6, "A100-21G"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5, "H100-10G"),
    ],
)
def test_products_are_known_by_their_drivers_names(product: str, gib: float, label: str) -> None:
    gpu = gpu_called(product, int(gib * 2**30))
    assert gpu.label == label
    assert [one.label for one in parse_gpus(gpus_spec([gpu] * 2))] == [label] * 2


def test_a_file_of_the_users_folder_is_not_taken_for_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert {"names", "torch", "cuda"} < ask_torch().keys()


def test_a_product_that_is_not_known_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"GPU 'NVIDIA GeForce RTX 2080' is not known.*--gpus"):
        gpu_called("NVIDIA GeForce RTX 2080", 8 * 2**30)
