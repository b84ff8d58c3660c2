"""A batch on disk: safetensors and JSON, written whole or not at all, read without pickle."""

from __future__ import annotations

import hashlib
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tensordict import TensorDict

from rollout.batch.disk import NewFiles
from rollout.batch.json_values import Number, number
from rollout.batch.records import (
    sample_from_line,
    sample_line,
    trajectory_from_line,
    trajectory_line,
)
from rollout.batch.saved_tokenizer import BatchTokenizer, TokenizerRecord, make_decodable
from rollout.chat.media_records import KnownContents, contents_of
from rollout.disk_room import unwritable
from rollout.errors import RolloutError
from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rollout.batch.sample import Sample
    from rollout.chat.trajectory import Trajectory

logger = logging.getLogger("rollout.batch")

TENSORS = "tensors.safetensors"
SAMPLES = "samples.jsonl"
TRAJECTORIES = "trajectories.jsonl"
#: What ``rollout run`` writes while it runs.
JOURNAL = "trajectories.journal"
METRICS = "metrics.json"
META = "meta.json"
FILES = (TENSORS, SAMPLES, TRAJECTORIES, METRICS)
#: Only where there are images or videos.
MEDIA = "media.safetensors"

#: Version of the files; another one is refused.
FORMAT = 1

#: A jagged tensor is two entries of the file: its values, and where each row begins.
VALUES, OFFSETS = ".values", ".offsets"

T = TypeVar("T")


class _File(msgspec.Struct, kw_only=True):
    """What a file of the batch must be."""

    bytes: int
    sha256: str


class _Meta(msgspec.Struct, kw_only=True):
    format: int
    rows: int
    jagged: list[str]
    files: dict[str, _File]
    tokenizer: TokenizerRecord | None = None


class _TokenizerPart(msgspec.Struct):
    """What is read of a `_Meta` for its tokenizer."""

    tokenizer: TokenizerRecord | None = None


class Parts(Protocol):
    """What is kept of a `RolloutBatch`."""

    tensors: TensorDict
    samples: list[Sample]
    metrics: dict[str, float]
    trajectories: list[Trajectory]
    decode: Callable[[Sequence[int]], str] | None
    tokenizer: BatchTokenizer | None


def write_batch(directory: Path, batch: Parts) -> None:
    """See `RolloutBatch.save`."""
    try:
        with NewFiles(directory) as files:
            _write_files(files, batch)
    except OSError as error:
        raise unwritable(directory, error, files.needed) from error
    if files.failure is not None:  # said now that what stood aside takes up no room
        path, failure = files.failure
        raise unwritable(path, failure, files.needed) from failure


def check_free(directory: Path, batch: Parts) -> None:
    """Whether nothing of others is lost where the batch is written; it may be there already.

    Raises:
        RolloutError: Files of these names are there, of another batch or of something else.
    """
    found = [name for name in (META, *FILES, MEDIA) if (directory / name).exists()]
    if not found:
        return
    what = "other files"
    with suppress(RolloutError):
        with _reading(directory):
            meta = _read_meta(directory / META)
        if meta.files[SAMPLES].sha256 == _digest(map(sample_line, batch.samples)) and meta.files[
            TRAJECTORIES
        ].sha256 == _digest(trajectory_line(row, batch.decode) for row in batch.trajectories):
            return
        what = f"another batch, of {count(meta.rows, 'row')}"
    raise RolloutError(
        f"{directory} holds {what} ({', '.join(found)}); expected an empty or new directory, or "
        "save(…, overwrite=True)"
    )


def _digest(lines: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line + b"\n")
    return digest.hexdigest()


def read_batch(directory: Path, moved_to: str | None = None) -> dict[str, Any]:
    """The fields of a `RolloutBatch`; see its `load`.

    Args:
        directory: Where it is.
        moved_to: Where its tokenizer is; None: where `meta.json` says.
    """
    with _reading(directory):
        meta = _read_meta(directory / META)
        for name in (*FILES, *({MEDIA} & meta.files.keys())):
            _check_file(directory / name, meta.files[name])
        metrics = _decoded(directory / METRICS, dict[str, Number])
        samples = _read_lines(directory / SAMPLES, sample_from_line)
        trajectories = _read_lines(directory / TRAJECTORIES, trajectory_from_line)
        _restore_media(directory / MEDIA, trajectories, is_listed=MEDIA in meta.files)
        tokenizer = _find_tokenizer(meta.tokenizer, moved_to)
        if tokenizer is not None:
            make_decodable(trajectories, tokenizer)
        return {
            "tokenizer": tokenizer,
            "decode": None if tokenizer is None else tokenizer.decode_ids,
            "tensors": _read_tensors(directory / TENSORS, meta),
            "samples": samples,
            "metrics": {name: float(value) for name, value in metrics.items()},
            "trajectories": trajectories,
        }


def _find_tokenizer(record: TokenizerRecord | None, moved_to: str | None) -> BatchTokenizer | None:
    if moved_to is not None:
        fingerprint = "" if record is None else record.fingerprint
        chat_template = "" if record is None else record.chat_template
        return BatchTokenizer(moved_to, fingerprint=fingerprint, chat_template=chat_template)
    return None if record is None else BatchTokenizer(**msgspec.structs.asdict(record))


def tokenizer_record(directory: Path) -> TokenizerRecord | None:
    """Which tokenizer the batch in a directory was written with; None where it does not say."""
    try:
        return msgspec.json.decode((directory / META).read_bytes(), type=_TokenizerPart).tokenizer
    except (OSError, msgspec.MsgspecError):
        return None


def _restore_media(path: Path, trajectories: Sequence[Trajectory], *, is_listed: bool) -> None:
    try:
        tensors = load_file(path) if is_listed else {}
        contents = {digest: tensor.numpy().tobytes() for digest, tensor in tensors.items()}
    except SafetensorError as error:
        raise RolloutError(f"{path} cannot be read: {error}") from error
    KnownContents(contents, str(path)).restore(trajectories)


def _write_files(files: NewFiles, batch: Parts) -> None:
    entries, jagged = _entries(batch.tensors)
    files.write_tensors(TENSORS, entries)
    files.write(SAMPLES, (sample_line(sample) + b"\n" for sample in batch.samples))
    tokenizer, decode = batch.tokenizer, batch.decode
    if tokenizer is not None and not tokenizer.is_at_hand():
        decode = None  # a loaded batch is saved again where its tokenizer is not
    files.write(
        TRAJECTORIES,
        (trajectory_line(row, decode) + b"\n" for row in batch.trajectories),
    )
    metrics = {name: number(value) for name, value in batch.metrics.items()}
    files.write(METRICS, [_formatted(metrics)])
    names: tuple[str, ...] = FILES
    if contents := contents_of(batch.trajectories):
        files.write_tensors(MEDIA, _content_tensors(contents))
        names = (*FILES, MEDIA)
    if files.failure is None:
        listed = {name: _file(files.aside(name)) for name in names}
        meta = _Meta(
            format=FORMAT,
            rows=len(batch.samples),
            jagged=jagged,
            files=listed,
            tokenizer=None if tokenizer is None else tokenizer.record,
        )
        files.write(META, [_formatted(meta)])
    if files.failure is None:
        files.put_in_place((*names, META))


def _content_tensors(contents: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """(bytes,) uint8 of each."""
    return {
        digest: torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for digest, content in contents.items()
    }


def _formatted(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value))


def _entries(tensors: TensorDict) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What the file of tensors holds, by name; and the keys of jagged ones."""
    entries: dict[str, torch.Tensor] = {}
    jagged: list[str] = []
    for key, value in tensors.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise RolloutError(f"tensors[{key!r}] cannot be saved: expected a flat dict of tensors")
        if value.is_nested:
            jagged.append(key)
            entries[key + VALUES] = value.values()
            entries[key + OFFSETS] = value.offsets()  # type: ignore[attr-defined]
        else:
            entries[key] = value
    return entries, jagged


def _read_tensors(path: Path, meta: _Meta) -> TensorDict:
    try:
        entries = load_file(path)
        offsets: dict[bytes, torch.Tensor] = {}
        for key in meta.jagged:
            values, own = entries.pop(key + VALUES), entries.pop(key + OFFSETS)
            # Equal offsets become one tensor again, so that torch lets the keys be combined.
            shared = offsets.setdefault(own.numpy().tobytes(), own)
            entries[key] = torch.nested.nested_tensor_from_jagged(values, shared)
        return TensorDict(entries, batch_size=[meta.rows])
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise RolloutError(f"{path} cannot be read as tensors: {error}") from error


def read_trajectories(path: Path) -> list[Trajectory]:
    """Those of a ``trajectories.jsonl``; a last line that was cut short is left out.

    Raises:
        RolloutError: The file cannot be read, or a line describes no trajectory; names it.
    """
    with _reading(path):
        trajectories = _read_lines(path, trajectory_from_line, may_be_cut=True)
    tokenizer = _find_tokenizer(tokenizer_record(path.parent), None)
    if tokenizer is not None:
        make_decodable(trajectories, tokenizer)
    return trajectories


def _read_lines(path: Path, read: Callable[[bytes], T], *, may_be_cut: bool = False) -> list[T]:
    rows = []
    with path.open("rb") as file:
        for at, line in enumerate(file, start=1):
            try:
                rows.append(read(line))
            except (msgspec.MsgspecError, ValueError, OverflowError) as error:
                if may_be_cut and not line.endswith(b"\n"):
                    logger.warning("%s, line %d was cut short and is left out", path, at)
                    break
                raise RolloutError(f"{path}, line {at}: {error}") from error
    return rows


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RolloutError(f"{error.filename or path} cannot be read: {error.strerror}") from error


def _read_meta(path: Path) -> _Meta:
    if not path.is_file():
        rest = next(
            (each for each in map(path.with_name, (TRAJECTORIES, JOURNAL)) if each.is_file()), path
        )
        hint = f"; rollout.load_trajectories reads {rest}" if rest.is_file() else ""
        raise RolloutError(
            f"{path} does not exist; expected a directory that RolloutBatch.save wrote{hint}"
        )
    version = _decoded(path, dict[str, msgspec.Raw]).get("format")
    if version is None or bytes(version) != str(FORMAT).encode():
        found = "none" if version is None else bytes(version).decode()
        raise RolloutError(f"{path}: format {found}; this version reads format {FORMAT}")
    meta = _decoded(path, _Meta)
    if missing := set(FILES) - meta.files.keys():
        raise RolloutError(f"{path} does not list {', '.join(sorted(missing))}")
    return meta


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise RolloutError(f"{path}: {error}") from error


def _check_file(path: Path, expected: _File) -> None:
    if not path.is_file():
        raise RolloutError(f"{path} does not exist, though {META} lists it")
    found = _file(path)
    if found != expected:
        raise RolloutError(
            f"{path} is not the file that {META} lists ({found.bytes} bytes, expected "
            f"{expected.bytes}; or another checksum): it was changed, or a save was cut short"
        )


def _file(path: Path) -> _File:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _File(bytes=path.stat().st_size, sha256=digest)
