"""A batch on disk: safetensors and JSON, written whole or not at all, read without pickle."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from rollout.batch.records import (
    Number,
    number,
    sample_from_line,
    sample_line,
    trajectory_from_line,
    trajectory_line,
)
from rollout.batch.rollout_batch import RolloutBatch
from rollout.errors import RolloutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TENSORS = "tensors.safetensors"
SAMPLES = "samples.jsonl"
TRAJECTORIES = "trajectories.jsonl"
METRICS = "metrics.json"
META = "meta.json"
FILES = (TENSORS, SAMPLES, TRAJECTORIES, METRICS)

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


def write_batch(directory: Path, batch: RolloutBatch) -> None:
    """See `RolloutBatch.save`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=directory))
        try:
            _write_files(scratch, batch)
            for name in (*FILES, META):
                (scratch / name).replace(directory / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise RolloutError(f"{error.filename or directory} cannot be written: {error}") from error


def read_batch(directory: Path) -> RolloutBatch:
    """See `RolloutBatch.load`."""
    meta = _read_meta(directory / META)
    for name in FILES:
        _check_file(directory / name, meta.files[name])
    metrics = _decoded(directory / METRICS, dict[str, Number])
    return RolloutBatch(
        tensors=_read_tensors(directory / TENSORS, meta),
        samples=_read_lines(directory / SAMPLES, sample_from_line),
        metrics={name: float(value) for name, value in metrics.items()},
        trajectories=_read_lines(directory / TRAJECTORIES, trajectory_from_line),
    )


def _write_files(scratch: Path, batch: RolloutBatch) -> None:
    jagged = _write_tensors(scratch / TENSORS, batch.tensors)
    _write_lines(scratch / SAMPLES, map(sample_line, batch.samples))
    lines = (trajectory_line(trajectory, batch.decode) for trajectory in batch.trajectories)
    _write_lines(scratch / TRAJECTORIES, lines)
    metrics = {name: number(value) for name, value in batch.metrics.items()}
    (scratch / METRICS).write_bytes(msgspec.json.format(msgspec.json.encode(metrics)))
    files = {name: _file(scratch / name) for name in FILES}
    meta = _Meta(format=FORMAT, rows=len(batch), jagged=jagged, files=files)
    (scratch / META).write_bytes(msgspec.json.format(msgspec.json.encode(meta)))


def _write_tensors(path: Path, tensors: TensorDict) -> list[str]:
    """Write every tensor; return the keys of jagged ones."""
    entries, jagged = {}, []
    for key, value in tensors.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise RolloutError(f"tensors[{key!r}] cannot be saved: expected a flat dict of tensors")
        if value.is_nested:
            jagged.append(key)
            entries[key + VALUES] = value.values()
            entries[key + OFFSETS] = value.offsets()  # type: ignore[attr-defined]
        else:
            entries[key] = value
    # Cloned, because safetensors refuses tensors that share memory.
    save_file(
        {key: value.detach().cpu().contiguous().clone() for key, value in entries.items()}, path
    )
    return jagged


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


def _write_lines(path: Path, lines: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)


def _read_lines(path: Path, read: Callable[[bytes], T]) -> list[T]:
    rows = []
    with path.open("rb") as file:
        for at, line in enumerate(file, start=1):
            try:
                rows.append(read(line))
            except (msgspec.MsgspecError, ValueError, OverflowError) as error:
                raise RolloutError(f"{path}, line {at}: {error}") from error
    return rows


def _read_meta(path: Path) -> _Meta:
    if not path.is_file():
        raise RolloutError(
            f"{path} does not exist; expected a directory that RolloutBatch.save wrote"
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
