"""Images and videos that messages and tools bring: read beside the event loop, once for a group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import anyio
import msgspec
import numpy as np

from rollout.errors import MediaError
from rollout.media import Media
from rollout.media.limits import check_decoded
from rollout.media.parts import MediaSource, media_part
from rollout.media.reading import find_url, read_media
from rollout.tools.results import ToolResult, error_result
from rollout.types import Message
from rollout.worker_threads import WorkerThreads, may_leave_loop

if TYPE_CHECKING:
    from rollout.config import MediaConfig
    from rollout.engine.pool.generation import Generation
    from rollout.media.processor import MediaProcessor

Given = Sequence[Message | Mapping[str, Any]]
#: ``await fetcher(url) -> bytes``; sync ones run in a thread.
MediaFetcher = Callable[[str], Any]

#: Lists of messages whose media are remembered: members of a group begin after one another.
_MOST_LISTS = 32
_SEQUENCES = (list, tuple, Sequence)
_TEXT = (str, type(None))
#: By what threads that were left behind are counted.
_NAME = "rollout.media"


class MediaIntake:
    """Reads what is given; `close` ends its threads.

    Args:
        limits: What is taken.
        processor: The model's; None where it reads text only.
        fetcher: Gets what http(s) addresses name; None: nothing is fetched.
        engines_fault: Why the engines cannot be asked about a kind of media; empty where they can.

    Attributes:
        placeholders: Ids that stand for images and videos, sorted; none where only text is read.
    """

    def __init__(
        self,
        limits: MediaConfig,
        processor: MediaProcessor | None = None,
        fetcher: MediaFetcher | None = None,
        engines_fault: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._engines_fault, self._limits, self.processor = engines_fault, limits, processor
        ids = () if processor is None else processor.placeholder_ids.values()
        self.placeholders = tuple(sorted(ids))
        self._fetcher = fetcher
        self._threads = WorkerThreads(max_threads=limits.max_threads)
        #: Lists that several trajectories begin with, and what came of reading their media; each
        #: holds its list, so that no other one gets its id.
        self._readings: OrderedDict[int, tuple[Given, anyio.Lock, list[Given]]] = OrderedDict()
        #: The same content is held once, wherever it comes from.
        self._known: WeakValueDictionary[str, Media] = WeakValueDictionary()

    @property
    def abandoned(self) -> dict[str, int]:
        """Threads that were left behind at a deadline and still work, by what they do."""
        return self._threads.abandoned

    def find_placeholder(self, sampled: Generation) -> int | None:
        """How many of its ids come before the first placeholder; None where there is none.

        A placeholder that the model sampled shows nothing, and a forward pass with the features of
        the others refuses it: the turn ends before it, as before a stop string.
        """
        ids = np.frombuffer(sampled.packed()[0], dtype=np.int32)
        found = np.flatnonzero(np.isin(ids, self.placeholders))
        return int(found[0]) if len(found) else None

    async def run(self, function: Callable[..., Any], *args: object) -> Any:
        """``function(*args)`` in one of its threads."""
        if not may_leave_loop():
            return function(*args)
        return await self._threads.run(_NAME, function, *args)

    async def prepare(self, messages: Given, before: int = 0, *, is_shared: bool = False) -> Given:
        """`messages` with their images and videos read; they themselves where they have none.

        Args:
            messages: As agents and prompts have them.
            before: How many images and videos the conversation has already.
            is_shared: Other trajectories begin with the same list, which is then read once.

        Raises:
            MediaError: One cannot be taken; names its message and part, and the field of a limit.
        """
        if self.processor is None or isinstance(messages, str) or not may_show(messages):
            return messages  # what is no text is refused where the text is made
        if is_shared:
            return await self._read_shared(messages)
        return await self._read_messages(messages, before)

    async def _read_shared(self, messages: Given) -> Given:
        """Read a list once; where that fails, who begins with it next tries again."""
        known = self._readings.setdefault(id(messages), (messages, anyio.Lock(), []))
        self._readings.move_to_end(id(messages))
        if len(self._readings) > _MOST_LISTS:
            self._readings.popitem(last=False)
        _, lock, results = known
        async with lock:
            if not results:
                results.append(await self._read_messages(messages))
        return results[0]

    async def read_result(self, name: str, result: ToolResult, before: int) -> ToolResult:
        """A tool's answer with its images and videos read; an error where one cannot be taken.

        Args:
            name: The tool's.
            result: What it answered.
            before: How many images and videos the conversation has already.
        """
        if not result.has_media:
            return result
        read: dict[str, list[Media]] = {"images": [], "videos": []}
        try:
            if self.processor is None:
                what = f"{name} answered with images or videos"
                raise MediaError(f"{what}; the model reads text only")
            self._check_count(before + len(result.images) + len(result.videos))
            for kind, media in read.items():
                for at, value in enumerate(getattr(result, kind)):
                    source = _make_source(f"{name}: {kind}[{at}]", kind[:-1], value)
                    media.append(await self._read_medium(source))
        except MediaError as error:
            return error_result(str(error))
        return msgspec.structs.replace(result, **read)

    def close(self) -> None:
        """Forget what was read."""
        self._readings.clear()

    def _check_count(self, count: int) -> None:
        most = self._limits.max_count
        if most is not None and count > most:
            raise MediaError(f"media.max_count = {most}: the conversation has {count}")

    async def _read_messages(self, messages: Given, count: int = 0) -> Given:
        own: list[Message | Mapping[str, Any]] = []
        for at, message in enumerate(messages):
            content = get_content(message)
            is_list = isinstance(content, list | tuple) or _is_objects(content)
            parts = [] if isinstance(content, _TEXT) else list(content) if is_list else [content]
            where = f"messages[{at}]: content"
            found = [media_part(f"{where}[{at}]", part) for at, part in enumerate(parts)]
            shown = sum(each is not None for each in found)
            count += shown
            self._check_count(count)
            for position, source in enumerate(found):
                if source is not None:
                    parts[position] = await self._read_medium(source)
            own.append(replace_content(message, parts) if shown else message)
        return own

    async def _read_medium(self, source: MediaSource | Media) -> Media:
        fault = self._engines_fault(source.kind)
        if fault:
            place = "" if isinstance(source, Media) else f"{source.where}: "
            raise MediaError(f"{place}{fault}")
        if isinstance(source, Media):
            return self._known.setdefault(source.digest, source)
        assert self.processor is not None
        if source.kind not in self.processor.kinds:
            reads = ", ".join(("text", *sorted(f"{kind}s" for kind in self.processor.kinds)))
            raise MediaError(f"{source.where}: a {source.kind}; the model reads {reads}")
        url = find_url(source)
        if url is not None and self._fetcher is not None:
            source = msgspec.structs.replace(source, value=await self._fetch(source, url))
        medium = await self.run(self._read, source)
        return self._known.setdefault(medium.digest, medium)

    def _read(self, source: MediaSource) -> Media:
        assert self.processor is not None
        medium = read_media(source, self._limits)
        try:
            medium = self.processor.sampled(medium)
            if medium.kind == "video":
                check_decoded(self._limits, medium.frames, medium.width, medium.height)
        except MediaError as error:
            raise MediaError(f"{source.where}: {error}") from None
        return medium

    async def _fetch(self, source: MediaSource, url: str) -> bytes:
        assert self._fetcher is not None
        try:
            with anyio.fail_after(self._limits.fetch_s):
                content = await self._threads.call(_NAME, self._fetcher, url)
        except TimeoutError:
            limit = f"media.fetch_s = {self._limits.fetch_s}"
            raise MediaError(f"{source.where}: {limit}: {url:.200} was not fetched") from None
        except Exception as error:
            raise MediaError(f"{source.where}: {url:.200} was not fetched: {error}") from None
        if not isinstance(content, bytes | bytearray):
            kind = type(content).__name__
            raise MediaError(f"{source.where}: the media_fetcher returned {kind}; expected bytes")
        return bytes(content)


def _make_source(where: str, kind: Any, value: Any) -> MediaSource | Media:
    """What a tool gave as an image or a video: a part, or what one holds."""
    if isinstance(value, MediaSource):
        return msgspec.structs.replace(value, where=where)
    source = media_part(where, value) if isinstance(value, Mapping | Media) else None
    return source or MediaSource(kind, value, where=where)


def get_content(message: object) -> Any:
    """A message's content; its parts where it has any."""
    if isinstance(message, Message):
        return message.parts or message.content
    return message.get("content") if isinstance(message, Mapping) else None


def _is_objects(value: object) -> bool:
    """Whether it is NumPy's array of objects, as tables of data sets hold lists."""
    return getattr(getattr(value, "dtype", None), "kind", "") == "O"


def may_show(messages: Any) -> bool:
    """Whether one of them is more than text."""
    if not isinstance(messages, _SEQUENCES) and not _is_objects(messages):
        return False
    return any(not isinstance(get_content(message), _TEXT) for message in messages)


def replace_content(message: Message | Mapping[str, Any], content: str | list[Any]) -> Any:
    """The message with another content."""
    if isinstance(message, Message):
        return msgspec.structs.replace(message, content=content, parts=())
    return {**message, "content": content}
