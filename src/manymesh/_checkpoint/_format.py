"""What is on disk: the files of Orbax, so that each library reads what the other one wrote.

::

    100/                            a step; made under another name (`ASIDE`) and renamed when all of it is there
        _CHECKPOINT_METADATA        JSON: which items there are, and the metadata of the user
        default/                    an item: one pytree
            _METADATA               JSON: the name and kind of every leaf
            array_metadatas/        JSON: what an array cannot say itself, as the kind of a random key
            manifest.ocdbt, d/      the arrays, a TensorStore database (OCDBT) of Zarr arrays
            ocdbt.process_0/        what each process wrote, of several; the manifest above points there

`save` leaves the middle level out, as Orbax's checkpointers do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import CheckpointError, CheckpointNotFoundError
from ._leaves import Leaf, Name, is_empty, text

ASIDE = ".orbax-checkpoint-tmp"  # part of the name of what is not finished
ITEM = "default"
TREE_FILE = "_METADATA"
STEP_FILE = "_CHECKPOINT_METADATA"
ARRAYS_FILE = Path("array_metadatas") / "process_0"
MANIFEST = "manifest.ocdbt"
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"

_RANDOM = "random_key_impl"  # Orbax's word
_DTYPE = "manymesh_dtype"
_SEQUENCE, _DICT = 1, 2  # how Orbax numbers the kinds of keys
_STEP = re.compile("0|[1-9][0-9]*")  # a name of a step
_OTHER_STEP = re.compile(r".*[^0-9][0-9]+|0[0-9]+")  # one that Orbax was told to give: ckpt_5, 000005


@dataclass(frozen=True)
class Record:
    """An array as a checkpoint lists it.

    Attributes:
      name: the words of its path.
      in_sequence: for each word, whether it is the position in a tuple or list.
      kind: ``jax.Array``, ``np.ndarray`` or ``scalar``.
      random: the implementation of the random keys it consists of, or None.
      dtype: what its bytes mean, where they are stored as bytes, or None.
    """

    name: Name
    in_sequence: tuple[bool, ...]
    kind: str
    random: str | None = None
    dtype: str | None = None

    @property
    def extra(self) -> dict[str, str] | None:
        """What its array cannot say itself."""
        if self.random is not None:
            return {_RANDOM: self.random}
        return None if self.dtype is None else {_DTYPE: self.dtype}

    @property
    def key(self) -> str:
        """What it is called in the database."""
        return ".".join(self.name)


@dataclass(frozen=True)
class Saved:
    """A finished checkpoint.

    Attributes:
      directory: where the arrays are.
      records: its arrays.
      empty: its empty containers, with what they are as their kind.
      zarr: name of the TensorStore driver of one array.
      one_database: whether the arrays are in one database, or each in a directory of its own.
    """

    directory: Path
    records: Mapping[Name, Record]
    empty: Sequence[Record]
    zarr: str
    one_database: bool

    def identity(self) -> str:
        """What is the same in copies of a checkpoint, whatever they are called, and different in another one."""
        if not self.one_database:
            return self.directory.name if self.directory.name != ITEM else self.directory.parent.name
        manifest = _read_bytes(self.directory / MANIFEST)  # it names files that have random names
        return hashlib.sha256(manifest).hexdigest()


def find_saved(path: Path) -> Saved:
    """The checkpoint in a directory.

    Args:
      path: that of a step or an item.

    Raises:
      CheckpointNotFoundError: there is none, or it was not finished.
      CheckpointError: what is there cannot be read.
    """
    directory = _directory_of(path)
    tree = _read_json(directory / TREE_FILE)
    extra: dict[str, Any] = {}
    if (directory / ARRAYS_FILE).exists():
        for listed in _read_json(directory / ARRAYS_FILE).get("array_metadatas", ()):
            found = listed["array_metadata"]
            extra[found["param_name"]] = found.get("ext_metadata") or {}
    records, empty = {}, []
    for entry in tree["tree_metadata"].values():
        kind = entry["value_metadata"]["value_type"]
        if kind == "string":
            continue  # text, which is beside the arrays
        name = tuple(key["key"] for key in entry["key_metadata"])
        in_sequence = tuple(key["key_type"] == _SEQUENCE for key in entry["key_metadata"])
        if entry["value_metadata"].get("skip_deserialize"):
            empty.append(Record(name, in_sequence, kind))
            continue
        more = extra.get(".".join(name), {})
        records[name] = Record(name, in_sequence, kind, more.get(_RANDOM), more.get(_DTYPE))
    one_database = (directory / MANIFEST).exists()
    if records and not one_database and tree.get("use_ocdbt"):
        raise CheckpointError(
            f"{directory} lists {len(records)} arrays, but their database ({MANIFEST}) is not there: somebody removed it; "
            "restore another checkpoint"
        )
    return Saved(directory, records, empty, "zarr3" if tree.get("use_zarr3") else "zarr", one_database)


def read_metadata(path: Path) -> Any:
    """The user's metadata of a finished checkpoint."""
    directory = _directory_of(path)
    for place in (directory, directory.parent):
        if (place / STEP_FILE).exists():
            return _read_json(place / STEP_FILE).get("custom_metadata")
    return None


def write_descriptions(
    aside: Path,
    item: str | None,
    leaves: Iterable[Leaf],
    records: Sequence[tuple[Record, Sequence[int]]],
    metadata: Any,
) -> None:
    """Writes the JSON files of a checkpoint.

    Args:
      aside: directory of the step.
      item: name of the only item, or None where the directory is that of the item too.
      leaves: the leaves and empty containers of the tree that are not arrays.
      records: its arrays, each with the shape of its chunks.
      metadata: the user's.
    """
    directory = aside / item if item else aside
    entries = {}
    for record, _ in records:
        entries.update(_entry(record.name, record.in_sequence, record.kind, False))
    for leaf in leaves:
        if is_empty(leaf.value):
            entries.update(_entry(leaf.name, leaf.in_sequence, _kind_of_empty(leaf.value), True))
    tree = {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    arrays = [
        {
            "array_metadata": {
                "param_name": r.key,
                "write_shape": list(c),
                "chunk_shape": list(c),
                "ext_metadata": r.extra,
            }
        }
        for r, c in records
    ]
    write_json(directory / TREE_FILE, tree)
    write_json(directory / ARRAYS_FILE, {"array_metadatas": arrays})
    write_json(
        aside / STEP_FILE,
        {"item_handlers": {item: HANDLER} if item else HANDLER, "metrics": {}, "custom_metadata": metadata},
    )


def write_json(file: Path, content: object) -> None:
    """Writes a file that is on disk when this returns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _entry(name: Name, in_sequence: tuple[bool, ...], kind: str, empty: bool) -> dict[str, Any]:
    keys = [
        {"key": word, "key_type": _SEQUENCE if position else _DICT}
        for word, position in zip(name, in_sequence, strict=True)
    ]
    return {str(name): {"key_metadata": keys, "value_metadata": {"value_type": kind, "skip_deserialize": empty}}}


def _kind_of_empty(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, dict):
        return "Dict"
    if isinstance(value, list):
        return "List"
    return "NamedTuple" if hasattr(value, "_fields") else "Tuple"


def _directory_of(path: Path) -> Path:
    """Where the arrays of a checkpoint are: in the directory of the step, or in that of its item."""
    with translated(f"{path} cannot be read"):
        return _find_directory(path)


def _find_directory(path: Path) -> Path:
    if ASIDE in path.name:
        raise CheckpointNotFoundError(
            f"{path} is a checkpoint that was not finished: saving was cut off, or goes on; restore a finished one"
        )
    if not path.exists():
        raise CheckpointNotFoundError(f"{path}: {_nothing_there(path)}")
    if not path.is_dir():
        raise CheckpointNotFoundError(f"{path} is a file; a checkpoint is a directory with a file {TREE_FILE}")
    if (path / TREE_FILE).exists():
        return path
    items = sorted(d.name for d in path.iterdir() if (d / TREE_FILE).exists())
    if ITEM in items:
        return path / ITEM
    if len(items) == 1 and not items[0].isdigit():
        return path / items[0]
    if items and not items[0].isdigit():
        raise CheckpointError(
            f"{path} holds {len(items)} items, {', '.join(items)}: say which, such as {path / items[0]}"
        )
    if steps := steps_in(path):
        raise CheckpointNotFoundError(
            f"{path} holds the checkpoints of {len(steps)} steps: restore {path / str(steps[-1])}, or ask "
            f"Manager({str(path)!r})"
        )
    inside = sorted(d.name for d in path.iterdir())
    shown = (
        f"there are {', '.join(inside[:6])}" + (" and others" if len(inside) > 6 else "") if inside else "it is empty"
    )
    raise CheckpointNotFoundError(f"{path} is no checkpoint: expected is a file {TREE_FILE}, {shown}")


def _nothing_there(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"there is no checkpoint, and no directory {parent} either"
    names = sorted(d.name for d in parent.iterdir() if d.is_dir())
    if any(name.startswith(path.name + ASIDE) for name in names):
        return "the checkpoint was not finished: saving was cut off, or goes on; restore an earlier one"
    finished = [name for name in names if ASIDE not in name]
    return f"there is no checkpoint; {parent} holds {', '.join(finished[-6:]) or 'none'}"


def steps_in(directory: Path) -> list[int]:
    """The steps of which a directory holds a finished checkpoint, in order.

    Raises:
      CheckpointError: it cannot be looked into.
    """
    with translated(f"{directory} cannot be read"):
        if not directory.is_dir():
            return []
        found = [d for d in directory.iterdir() if _STEP.fullmatch(d.name) and d.is_dir()]
        return sorted(int(d.name) for d in found if (d / STEP_FILE).exists() or any(d.glob(f"*/{TREE_FILE}")))


def unfinished_steps(directory: Path) -> list[Path]:
    """What is left of steps whose saving was cut off. What has another name may be saved beside them at this moment."""
    return [d for d in directory.iterdir() if ASIDE in d.name and _STEP.fullmatch(d.name.partition(ASIDE)[0])]


def check_names_of_steps(directory: Path) -> None:
    """Goes on where no step of a directory has another name than its number.

    Raises:
      CheckpointError: one has, as Orbax gives them where it is told to; with its name.
    """
    with translated(f"{directory} cannot be read"):
        inside = list(directory.iterdir()) if directory.is_dir() else []
        others = [d for d in inside if _OTHER_STEP.fullmatch(d.name) and ASIDE not in d.name]
        found = sorted(d.name for d in others if (d / STEP_FILE).exists() and any(d.glob(f"*/{TREE_FILE}")))
    if found:
        number = int(re.findall(r"\d+", found[-1])[-1])
        raise CheckpointError(
            f"{directory} holds checkpoints of steps under names that are not their numbers: {', '.join(found[-3:])}; a Manager "
            f"would not see them. Call the directories {number} and so on, as Orbax does without step_prefix and "
            f"step_format_fixed_length, or name another directory and restore with checkpoint.restore({str(directory / found[-1])!r}, like)"
        )


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Makes a `CheckpointError` of what goes wrong on disk in the block.

    Args:
      what: what it means, for its message.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # TensorStore raises either
        raise CheckpointError(f"{what}: {error}") from error


def _read_json(file: Path) -> Any:
    content = _read_bytes(file)
    try:
        return json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}; restore another checkpoint") from None


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}; restore another checkpoint") from None


def check_names(records: Iterable[Record]) -> None:
    """Refuses two leaves that would be one in the database.

    Raises:
      CheckpointError: with both names.
    """
    seen: dict[str, Record] = {}
    for record in records:
        other = seen.setdefault(record.key, record)
        if other is not record:
            raise CheckpointError(
                f"leaves {text(other.name)} and {text(record.name)} have the same name {record.key!r} in a checkpoint, where "
                "words are joined by dots; rename one of them"
            )
