"""Reading checkpoint folders, and what is wrong with some."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import INDEX, change_index, content, save, shard_name, tensors, three
from command import ok, refused
from safetensors.numpy import save_file

import qtool
from qtool.formats.carried import others
from qtool.formats.checkpoint import CheckpointSource

FIRST, SECOND, THIRD = (shard_name(number, 3) for number in (1, 2, 3))
WEIGHT = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return three(tmp_path / "m")


def test_open_lists_and_reads_the_tensors_of_all_shards(folder: Path) -> None:
    source = qtool.open(folder)
    assert source.container == "checkpoint"
    assert source.nbytes == sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert source.metadata == {"format": "pt"}
    expected = tensors(range(5))
    infos = {info.name: info for info in source.infos()}
    assert set(infos) == set(expected)
    for name, array in expected.items():
        assert (infos[name].shape, infos[name].nbytes) == (array.shape, array.nbytes)
        assert infos[name].dtype.name == "bfloat16"
        assert source.read(name).tobytes() == array.tobytes()
        assert b"".join(source.chunks(name)) == array.tobytes()
    with pytest.raises(qtool.QtoolError, match="has no tensor 'gone'"):
        source.read("gone")
    source.close()


def test_tensors_of_several_shards_are_read_at_the_same_time(folder: Path) -> None:
    source = qtool.open(folder)
    names = [f"model.layers.{layer}.norm.weight" for layer in range(5)]
    out = np.empty((5, 64), ml_dtypes.bfloat16)
    with source.reading(names[0]) as first, source.reading(names[2]) as second:
        third = source.chunks(names[3])
        first(0, out[0])
        second(0, out[2])
        assert len(next(third)) == 128
        assert source.read(names[4]).shape == (64,)
        first(0, out[1])
    assert (out[:3] == 1).all()
    source.close()


def test_shards_come_in_the_order_of_their_names(folder: Path) -> None:
    layers = [info.name.split(".")[2] for info in qtool.open(folder).infos()]
    assert layers == sorted(layers)


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    source = qtool.open(save(tmp_path / "m", [tensors([0])]))
    assert [info.name for info in source.infos()] == list(tensors([0]))


def put(path: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / path).write_text(text)


def mapped(name: str, shard: str | None) -> Callable[[Path], None]:
    return lambda folder: change_index(folder, **{name: shard})


def added(folder: Path) -> None:
    save_file({**tensors([2]), "more": np.ones(2, np.float32)}, folder / SECOND)


def twice(folder: Path) -> None:
    save_file({**tensors([2]), "model.layers.0.norm.weight": np.ones(2)}, folder / SECOND)


def linked(path: str, target: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / path).unlink(missing_ok=True)
        (folder / path).symlink_to(target)

    return link


def outside(folder: Path) -> None:
    (folder / SECOND).rename(folder.parent / SECOND)
    (folder / SECOND).symlink_to(folder.parent / SECOND)


BROKEN = {
    "missing-tensor": (mapped("gone", FIRST), f"m: tensor 'gone': {INDEX} puts it in {FIRST}, no "
                       "shard has it; correct the index"),
    "wrong-shard": (mapped(WEIGHT, FIRST), f"m: tensor '{WEIGHT}': {INDEX} puts it in {FIRST}, it "
                    f"is in {SECOND}; correct the index"),
    "extra-tensor": (added, f"m: tensor 'more': is in {SECOND} and not in {INDEX}; add it there"),
    "not-in-the-index": (mapped(WEIGHT, None), f"m: tensor '{WEIGHT}': is in {SECOND} and not in "
                         f"{INDEX}; add it there"),
    "two-shards": (twice, f"m: tensor 'model.layers.0.norm.weight': is in {FIRST} and in {SECOND}; "
                   "each tensor belongs into one shard"),
    "missing-shard": (lambda folder: (folder / SECOND).unlink(),
                      f"m/{SECOND}: is missing; complete the download"),
    "damaged-shard": (put(SECOND, "nothing of the kind, but long enough to be one"),
                      f"m/{SECOND}: a header of "),
    "path": (mapped("x", f"sub/{FIRST}"), f"m/{INDEX}: the shard 'sub/{FIRST}' is not the plain "
             "name of a .safetensors file; shards stand beside the index"),
    "above": (mapped("x", "../x.safetensors"), "the shard '../x.safetensors' is not the plain"),
    "absolute": (mapped("x", "/x.safetensors"), "the shard '/x.safetensors' is not the plain name"),
    "backslash": (mapped("x", "..\\x.safetensors"), "is not the plain name of a .safetensors file"),
    "pickled": (mapped("x", "model.bin"), "the shard 'model.bin' is not the plain name"),
    "no-name": (mapped("x", ""), "the shard '' is not the plain name of a .safetensors file"),
    "link-outside": (outside, f"m/{SECOND}: is a link that leaves the folder, to "),
    "circle": (linked(SECOND, SECOND), f"m/{SECOND}: cannot be reached"),
    "config-outside": (linked("config.json", "/etc/hostname"),
                       "m/config.json: is a link that leaves the folder, to /etc/hostname; put the "
                       "file itself there"),
    "dangling": (linked("README.md", "gone"), "m/README.md: is missing; complete the download"),
    "carried-outside": (linked("README.md", "/etc/hostname"), "m/README.md: is a link that leaves"),
    "carried-folder": (linked("more", "1_Pooling"), "m/more: is a link to a folder; replace it by "
                       "what it stands for, or remove it"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "m/pipe: is no regular file"),
    "no-map": (put(INDEX, "{}"), f"m/{INDEX}: has no weight_map of tensors to shards; the file is "
               "damaged"),
    "map-of-numbers": (put(INDEX, '{"weight_map": {"a": 1}}'), f"m/{INDEX}: has no weight_map"),
    "metadata": (put(INDEX, '{"weight_map": {}, "metadata": 1}'), "its metadata is no object"),
    "no-json": (put(INDEX, "{"), f"m/{INDEX}: is not valid JSON: expecting property name "
                "enclosed in double quotes at line 1, column 2"),
    "no-object": (put(INDEX, "[]"), f"m/{INDEX}: holds no JSON object; the file is damaged"),
    "key-twice": (put(INDEX, '{"weight_map": {"a": "b", "a": "c"}}'),
                  f"m/{INDEX}: is not valid JSON: the key 'a' appears twice"),
    "deep": (put("config.json", "[" * 100_000), "m/config.json: is not valid JSON"),
    "no-config": (lambda folder: (folder / "config.json").unlink(), "m: is a folder without "
                  "config.json; name a checkpoint folder, or a file in it"),
    "no-weights": (lambda folder: (folder / INDEX).unlink(), "m: has shards without "
                   f"{INDEX}; fetch that file too"),
    "both": (lambda folder: save_file(tensors([0]), folder / "model.safetensors"),
             f"m: holds model.safetensors and {INDEX}, which does not name it; remove one of the "
             "two: readers differ in which they take"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_before_anything_is_written(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, message = BROKEN[case]
    damage(folder)
    monkeypatch.chdir(folder.parent)
    before = sorted(folder.parent.iterdir())
    assert message in refused("quantize", "m", "--dtype", "int8", "-o", "q")
    assert sorted(folder.parent.iterdir()) == before


def test_a_folder_of_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    folder = three(tmp_path / "models--a--b" / "snapshots" / "0123abcd")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(p for p in folder.iterdir() if p.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q")
    assert not any(path.is_symlink() for path in (tmp_path / "q").iterdir())
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(three(tmp_path / "other") / SECOND)
    assert "leaves the folder" in refused("quantize", folder, "--dtype", "int8")


def test_links_inside_the_folder_are_followed(folder: Path) -> None:
    (folder / "kept").mkdir()
    (folder / SECOND).rename(folder / "kept" / "second")
    (folder / SECOND).symlink_to("kept/second")
    assert len(qtool.open(folder).infos()) == 10


OTHER_FILES = {
    "README.md": True, "tokenizer.model": True, "vocab.txt": True, "chat_template.jinja": True,
    "modeling_tiny.py": True, "generation_config.json": True, "training_args.bin": True,
    "figures/loss.png": True, "2_Dense/model.safetensors": True, "2_Dense/config.json": True,
    "2_Dense/pytorch_model.bin": True, "2_Dense/model.onnx": False, ".gitattributes": True,
    "pytorch_model.bin": False, "pytorch_model-00001-of-00002.bin": False,
    "pytorch_model.bin.index.json": False, "consolidated.00.pth": False, "tiny-q4.gguf": False,
    "consolidated.safetensors": False, "model.fp16.safetensors": False,
    "model.fp16.safetensors.index.json": False, "tf_model.h5": False, "flax_model.msgpack": False,
    "rust_model.ot": False, "onnx/model.onnx": False, "onnx/model.onnx_data": False,
    "onnx/readme.txt": True, "original/consolidated.00.pth": False,
    "openvino/openvino_model.bin": False,
}  # fmt: skip


def test_other_copies_of_the_weights_are_not_carried_over(folder: Path) -> None:
    for path in OTHER_FILES:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(path)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main")
    found = others(folder, CheckpointSource(folder).shards)
    own = {"tokenizer.json", "LICENSE", "1_Pooling/config.json"}
    assert set(found.carried) == {path for path, kept in OTHER_FILES.items() if kept} | own
    assert set(found.left_out) == {path for path, kept in OTHER_FILES.items() if not kept} | {
        ".git"
    }
    done = ok("quantize", folder, "--dtype", "int8", "-o", folder.parent / "q")
    written = content(folder.parent / "q")
    assert set(written) == {*found.carried, "config.json", INDEX, FIRST, SECOND, THIRD}
    assert all(written[path] == (folder / path).read_bytes() for path in found.carried)
    assert (
        "warning: left out, as other copies of the weights or leftovers: .git, 2_Dense/model.onnx, "
        "consolidated.00.pth, consolidated.safetensors, flax_model.msgpack, 12 more"
    ) in done.err


def test_the_metadata_of_shards_is_put_together(tmp_path: Path) -> None:
    folder = three(tmp_path / "m")
    save_file(tensors([2]), folder / SECOND, metadata={"format": "np", "made": "here"})
    assert qtool.open(folder).metadata == {"format": "pt", "made": "here"}
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q")
    document = json.loads(qtool.open(tmp_path / "q").metadata["qtool"])
    assert len(document["tensors"]) == 5
