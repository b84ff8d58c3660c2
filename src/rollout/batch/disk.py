"""Files that are written whole or not at all."""

from __future__ import annotations

import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

    import torch


class NewFiles:
    """Files on their way into a directory: they stand aside until all of them are whole.

    Once one of them cannot be written, the others are only measured, so that the error can say
    what all of them need. A context manager; nothing stands aside after it.

    Attributes:
        needed: Bytes of everything given so far, written or not.
        failure: The path that cannot be written, and why; None so far.
    """

    def __init__(self, directory: Path) -> None:
        self.needed = 0
        self.failure: tuple[Path, Exception] | None = None
        self._directory = directory
        self._aside: Path | None = None

    def __enter__(self) -> NewFiles:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._aside = Path(tempfile.mkdtemp(prefix=".saving-", dir=self._directory))
        except OSError as error:
            self.failure = (self._directory, error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)

    def aside(self, name: str) -> Path:
        """Where a file stands until all are whole."""
        assert self._aside is not None
        return self._aside / name

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write the pieces, one after the other, as a file."""
        rest = self._measured(pieces)
        if self.failure is None:
            try:
                with self.aside(name).open("wb") as file:
                    file.writelines(rest)
            except OSError as error:
                self.failure = (self._directory / name, error)
        for _ in rest:  # what there was no room for
            pass

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors in the safetensors format, with the rights that other new files get."""
        self.needed += sum(tensor.nbytes for tensor in tensors.values())
        if self.failure is not None:
            return
        path = self.aside(name)
        try:
            path.touch()
            mode = stat.S_IMODE(path.stat().st_mode)
            # Cloned, because safetensors refuses tensors that share memory.
            copies = {
                key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()
            }
            save_file(copies, path)
            path.chmod(mode)  # safetensors makes files for their owner alone
        except (OSError, SafetensorError) as error:
            self.failure = (self._directory / name, error)

    def put_in_place(self, names: Iterable[str]) -> None:
        """Replace the files of these names, in this order."""
        for name in names:
            self.aside(name).replace(self._directory / name)

    def _measured(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.needed += len(piece)
            yield piece
