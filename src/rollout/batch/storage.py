"""A batch on disk: safetensors and JSON, written as one or not at all, read without pickle."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import safetensors.torch
import torch
from tensordict import TensorDict

from rollout.batch.records import (
    encode_json,
    make_floats,
    sample_from_line,
    sample_line,
    trajectory_from_line,
    trajectory_line,
)
from rollout.chat.trajectory_codec import collect_contents, list_trajectory_media, restore_media
from rollout.disk_room import unwritable
from rollout.engine.model_files import load_decoder
from rollout.errors import RolloutError
from rollout.media.records import KnownContents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.chat.trajectory import Trajectory

TENSORS = "tensors.safetensors"
SAMPLES = "samples.jsonl"
TRAJECTORIES = "trajectories.jsonl"
JOURNAL = "trajectories.journal"  # what ``rollout run`` writes while it runs
METRICS = "metrics.json"
META = "meta.json"
FILES = (TENSORS, SAMPLES, TRAJECTORIES, METRICS)
#: Only where there are images or videos.
MEDIA = "media.safetensors"

#: Version of the files; another one is refused.
FORMAT = 3

#: A jagged tensor is two entries of the file: its values, and the ends of all rows, with a 0.
VALUES, OFFSETS = ".values", ".offsets"

T = TypeVar("T")


class BatchTokenizer(msgspec.Struct, kw_only=True, dict=True):
    """The tokenizer of a batch, by the path and revision of its model: loaded once it is used."""

    path: str
    revision: str | None = None

    def __post_init__(self) -> None:
        if os.path.isdir(self.path):
            self.path = str(Path(self.path).resolve())

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens spelled out.

        Raises:
            RolloutError: The tokenizer cannot be loaded.
        """
        return self._decoder(ids)

    @cached_property
    def _decoder(self) -> Callable[[Sequence[int]], str]:
        try:
            return load_decoder(self.path, self.revision)
        except RolloutError as error:
            name = f"{self.path} (revision {self.revision})" if self.revision else self.path
            raise RolloutError(
                f"the batch's tokenizer, that of {name}, cannot be loaded: {error}; give "
                "RolloutBatch.load(..., tokenizer=) where it is now"
            ) from error


class _Meta(msgspec.Struct, kw_only=True):
    """The other files are listed with the SHA-256 of each."""

    format: int
    rows: int
    files: dict[str, str]
    tokenizer: BatchTokenizer | None = None


def write_batch(directory: Path, batch: Any, *, overwrite: bool) -> None:
    """Write a `RolloutBatch`; see its `save`."""
    files = _encode_files(batch)
    if not overwrite:
        _check_free(directory)
    path = directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=".saving-", dir=directory, ignore_cleanup_errors=True
        ) as aside:
            for name, content in files.items():
                path = directory / name
                Path(aside, name).write_bytes(content)
            for path in map(directory.joinpath, files):  # the one with the checksums last
                Path(aside, path.name).replace(path)
            if MEDIA not in files:  # an earlier batch's
                (directory / MEDIA).unlink(missing_ok=True)
    except OSError as error:  # what stood aside takes up no room any more
        raise unwritable(path, error, sum(map(len, files.values()))) from error


def _encode_files(batch: Any) -> dict[str, bytes]:
    """The content of each file; that of ``meta.json`` comes last."""
    trajectories = batch.trajectories
    try:
        lines = [trajectory_line(each, batch.decode) for each in trajectories]
    except RolloutError:  # a loaded batch is saved again where its tokenizer is not
        lines = [trajectory_line(each, None) for each in trajectories]
    files = {
        TENSORS: _dump_tensors(batch.tensors),
        SAMPLES: b"".join(sample_line(each) + b"\n" for each in batch.samples),
        TRAJECTORIES: b"".join(line + b"\n" for line in lines),
        METRICS: msgspec.json.format(encode_json(make_floats(batch.metrics))),
    }
    contents, media = collect_contents(trajectories), list_trajectory_media(trajectories)
    if bare := next((each for each in media if each.digest not in contents), None):
        raise RolloutError(
            f"the batch lacks the content of {bare!r}, and would not be loaded again; "
            "RolloutBatch.load has contents, load_trajectories has none"
        )
    if contents:
        packed = {k: torch.frombuffer(bytearray(v), dtype=torch.uint8) for k, v in contents.items()}
        files[MEDIA] = _dump_tensors(packed)
    meta = _Meta(
        format=FORMAT,
        rows=len(batch.samples),
        files={name: sha256(content).hexdigest() for name, content in files.items()},
        tokenizer=batch.tokenizer,
    )
    return files | {META: msgspec.json.format(encode_json(meta))}


def _check_free(directory: Path) -> None:
    """Refuse to write over files of another batch or of something else."""
    if found := [name for name in (META, *FILES, MEDIA) if (directory / name).exists()]:
        raise RolloutError(
            f"{directory} holds {', '.join(found)}, of another batch or of something else; "
            "expected an empty or new directory, or save(…, overwrite=True)"
        )


def _dump_tensors(tensors: Any) -> bytes:
    """The file of tensors."""
    entries: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise RolloutError(f"tensors[{key!r}] cannot be saved: expected a flat dict of tensors")
        if value.is_nested:
            offsets = value.offsets()  # type: ignore[attr-defined]
            entries |= {key + VALUES: value.values(), key + OFFSETS: offsets}
        else:
            entries[key] = value
    # Cloned, because safetensors refuses tensors that share memory.
    return safetensors.torch.save(
        {key: each.detach().cpu().contiguous().clone() for key, each in entries.items()}
    )


def read_batch(directory: Path, moved_to: str | None = None) -> dict[str, Any]:
    """The fields of a `RolloutBatch`; see its `load`. Its tokenizer may have moved."""
    meta = _read_meta(directory / META)
    files = {}
    for name in (*FILES, *({MEDIA} & meta.files.keys())):
        files[name] = _read(directory / name)
        if sha256(files[name]).hexdigest() != meta.files[name]:
            raise RolloutError(
                f"{directory / name} is not the file that {META} lists, by its checksum: it was "
                "changed, or a save was cut short"
            )
    media = safetensors.torch.load(files[MEDIA]) if MEDIA in files else {}
    contents = {digest: tensor.numpy().tobytes() for digest, tensor in media.items()}
    known = KnownContents(contents.get, str(directory / MEDIA))
    tokenizer = meta.tokenizer if moved_to is None else BatchTokenizer(path=moved_to)
    decode = None if tokenizer is None else tokenizer.decode
    read_line = partial(trajectory_from_line, decode=decode)
    trajectories = _decode_lines(files[TRAJECTORIES], directory / TRAJECTORIES, read_line)
    for trajectory in trajectories:
        restore_media(trajectory, known)
    return {
        "tokenizer": tokenizer,
        "decode": decode,
        "tensors": _load_tensors(files[TENSORS], directory / TENSORS, meta),
        "samples": _decode_lines(files[SAMPLES], directory / SAMPLES, sample_from_line),
        "metrics": _decode(files[METRICS], directory / METRICS, dict[str, float], strict=False),
        "trajectories": trajectories,
    }


def read_trajectories(path: Path) -> list[Trajectory]:
    """Those of a ``trajectories.jsonl``, printed with the tokenizer of the batch beside it.

    Raises:
        RolloutError: The file cannot be read, or a line describes no trajectory; names it.
    """
    tokenizer = read_tokenizer(path.parent)
    decode = None if tokenizer is None else tokenizer.decode
    return _decode_lines(_read(path), path, partial(trajectory_from_line, decode=decode))


def read_tokenizer(directory: Path) -> BatchTokenizer | None:
    """Which tokenizer the batch in a directory was written with; None where it does not say."""
    with suppress(RolloutError):
        return _read_meta(directory / META).tokenizer
    return None


def _load_tensors(content: bytes, path: Path, meta: _Meta) -> TensorDict:
    try:
        entries = safetensors.torch.load(content)
        offsets: dict[bytes, torch.Tensor] = {}
        ends = [name for name in entries if name.endswith(OFFSETS)]
        for key in [end.removesuffix(OFFSETS) for end in ends if len(entries[end]) > meta.rows]:
            values, own = entries.pop(key + VALUES), entries.pop(key + OFFSETS)
            # Equal offsets become one tensor again, so that torch lets the keys be combined.
            shared = offsets.setdefault(own.numpy().tobytes(), own)
            entries[key] = torch.nested.nested_tensor_from_jagged(values, shared)
        return TensorDict(entries, batch_size=[meta.rows])
    except (safetensors.SafetensorError, KeyError, RuntimeError) as error:
        raise RolloutError(f"{path} cannot be read as tensors: {error}") from error


def _decode_lines(content: bytes, path: Path, read: Callable[[bytes], T]) -> list[T]:
    rows = []
    for at, line in enumerate(content.splitlines(), start=1):
        try:
            rows.append(read(line))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise RolloutError(f"{path}, line {at}: {error}") from error
    return rows


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RolloutError(f"{path} cannot be read: {error.strerror}") from error


def _read_meta(path: Path) -> _Meta:
    if not os.path.isfile(path):
        beside = (path.with_name(name) for name in (TRAJECTORIES, JOURNAL))
        hints = [f"; rollout.load_trajectories reads {at}" for at in beside if os.path.isfile(at)]
        expected = f"expected a directory that RolloutBatch.save wrote{''.join(hints[:1])}"
        raise RolloutError(f"{path} does not exist; {expected}")
    content = _read(path)
    version = _decode(content, path, dict[str, Any]).get("format")
    if version != FORMAT:
        found = "none" if version is None else repr(version)
        raise RolloutError(f"{path}: format {found}; this version reads format {FORMAT}")
    meta = _decode(content, path, _Meta)
    if missing := set(FILES) - meta.files.keys():
        raise RolloutError(f"{path} does not list {', '.join(sorted(missing))}")
    return meta


def _decode(content: bytes, path: Path, kind: type[T], *, strict: bool = True) -> T:
    try:
        return msgspec.json.decode(content, type=kind, strict=strict)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # of damaged bytes
        raise RolloutError(f"{path}: {error}") from error
