"""What is released: the sdist and the wheel, what they hold, and what they say of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
from test_rooms import FILES, imports

import qtool

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "import sys, hatchling.build as b; b.build_sdist(sys.argv[1]); b.build_wheel(sys.argv[1])"
INFO = f"qtool-{qtool.__version__}.dist-info"
MADE = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
PARTS = {"qtool", "tests", "examples", ".ci"}
SUFFIXES = {".py", ".json", ".typed", ".html", ".css", ".js"}


def built(source: Path, target: Path) -> tuple[Path, Path]:
    """The sdist and the wheel of a tree."""
    subprocess.run([sys.executable, "-c", BUILD, target], cwd=source, check=True, timeout=60)
    [sdist], [wheel] = target.glob("*.tar.gz"), target.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return built(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(released: tuple[Path, Path]) -> zipfile.ZipFile:
    return zipfile.ZipFile(released[1])


@pytest.fixture(scope="module")
def said(wheel: zipfile.ZipFile) -> Message:
    """The wheel's metadata."""
    return message_from_bytes(wheel.read(f"{INFO}/METADATA"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "qtool").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert set(wheel.namelist()) == package | MADE | {f"{INFO}/licenses/LICENSE"}
    assert {Path(name).suffix for name in package} == SUFFIXES


def test_the_sdist_holds_all_that_tests_need(released: tuple[Path, Path]) -> None:
    with tarfile.open(released[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".ci/run"} <= names
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    assert tests <= names
    assert {name.partition("/")[0] for name in names if "/" in name} == PARTS
    assert [name for name in names if "__pycache__" in name or name.endswith((".o", ".pyc"))] == []


def test_another_day_user_and_folder_give_the_same_bytes(
    released: tuple[Path, Path], tmp_path: Path
) -> None:
    """From the sdist as from the tree, whatever the modes and times of files are."""
    with tarfile.open(released[0]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    [tree] = tmp_path.iterdir()
    for path in tree.rglob("*"):
        path.chmod(0o700 if path.stat().st_mode & 0o100 else 0o600)
        os.utime(path, (1e9, 1e9))
    again = built(tree, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in released]


def test_the_version_stands_in_one_place(said: Message) -> None:
    assert said["Version"] == qtool.__version__ == metadata.version("qtool")
    assert "version" not in PROJECT


def test_the_licence_is_named_and_there(said: Message, wheel: zipfile.ZipFile) -> None:
    assert said["License-Expression"] == "Apache-2.0"
    assert said.get_all("License-File") == ["LICENSE"]
    text = wheel.read(f"{INFO}/licenses/LICENSE")
    assert text == (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in text


def test_the_classifiers_agree_with_the_rest(said: Message) -> None:
    classifiers = said.get_all("Classifier") or []
    versions = [line.rpartition(" ")[2] for line in classifiers if "Python :: 3." in line]
    assert said["Requires-Python"] == f">={versions[0]}"
    assert not [line for line in classifiers if line.startswith("License")]
    assert "Typing :: Typed" in classifiers


def test_the_page_of_the_project_is_its_readme(said: Message) -> None:
    assert said["Description-Content-Type"] == "text/markdown"
    text = said.get_payload(decode=True)
    assert text == (ROOT / "README.md").read_bytes()


def canonical(requirement: str) -> str:
    """The name in a requirement, as PEP 503 spells it."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_imported_is_required_and_what_is_required_is_imported() -> None:
    found = {name for path in FILES for name in imports(path)}
    names = {name.split(".")[1 if name.startswith("google.") else 0] for name in found}
    optional = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *optional["cluster"], *optional["runtime"]]
    third = names - sys.stdlib_module_names - {"qtool"}
    assert {canonical(name) for name in third} == {canonical(line) for line in required}
    assert [line for line in required if ">=" not in line] == []


def closure(name: str, found: dict[str, Message]) -> dict[str, Message]:
    """The metadata of all that a distribution requires, without extras."""
    for line in metadata.requires(name) or []:
        other = canonical(line)
        if "extra ==" not in line and other not in found:
            try:
                found[other] = metadata.distribution(other).metadata  # type: ignore[assignment]
            except metadata.PackageNotFoundError:
                assert ";" in line, f"{name} requires {line}"  # of another system
            else:
                closure(other, found)
    return found


def test_a_bill_of_materials_has_a_licence_for_every_part() -> None:
    parts = closure("qtool", {})
    assert {"numpy", "numba", "onnx", "protobuf", "pillow"} <= parts.keys()
    for name, part in parts.items():
        classifiers = part.get_all("Classifier") or []
        licences = [line for line in classifiers if line.startswith("License ::")]
        assert part.get("License-Expression") or part.get("License") or licences, name
        assert part["Version"], name
