"""Requests whose images and videos have not been read yet: one medium is read between two steps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.core import GenerationRequest
    from rollout.engine.cores.transformers.slot_model import SlotModel
    from rollout.engine.cores.transformers.vision import Unit, VisionPrompt


class UnreadRequests:
    """A queue in the order of arrival.

    Args:
        ready: Called with a request whose media have all been read, and what they are.
        failed: Called with one whose media cannot be used, and why.
    """

    def __init__(
        self,
        ready: Callable[[GenerationRequest, VisionPrompt], None],
        failed: Callable[[GenerationRequest, str], None],
    ) -> None:
        self._requests: deque[GenerationRequest] = deque()
        self._ready = ready
        self._failed = failed

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: GenerationRequest) -> None:
        """Queue one."""
        self._requests.append(request)

    def pop(self, request_id: str) -> GenerationRequest | None:
        """Take one out; None where it is not here."""
        for request in self._requests:
            if request.request_id == request_id:
                self._requests.remove(request)
                return request
        return None

    def clear(self) -> list[GenerationRequest]:
        """Take all out."""
        taken = list(self._requests)
        self._requests.clear()
        return taken

    def read_some(self, model: SlotModel) -> None:
        """Read one medium at most: the requests that run wait meanwhile."""
        has_read = False
        while self._requests:
            request = self._requests[0]
            try:
                new = _first_unread(model, request)
                if new is not None and has_read:
                    return
                if new is not None:
                    has_read = True
                    model.read(new)
                    continue
                prompt = np.frombuffer(request.prompt_ids, dtype="<i4")
                assert model.reader is not None
                vision = model.reader.lay_out(prompt, request.media)
            except (MemoryError, torch.OutOfMemoryError):
                raise  # the engine's, not this request's
            except Exception as error:  # whatever a processor or an encoder makes of it
                self._requests.popleft()
                self._failed(request, f"media of the prompt: {error}")
            else:
                self._requests.popleft()
                self._ready(request, vision)


def _first_unread(model: SlotModel, request: GenerationRequest) -> Unit | None:
    reader = model.reader
    assert reader is not None  # the engine refuses media where there is none
    return next((u for u in reader.units_of(request.media) if not reader.is_read(u)), None)
