"""Trajectories with images and videos: limits, bad media, groups, and what tools show."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import struct
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio
import attrs
import numpy as np
import pytest
from PIL import Image

import rollout
from journal_material import cut_before_end
from media_material import (
    CALL,
    config_of,
    encoded,
    frames,
    image,
    picture,
    template_of,
    video_file,
)
from rollout import (
    GroupPolicy,
    MediaError,
    Outcome,
    Prompt,
    RolloutBatch,
    function_tool,
    load_trajectories,
)
from rollout.config import (
    AgentConfig,
    JournalConfig,
    LimitsConfig,
    MediaConfig,
    RewardsConfig,
    RolloutConfig,
    SandboxConfig,
    SchedulingConfig,
)
from rollout.integrations.verl.function_tools import read_answer
from rollout.media import Media, decode
from rollout.media.parts import MediaSource, media_part
from rollout.media.reading import read_media
from rollout.tools import PythonTool, ShellTool, ToolResult

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed"),
    pytest.mark.process,
]


@pytest.fixture
def anyio_backend() -> str:
    """The machine's own clock: media are read in threads."""
    return "asyncio"


async def play(
    config: RolloutConfig, *contents: Any, samples: int = 1, **options: Any
) -> RolloutBatch:
    prompts = [
        Prompt(messages=[{"role": "user", "content": content}], uid=str(at))
        for at, content in enumerate(contents)
    ]
    async with rollout.open_rollout(config, **options) as runtime:
        return await runtime.generate(prompts, samples=samples)


def check_rejected(batch: RolloutBatch, said: str) -> None:
    """The batch's only prompt was rejected, and its cause says so."""
    (trajectory,) = batch.trajectories
    assert trajectory.outcome is Outcome.REJECTED
    assert trajectory.cause is not None
    assert said in trajectory.cause.message


def data_url(content: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def png_chunk(kind: bytes, body: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + checksum


def header_of(width: int, height: int) -> bytes:
    """The beginning of a PNG that says it has so many pixels."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    packed = png_chunk(b"IDAT", zlib.compress(b"\0" * 100_000))
    return b"\x89PNG\r\n\x1a\n" + head + packed + png_chunk(b"IEND", b"")


def text_bomb() -> bytes:
    """A picture with a chunk that is small, and 7 MB of text once it is unpacked."""
    whole = encoded(picture())
    bomb = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"\0" * 7_000_000))
    return whole[:33] + bomb + whole[33:]


def animated_gif(count: int) -> bytes:
    """A GIF of so many frames of one pixel, written out by hand."""
    frame = (
        b"\x21\xf9\x04\x04\x01\x00\x00\x00" + b"\x2c\0\0\0\0\1\0\1\0\0" + b"\x02\x02\x4c\x01\x00"
    )
    head = b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff"
    return head + frame * count + b"\x3b"


def solid_video(count: int, width: int, height: int, path: Path) -> bytes:
    """An MP4 whose index comes first, of frames that need few bytes."""
    import av

    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("mpeg4", rate=6)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        pixels = np.zeros((height, width, 3), np.uint8)
        for _ in range(count):
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path.read_bytes()


def saved(image: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def deep(width: int = 40) -> Any:
    """A grey picture of 16 bits."""
    return Image.fromarray(np.arange(width * 30, dtype=np.uint16).reshape(30, width))


#: What FFmpeg would follow to files and addresses.
PLAYLISTS = {
    "ffconcat": b"ffconcat version 1.0\nfile movie.mp4\n",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    b"m=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    "m3u8": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nmovie.mp4\n#EXT-X-ENDLIST\n",
}


def video(value: Any, **more: Any) -> list[Any]:
    return [{"type": "video", "video": value, **more}]


def make_bad_media() -> dict[str, tuple[Any, str]]:
    """What a prompt or a tool may show, and what is said of it."""
    return {
        "truncated": (image(encoded(picture())[:2000]), "a picture that cannot be decoded: "),
        "path": (image("/etc/hostname"), "media.roots names no directory; none is opened"),
        "svg": (image(b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>"), "an SVG"),
        "ffconcat": (video(PLAYLISTS["ffconcat"]), "expected a video (MP4, "),
        "bomb": (image(header_of(9_000, 9_000)), "media.max_pixels = 33554432: 9000 x 9000 are"),
        "chunk of text": (image(text_bomb()), "expected a picture"),
        "file url": (image("file:///etc/hostname"), "media.roots names no directory"),
        "url": (image("https://host/a.png"), "no media_fetcher was given to open_rollout"),
        "wrong mime": (
            image(data_url(encoded(picture()), "image/jpeg")),
            "said to be image/jpeg, and is image/png",
        ),
        "no base64": (image("data:image/png,abc"), "a data URL that is not of the form"),
        "broken base64": (image("data:image/png;base64,@@@"), "not valid base64"),
        "animated": (image(animated_gif(2)), "an animated GIF where one picture is expected"),
        "gif": (video(animated_gif(4_200)), "media.max_frames = 4096: it has 4200"),
        "no video": (video(encoded(picture())[:300]), "a video"),
        "floats": (image(np.zeros((4, 4, 3))), "an array of float64 (4, 4, 3); expected uint8"),
        "thin": (image(np.zeros((1, 900, 3), np.uint8)), "Processor refuses media of 900x1"),
        "deep pixels": (
            image(Image.fromarray(np.zeros((30, 40), np.uint16))),
            "a picture of mode 'I;16': expected 8 bits for each channel",
        ),
        "frames of two sizes": (
            video([picture(), picture(28, 28)]),
            "expected frames that are images of one size",
        ),
        "no bytes": (image(b""), "no bytes at all; expected a picture"),
        "a number": (image(3), "int: expected a PIL image"),
        "odd url": (image("file://[x/a.png"), "cannot be read: ValueError"),
        "audio": (
            [{"type": "input_audio", "input_audio": {"data": "AA"}}],
            "audio is not supported",
        ),
        "nothing": ([{"type": "image"}], "is a part of type 'image' that holds nothing"),
    }


async def test_prompt_with_bad_media_is_rejected_by_name(folder: Path) -> None:
    bad = make_bad_media()
    batch = await play(config_of(folder), *(content for content, _ in bad.values()))
    for (name, (_, said)), trajectory in zip(bad.items(), batch.trajectories, strict=True):
        assert (trajectory.outcome, trajectory.reason) == (Outcome.REJECTED, "bad_message"), name
        assert trajectory.cause is not None
        assert said in trajectory.cause.message, (name, trajectory.cause.message)
        assert trajectory.cause.message.startswith("messages[0]: content[") or name == "thin", name


async def test_tool_that_shows_bad_media_answers_with_the_error(folder: Path) -> None:
    bad = list(make_bad_media().values())[:4]
    left = iter([part for (*_, part), _ in bad])

    @function_tool
    async def show() -> Any:
        """Show."""
        part = next(left)
        return ToolResult("see", **{f"{part['type']}s": [part[part["type"]]]})

    batch = await play(config_of(folder, (CALL, "ok")), *["go"] * len(bad), tools=[show])
    assert {each.outcome for each in batch.trajectories} == {Outcome.COMPLETED}
    answers = [each.messages[2] for each in batch.trajectories]
    assert not any(each.parts for each in answers)
    for _, said in bad:
        assert any(said in str(each.content) for each in answers), (said, answers)


async def test_rejected_prompt_is_saved_without_the_content_of_its_media(
    folder: Path, tmp_path: Path
) -> None:
    batch = await play(config_of(folder), image(np.zeros((4, 4, 3))), image("/etc/hostname"))
    batch.save(tmp_path)
    loaded = [each.prompt for each in RolloutBatch.load(tmp_path).trajectories]
    shown = [prompt.messages[0]["content"][1]["image"] for prompt in loaded if prompt is not None]
    assert shown == ["<ndarray>", "/etc/hostname"]


LIMITS: dict[str, tuple[dict[str, Any], Any]] = {
    "media.max_bytes = 1000: it has": ({"max_bytes": 1000}, image(encoded(picture()))),
    "media.max_pixels = 100: 60 x 44 are 2640": ({"max_pixels": 100}, image(picture())),
    "media.max_frames = 3: it has 4": ({"max_frames": 3}, video(frames(4))),
    "media.max_frames = 5: it has 12": ({"max_frames": 5}, video(video_file(12))),
    "media.max_seconds = 1.0: it takes 2.0 s": ({"max_seconds": 1.0}, video(video_file(12))),
    "media.max_seconds = 0.1: it takes 2.0 s": ({"max_seconds": 0.1}, video(frames(4), fps=2)),
}


@pytest.mark.parametrize(("said", "case"), LIMITS.items(), ids=LIMITS)
def test_media_past_a_limit_are_refused_by_its_field(
    said: str, case: tuple[dict[str, Any], Any]
) -> None:
    limits, (*_, part) = case
    source = media_part("part", part)
    assert isinstance(source, MediaSource)
    with pytest.raises(MediaError, match=re.escape(said)):
        read_media(source, MediaConfig(**limits))


async def test_huge_data_url_is_refused_without_another_copy(folder: Path) -> None:
    url = "data:image/png;base64," + "A" * (1 << 25)
    prompt = Prompt(messages=[{"role": "user", "content": image(url)}])
    async with rollout.open_rollout(config_of(folder, max_bytes=1 << 20)) as runtime:
        tracemalloc.start()
        try:
            batch = await runtime.generate([prompt], samples=1)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    check_rejected(batch, "media.max_bytes = 1048576: it has about 25165824 bytes")
    assert peak < 16 * 1024 * 1024


async def test_path_is_opened_below_a_root_only(folder: Path, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for each in (inside, outside):
        each.mkdir()
        (each / "a.png").write_bytes(encoded(picture()))
    os.symlink(outside / "a.png", inside / "link.png")
    os.symlink(inside / "a.png", inside / "good.png")
    os.mkfifo(inside / "pipe")
    names = ["a.png", "good.png", "link.png", "../out/a.png", "none.png", ".", "pipe"]
    paths: list[Any] = [str(inside / name) for name in names]
    paths[1] = inside / names[1]
    batch = await play(config_of(folder, roots=(str(inside),)), *map(image, paths))
    ended = [trajectory.outcome for trajectory in batch.trajectories]
    assert ended == [Outcome.COMPLETED] * 2 + [Outcome.REJECTED] * 5
    said = [t.cause.message for t in batch.trajectories if t.cause is not None]
    for text, expected in zip(
        said,
        ("not below one of media.roots", "not below", "cannot be opened", "is no file", "no file"),
        strict=True,
    ):
        assert expected in text


def test_video_that_names_other_files_opens_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even beside the process, where FFmpeg looks for relative names."""
    (tmp_path / "movie.mp4").write_bytes(video_file(2))
    monkeypatch.chdir(tmp_path)
    for content in PLAYLISTS.values():
        with pytest.raises(MediaError, match="expected a video"):
            read_media(MediaSource("video", content), MediaConfig())


def test_video_that_breaks_off_is_refused(tmp_path: Path) -> None:
    content = solid_video(60, 64, 64, tmp_path / "a.mp4")
    read_media(MediaSource("video", content), MediaConfig())
    with pytest.raises(MediaError, match="a video that breaks off: "):
        read_media(MediaSource("video", content[: int(len(content) * 0.9)]), MediaConfig())


async def test_video_of_few_bytes_and_many_pixels_is_refused(folder: Path, tmp_path: Path) -> None:
    content = solid_video(12, 640, 480, tmp_path / "a.mp4")
    assert len(content) < 20_000
    batch = await play(config_of(folder, max_bytes=20_000), video(content))
    check_rejected(batch, "media.max_bytes = 20000: 4 frames have 3686400 decoded")


def turned() -> Any:
    """A picture as a camera writes it: 40 x 30, to be shown upright as 30 x 40."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return Image.open(io.BytesIO(saved(picture(40, 30), "jpeg", exif=exif)))


def lines(content: bytes) -> str:
    """A data URL of lines, as mails and shells write them."""
    return f"data:image/png;base64,\n{base64.encodebytes(content).decode()}"


def percents(content: bytes) -> str:
    """A data URL in which what is special in URLs is written out."""
    return f"data:image/png;base64,{quote(base64.b64encode(content).decode(), safe='')}"


def camera_file() -> bytes:
    """A JPEG of two pictures, of which the second is for other readers."""
    return saved(picture(40, 30), "MPO", save_all=True, append_images=[picture(40, 30)])


GOOD: dict[str, tuple[Any, tuple[int, int]]] = {
    "lines": (lines(encoded(picture())), (60, 44)),
    "percents": (percents(encoded(picture())), (60, 44)),
    "camera": (camera_file(), (40, 30)),
    "turned": (turned(), (30, 40)),
    "CMYK": (saved(picture().convert("CMYK"), "jpeg"), (60, 44)),
    "alpha": (picture().convert("RGBA"), (60, 44)),
}


def test_picture_that_is_loaded_by_many_at_once_is_itself() -> None:
    content = saved(picture(400, 300), "jpeg")
    shown = Image.open(io.BytesIO(content))
    for _ in range(3):
        unloaded = Image.open(io.BytesIO(content))
        sources = [MediaSource("image", unloaded)] * 4
        with ThreadPoolExecutor(4) as threads:
            media = list(threads.map(read_media, sources, [MediaConfig()] * 4))
        assert all(np.array_equal(decode(each), np.asarray(shown)) for each in media)


@pytest.mark.parametrize(("value", "size"), GOOD.values(), ids=GOOD)
def test_picture_of_an_unusual_form_is_read(value: Any, size: tuple[int, int]) -> None:
    medium = read_media(MediaSource("image", value), MediaConfig())
    assert (medium.width, medium.height) == size
    assert decode(medium).shape == (size[1], size[0], 3)


def test_frames_are_shown_upright_as_pictures_are() -> None:
    medium = read_media(MediaSource("video", [turned(), turned()]), MediaConfig())
    assert decode(medium).shape == (2, 40, 30, 3)
    single = read_media(MediaSource("image", turned()), MediaConfig())
    assert np.array_equal(decode(medium)[0], decode(single))


async def test_path_in_a_text_is_never_opened(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture()))
    path = str(tmp_path / "a.png")
    said = [path, [{"type": "text", "text": path}], [path], f"file://{path}"]
    batch = await play(config_of(folder, roots=(str(tmp_path),)), *said)
    assert all(not trajectory.transcript.media for trajectory in batch.trajectories)
    assert all(t.outcome is Outcome.COMPLETED for t in batch.trajectories)


async def test_image_of_a_tool_is_fetched_while_its_trajectory_is_carried(folder: Path) -> None:
    """That takes longer than a turn may, and no call has the trajectory for so long."""

    @function_tool
    def show() -> ToolResult:
        """Show it."""
        return ToolResult(text="here", images=["https://host/a.png"])

    is_fetching, is_late = anyio.Event(), anyio.Event()

    async def fetch(_url: str) -> bytes:
        is_fetching.set()
        await is_late.wait()
        return encoded(picture())

    opened = attrs.evolve(
        config_of(folder, [CALL, "ok"], fetch_s=10.0),
        agent=AgentConfig(name="tool_agent", tool_format="hermes"),
        limits=LimitsConfig(turn_s=2.0, tool_s=2.0, generation_s=2.0),
        scheduling=SchedulingConfig(samples_per_prompt=1),
    )
    prompts = [Prompt(messages=[{"role": "user", "content": "go"}], uid="p0")]
    policy = GroupPolicy(surplus="carry")
    async with rollout.open_rollout(opened, [show], media_fetcher=fetch) as runtime:
        async with runtime.stream_groups(prompts, policy=policy):
            await is_fetching.wait()
        await anyio.sleep(2.1)
        is_late.set()
        batch = await runtime.collect(prompts, 1)
    assert [t.outcome for t in batch.trajectories] == [Outcome.COMPLETED]


async def test_url_is_fetched_by_the_given_function_alone(folder: Path) -> None:
    asked: list[str] = []

    async def fetch(url: str) -> bytes:
        asked.append(url)
        if url.endswith("late"):
            await anyio.sleep_forever()
        return b"text" if url.endswith("text") else encoded(picture())

    urls = [f"https://host/{name}" for name in ("a.png", "text", "late")]
    batch = await play(config_of(folder, fetch_s=0.05), *map(image, urls), media_fetcher=fetch)
    assert sorted(asked) == sorted(urls)
    good, text, late = batch.trajectories
    assert good.outcome is Outcome.COMPLETED
    assert len(good.transcript.media) == 1
    assert text.cause is not None
    assert "expected a picture" in text.cause.message
    assert late.cause is not None
    assert "media.fetch_s = 0.05: https://host/late was not fetched" in late.cause.message
    batch = await play(
        config_of(folder), image(urls[0]), media_fetcher=lambda _: encoded(picture())
    )
    assert batch.trajectories[0].outcome is Outcome.COMPLETED


class Response:
    """As verl's `ToolResponse`."""

    def __init__(self, text: str | None, image: Any = None, video: Any = None) -> None:
        self.text, self.image, self.video = text, image, video


ANSWERS: dict[str, Any] = {
    "images": lambda: ToolResult("see", images=[picture(), encoded(picture(28, 28))]),
    "video": lambda: ToolResult("see", videos=[frames(4)]),
    "its bytes": lambda: encoded(picture()),
    "parts": lambda: [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": data_url(encoded(picture()))}},
    ],
    "verl": lambda: read_answer((Response("see", [picture()], [frames(4)]), 0.5, {})),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_tool_that_shows_media_is_seen_by_the_model(folder: Path, answer: Any) -> None:
    @function_tool
    async def show() -> Any:
        """Show."""
        return answer()

    batch = await play(config_of(folder, (CALL, "I see")), image(picture(33, 81)), tools=[show])
    (trajectory,) = batch.trajectories
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.cause
    transcript = trajectory.transcript
    first, *others = transcript.media
    assert first.start < transcript.prompt_length
    assert others
    template = template_of(folder)
    assert template.processor is not None
    shown = [each for each in trajectory.messages[2].parts if not isinstance(each, str)]
    assert [each.medium for each in others] == shown
    assert np.array_equal(
        template.places_of(transcript.ids().tolist(), [each.medium for each in transcript.media]),
        transcript.media,
    )
    assert not transcript.mask()[others[0].start : others[0].start + others[0].count].any()
    assert decode(shown[0]).shape[-1] == 3


#: The system's Python has no library of pictures.
DRAW = """import struct, zlib
def part(name, data):
    body = name + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
head = part(b"IHDR", struct.pack(">IIBBBBB", 50, 40, 8, 2, 0, 0, 0))
rows = part(b"IDAT", zlib.compress((bytes(1) + bytes([255, 0, 0]) * 50) * 40))
start = bytes([137, 80, 78, 71, 13, 10, 26, 10])
open("plot.png", "wb").write(start + head + rows + part(b"IEND", b""))
print("drawn")
"""
PLOTS = {
    "python": ("exec(open('draw.py').read())", "print('again')", "exec(open('draw.py').read()); x"),
    "shell": ("python3 draw.py", "echo again", "python3 draw.py; exit 1"),
}


@pytest.mark.parametrize("language", PLOTS)
async def test_sandbox_shows_the_plots_of_a_call(folder: Path, language: str) -> None:
    calls = []
    for code in PLOTS[language]:
        arguments = {"code" if language == "python" else "command": code}
        call = json.dumps({"name": language, "arguments": arguments})
        calls.append(f"<tool_call>\n{call}\n</tool_call>")
    config = attrs.evolve(
        config_of(folder, (*calls, "I see")), sandbox=SandboxConfig(files={"draw.py": DRAW})
    )
    tool = (PythonTool if language == "python" else ShellTool)(max_pictures=1)
    (trajectory,) = (await play(config, "plot it", tools=[tool])).trajectories
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.cause
    shown, *others = (message for message in trajectory.messages if message.role == "tool")
    assert isinstance(shown.parts[0], Media), shown
    assert shown.parts[1] == "drawn\n"
    assert decode(shown.parts[0])[0, 0].tolist() == [255, 0, 0]
    assert (others[0].content, others[0].parts) == ("again\n", ())
    assert (others[1].parts, "drawn" in others[1].content) == ((), True)


@function_tool("show")
async def show_small() -> Any:
    """Show."""
    return ToolResult("see", images=[picture(28, 28)])


async def test_prompt_or_tool_that_shows_too_much_is_told_the_limit(folder: Path) -> None:
    config = config_of(folder, (CALL, CALL, "I see"), max_count=2)
    shown = image(picture())
    trajectory, rejected = (await play(config, shown, shown * 3, tools=[show_small])).trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    assert len(trajectory.transcript.media) == 2
    said = "media.max_count = 2: the conversation has 3"
    assert trajectory.messages[4].content == said
    assert rejected.outcome is Outcome.REJECTED
    assert rejected.cause is not None
    assert said in rejected.cause.message


async def test_transcript_of_a_trajectory_is_its_conversation_rendered_again(folder: Path) -> None:
    @function_tool
    async def show() -> Any:
        """Show."""
        return ToolResult("see", images=[picture()], videos=[video_file()])

    config = config_of(folder, (CALL, "I see"))
    config = attrs.evolve(
        config, agent=AgentConfig(tool_format="hermes", tokenization_check="strict")
    )
    (trajectory,) = (await play(config, image(picture()), tools=[show])).trajectories
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.cause
    assert trajectory.metrics["tokenization/identical"] == 1


async def test_reward_process_sees_the_images(folder: Path) -> None:
    config = attrs.evolve(config_of(folder, (CALL, "I see")), rewards=RewardsConfig(processes=1))
    batch = await play(
        config, image(picture()), tools=[show_small], reward="isolated_rewards:pixels_seen"
    )
    (trajectory,) = batch.trajectories
    assert trajectory.reward == 60 * 44 + 60 * 44 + 28 * 28, trajectory.cause


def check_same_media(first: RolloutBatch, again: RolloutBatch) -> None:
    """The only trajectory of each has the same tokens, images and rows."""
    (before,), (after,) = first.trajectories, again.trajectories
    assert (before.outcome, after.outcome) == (Outcome.COMPLETED, Outcome.COMPLETED), after.cause
    assert len(before.transcript.media) == 2
    assert after.transcript.ids_bytes() == before.transcript.ids_bytes()
    assert after.transcript.log_probs().tobytes() == before.transcript.log_probs().tobytes()
    assert after.transcript.media == before.transcript.media
    assert all(each.medium.is_intact for each in after.transcript.media)
    assert list(after.messages) == list(before.messages)
    assert str(after) == str(before)
    for one, other in zip(first.multi_modal_inputs, again.multi_modal_inputs, strict=True):
        assert one.keys() == other.keys()
        assert all(bool((one[name] == other[name]).all()) for name in one)


async def test_resumed_trajectory_with_images_shows_them_again(
    folder: Path, tmp_path: Path
) -> None:
    shown = []

    @function_tool
    async def show() -> Any:
        """Show a picture."""
        shown.append(1)
        return ToolResult("here", images=[{"type": "image", "image": picture(64, 64)}])

    journal = JournalConfig(path=str(tmp_path / "journal"))
    config = attrs.evolve(config_of(folder, (CALL, "A square.")), journal=journal)
    content = [{"type": "image", "image": data_url(encoded(picture(56, 56)))}]
    first = await play(config, content, tools=[show])
    async with rollout.open_rollout(config, [show], resume=True) as runtime:
        prompt = Prompt(messages=[{"role": "user", "content": content}], uid="0")
        check_same_media(first, await runtime.generate([prompt], samples=1))
        statistics = runtime.statistics().journal
        assert statistics is not None
        assert (statistics.returned, statistics.recalled) == (1, 0)
    (loaded,) = load_trajectories(tmp_path / "journal")
    assert list(loaded.transcript.ids()) == list(first.trajectories[0].transcript.ids())
    cut_before_end(tmp_path / "journal")
    check_same_media(first, await play(config, content, tools=[show], resume=True))
    assert len(shown) == 1


async def test_placeholder_that_the_model_samples_ends_its_turn_before_it(folder: Path) -> None:
    """No forward pass takes placeholders that stand for nothing."""
    token = "<|image_pad|>"
    config = config_of(folder, (f"{CALL}{token}{token} dropped", "I see"))
    batch = await play(config, image(picture()), "go on", samples=2, tools=[show_small])
    template = template_of(folder)
    assert template.processor is not None
    (unreal,) = template.text_ids(token)
    for trajectory in batch.trajectories:
        assert trajectory.outcome is Outcome.COMPLETED, trajectory.cause
        assert trajectory.metrics["sampled_placeholders"] == 1
        assert trajectory.metrics["discarded_tokens"] > 2
        transcript = trajectory.transcript
        first, last = transcript.generated_spans()
        assert first.finish_reason == "stop"
        assert template.decode(transcript.span_ids(first)) == CALL
        assert "I see" in template.decode(transcript.span_ids(last))
        generated = transcript.ids()[transcript.mask()]
        assert unreal not in generated
        placed = template.places_of(
            transcript.ids().tolist(), [each.medium for each in transcript.media]
        )
        assert placed == transcript.media
    assert batch.metrics["media/sampled_placeholders"] == 4


async def test_turn_that_begins_with_a_placeholder_is_empty_and_trains_nothing(
    folder: Path,
) -> None:
    batch = await play(config_of(folder, ("<|image_pad|>words",)), image(picture()))
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "never_generated")
    assert trajectory.transcript.generated_length == 0
    assert not batch.tensors["response_mask"].any()
    assert len(batch.multi_modal_inputs[0]["image_grid_thw"]) == 1
