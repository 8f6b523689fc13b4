"""Plain data to versioned JSON and back. Every field is checked, so that a damaged file is an error, nothing worse."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.basics.files import BYTE_ORDER_MARK, read_text

T = TypeVar("T")
CALLBACK_STATE_VERSION = 2  # of the callback's entry in a checkpoint; read by the callback and by `restore`


def parse_document(source: str | Path, kind: str, version: int) -> dict[str, Any]:
    """Read versioned JSON, from text or from a file.

    Args:
        source: JSON text that starts with a brace, or a path.
        kind: The kind that the document must declare.
        version: The version that can be read.

    Raises:
        CheckpointError: If it cannot be read, or is of another kind or version.
    """
    given = source.removeprefix(BYTE_ORDER_MARK) if isinstance(source, str) else source
    inline = isinstance(given, str) and given.lstrip().startswith("{")
    text = str(given) if inline else read_text(source)
    where = "The text" if inline else repr(str(source))
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not a {kind}: invalid JSON ({error}).", _how_to_write(kind)) from error
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise CheckpointError(f"{where} is not a {kind}: it holds {_what_it_is(data)}.", _how_to_write(kind))
    if type(data.get("version")) is not int or data["version"] != version:
        raise CheckpointError(
            f"{where} is a {kind} of version {data.get('version')!r}; this release reads version {version}.",
            _how_to_write(kind),
        )
    return data


def damaged(what: str, error: Exception, hint: str) -> CheckpointError:
    """The error for a document whose entries do not fit together.

    Args:
        what: The kind of document.
        error: What reading it raised; the words of a ValueError are ours.
        hint: What to do.
    """
    said = f"it has no entry {error}" if isinstance(error, KeyError) else f"{error!r}"
    return CheckpointError(f"This {what} is damaged: {error if isinstance(error, ValueError) else said}.", hint)


def _what_it_is(data: Any) -> str:
    if not isinstance(data, dict):
        return f"a {type(data).__name__}"
    if isinstance(data.get("kind"), str):
        return f"a {data['kind']}"
    return "the layers of a decomposition" if isinstance(data.get("layers"), dict) else "JSON of another kind"


def _how_to_write(kind: str) -> str:
    return f"Write the {kind} again: {kind}.to_json(path)."


def read_record(kind: type[T], found: Mapping[str, Any] | Sequence[Any]) -> T:
    """Make a dataclass of plain fields from its row or its mapping.

    Args:
        kind: The dataclass; its fields are numbers, text, booleans, or tuples and dataclasses of these.
        found: Its fields by name, where defaults may be left out, or all of them in order.

    Raises:
        ValueError: If a field is missing, unknown, or of another type.
    """
    hints = _hints(cast(Hashable, kind))
    if not isinstance(found, Mapping):
        found = dict(zip(hints, found, strict=True))
    if unknown := found.keys() - hints.keys():
        raise ValueError(f"unknown {sorted(unknown)} in {kind.__name__}")
    return kind(**{name: _read(hints[name], item, f"{kind.__name__}.{name}") for name, item in found.items()})


def plain_of(record: Any) -> Any:
    """Convert a dataclass of plain fields to a mapping that ``read_record`` reads back.

    Records that stand for one of several kinds carry their kind: a class attribute of that name.
    """
    if isinstance(record, (tuple, list)):
        return [plain_of(item) for item in record]
    if not hasattr(record, "__dataclass_fields__"):
        return record
    names = [f.name for f in fields(record)]
    tag = {"kind": record.kind} if hasattr(record, "kind") and "kind" not in names else {}
    return tag | {name: plain_of(getattr(record, name)) for name in names}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _read_one_of(hints: tuple[Any, ...], item: Any, where: str) -> Any:
    """A field of several types: one or None, or records that are told apart by their kind."""
    tagged = {hint.kind: hint for hint in hints if hasattr(hint, "__dataclass_fields__")}
    if not tagged:
        return None if item is None else _read(hints[0], item, where)
    found = dict(item) if isinstance(item, Mapping) else {}
    kind = found.pop("kind", None)
    if not isinstance(kind, str) or kind not in tagged:
        raise ValueError(f"{where} is of the unknown kind {kind!r}; known: {', '.join(tagged)}")
    return read_record(tagged[kind], found)


def _read(hint: Any, item: Any, where: str) -> Any:
    if isinstance(hint, UnionType):
        return _read_one_of(get_args(hint), item, where)
    if get_origin(hint) is tuple and isinstance(item, list):
        return tuple(_read(get_args(hint)[0], entry, where) for entry in item)
    if hasattr(hint, "__dataclass_fields__") and isinstance(item, (dict, list)):
        return read_record(hint, item)
    if hint is float and type(item) in (int, float) and math.isfinite(item):
        return float(item)
    if hint is float or type(item) is not hint:
        raise ValueError(f"{where} is {item!r}")
    return item
