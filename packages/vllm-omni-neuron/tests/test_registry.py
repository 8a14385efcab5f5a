# SPDX-License-Identifier: Apache-2.0
"""Model packages: discovery, broken ones, duplicates, malformed entries, registration."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_neuron import discover_models, registry

ENTRY = {"model_arch": "ToyOnePipeline", "class_name": "ToyOne"}


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    registry._warn_once.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a distribution with a model entry point: `install("acme-toy", "module", source, entry="name")`."""
    modules: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(distribution: str, module: str, source: str, *, entry: str | None = None, version: str = "1.2") -> None:
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[vllm_omni_neuron.models]\n{entry or module} = {module}\n")

    yield make
    for module in modules:
        sys.modules.pop(module, None)


def source_of(*entries: Any) -> str:
    return f"PIPELINE_REGISTRY = {list(entries)!r}\n"


def by_distribution(name: str) -> registry.RegisteredModel:
    [model] = [model for model in discover_models() if model.distribution == name]
    return model


def test_a_model_is_found_without_importing_it(install: Callable[..., None]) -> None:
    install("acme-toy", "acme_toy", source_of({**ENTRY, "module_name": "no.such.module", "pre_process_func_name": "f"}))
    assert by_distribution("acme-toy") == registry.RegisteredModel(
        architecture="ToyOnePipeline",
        class_name="ToyOne",
        module="no.such.module",
        entry_point="acme_toy",
        distribution="acme-toy",
        version="1.2",
        hooks=(("pre_process_func_name", "f"),),
    )


def test_without_module_name_it_is_the_package_of_the_registry(install: Callable[..., None]) -> None:
    install("acme-toy", "acme_toy", source_of(ENTRY))
    assert by_distribution("acme-toy").module == "acme_toy"


def test_a_package_that_raises_leaves_the_others_alone(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install("acme-toy", "acme_toy", source_of(ENTRY))
    install("broken-toy", "broken_toy", "raise ImportError('no libfoo.so')\n", version="3.1")
    with caplog.at_level(logging.WARNING):
        assert by_distribution("acme-toy").status == "registered"
    assert by_distribution("broken-toy").status == "failed"
    assert "no libfoo.so" in by_distribution("broken-toy").reason
    for part in ("broken-toy", "3.1", "no libfoo.so"):
        assert part in caplog.text


def test_two_claims_of_one_architecture(install: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """Others before ours, then by name; said once, with how to choose."""
    install("omni-neuron-aaa", "ours_toy", source_of(ENTRY))
    install("zeta-toy", "zeta_toy", source_of(ENTRY))
    install("beta-toy", "beta_toy", source_of(ENTRY))
    for _ in range(2):
        models = [model for model in discover_models() if model.architecture == "ToyOnePipeline"]
        assert [(model.distribution, model.status) for model in models] == [
            ("beta-toy", "registered"),
            ("zeta-toy", "shadowed"),
            ("omni-neuron-aaa", "shadowed"),
        ]
    warnings = [record.getMessage() for record in caplog.records if "ToyOnePipeline" in record.getMessage()]
    assert len(warnings) == 2
    assert "beta-toy 1.2 claims ToyOnePipeline too" in warnings[0]
    assert "VLLM_PLUGINS" in warnings[0]


def test_vllm_plugins_that_drops_a_model_says_so(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme-toy", "acme_toy", source_of(ENTRY))
    monkeypatch.setenv("VLLM_PLUGINS", "neuron,wan22")
    model = by_distribution("acme-toy")
    assert model.status == "filtered"
    assert "VLLM_PLUGINS" in model.reason
    assert "acme-toy" in caplog.text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("PIPELINE_REGISTRY = {}\n", "must be a list of dicts; found a dict"),
        ("", "must be a list of dicts; found a module"),
        (source_of("ToyOnePipeline"), r"PIPELINE_REGISTRY\[0\] is a str"),
        (source_of(ENTRY, {"class_name": "A"}), r"PIPELINE_REGISTRY\[1\] lacks the key 'model_arch'"),
        (
            source_of({**ENTRY, "preprocess_func_name": "f"}),
            "'preprocess_func_name'; did you mean 'pre_process_func_name'",
        ),
        (source_of({**ENTRY, "class_name": 3}), "key 'class_name' is 3"),
        (
            source_of({**ENTRY, "final_output_type": "movie"}),
            "final_output_type is 'movie'; it must be one of image, vid",
        ),
    ],
)
def test_malformed_entries(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture, source: str, message: str
) -> None:
    install("acme-toy", "acme_toy", source)
    model = by_distribution("acme-toy")
    assert model.status == "failed"
    assert re.search(message, model.reason), model.reason
    assert "acme-toy 1.2" in model.reason
    assert "acme_toy" in model.reason
    assert model.reason in caplog.text


def test_the_output_type_reaches_vllm_omnis_endpoints(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.diffusion import model_metadata

    monkeypatch.setattr(model_metadata, "_DIFFUSION_MODEL_METADATA", dict(model_metadata._DIFFUSION_MODEL_METADATA))
    install("acme-toy", "acme_toy", source_of({**ENTRY, "final_output_type": "video"}))
    registry.declare_output_types()
    assert model_metadata.get_diffusion_model_metadata("ToyOnePipeline").final_output_type == "video"
    assert model_metadata.get_diffusion_model_metadata("WanPipeline").final_output_type == "video"


def test_registration_twice_and_over_a_built_in(install: Callable[..., None]) -> None:
    from vllm_omni.diffusion import registry as stock

    install("acme-toy", "acme_toy", source_of({**ENTRY, "model_arch": "ZImagePipeline", "module_name": "json"}))
    saved = {
        name: dict(getattr(stock, name))
        for name in ("_DIFFUSION_MODELS", "_DIFFUSION_PRE_PROCESS_FUNCS", "_DIFFUSION_POST_PROCESS_FUNCS")
    }
    models = dict(stock.DiffusionModelRegistry.models)
    assert "ZImagePipeline" in stock._DIFFUSION_POST_PROCESS_FUNCS
    try:
        for _ in range(2):
            registry.register_models()
            assert stock._DIFFUSION_MODELS["ZImagePipeline"] == ("json", "", "ToyOne")
            # The built-in's hook would be looked for in our module.
            assert "ZImagePipeline" not in stock._DIFFUSION_POST_PROCESS_FUNCS
    finally:
        for name, table in saved.items():
            getattr(stock, name).clear()
            getattr(stock, name).update(table)
        stock.DiffusionModelRegistry.models.clear()
        stock.DiffusionModelRegistry.models.update(models)
