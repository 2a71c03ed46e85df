"""What people see: tables that fit the terminal, figures with units, nothing that it would obey."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import PYTHON, float32, ok
from rich.cells import cell_len
from safetensors.numpy import save_file

from qtool.render.listing import sparkline
from qtool.render.text import many, number, room, safe, short_names, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (91_190_000, "91.2 MB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"), (1_500_000_000, "1.5 GB"), (2 * 10**15, "2000.0 TB"),
    ],
)  # fmt: skip
def test_sizes_count_in_thousands(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_undefined_figures_are_dashes() -> None:
    assert (number(None, ".2f", " dB"), number(1.234, ".2f", " dB")) == ("-", "1.23 dB")


def test_nouns_count() -> None:
    assert (many(1, "tensor"), many(2, "tensor"), many(0, "tensor")) == (
        "1 tensor", "2 tensors", "0 tensors",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größe.重み", "größe.重み"), ("a\x1b[31m", "a?[31m"), ("\r\n\t\0", "????"),
        ("a\u202eb\u2028", "a?b?"), ("[bold]", "[bold]"),
    ],
)  # fmt: skip
def test_text_of_files_cannot_move_the_cursor(text: str, shown: str) -> None:
    assert safe(text) == shown


@pytest.mark.parametrize(
    ("name", "width", "shown"),
    [
        pytest.param("layers.10.mlp.up_proj.weight", 28, "layers.10.mlp.up_proj.weight", id="fits"),
        pytest.param("layers.10.mlp.up_proj.weight", 27, "l.10.mlp.up_proj.weight", id="one"),
        pytest.param("layers.10.mlp.up_proj.weight", 21, "l.10.m.up_proj.weight", id="two"),
        pytest.param("layers.10.mlp.up_proj.weight", 20, "…10…m.up_proj.weight", id="number"),
        pytest.param("layers.10.mlp.up_proj.weight", 3, "…10…_proj.weight", id="narrowest"),
        pytest.param("layers.1.experts.207.up_proj.weight", 20, "…207…up_proj.weight", id="last"),
        pytest.param("encoder.embeddings.word.weight", 24, "e.embeddings.word.weight", id="words"),
        pytest.param("encoder/layer_4/self/query/kernel:0", 24, "e/layer_4/s/q/kernel:0", id="/"),
        pytest.param("7" * 99, 20, "…" + "7" * 19, id="digits"),
        pytest.param("[red]x[/red]", 30, "[red]x[/red]", id="no-markup"),
    ],
)
def test_long_names_keep_their_numbers_and_tails(name: str, width: int, shown: str) -> None:
    assert [text.plain for text in short_names([name], width)] == [shown]


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([0, 1, 4, 16, 64], " ▁▂▄█"), ([0, 0], "  "), ([7, 7], "██"), ([1, 10**12], "▁█"),
    ],
)  # fmt: skip
def test_a_sparkline_keeps_tails_visible(counts: list[int], text: str) -> None:
    assert sparkline(counts) == text


ALIKE: list[Any] = [  # names of published models
    pytest.param(
        [f"encoder.layer.{i}.{part}.dense.weight" for i in range(12)
         for part in ("attention.output", "intermediate", "output")], id="BERT",
    ),
    pytest.param(
        [f"model.layers.{i}.{part}.weight" for i in range(32)
         for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj",
                      "input_layernorm", "post_attention_layernorm")], id="Llama",
    ),
    pytest.param(
        [f"model.layers.{i}.block_sparse_moe.experts.{j}.w{k}.weight" for i in range(32)
         for j in range(8) for k in (1, 2, 3)], id="Mixtral",
    ),
    pytest.param(
        [f"{side}.block.{i}.layer.{j}.{part}.weight" for side in ("encoder", "decoder")
         for i in range(6) for j in (0, 1)
         for part in ("SelfAttention.q", "EncDecAttention.q", "DenseReluDense.wi")], id="T5",
    ),
    pytest.param(
        [f"model.{side}.layers.{i}.{part}.weight" for side in ("encoder", "decoder")
         for i in range(6) for part in ("self_attn.q_proj", "encoder_attn.q_proj", "fc1")],
        id="Whisper",
    ),
    pytest.param(["a.mask.x.weights_of_it", "a.mark.x.weights_of_it"], id="first-letters"),
]  # fmt: skip


@pytest.mark.parametrize("names", ALIKE)
def test_names_can_be_told_apart(names: list[str]) -> None:
    shown = [text.plain for text in short_names(names, 22)]
    assert len(set(shown)) == len(names)
    assert max(map(len, shown)) <= 22


NAMES = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(14)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with names longer than a narrow terminal leaves room for."""
    path = tmp_path_factory.mktemp("render") / "m.safetensors"
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=(8, 64)).astype(np.float32) for name in NAMES}
    save_file({**tensors, "bias": np.zeros(8, np.float32)}, path)
    ok("quantize", path, "--dtype", "int4", "-o", path.with_name("q.safetensors"))
    return path


def in_terminal(columns: int, *arguments: str | Path) -> list[str]:
    """The lines that a command leaves on a terminal of that width, without colours."""
    reader, terminal = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "LINES": "50", "TERM": "xterm-256color"}
    with subprocess.Popen([*PYTHON, *arguments], stdout=terminal, stderr=terminal, stdin=terminal,
                          env=environment) as running:  # fmt: skip
        os.close(terminal)
        data = b""
        while True:
            try:
                piece = os.read(reader, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            data += piece
        assert running.wait(timeout=60) == 0, data
    os.close(reader)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\a", data.decode())
    lines = [line.rpartition("\r")[2].replace("\a", "") for line in text.split("\r\n")]
    return [line for line in lines if line.strip()]


COMMANDS: list[Any] = [
    pytest.param(["quantize", "{}", "--dtype", "int4", "--block-size", "32"], id="quantize"),
    pytest.param(["quantize", "{}", "--dtype", "float8e5m2", "--axis", "0"], id="float8"),
    pytest.param(["dynamic", "{}"], id="dynamic"),
    pytest.param(["inspect", "{}"], id="inspect"),
    pytest.param(["inspect", "{}", "--stats"], id="stats"),
    pytest.param(["dtypes"], id="dtypes"),
    pytest.param(["presets"], id="presets"),
    pytest.param(["quantize", "{}", "--preset", "nvfp4"], id="nvfp4"),
    pytest.param(["quantize", "{}", "--preset", "fp8-block"], id="tiles"),
    pytest.param(["quantize", "--help"], id="help"),
]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("arguments", COMMANDS)
def test_everything_fits_the_terminal(
    arguments: list[str], columns: int, checkpoint: Path, tmp_path: Path
) -> None:
    command = [a.format(checkpoint) for a in arguments]
    if command[0] in ("quantize", "dynamic") and "--help" not in command:
        command += ["-o", str(tmp_path / "y.safetensors")]
    lines = in_terminal(columns, *command)
    table = [line for line in lines if not line.startswith(str(tmp_path.parent.parent))]
    assert max(map(cell_len, table)) <= columns
    if command[0] in ("quantize", "inspect") and "--help" not in command:
        names = {line.partition("q_proj")[0] for line in lines if "q_proj" in line}
        assert len(names) >= 12, "tensors cannot be told apart"
    assert not [line for line in lines if "…" in line[columns // 2 :]], "figures are cut"


def test_pipes_get_whole_names_and_no_colours(checkpoint: Path) -> None:
    text = ok("inspect", checkpoint, "--stats").out.decode()
    assert all(name in text for name in NAMES)
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("preset", "told"),
    [("fp8-block", "float8e4m3fn /128x128"), ("nvfp4", "float4e2m1 /16")],
)
def test_what_shares_a_scale_is_told(
    preset: str, told: str, checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "q.safetensors"
    err = ok("quantize", checkpoint, "-o", target, "--preset", preset).err
    assert f"  {told}  " in err
    assert f"  {told}  " in ok("inspect", target).out.decode()


def test_worst_tensors_come_first_and_exact_ones_last(tmp_path: Path) -> None:
    save_file(
        {
            "exact": float32([[1, -2]] * 9),
            "bad": float32([[0.4, 10]] * 9),
            "worse": float32([[0.4, 0.6]] * 9),
        },
        tmp_path / "m.safetensors",
    )
    err = ok("quantize", tmp_path / "m.safetensors", "--dtype", "int8", "--scale", "1").err
    lines = err.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["worse", "bad", "exact"]
    assert "exact" in lines[3].split()[4:5]
    assert lines[4].startswith("3 tensors ")


def test_clipping_is_shown_in_percent(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", float32([1, 2, 300, -300]))
    err = ok("quantize", tmp_path / "x.npy", "--dtype", "int8", "--scale", "1").err
    assert "50.000%" in err.splitlines()[1]


def test_what_was_left_alone_is_one_line_per_reason(tmp_path: Path) -> None:
    save_file(
        {"w": np.ones((9, 9), np.float32), "a": float32([1, 2]), "b": float32([1, 2])},
        tmp_path / "m.safetensors",
    )
    err = ok("quantize", tmp_path / "m.safetensors", "--dtype", "int8").err
    assert "left alone: 2 tensors: rank below 2\n" in err


def test_more_than_twelve_tensors_are_summed_up(checkpoint: Path, tmp_path: Path) -> None:
    err = ok("quantize", checkpoint, "--dtype", "int8", "-o", tmp_path / "y.npz").err
    assert "and 2 more tensors\n" in err
    assert "14 tensors" in err


@pytest.mark.parametrize("columns", ["40", "60"])
@pytest.mark.parametrize(
    "args",
    [
        ["quantize", "--dtype", "int4", "-o", "y.npz", "--force"],
        ["quantize", "--dtype", "int4", "--dry-run"],
        ["inspect"],
        ["compare", "--dtypes", "int8,int4", "--jobs", "1"],
    ],
    ids=["quantize", "plan", "inspect", "compare"],
)
def test_figures_are_whole_on_narrow_terminals(
    args: list[str], columns: str, checkpoint: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for width in ("100", columns):
        monkeypatch.setenv("COLUMNS", width)
        done = ok(args[0], checkpoint, *args[1:])
        text = re.sub(r"[\d.]+ m?s\b", "", done.out.decode() + done.err)  # times
        assert "…" not in text or width == columns
        found.append(sorted(re.findall(r"(?<= )-?\d[\d.]*(?= |%|$)", text, re.MULTILINE)))
    assert found[0] == found[1]


def test_room_is_what_other_columns_leave() -> None:
    from rich.table import Table

    table = Table("name", "type", "size")
    assert room(table, [["int4", "1.0 kB"], ["float32", "9 B"]], 80) == 80 - (2 + 7) - (2 + 6)
