# SPDX-License-Identifier: Apache-2.0
"""Model packages: discovery, broken ones, duplicates, malformed entries, registration."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_neuron import __version__, discover_models, registry
from vllm_omni_neuron.sdk import SpecError, model_spec

ENTRY = {"model_arch": "ToyOnePipeline", "class_name": "ToyOne"}


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    registry._warn_once.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a distribution with a model entry point: `install("acme-toy", "module", source, entry="name")`."""
    modules: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(
        distribution: str,
        module: str,
        source: str,
        *,
        entry: str | None = None,
        version: str = "1.2",
        requirements: tuple[str, ...] = (),
    ) -> None:
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        requires = "".join(f"Requires-Dist: {line}\n" for line in requirements)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{requires}")
        (info / "entry_points.txt").write_text(f"[vllm_omni_neuron.models]\n{entry or module} = {module}\n")

    yield make
    for module in modules:
        for part in ("", "_spec", "_pipeline"):
            sys.modules.pop(module + part, None)


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


SPEC = """
from dataclasses import replace
from vllm_omni_neuron.sdk import FEATURES, ComponentSpec, ModelSpec
transformer = ComponentSpec('transformer', 'transformer')
SPEC = ModelSpec('ToyOnePipeline', 'Toy', 'image', (transformer,), dict.fromkeys(FEATURES, 'a toy'))
OTHER = replace(SPEC, architecture='OtherPipeline')
"""


def spec_source(module: str, sdk: int = 1, path: str | None = None) -> str:
    return f"{source_of(ENTRY)}SDK = {sdk}\nMODEL_SPECS = {{'ToyOnePipeline': {path or module + '_spec:SPEC'!r}}}\n"


def test_a_package_for_another_sdk_is_not_imported(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """By its metadata, before anything of it is imported."""
    install("acme-toy", "acme_toy", source_of(ENTRY))
    install(
        "future-toy",
        "future_toy",
        "raise SystemExit('imported')\n",
        requirements=("vllm-omni-neuron>=1,<2", "no-such-extra; extra == 'more'"),
    )
    assert by_distribution("acme-toy").status == "registered"
    model = by_distribution("future-toy")
    assert model.status == "failed"
    assert model.reason == (
        f"needs vllm-omni-neuron<2,>=1, and {__version__} is installed; "
        "uv pip install --upgrade future-toy vllm-omni-neuron"
    )
    assert f"of future-toy 1.2 in group vllm_omni_neuron.models is left out: {model.reason}" in caplog.text


def test_a_registry_for_another_sdk_says_so(install: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    install("future-toy", "future_toy", spec_source("future_toy", sdk=2))
    install("other-toy", "other_toy", "SDK = 2\nPIPELINE_REGISTRY = [{'of another': 'form'}]\n")
    assert "its SDK is 2, " in by_distribution("other-toy").reason
    model = by_distribution("future-toy")
    assert model.status == "failed"
    assert "future-toy 1.2" in model.reason
    assert "its SDK is 2, and this vllm-omni-neuron has the model SDK 1" in model.reason
    assert "uv pip install --upgrade future-toy vllm-omni-neuron" in model.reason
    assert model.reason in caplog.text


def test_a_requirement_that_is_not_met_is_named_and_the_model_stays(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """A name in the metadata is no proof that the module is missing: somebody may have it under another name."""
    install(
        "acme-toy", "acme_toy", source_of(ENTRY), requirements=("no-such-lib>=2", "typer<0.1", "pyyaml", "not a line")
    )
    model = by_distribution("acme-toy")
    [problem] = model.problems
    assert model.status == "registered"
    for part in ("needs no-such-lib>=2, and it is not installed", "needs typer<0.1, and ", "is installed; "):
        assert part in problem
    assert problem.endswith("uv pip install 'no-such-lib>=2' 'typer<0.1'")
    assert f"of acme-toy 1.2 in group vllm_omni_neuron.models: {problem}" in caplog.text


@pytest.mark.parametrize(
    ("requirements", "source", "reason"),
    [
        (
            ("no-such-lib",),
            "import no_such_lib",
            "ModuleNotFoundError: No module named 'no_such_lib': acme-toy needs no-such-lib, and it is not installed; "
            "uv pip install 'no-such-lib'",
        ),
        (
            (),
            "import no_such_lib",
            "ModuleNotFoundError: No module named 'no_such_lib': acme-toy does not require what provides no_such_lib; "
            "uv pip install that",
        ),
        (
            (),
            "from vllm_omni_neuron.sdk import no_such_name",
            f": it is not written for vllm-omni-neuron {__version__}; "
            "uv pip install --upgrade acme-toy vllm-omni-neuron",
        ),
        ((), "raise RuntimeError('no luck')", "RuntimeError: no luck"),
    ],
)
def test_a_failing_import_is_named_with_its_fix_wherever_it_is(
    install: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    requirements: tuple[str, ...],
    source: str,
    reason: str,
) -> None:
    """In the registry, the spec and the pipeline; other packages are registered."""
    install("good-toy", "good_toy", source_of({**ENTRY, "model_arch": "GoodPipeline"}))
    install("acme-toy", "acme_toy", source, requirements=requirements)
    model = by_distribution("acme-toy")
    assert model.status == "failed"
    assert model.reason.endswith(reason)
    assert reason in caplog.text
    assert by_distribution("good-toy").status == "registered"

    (tmp_path / "acme_toy.py").write_text(spec_source("acme_toy"))
    for name in ("acme_toy_spec", "acme_toy_pipeline"):
        (tmp_path / f"{name}.py").write_text(source)
    sys.modules.pop("acme_toy", None)
    importlib.invalidate_caches()
    model = replace(model, spec_path="acme_toy_spec:SPEC", module="acme_toy_pipeline", class_name="Acme")
    with pytest.raises(SpecError, match=re.escape(reason)) as spec_error:
        model.load_spec()
    with pytest.raises(registry.ModelPackageError, match=re.escape(reason)) as pipeline_error:
        model.import_pipeline()
    assert "spec 'acme_toy_spec:SPEC' of acme-toy 1.2: " in str(spec_error.value)
    assert "pipeline acme_toy_pipeline.Acme of acme-toy 1.2: " in str(pipeline_error.value)


def test_the_engine_names_the_package_whose_pipeline_it_cannot_import(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.diffusion import registry as stock

    from vllm_omni_neuron.compat import apply_engine_patches

    apply_engine_patches()
    install("acme-toy", "acme_toy", source_of({**ENTRY, "module_name": "no_such_module"}))
    config = SimpleNamespace(model_class_name="ToyOnePipeline")
    with pytest.raises(registry.ModelPackageError, match=r"pipeline no_such_module.ToyOne of acme-toy 1.2: Module"):
        stock._load_process_func(config, "f")


def test_specs(install: Callable[..., None], tmp_path: Path) -> None:
    """Found by architecture; one that is broken, of another architecture or missing is said by name."""
    (tmp_path / "acme_toy_spec.py").write_text(SPEC)
    install("acme-toy", "acme_toy", spec_source("acme_toy"))
    found = model_spec("ToyOnePipeline")
    assert (found.title, found.supports("lora"), found.why_not("lora")) == ("Toy", False, "a toy")
    with pytest.raises(SpecError, match=r"offers 'NoPipeline'; offered are .*ToyOnePipeline"):
        model_spec("NoPipeline")
    model = by_distribution("acme-toy")
    for path, message in {
        "acme_toy_spec:OTHER": "spec 'acme_toy_spec:OTHER' of acme-toy 1.2 is of OtherPipeline, not of ToyOnePipeline",
        "acme_toy_spec:ENTRY": "spec 'acme_toy_spec:ENTRY' of acme-toy 1.2: SpecError: .* it must be a ModelSpec",
    }.items():
        with pytest.raises(SpecError, match=message):
            replace(model, spec_path=path).load_spec()
    assert replace(model, spec_path="").load_spec() is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (spec_source("x", path="nowhere"), r"MODEL_SPECS\['ToyOnePipeline'\] is 'nowhere'; write 'module:NAME'"),
        (
            source_of(ENTRY) + "SDK = 1\nMODEL_SPECS = {'Two': 'a:B'}\n",
            "MODEL_SPECS names 'Two'; PIPELINE",
        ),
        (source_of(ENTRY) + "MODEL_SPECS = {'ToyOnePipeline': 'a:B'}\n", "its SDK is None"),
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
    install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The registry's own word for it, else the spec's; a spec that is broken is said and stops nobody."""
    from vllm_omni.diffusion import model_metadata

    monkeypatch.setattr(model_metadata, "_DIFFUSION_MODEL_METADATA", dict(model_metadata._DIFFUSION_MODEL_METADATA))
    install("acme-toy", "acme_toy", source_of({**ENTRY, "final_output_type": "video"}))
    specified = spec_source("mute_toy", path="acme_toy:IMAGE").replace("ToyOnePipeline", "MutePipeline")
    install("mute-toy", "mute_toy", specified)
    registry.declare_output_types()
    assert "spec 'acme_toy:IMAGE' of mute-toy 1.2: SpecError" in caplog.text
    (tmp_path / "mute_toy_spec.py").write_text(SPEC.replace("ToyOnePipeline", "MutePipeline"))
    (tmp_path / "mute_toy.py").write_text(specified.replace("acme_toy:IMAGE", "mute_toy_spec:SPEC"))
    sys.modules.pop("mute_toy")
    importlib.invalidate_caches()
    registry.declare_output_types()
    assert model_metadata.get_diffusion_model_metadata("MutePipeline").final_output_type == "image"
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
