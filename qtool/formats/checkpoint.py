"""A checkpoint folder: config.json, and tensors in model.safetensors or in several shards.

model.safetensors.index.json, beside several shards, is {"metadata": {"total_size": bytes, ...},
"weight_map": {tensor: shard}}. A link must not leave the folder; only the hub's cache, where
snapshots/REVISION holds links into ../../blobs, is known to be laid out so.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from numpy.typing import NDArray

from qtool.errors import FormatError, QtoolError, unreadable
from qtool.formats.safetensors import SafetensorsSource
from qtool.spec import Reader, TensorInfo

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
METADATA_KEY = "qtool"
_MAKING = ("tool", "recipe")


@dataclass(frozen=True)
class Shard:
    """One file of tensors, from its header alone."""

    path: Path
    nbytes: int
    infos: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]


class CheckpointSource:
    """A checkpoint folder, open for reading.

    shards: by file name, in the order of the names. config: what config.json says. index: what the
    index says beside the weight map; None where model.safetensors is all there is. metadata: of
    all shards together.
    Raises FormatError where a file is missing or damaged, a link leaves the folder, or the index
    and the headers do not name each tensor once, in the same shard.
    """

    container = "checkpoint"

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_kind(path)
        self.config = _document(path, CONFIG)
        self.index: dict[str, Any] | None = None
        if os.path.lexists(path / INDEX):
            self.index = _document(path, INDEX)
            placed = _weight_map(self.index, f"{path / INDEX}")
            _check_single(path, placed)
            _check_shards(path, placed)
            names = sorted(set(placed.values()))
            self.shards = {name: shard_of(path, name) for name in names}
            _check_places(placed, self.shards, path)
        else:
            self.shards = {SINGLE: shard_of(path, SINGLE)}
        self.nbytes = sum(shard.nbytes for shard in self.shards.values())
        self.metadata: Mapping[str, str] = _merged([s.metadata for s in self.shards.values()])
        self._places = {i.name: name for name, s in self.shards.items() for i in s.infos}
        self._open: dict[str, SafetensorsSource] = {}
        self._users = 0

    def infos(self) -> Sequence[TensorInfo]:
        """Every tensor, shard by shard, in the order of the headers."""
        return [info for shard in self.shards.values() for info in shard.infos]

    def read(self, name: str) -> NDArray[Any]:
        with self._using(name) as shard:
            return shard.read(name)

    def chunks(self, name: str) -> Iterator[bytes]:
        with self._using(name) as shard:
            yield from shard.chunks(name)

    @contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        with self._using(name) as shard, shard.reading(name) as read:
            yield read

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    @contextmanager
    def _using(self, name: str) -> Iterator[SafetensorsSource]:
        """The open shard of a tensor; others are closed once nothing is read from them."""
        if name not in self._places:
            raise QtoolError(str(self.path), f"has no tensor {name!r}")
        shard = self._places[name]
        if shard not in self._open:
            if not self._users:
                self.close()
            self._open[shard] = SafetensorsSource(self.shards[shard].path)
        self._users += 1
        try:
            yield self._open[shard]
        finally:
            self._users -= 1


def inside(folder: Path, name: str) -> Path:
    """The file or folder of that name, links followed, which must be there and in the folder.

    Raises FormatError.
    """
    thing = str(folder / name)
    try:
        root, path = folder.resolve(), (folder / name).resolve(strict=True)
    except FileNotFoundError as error:
        raise FormatError(thing, "is missing", "complete the download") from error
    except (OSError, RuntimeError) as error:
        raise FormatError(thing, "cannot be reached", "choose another folder") from error
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(path.is_relative_to(allowed) for allowed in roots):
        raise FormatError(
            thing, f"is a link that leaves the folder, to {path}", "put the file itself there"
        )
    return path


def _file(folder: Path, name: str) -> Path:
    """The regular file of that name; errors as inside()."""
    path = inside(folder, name)
    if not path.is_file():
        raise FormatError(str(folder / name), "is no regular file", "complete the download")
    return path


def _check_kind(folder: Path) -> None:
    """Refuse a folder that does not look like a checkpoint."""
    rule = None
    if not os.path.lexists(folder / CONFIG):
        rule = f"is a folder without {CONFIG}"
    elif not any(os.path.lexists(folder / name) for name in (SINGLE, INDEX)):
        rule = f"has neither {SINGLE} nor {INDEX}"
        if next(folder.glob("model-*.safetensors"), None) is not None:
            raise FormatError(str(folder), f"has shards without {INDEX}", "fetch that file too")
    if rule is not None:
        raise FormatError(str(folder), rule, "name a checkpoint folder, or a file in it")


def _document(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file, no name in it twice."""
    path = _file(folder, name)
    thing = str(folder / name)
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except OSError as error:
        raise FormatError(thing, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(thing, f"is not valid JSON: {unreadable(error)}") from error
    if not isinstance(found, dict):
        raise FormatError(thing, "holds no JSON object", "the file is damaged")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        name, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r} appears twice")
    return unique


def _weight_map(index: dict[str, Any], thing: str) -> dict[str, str]:
    """The weight map, taken out of the index."""
    placed = index.pop("weight_map", None)
    if not isinstance(placed, dict) or not all(isinstance(v, str) for v in placed.values()):
        raise FormatError(thing, "has no weight_map of tensors to shards", "the file is damaged")
    if not isinstance(index.get("metadata", {}), dict):
        raise FormatError(thing, "its metadata is no object", "the file is damaged")
    if not placed:
        raise FormatError(thing, "names no tensor", "the file is damaged")
    for name in sorted(set(placed.values())):
        plain = PurePosixPath(name).name == name and "\\" not in name and name.isprintable()
        if not plain or not name.endswith(".safetensors"):
            raise FormatError(
                thing,
                f"the shard {name[:80]!r} is not the plain name of a .safetensors file",
                "shards stand beside the index",
            )
    return placed


def _check_single(folder: Path, placed: Mapping[str, str]) -> None:
    """Refuse a model.safetensors that the index does not know of."""
    if os.path.lexists(folder / SINGLE) and SINGLE not in placed.values():
        raise FormatError(
            str(folder),
            f"holds {SINGLE} and {INDEX}, which does not name it",
            "remove one of the two: readers differ in which they take",
        )


def _check_shards(folder: Path, placed: Mapping[str, str]) -> None:
    """Refuse a file with the name of a shard that the index does not know of."""
    for path in sorted(folder.glob("model-*-of-*.safetensors")):
        if path.name not in placed.values():
            rule = f"has the name of a shard, but {INDEX} does not name it"
            raise FormatError(str(path), rule, "correct the index, or remove the file")


def shard_of(folder: Path, name: str) -> Shard:
    """One file of tensors in a folder. Raises FormatError as CheckpointSource does."""
    _file(folder, name)
    path = folder / name
    with closing(SafetensorsSource(path)) as source:
        return Shard(path, source.nbytes, tuple(source.infos()), source.metadata)


def _check_places(placed: Mapping[str, str], shards: Mapping[str, Shard], folder: Path) -> None:
    """Refuse tensors that the index and the headers do not place alike, and once."""
    found: dict[str, str] = {}
    for name, shard in shards.items():
        for info in shard.infos:
            thing = f"{folder}: tensor {info.name!r}"
            if info.name in found:
                rule = f"is in {found[info.name]} and in {name}"
                raise FormatError(thing, rule, "each tensor belongs into one shard")
            found[info.name] = name
            if info.name not in placed:
                raise FormatError(thing, f"is in {name} and not in {INDEX}", "add it there")
    for tensor, name in placed.items():
        if found.get(tensor) != name:
            actual = f"it is in {found[tensor]}" if tensor in found else "no shard has it"
            rule = f"{INDEX} puts it in {name}, {actual}"
            raise FormatError(f"{folder}: tensor {tensor!r}", rule, "correct the index")


def _merged(shards: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The metadata of all shards; where they differ, that of the first one that has the entry.

    What qtool says of the tensors of each shard is put together.
    """
    merged: dict[str, str] = {}
    for metadata in reversed(shards):
        merged |= metadata
    texts = [metadata[METADATA_KEY] for metadata in shards if METADATA_KEY in metadata]
    if len(texts) > 1:
        merged[METADATA_KEY] = _described(texts)
    return merged


def _described(texts: Sequence[str]) -> str:
    """One text for several; a damaged one alone, for its reader to say what is wrong. What they
    do not say alike of their making is left out."""
    heads: list[dict[str, Any]] = []
    made: list[dict[str, Any]] = []
    together: dict[str, dict[str, Any]] = {"tensors": {}, "stored": {}}
    for text in texts:
        try:
            document = json.loads(text)
            for key, entries in together.items():
                entries.update(document.pop(key))
            made.append({key: document.pop(key) for key in _MAKING if key in document})
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return text
        heads.append(document)
    head = heads[0] if all(other == heads[0] for other in heads) else {"version": "several"}
    alike = made[0] if all(other == made[0] for other in made) else {}
    return json.dumps(head | alike | together)
