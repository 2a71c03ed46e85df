"""Options from the environment and from qtool.toml, and what wins."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import PYTHON, described, ok, qtool, refused, report, unmeasured
from safetensors.numpy import save_file

from qtool.cli import config

NAMES = ("fc1.weight", "fc2.weight", "head.weight")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a file of three weights."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    save_file({n: rng.standard_normal((8, 64), np.float32) for n in NAMES}, "m.safetensors")
    return tmp_path


def recipe(*arguments: str) -> dict[str, Any] | None:
    """What `qtool recipe` says is in force; None where that is no type to quantize to."""
    done = qtool(*arguments, "recipe")
    if done.err.startswith("qtool: --dtype: no type to quantize to"):
        return None
    assert done.code == 0, done.err
    return tomllib.loads(done.out.decode())


def configure(text: str, name: str = "qtool.toml") -> None:
    Path(name).write_text(text, encoding="utf-8")


# ---------------------------------------------------------------------------------- environment


def test_a_variable_gives_an_option(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_QUANTIZE_DTYPE", "int4")
    monkeypatch.setenv("QTOOL_QUANTIZE_BLOCK_SIZE", "16")
    monkeypatch.setenv("QTOOL_QUANTIZE_FORCE", "1")
    Path("m.int4.safetensors").touch()
    ok("quantize", "m.safetensors")
    how = described(Path("m.int4.safetensors"))["fc1.weight"]
    assert (how["dtype"], how["block_size"]) == ("int4", 16)
    ok("quantize", "m.safetensors", "--dtype", "int8", "--block-size", "32")
    how = described(Path("m.int8.safetensors"))["fc1.weight"]
    assert (how["dtype"], how["block_size"]) == ("int8", 32)


def test_a_repeatable_option_has_a_value_in_each_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_QUANTIZE_DTYPE", "int8")
    monkeypatch.setenv("QTOOL_QUANTIZE_RULE", "\nfc1*: dtype=int4, block_size=16\n\n head*: skip\n")
    monkeypatch.setenv("QTOOL_QUANTIZE_FAIL_IF", "sqnr_db < 2\ntotal.bits_per_weight > 30\n")
    said = ok("recipe").out.decode()
    assert tomllib.loads(said)["rules"] == [
        {"pattern": "fc1*", "dtype": "int4", "block_size": 16}, {"pattern": "head*", "skip": True},
    ]  # fmt: skip
    ok("quantize", "m.safetensors")
    found = described(Path("m.int8.safetensors"))
    assert {n: t["dtype"] for n, t in found.items()} == {"fc1.weight": "int4", "fc2.weight": "int8"}
    gates = report(Path("m.int8.safetensors"))["gates"]
    assert [gate["expression"] for gate in gates] == ["sqnr_db < 2", "total.bits_per_weight > 30"]


@pytest.mark.parametrize(("text", "expected"), [
    ("1", True), ("0", False), ("true", True), ("false", False), ("TRUE", True), ("", None),
])  # fmt: skip
def test_a_flag_is_0_or_1_or_a_word(
    text: str, expected: bool | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_QUANTIZE_SATURATE", text)
    said = tomllib.loads(ok("recipe", "--dtype", "float8e5m2").out.decode())
    assert said.get("saturate") is expected


@pytest.mark.parametrize(("name", "value", "message"), [
    ("JOBS", "many", "'--jobs' (QTOOL_QUANTIZE_JOBS)"),
    ("JOBS", "0", "'--jobs' (QTOOL_QUANTIZE_JOBS)"),
    ("SYMMETRIC", "perhaps", "(QTOOL_QUANTIZE_SYMMETRIC)"),
    ("DTYPE", "int5", "--dtype (QTOOL_QUANTIZE_DTYPE): 'int5' is"),
    ("TILE", "5", "--tile (QTOOL_QUANTIZE_TILE): '5' is not ROWSxCOLUMNS"),
    ("METHOD", "best", "QTOOL_QUANTIZE_METHOD"),
])  # fmt: skip
def test_a_bad_value_names_the_variable(
    name: str, value: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"QTOOL_QUANTIZE_{name}", value)
    default = [] if name == "DTYPE" else ["--dtype", "int8"]
    done = qtool("quantize", "m.safetensors", *default)
    assert done.code in (1, 2)
    assert message in done.err


def test_variables_of_other_things_are_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QTOOL_VERSION", "QTOOL_HELP", "QTOOL_RECIPE_DTYPE", "QTOOL_QUANTIZE_DTYP",
                 "QTOOL_INSTALL_COMPLETION", "QTOOL_TEST_CACHE"):  # fmt: skip
        monkeypatch.setenv(name, "1")
    assert ok("dtypes").out.startswith(b"type")


@pytest.mark.parametrize(("name", "near"), [
    ("FAILIF", "FAIL_IF"), ("DTYP", "DTYPE"), ("ASYMMETRIC", "SYMMETRIC"),
])  # fmt: skip
def test_a_variable_that_is_misspelt_is_wrong_usage(
    name: str, near: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"QTOOL_QUANTIZE_{name}", "sqnr_db < 200")
    for words in (["quantize", "m.safetensors", "--dtype", "int8"], ["recipe", "--dtype", "int8"]):
        assert refused(*words, code=2) == (
            f"QTOOL_QUANTIZE_{name}: no option of `qtool {words[0]}` has this variable; "
            f"did you mean {near}?"
        )
    ok("quantize", "--help")
    assert not Path("m.int8.safetensors").exists()


def test_a_nearer_place_decides_on_activations(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("qtool.toml").write_text('[quantize]\npreset = "fp8"\nno-dynamic-activations = true\n')
    assert tomllib.loads(ok("recipe").out.decode())["dynamic_activations"] is False
    said = tomllib.loads(ok("recipe", "--dynamic-activations").out.decode())
    assert said["dynamic_activations"] is True
    monkeypatch.setenv("QTOOL_QUANTIZE_DYNAMIC_ACTIVATIONS", "1")
    assert tomllib.loads(ok("recipe").out.decode())["dynamic_activations"] is True


# --------------------------------------------------------------------------------- configuration


def test_the_nearest_file_is_read_and_commands_have_tables(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure('[tool.qtool]\nquiet = true\n[tool.qtool.quantize]\ndtype = "int4"\nblock-size = 16\n'
              'include = ["fc*"]\n', "pyproject.toml")  # fmt: skip
    Path("a/b").mkdir(parents=True)
    monkeypatch.chdir("a/b")
    configure("[tool.other]\nname = 'qtool'\n", "pyproject.toml")  # is passed over
    done = ok("quantize", "../../m.safetensors")
    assert done.err == ""
    found = described(Path("../../m.int4.safetensors"))
    assert {name: t["block_size"] for name, t in found.items()} == dict.fromkeys(NAMES[:2], 16)
    settings = report(Path("../../m.int4.safetensors"))["settings"]
    assert settings["include"] == ["fc*"]
    assert recipe() == {"dtype": "int4", "block_size": 16, "include": ["fc*"]}
    configure("[quantize]\ndtype = 'uint4'\n")
    assert recipe() == {"dtype": "uint4"}
    assert "Configuration: qtool.toml gives dtype." in ok("quantize", "--help").out.decode()


def test_the_command_line_comes_before_variables_and_those_before_tables(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("axis = 0\nblock_size = 8\nscale-dtype = 'float16'\nnarrow_range = true\n"
              "[quantize]\nblock-size = 16\nscale_dtype = 'bfloat16'\n")  # fmt: skip
    Path("r.toml").write_text("dtype = 'int4'\nblock_size = 64\nmethod = 'absmax'\n")
    monkeypatch.setenv("QTOOL_QUANTIZE_SCALE_DTYPE", "float32")
    said = ok("recipe", "--recipe", "r.toml", "--block-size", "32").out.decode()
    assert tomllib.loads(said) == {
        "dtype": "int4", "block_size": 32, "method": "absmax", "axis": 0, "scale_dtype": "float32",
        "narrow_range": True,
    }  # fmt: skip


@pytest.mark.parametrize(("table", "arguments", "expected"), [
    ("block_size = 16\naxis = 1", ["--tile", "8x8"], {"dtype": "int8", "tile": "8x8"}),
    ("tile = '8x8'", ["--block-size", "16"], {"dtype": "int8", "block_size": 16}),
    ("method = 'absmax'", ["--asymmetric"], {"dtype": "int8", "symmetric": False}),
    ("method = 'mse'", ["--scale", "0.5"], {"dtype": "int8", "scale": "0.5"}),
    ("importance = ['a.npz']", ["--scale", "0.5"], {"dtype": "int8", "scale": "0.5"}),
    ("target_bits = 5", ["--target-sqnr", "30"], {"dtype": "int8", "target_sqnr": 30.0}),
    ("block_size = 16\nlayout = 'mlx'", ["--preset", "nvfp4"],
     {"preset": "nvfp4", "layout": "mlx"}),
    ("saturate = false", ["--saturate"], {"dtype": "int8", "saturate": True}),
    ("no-narrow-range = true", [], {"dtype": "int8", "narrow_range": False}),
    ("asymmetric = true", [], {"dtype": "int8", "symmetric": False}),
], ids=str)  # fmt: skip
def test_what_is_nearer_takes_the_place_of_what_contradicts_it(
    table: str, arguments: list[str], expected: dict[str, Any], folder: Path
) -> None:
    configure(f"[quantize]\ndtype = 'int8'\n{table}\n")
    assert tomllib.loads(ok("recipe", *arguments).out.decode()) == expected


def test_the_recipe_of_an_output_is_its_own(folder: Path) -> None:
    ok("quantize", "m.safetensors", "--dtype", "int8")
    configure("[quantize]\ndtype = 'int4'\nforce = true\nexternal-data = true\n")
    assert ok("recipe", "--from", "m.int8.safetensors").out == b'dtype = "int8"\n'


def test_names_of_files_are_relative_to_the_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("r.toml").write_text("dtype = 'int4'\n")
    np.savez("h.npz", **{name: np.ones((8, 64), np.float32) for name in NAMES[:1]})
    np.save("one.npy", np.ones((8, 64), np.float32))
    configure("[quantize]\nrecipe = 'r.toml'\nimportance = ['h.npz', 'fc2*=one.npy']\n"
              "scale-dtype = 'float16'\n[dequantize]\nscale = 2\n")  # fmt: skip
    Path("sub").mkdir()
    monkeypatch.chdir("sub")
    ok("quantize", "../m.safetensors", "-o", "y.safetensors")
    tensors = {t["name"]: t["importance"] for t in report(Path("y.safetensors"))["tensors"]}
    assert tensors == {"fc1.weight": "element", "fc2.weight": "element", "head.weight": None}
    np.save("codes.npy", np.asarray([1, 2], np.int8))
    ok("dequantize", "codes.npy", "-o", "x.npy")
    assert np.load("x.npy").tolist() == [2, 4]


def test_another_file_or_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("[quantize]\ndtype = 'int8'\n")
    Path("o").mkdir()
    configure("[quantize]\ndtype = 'int4'\n", "o/other.toml")
    assert recipe() == {"dtype": "int8"}
    assert recipe("--config", "o/other.toml") == {"dtype": "int4"}
    assert recipe("--no-config") is None
    monkeypatch.setenv("QTOOL_CONFIG", "o/other.toml")
    assert recipe() == {"dtype": "int4"}
    assert recipe("--no-config") is None
    monkeypatch.setenv("QTOOL_CONFIG", "")
    monkeypatch.setenv("QTOOL_NO_CONFIG", "1")
    assert recipe() is None
    assert recipe("--config", "o/other.toml") == {"dtype": "int4"}
    done = qtool("--no-config", "--config", "o/other.toml", "recipe")
    assert done.code == 2
    assert "contradict" in done.err


WRONG = [
    ("dtpye = 'int8'", 2, "qtool.toml: dtpye: is unknown; did you mean dtype or dtypes?"),
    ("[quantize]\nblok-size = 8", 2, "qtool.toml: blok-size in [quantize]: is unknown; "
     "did you mean block-size?"),
    ("[quantise]\ndtype = 'int8'", 2,
     "qtool.toml: [quantise]: is unknown; did you mean quantize or dequantize?"),
    ("[quantize]\nx = 1", 2,
     "qtool.toml: x in [quantize]: is unknown; `qtool quantize --help` names all"),
    ("x = 1", 2, "qtool.toml: x: is unknown; `qtool COMMAND --help` names all"),
    (f"jobs = {'1' * 5000}", 1, "qtool.toml: is no TOML: a number in it has too many digits"),
    ("[quantize]\nblock-size = '8'", 2, "qtool.toml: block-size in [quantize]: is '8'; "
     "give a number"),
    ("[quantize]\nblock-size = 8.5", 2, "block-size in [quantize]: is 8.5; give a number"),
    ("[quantize]\nblock-size = true", 2, "block-size in [quantize]: is True; give a number"),
    ("[quantize]\nblock-size = 0x" + "f" * 5000, 2, "is beyond 64 bits; give a number"),
    ("[quantize]\ndtype = 8", 2, "dtype in [quantize]: is 8; give a text in quotes"),
    ("[quantize]\ndtype = 2020-01-01", 2, "is datetime.date(2020, 1, 1); give a text in quotes"),
    ("[quantize]\ninclude = 'a'", 2, "include in [quantize]: is 'a'; give texts in [ ]"),
    ("[quantize]\ninclude = [1]", 2, "include in [quantize]: is a list; give texts in [ ]"),
    ("[quantize]\nforce = 1", 2, "force in [quantize]: is 1; give true or false"),
    ("[quantize.dtype]\na = 1", 2, "dtype in [quantize]: is a table; give a text in quotes"),
    ("force = 'yes'", 2, "qtool.toml: force: is 'yes'; give true or false"),
    ("[quantize]\ndtype = 'int8'\nblock-size = 8\nblock_size = 9", 2, "block_size in [quantize]: "
     "is said twice"),
    ("[quantize]\nsaturate = true\nno-saturate = true", 2, "is said twice"),
    ("[quantize]\noutput = \"a\\u0000b\"", 2, "holds a NUL character"),
    ("[quantize]\ndtype = 'int5'", 2, "--dtype (in qtool.toml): 'int5' is not an element type"),
    ("dtype = ", 1, "qtool.toml: is no TOML: Invalid value"),
    ("\0", 1, "qtool.toml: is no TOML"),
    ("a = " + "[" * 100_000, 1, "qtool.toml: is no TOML"),
    ("a." * 900 + "b = 1", 2, "qtool.toml: [a]: is unknown"),
    ("a." * 100_000 + "b = 1", 1, "qtool.toml: has more than 1000 dots in a line"),
    ("#" * (1 << 20) + "\n", 1, "qtool.toml: is larger than 1 MiB"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code", "message"), WRONG, ids=lambda v: str(v)[:20])
def test_what_is_wrong_in_a_file_is_one_line(
    text: str, code: int, message: str, folder: Path
) -> None:
    configure(text)
    assert message in refused("quantize", "m.safetensors", code=code)
    assert sorted(os.listdir()) == ["m.safetensors", "qtool.toml"]
    assert ok("quantize", "--help").out.decode().startswith("Usage: qtool quantize")
    assert ok("--no-config", "quantize", "m.safetensors", "--dtype", "int8").err


def test_the_whole_file_is_checked_whatever_the_command(folder: Path) -> None:
    configure("[quantize]\ndtpye = 'int8'\n")
    assert "did you mean dtype?" in refused("dtypes", code=2)


def test_a_key_for_all_commands_is_for_those_that_its_value_fits(folder: Path) -> None:
    configure("dtype = 'int8'\nhessian = true\n")  # a flag of capture, files for quantize
    assert recipe() == {"dtype": "int8"}
    assert "gives hessian." in " ".join(ok("capture", "--help").out.decode().split())


def test_origins_are_named_in_errors_of_jobs(folder: Path) -> None:
    configure("json = true\n[quantize]\nto = 'npz'\ndtype = 'int8'\n")
    message = refused("quantize", "m.safetensors", "-o", "-", code=2)
    assert message.startswith("--json (in qtool.toml): standard output carries the file")
    message = refused("quantize", "m.safetensors", "-o", "y.safetensors", code=2)
    assert "its suffix contradicts --to (in qtool.toml) npz" in message


def test_files_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gone.toml: cannot be read: No such file" in refused("--config", "gone.toml", "recipe")
    assert ".: cannot be read: Is a directory" in refused("--config", ".", "recipe")
    configure("[tool.ruff]\n", "pyproject.toml")
    assert "pyproject.toml: has no table [tool.qtool]" in refused(
        "--config", "pyproject.toml", "recipe"
    )
    configure("[tool]\nqtool = 1\n", "pyproject.toml")
    assert "pyproject.toml: tool.qtool: is 1; write [tool.qtool]" in refused("recipe", code=2)
    configure("name = broken", "pyproject.toml")  # not ours
    assert recipe() is None
    Path("qtool.toml").symlink_to("qtool.toml")  # a circle
    assert recipe() is None
    Path("qtool.toml").unlink()
    Path("qtool.toml").mkdir()
    assert recipe() is None
    os.mkfifo("sub.toml")
    Path("qtool.toml").rmdir()
    Path("sub.toml").rename("qtool.toml")
    assert recipe() is None


def test_a_folder_that_is_gone_has_no_configuration(tmp_path: Path) -> None:
    command = "mkdir gone && cd gone && rmdir ../gone && exec " + " ".join([*PYTHON, "dtypes"])
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_parents_that_cannot_be_entered_are_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    configure("dtpye = 1\n")
    Path("sub").mkdir()
    monkeypatch.chdir("sub")
    assert refused("recipe", code=2) == (
        "../qtool.toml: dtpye: is unknown; did you mean dtype or dtypes?"
    )
    monkeypatch.setattr(os, "stat", denied)  # root, who runs tests, is never refused
    assert config.loaded(None) is None


def test_toml_is_loaded_only_where_there_is_a_file(folder: Path) -> None:
    show = (
        "import sys; sys.argv = ['qtool', 'dtypes']\nfrom qtool.cli import main\n"
        "try: main()\nexcept SystemExit: pass\nprint('loaded', 'tomllib' in sys.modules)"
    )
    for expected in (b"False", b"True"):
        command = [sys.executable, "-c", show]
        done = subprocess.run(command, capture_output=True, check=True, env=unmeasured())
        assert done.stdout.rpartition(b"loaded ")[2].strip() == expected
        configure("quiet = true\n")


def test_a_hostile_file_takes_no_time(folder: Path) -> None:
    configure("".join(f"a{i}.b.c.d = 1\n" for i in range(40_000)))
    started = time.perf_counter()
    assert qtool("recipe").code == 2
    assert time.perf_counter() - started < 10
