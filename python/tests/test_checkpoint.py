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


GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 4, "n_head": 2, "vocab_size": 6, "n_positions": 3, "n_inner": 8}


def gpt2():
    """The shapes of a GPT-2 of one layer."""
    shapes = {"wte.weight": (6, 4), "wpe.weight": (3, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    for name, shape in {"attn.c_attn": (4, 12), "attn.c_proj": (4, 4), "mlp.c_fc": (4, 8), "mlp.c_proj": (8, 4)}.items():
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    shapes |= {f"h.0.{name}.{part}": (4,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def test_ours_and_back(tmp_path):
    """Heads are dims of their own in ours."""
    tensors = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in gpt2().items()}
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    hf.mkdir()
    write(hf / "model.safetensors", tensors)
    (hf / "config.json").write_text(json.dumps(GPT2))
    cm.checkpoint.convert(hf, ours, to="crossmesh", ranks=2)
    assert cm.checkpoint.open(ours).format == "crossmesh" and cm.checkpoint.check(ours) == []
    heads = np.zeros((4, 3, 2, 2), np.float32)
    cm.checkpoint.load(ours, into={"h.0.attn.c_attn.weight": heads})
    assert (heads.reshape(4, 12) == tensors["transformer.h.0.attn.c_attn.weight"]).all()
    cm.checkpoint.convert(ours, tmp_path / "back", to="hf")
    assert cm.checkpoint.diff(hf, tmp_path / "back") == []


def test_explain_writes_nothing(folder):
    text = cm.checkpoint.explain(folder / "in", to="dcp", ranks=2)
    assert "a [0:3, 0:4]" in text and "of model.safetensors" in text
    assert sorted(p.name for p in folder.iterdir()) == ["in"]


def test_progress_ends_when_all_is_written(folder):
    for to in ("dcp", "hf", "dcp-hf"):
        told = []
        report = cm.checkpoint.convert(folder / "in", folder / to, to=to, progress=lambda *at: told.append(at))
        assert told and all(0 <= done <= total for done, total in told)
        assert told[-1] == (report["bytes_written"],) * 2


def test_stopped_it_says_what_stays_and_goes_on(folder):
    # Large enough that somebody can come in the middle.
    write(folder / "in" / "model.safetensors", {"a": np.zeros((8192, 4096), np.float32)})

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupted:
        cm.checkpoint.convert(folder / "in", folder / "out", to="dcp", max_memory="200KiB", progress=stop)
    [note] = interrupted.value.__notes__
    assert ".out.partial keeps what was written" in note and "the same command goes on" in note
    assert (folder / ".out.partial" / "journal").exists() and not (folder / "out").exists()
    report = cm.checkpoint.convert(folder / "in", folder / "out", to="dcp", max_memory="200KiB")
    assert report["bytes_kept"] > 0 and not (folder / ".out.partial").exists()
    assert cm.checkpoint.diff(folder / "in", folder / "out") == []


def test_options_are_said_the_same_way_everywhere(tmp_path):
    """A config is a path, memory is a number or a text, and what nobody knows is refused."""
    values = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in gpt2().items()}
    config = tmp_path / "gpt2.json"
    config.write_text(json.dumps(GPT2))
    (tmp_path / "hf").mkdir()
    write(tmp_path / "hf" / "model.safetensors", values)
    qkv = np.zeros((1, 12, 4), np.float32)
    into = {"decoder.layers.self_attention.linear_qkv.weight": qkv}
    for path, memory in ((config, 1 << 20), (str(config), "1MiB")):
        qkv[:] = 0
        cm.checkpoint.load(tmp_path / "hf", into=into, names="gpt2", to_names="megatron", config=path, max_memory=memory)
        # Megatron has q, k and v of a head behind each other, and outputs first.
        wanted = values["transformer.h.0.attn.c_attn.weight"].reshape(4, 3, 2, 2).transpose(2, 1, 3, 0).reshape(12, 4)
        assert np.array_equal(qkv[0], wanted)
        assert cm.checkpoint.diff(tmp_path / "hf", tmp_path / "hf", max_memory=memory) == []
        assert "w" not in cm.checkpoint.open(tmp_path / "hf", max_memory=memory).tensors
    with pytest.raises(cm.checkpoint.CheckpointError, match="cannot read .*missing.json"):
        cm.checkpoint.load(tmp_path / "hf", into=into, names="gpt2", to_names="megatron", config="missing.json")
    for wrong in ({"rank": 2}, {"progress": True}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            cm.checkpoint.explain(tmp_path / "hf", to="dcp", **wrong)


def test_views_that_interleave_are_filled(folder):
    whole = np.zeros((6, 4), np.float32)
    write(folder / "in" / "model.safetensors", {f"a{i}": np.full((6, 1), i, np.float32) for i in range(4)})
    cm.checkpoint.load(folder / "in", into={f"a{i}": whole[:, i : i + 1] for i in range(4)})
    assert np.array_equal(whole, np.tile(np.arange(4, dtype=np.float32), (6, 1)))


def test_a_metadata_that_takes_too_much_memory_is_refused(folder):
    (folder / "big").mkdir()
    (folder / "big" / ".metadata").write_bytes(b"\x80\x04" + b"N" * (8 << 20))
    with pytest.raises(cm.checkpoint.CheckpointError, match="bytes of memory that there may be"):
        cm.checkpoint.open(folder / "big", max_memory="1MiB")


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


def test_tied_weights_are_loaded_once(folder):
    np_a = np.zeros((6, 4), np.float32)
    # The checkpoint does not have `tied`; its memory is that of `a`.
    report = cm.checkpoint.load(folder / "in", into={"tied": np_a, "a": np_a})
    assert report["tensors"] == 1 and np.array_equal(np_a, np.arange(24).reshape(6, 4))
    with pytest.raises(cm.checkpoint.CheckpointError, match="does not have it"):
        cm.checkpoint.load(folder / "in", into={"tied": np.zeros((6, 4), np.float32), "a": np_a})


def test_two_that_differ_are_not_loaded_into_one_array(tmp_path):
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    write(tmp_path / "model.safetensors", {"a": ones, "b": ones, "c": zeros})
    one = np.full(8, 7, np.float32)[::2]
    cm.checkpoint.load(tmp_path, into={"a": one, "b": one})
    assert np.array_equal(one, np.ones(4))
    with pytest.raises(cm.checkpoint.CheckpointError, match="`a` and `c` are one array here"):
        cm.checkpoint.load(tmp_path, into={"a": one, "c": one})


def test_what_cannot_be_filled_says_so(folder):
    class Frozen:
        shape = (6, 4)

    for value, says in [
        (np.broadcast_to(np.zeros(4, np.float32), (6, 4)), "read-only"),
        (np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (6, 4), (0, 4)), "several elements in one place"),
        (Frozen(), "cannot be filled in place"),
    ]:
        with pytest.raises(cm.checkpoint.CheckpointError, match=says):
            cm.checkpoint.load(folder / "in", into={"a": value})
