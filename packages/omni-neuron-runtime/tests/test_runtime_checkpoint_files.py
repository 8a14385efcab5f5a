# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a checkpoint's files is said from the headers alone, with file, tensor and sizes."""

import json
import struct
import sys
import types

import pytest
import torch
from safetensors.torch import save_file

from omni_neuron_runtime import CheckpointError, SafetensorsCheckpoint


def _write(path, header, data=b"", header_length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header_length is None else header_length) + text + data)
    return path


def _tensor(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _error(path):
    with pytest.raises(CheckpointError) as error:
        SafetensorsCheckpoint(path).validate()
    return str(error.value)


def test_a_folder_without_index(tmp_path):
    save_file({"b": torch.zeros(2, 3)}, tmp_path / "two.safetensors")
    save_file({"a": torch.zeros(4, dtype=torch.bfloat16), "s": torch.tensor(1)}, tmp_path / "one.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    checkpoint.validate()
    assert [file.name for file in checkpoint.files] == ["one.safetensors", "two.safetensors"]
    assert checkpoint.keys() == ["a", "b", "s"]
    assert checkpoint.shape("b") == (2, 3)
    assert checkpoint.shape("s") == ()
    assert checkpoint.dtype("a") == torch.bfloat16
    assert checkpoint.stats.bytes_read == 0
    with pytest.raises(CheckpointError, match="has no tensor 'c'"):
        checkpoint.shape("c")


def test_one_file_and_its_metadata_entry(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert SafetensorsCheckpoint(tmp_path / "x.safetensors").keys() == ["a"]


def test_every_dtype_of_safetensors_that_torch_has(tmp_path):
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.float16]
    dtypes += [torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.uint16]
    tensors = {str(dtype): torch.zeros(3, 2).to(dtype) for dtype in dtypes}
    save_file(tensors, tmp_path / "x.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert {key: checkpoint.dtype(key) for key in checkpoint.keys()} == {str(dtype): dtype for dtype in dtypes}  # noqa: SIM118


def test_nothing_there(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no such folder or file"):
        SafetensorsCheckpoint(tmp_path / "absent")
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"has no \*.safetensors file; it holds: config.json"):
        SafetensorsCheckpoint(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"organisation/name: .* install huggingface_hub"):
        SafetensorsCheckpoint("organisation/name")


def test_a_hub_name_is_fetched_top_level_only(tmp_path, monkeypatch):
    """With a stand-in for huggingface_hub that has the keyword arguments of its `snapshot_download`."""
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    seen = {}

    def snapshot_download(repo_id, *, allow_patterns=None, ignore_patterns=None, cache_dir=None):
        seen.update(repo_id=repo_id, allow=allow_patterns, ignore=ignore_patterns, cache_dir=cache_dir)
        if repo_id.endswith("gone"):
            raise OSError("offline")
        return str(tmp_path)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert SafetensorsCheckpoint("organisation/name", cache_dir="kept").keys() == ["a"]
    assert seen["repo_id"] == "organisation/name"
    assert seen["cache_dir"] == "kept"
    assert seen["ignore"] == ["*/*"]
    with pytest.raises(CheckpointError, match="not fetched from the Hugging Face Hub: offline"):
        SafetensorsCheckpoint("organisation/gone")


def test_truncated_files_are_named_with_sizes(tmp_path):
    whole = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.zeros(50)}, whole)
    content = whole.read_bytes()
    whole.write_bytes(content[:-30])
    message = _error(tmp_path)
    assert "x.safetensors: truncated" in message
    assert f"expected {len(content)} bytes, found {len(content) - 30} (30 missing)" in message
    assert "the first is 'b'" in message
    whole.write_bytes(content[:20])
    assert "the file ends after 20 bytes: truncated" in _error(tmp_path)
    whole.write_bytes(content[:5])
    assert "is 5 bytes long; a safetensors file begins with an 8-byte header length" in _error(tmp_path)
    whole.write_bytes(b"")
    assert "is 0 bytes long" in _error(tmp_path)
    whole.write_bytes(content + b"xx")
    assert "2 bytes follow the last tensor" in _error(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{not json", b"", "corrupt header"),
        (b"\xff\xfe\x00\x01", b"", "corrupt header"),
        (b"[1, 2]", b"", "not a JSON object"),
        (b'{"a": 1, "a": 2}', b"", "'a' stands in it twice"),
        ({"a": {"dtype": "F32"}}, b"", "tensor 'a' has no valid dtype, shape and data_offsets"),
        ({"a": _tensor(0, 8, [-2])}, b"\0" * 8, "no valid dtype"),
        ({"a": _tensor(0, 8, [2], "F99")}, b"\0" * 8, "unknown dtype 'F99'; known: BOOL"),
        ({"a": _tensor(0, 8, [3])}, b"\0" * 8, r"'a' F32 [3] takes 12 bytes, but the header gives it 8"),
        ({"a": _tensor(0, 8, [2]), "b": _tensor(4, 12, [2])}, b"\0" * 12, "overlaps the one before it"),
        ({"a": _tensor(0, 8, [2]), "b": _tensor(12, 20, [2])}, b"\0" * 20, "leaves a gap before it"),
    ],
)
def test_corrupt_headers(tmp_path, header, data, message):
    _write(tmp_path / "x.safetensors", header, data)
    text = _error(tmp_path)
    assert "x.safetensors" in text
    assert message in text


def test_files_that_are_no_safetensors(tmp_path):
    _write(tmp_path / "x.safetensors", b"{}", header_length=2**40)
    assert f"header length {2**40} is above the format's limit" in _error(tmp_path)
    (tmp_path / "x.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    assert "git-lfs pointer" in _error(tmp_path)
    (tmp_path / "x.safetensors").unlink()
    (tmp_path / "x.safetensors").mkdir()
    assert "x.safetensors: cannot be read" in _error(tmp_path)


def test_all_damaged_files_are_named_at_once(tmp_path):
    for name in ("a", "b", "c"):
        save_file({name: torch.zeros(9)}, tmp_path / f"{name}.safetensors")
    for name in ("a", "c"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"short")
    message = _error(tmp_path)
    assert "a.safetensors" in message
    assert "b.safetensors" not in message
    assert "c.safetensors" in message


def test_one_key_in_two_files(tmp_path):
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "model.fp16.safetensors")
    message = _error(tmp_path)
    assert "1 tensor(s) are both in model.fp16.safetensors and model.safetensors: 'b'" in message


def _index(folder, weight_map, name="model.safetensors.index.json"):
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_the_index_is_authoritative(tmp_path, caplog):
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(4), "c": torch.zeros(5)}, tmp_path / "two.safetensors")
    save_file({"a": torch.zeros(6)}, tmp_path / "other.safetensors")
    _index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert {key: checkpoint.shape(key) for key in checkpoint.keys()} == {"a": (2,), "b": (4,), "c": (5,)}  # noqa: SIM118
    assert [file.name for file in checkpoint.files] == ["one.safetensors", "two.safetensors"]
    assert "the index does not list 1 tensor(s) in it, which are ignored: b" in caplog.text


def test_an_index_that_does_not_fit_its_files(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    _index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    assert "one.safetensors: lacks 1 tensor(s) that the index says it holds: 'b'" in _error(tmp_path)
    _index(tmp_path, {"a": "one.safetensors", "b": "gone.safetensors"})
    assert "names files that are not there: gone.safetensors (1 tensors)" in _error(tmp_path)
    _index(tmp_path, {"a": "../one.safetensors"})
    assert "names files outside its own folder: ../one.safetensors" in _error(tmp_path)
    for damaged in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "{}"):
        (tmp_path / "model.safetensors.index.json").write_text(damaged)
        assert "model.safetensors.index.json: is not a safetensors index" in _error(tmp_path)
    _index(tmp_path, {"a": "one.safetensors"})
    _index(tmp_path, {"a": "one.safetensors"}, "model.fp16.safetensors.index.json")
    assert "more than one index (model.fp16.safetensors.index.json, model.safetensors.index.json)" in _error(tmp_path)
