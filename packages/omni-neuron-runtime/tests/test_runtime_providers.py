# SPDX-License-Identifier: Apache-2.0
"""Providers, over real metadata: each test writes small distributions into a folder on sys.path."""

import functools
import subprocess
import sys

import pytest

from omni_neuron_runtime import ProviderError, discover_providers, distribution_precedence, providers

GROUP = "vllm_omni_neuron.models.test"


@pytest.fixture
def install(tmp_path, monkeypatch, request):
    """`install(distribution, version, {name: value}, modules={...})` makes a distribution importable."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    providers._warn_once.cache_clear()

    def make(distribution, version, entry_points, modules=None):
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in entry_points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in (modules or {}).items():
            (tmp_path / f"{module}.py").write_text(source)
            request.addfinalizer(functools.partial(sys.modules.pop, module, None))

    return make


def _table(found):
    return [(provider.name, provider.distribution, provider.status) for provider in found]


def test_discovery_imports_nothing_and_is_sorted(install):
    install("zeta-models", "1.0", {"toy": "toy_module:VALUE"}, {"toy_module": "VALUE = 7\n"})
    install("alpha-models", "2.0", {"zoo": "nowhere", "ark": "nowhere"})
    found = discover_providers(GROUP)
    assert _table(found) == [
        ("ark", "alpha-models", "found"),
        ("toy", "zeta-models", "found"),
        ("zoo", "alpha-models", "found"),
    ]
    assert "toy_module" not in sys.modules
    toy = found.get("toy")
    assert (toy.value, toy.group, toy.version) == ("toy_module:VALUE", GROUP, "1.0")
    assert toy.load() == toy.load() == 7
    assert toy.status == "loaded"
    assert len(found) == 3


def test_a_distribution_may_be_out_of_reach_of_the_filter(install, caplog, monkeypatch):
    install("omni-neuron-one", "1.0", {"ours": "nowhere"})
    install("zeta-models", "1.0", {"theirs": "nowhere"})
    monkeypatch.setenv("VLLM_PLUGINS", "neuron")
    found = discover_providers(GROUP, unfiltered=("omni-neuron-one",))
    assert _table(found) == [("ours", "omni-neuron-one", "found"), ("theirs", "zeta-models", "filtered")]
    assert "omni-neuron-one" not in caplog.text


def test_precedence_is_others_first_then_the_normalised_name():
    names = ["vllm_omni_neuron", "Omni.Neuron-wan22", "zeta", "Acme_Models"]
    assert sorted(names, key=distribution_precedence) == [
        "Acme_Models",
        "zeta",
        "Omni.Neuron-wan22",
        "vllm_omni_neuron",
    ]


def test_no_providers():
    found = discover_providers("no.such.group")
    assert len(found) == 0
    assert found.load_all() == {}
    with pytest.raises(ProviderError, match=r"group no.such.group has no entry point 'x'; installed: none"):
        found.get("x")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise RuntimeError('half installed')", "RuntimeError: half installed"),
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("x = (", "SyntaxError"),
        ("", "AttributeError"),
    ],
)
def test_a_broken_provider_is_reported_and_hides_nobody(install, caplog, source, cause):
    install("broken-models", "0.3", {"broken": "broken_module:VALUE"}, {"broken_module": source})
    install("good-models", "1.0", {"good": "good_module:VALUE"}, {"good_module": "VALUE = 1\n"})
    found = discover_providers(GROUP)
    assert found.load_all() == {"good": 1}
    [record] = caplog.records
    assert record.levelname == "WARNING"
    for part in ("broken-models 0.3", "'broken' = 'broken_module:VALUE'", cause):
        assert part in record.getMessage()
    broken = found.get("broken")
    assert broken.status == "failed"
    assert cause in broken.reason
    with pytest.raises(ProviderError, match=r"broken-models 0.3.*failed"):
        broken.load()
    assert len(caplog.records) == 1  # said once
    assert [provider.name for provider in found.usable()] == ["good"]


def test_the_warning_reaches_stderr_of_an_unconfigured_process(install, tmp_path):
    install("broken-models", "0.3", {"broken": "broken_module"}, {"broken_module": "raise RuntimeError('no')"})
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"from omni_neuron_runtime import discover_providers; print(discover_providers({GROUP!r}).load_all())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "{}"
    assert "broken-models 0.3" in done.stderr
    assert "RuntimeError: no" in done.stderr


def test_two_claims_of_one_name_others_before_ours_then_by_name(install, caplog):
    install("omni-neuron-wan99", "1.0", {"wan": "ours"})
    install("Zebra_Models", "1.0", {"wan": "zebra"}, {"zebra": "VALUE = 'zebra'\n"})
    install("yak-models", "1.0", {"wan": "yak"}, {"yak": "VALUE = 'yak'\n"})
    found = discover_providers(GROUP)
    assert _table(found) == [
        ("wan", "yak-models", "found"),
        ("wan", "Zebra_Models", "shadowed"),
        ("wan", "omni-neuron-wan99", "shadowed"),
    ]
    assert found.get("wan").load().VALUE == "yak"
    assert len(found.load_all()) == 1
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all("yak-models 1.0 claims the same name" in message for message in messages)
    assert "Zebra_Models 1.0" in messages[0]
    assert "omni-neuron-wan99 1.0" in messages[1]
    with pytest.raises(ProviderError, match=r"Zebra_Models 1.0.*shadowed: yak-models"):
        list(found)[1].load()
    discover_providers(GROUP)
    assert len(caplog.records) == 2  # said once per process


def test_a_shadowed_provider_does_not_step_in_for_a_broken_one(install):
    install("omni-neuron-wan99", "1.0", {"wan": "json"})
    install("yak-models", "1.0", {"wan": "yak_broken"}, {"yak_broken": "raise RuntimeError"})
    assert discover_providers(GROUP).load_all() == {}


def test_vllm_plugins_filters_by_name_and_says_so(install, caplog, monkeypatch):
    install("good-models", "1.0", {"good": "json", "other": "json"})
    monkeypatch.setenv("VLLM_PLUGINS", "good,neuron")
    found = discover_providers(GROUP)
    assert _table(found) == [("good", "good-models", "found"), ("other", "good-models", "filtered")]
    [record] = caplog.records
    assert "good-models 1.0" in record.getMessage()
    assert "VLLM_PLUGINS='good,neuron' does not name 'other'" in record.getMessage()
    with pytest.raises(ProviderError, match="VLLM_PLUGINS='good,neuron' does not name 'other'"):
        found.get("other")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert [provider.status for provider in discover_providers(GROUP)] == ["filtered", "filtered"]


def test_a_filter_drops_the_winner_and_the_shadowed_alike(install, monkeypatch):
    install("a-models", "1.0", {"wan": "json"})
    install("b-models", "1.0", {"wan": "json"})
    monkeypatch.setenv("VLLM_PLUGINS", "neuron")
    assert [provider.status for provider in discover_providers(GROUP)] == ["filtered", "filtered"]


def test_unreadable_metadata_is_reported_and_hides_nobody(install, caplog, tmp_path):
    install("good-models", "1.0", {"good": "json"})
    install("odd-models", "1.0", {})
    (tmp_path / "odd_models-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe broken \x80")
    assert _table(discover_providers(GROUP)) == [("good", "good-models", "found")]
    assert "odd_models-1.0.dist-info" in caplog.text


def test_a_second_copy_of_a_distribution_is_not_a_second_claim(install, tmp_path, monkeypatch, caplog):
    install("good-models", "1.0", {"good": "json"})
    copy = tmp_path / "copy" / "good_models-0.9.dist-info"
    copy.mkdir(parents=True)
    (copy / "METADATA").write_text("Metadata-Version: 2.1\nName: Good.Models\nVersion: 0.9\n")
    (copy / "entry_points.txt").write_text(f"[{GROUP}]\ngood = nowhere\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(copy.parent)])
    [provider] = discover_providers(GROUP)
    assert provider.version == "1.0"
    assert not caplog.records
