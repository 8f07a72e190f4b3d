"""Checkpoints: opened, checked, converted, loaded. What torch, transformers and Megatron say of them is in test_checkpoint_oracles.py."""

import json
import struct

import numpy as np
import pytest

import crossmesh as cm


def write(path, tensors):
    """A safetensors file, by hand."""
    header, at, body = {"__metadata__": {"format": "pt"}}, 0, b""
    for name, array in sorted(tensors.items()):
        kind = {"float32": "F32", "int64": "I64", "float16": "F16"}[array.dtype.name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at, body = at + array.nbytes, body + array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.fixture
def folder(tmp_path):
    tensors = {"a": np.arange(24, dtype=np.float32).reshape(6, 4), "b": np.arange(5)}
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "model.safetensors", tensors)
    return tmp_path


def test_any_format_and_back(folder):
    ck = cm.checkpoint.open(folder / "in")
    assert (ck.format, ck.bytes, ck.tensors["a"]) == ("hf", 136, ("f32", (6, 4)))
    for to in ("dcp", "dcp-hf", "torch_dist"):
        # Megatron's names are Megatron's: without a map they are no Hugging Face names.
        if to == "torch_dist":
            with pytest.raises(cm.checkpoint.CheckpointError, match="what model this is"):
                cm.checkpoint.convert(ck, folder / to, to=to)
            continue
        report = cm.checkpoint.convert(ck, folder / to, to=to, ranks=3, max_memory="1MiB")
        assert report["tensors"] == 2
        assert cm.checkpoint.check(folder / to) == []
        assert cm.checkpoint.diff(ck, folder / to) == []
        cm.checkpoint.convert(folder / to, folder / f"{to}-back", to="hf")
        assert cm.checkpoint.diff(ck, folder / f"{to}-back") == []


def test_explain_writes_nothing(folder):
    text = cm.checkpoint.explain(folder / "in", to="dcp", ranks=2)
    assert "a [0:3, 0:4]" in text and "of model.safetensors" in text
    assert sorted(p.name for p in folder.iterdir()) == ["in"]


def test_progress_is_told_and_can_stop_it(folder):
    told = []
    cm.checkpoint.convert(folder / "in", folder / "out", to="dcp", progress=lambda *at: told.append(at))
    assert told and all(0 <= done <= total for done, total in told)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cm.checkpoint.convert(folder / "in", folder / "stopped", to="dcp", progress=stop)


def test_problems_are_named(folder):
    cm.checkpoint.convert(folder / "in", folder / "out", to="dcp", ranks=3)
    (folder / "out" / "__1_0.distcp").unlink()
    problems = cm.checkpoint.check(folder / "out")
    assert any(p.kind == "missing-file" and "__1_0.distcp" in p.what for p in problems)
    with pytest.raises(cm.CrossmeshError, match="missing-file"):
        cm.checkpoint.convert(folder / "out", folder / "again", to="hf")
    with pytest.raises(cm.checkpoint.CheckpointError, match="no format is called `gguf`"):
        cm.checkpoint.convert(folder / "in", folder / "again", to="gguf")


def test_os_system_is_refused_and_not_run(folder):
    import os
    import pickle

    class Bad:
        def __reduce__(self):
            return os.system, (f"touch {folder}/it-ran",)

    cm.checkpoint.convert(folder / "in", folder / "out", to="dcp")
    (folder / "out" / ".metadata").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(cm.checkpoint.CheckpointError, match="system"):
        cm.checkpoint.open(folder / "out")
    assert not (folder / "it-ran").exists()


def test_load_fills_arrays_in_place(folder):
    cm.checkpoint.convert(folder / "in", folder / "out", to="dcp", ranks=3)
    whole, column, b = np.zeros((6, 4), np.float16), np.zeros((6, 1), np.float32), np.zeros(5, np.int64)
    report = cm.checkpoint.load(folder / "out", into={"a": whole, "b": b})
    assert np.array_equal(whole, np.arange(24).reshape(6, 4)) and np.array_equal(b, np.arange(5))
    assert report["tensors"] == 2
    cm.checkpoint.load(folder / "out", into={"a": (column, [(0, 6), (2, 3)])})
    assert np.array_equal(column[:, 0], np.arange(24).reshape(6, 4)[:, 2])
    turned = np.zeros((4, 6), np.float32).T
    cm.checkpoint.load(folder / "out", into={"a": turned})
    assert np.array_equal(turned, np.arange(24).reshape(6, 4))


def test_load_refuses_what_does_not_fit(folder):
    for value, says in [
        (np.zeros((4, 6), np.float32), "in the checkpoint"),
        ((np.zeros((2, 4), np.float32), [(5, 7), (0, 4)]), "is no box of"),
        (np.zeros((6, 4), np.int64), "it is f32 in the checkpoint, and i64"),
    ]:
        with pytest.raises(cm.checkpoint.CheckpointError, match=says):
            cm.checkpoint.load(folder / "in", into={"a": value})
    with pytest.raises(cm.checkpoint.CheckpointError, match="does not have it"):
        cm.checkpoint.load(folder / "in", into={"c": np.zeros(1, np.float32)})
    assert cm.checkpoint.load(folder / "in", into={"c": np.zeros(1)}, strict=False)["tensors"] == 0
