"""Transcripts with media, built turn by turn, are what the processor makes of the whole."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from media_material import FAMILIES, encoded, frames, picture, template_of, write_model
from rollout.chat.transcript import Transcript
from rollout.config import MediaConfig
from rollout.errors import TemplateError
from rollout.media import Media, decode
from rollout.media.parts import MediaSource, media_part
from rollout.media.reading import read_media

if TYPE_CHECKING:
    from rollout.chat import ChatTemplate

pytestmark = pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed")

LIMITS = MediaConfig()
APPENDABLE = tuple(family for family in FAMILIES if family != "llava_onevision")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


_TEMPLATES: dict[str, ChatTemplate] = {}


@pytest.fixture
def template(family: str, tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    if family not in _TEMPLATES:
        _TEMPLATES[family] = template_of(write_model(family, tmp_path_factory.mktemp(family)))
    return _TEMPLATES[family]


class Shown(NamedTuple):
    """An image or a video as a user has it."""

    kind: str
    value: Any


def medium(kind: str, seed: int, width: int = 60, height: int = 44) -> Shown:
    video = frames(4 + seed % 2, width=width, height=height, seed=seed)
    return Shown(kind, picture(width, height, seed) if kind == "image" else video)


def read(template: ChatTemplate, shown: Shown) -> Media:
    source = media_part("part", {"type": shown.kind, shown.kind: shown.value})
    assert isinstance(source, MediaSource)
    assert template.processor is not None
    return template.processor.sampled(read_media(source, LIMITS))


def as_read(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their media read, as trajectories have them."""

    def own(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        kind = part["type"]
        return {"type": kind, kind: read(template, Shown(kind, part[kind]))}

    return [
        m if isinstance(m["content"], str) else {**m, "content": [own(p) for p in m["content"]]}
        for m in messages
    ]


def part(given: Shown) -> dict[str, Any]:
    return {"type": given.kind, given.kind: given.value}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def whole(template: ChatTemplate, messages: list[dict[str, Any]], *, is_open: bool) -> Any:
    """One call of the processor on the whole conversation, as transformers' users make it."""
    assert template.processor is not None
    processor = template.processor.processor
    rendered = processor.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=is_open
    )
    shown = [p for m in messages if isinstance(m["content"], list) for p in m["content"]]
    images = [p["image"] for p in shown if p["type"] == "image"]
    videos = [p["video"] for p in shown if p["type"] == "video"]
    given: dict[str, Any] = {}
    if images:
        given["images"] = [images]
    if videos:
        given["videos"] = videos
    return processor(text=[rendered], return_tensors="pt", **given)


def play(template: ChatTemplate, messages: list[dict[str, Any]]) -> Transcript:
    """A transcript of the messages: those of the assistant as if it had sampled them."""
    messages = as_read(template, messages)
    transcript = Transcript()
    waiting: list[dict[str, Any]] = []
    last: list[int] = []
    for message in [*messages, {"role": "assistant", "content": None}]:
        if message["role"] != "assistant":
            waiting.append(message)
            continue
        shown = [p for m in waiting if isinstance(m["content"], list) for p in m["content"]]
        media = [p[p["type"]] for p in shown if p["type"] != "text"]
        if not transcript:
            ids = template.prompt_ids(waiting)
            transcript.append_prompt(ids, media=template.places_of(ids, media))
        else:
            before = [each.medium for each in transcript.media]
            ids = template.observation_ids(waiting, after=last, before=before)
            transcript.append_observation(ids, media=template.places_of(ids, media))
        waiting = []
        if message["content"] is not None:
            last = template.text_ids(message["content"]) + list(template.end_ids())
            transcript.append_generated(
                last, [0.0] * len(last), versions=[(0, len(last))], finish_reason="stop"
            )
    return transcript


def check_equal(template: ChatTemplate, messages: list[dict[str, Any]]) -> None:
    """Ids, features and places of the transcript are those of the processor's one call."""
    transcript = play(template, messages)
    expected = whole(template, messages, is_open=True)
    assert transcript.ids().tolist() == expected["input_ids"][0].tolist()
    processor = template.processor
    assert processor is not None
    features = processor.features([each.medium for each in transcript.media])
    wanted = {n for n in expected if n not in ("input_ids", "attention_mask", "mm_token_type_ids")}
    assert features.keys() == wanted
    for name, value in features.items():
        assert np.array_equal(np.asarray(value), np.asarray(expected[name])), name
    for each in transcript.media:
        own = transcript.ids()[each.start : each.start + each.count]
        placeholder = processor.placeholder_ids[each.medium.kind]
        assert own[0] == own[-1] == placeholder
    places = [at for e in transcript.media for at in range(e.start, e.start + e.count)]
    assert not transcript.mask()[places].any()


KINDS = st.sampled_from(("image", "video"))
WORDS = st.sampled_from(("", "Look:", " at 0.5 seconds", "what is\n", "12 <", "é漢 "))
SHAPES = st.sampled_from(((60, 44), (28, 28), (100, 30), (33, 81)))


@st.composite
def contents(draw: st.DrawFn, kinds: Any = KINDS) -> list[dict[str, Any]]:
    parts = []
    for _ in range(draw(st.integers(0, 2))):
        parts.append(text(draw(WORDS)))
        parts.append(part(medium(draw(kinds), draw(st.integers(0, 5)), *draw(SHAPES))))
    return [*parts, text(draw(WORDS) or "and?")]


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": draw(contents())}]
    for _ in range(draw(st.integers(0, 3))):
        messages.append({"role": "assistant", "content": draw(st.sampled_from(("ok", "so be it")))})
        role = draw(st.sampled_from(("tool", "user")))
        messages += [
            {"role": role, "content": draw(contents())} for _ in range(draw(st.integers(1, 2)))
        ]
    return messages


@pytest.mark.parametrize("family", APPENDABLE, indirect=True)
@given(messages=conversations())
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_transcript_of_turns_is_what_the_processor_makes_of_the_whole(
    template: ChatTemplate, messages: list[dict[str, Any]]
) -> None:
    check_equal(template, messages)


@given(content=contents(st.just("image")))
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_prompt_is_what_the_processor_makes_of_it(
    template: ChatTemplate, content: list[dict[str, Any]]
) -> None:
    check_equal(template, [{"role": "user", "content": content}])


@pytest.mark.parametrize("family", ["llava_onevision"], indirect=True)
def test_processor_that_rewrites_earlier_media_refuses_to_append(template: ChatTemplate) -> None:
    first = [part(medium("image", 0)), text("?")]
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [part(medium("image", 1))]},
    ]
    with pytest.raises(TemplateError, match="none can be appended; show all in the prompt"):
        play(template, messages)


def test_placeholders_that_a_user_spells_stay_text(template: ChatTemplate) -> None:
    processor = template.processor
    assert processor is not None
    spelled = " ".join(processor.tokens.values())
    shown = read(template, medium("image", 0))
    content = [text(spelled), {"type": "image", "image": shown}, text(spelled)]
    messages = [{"role": "user", "content": content}]
    ids = template.prompt_ids(messages)
    (placed,) = template.places_of(ids, [shown])
    own = set(processor.placeholder_ids.values())
    assert all(
        placed.start <= at < placed.start + placed.count
        for at, token in enumerate(ids)
        if token in own
    )
    assert template.decode(ids).count(spelled) == 2
    transcript = Transcript()
    transcript.append_prompt(ids)
    assert template.drift(transcript, messages, {}).kind == "identical"


@pytest.mark.parametrize("family", APPENDABLE, indirect=True)
def test_positions_are_those_of_the_models_own_code(template: ChatTemplate, family: str) -> None:
    import transformers

    shown = [medium("image", 1, 100, 30), medium("video", 2), medium("image", 3)]
    messages = [{"role": "user", "content": [text("a"), *map(part, shown), text("?")]}]
    transcript, expected = play(template, messages), whole(template, messages, is_open=True)
    processor = template.processor
    assert processor is not None
    config = transformers.AutoConfig.from_pretrained(processor.processor.tokenizer.name_or_path)
    model = transformers.AutoModel.from_config(config)
    given = {n: v for n, v in expected.items() if "pixel" not in n}
    positions, _ = model.get_rope_index(**given)
    own = processor.position_ids(transcript.ids(), transcript.media)
    assert own.shape == (3, len(transcript))
    assert np.array_equal(own, positions[:, 0].numpy())


def test_picture_given_in_any_form_has_the_same_pixels() -> None:
    import base64

    shown = picture()
    data = base64.b64encode(encoded(shown)).decode()
    url = f"data:image/png;base64,{data}"
    forms: list[Any] = [
        *(shown, np.asarray(shown), encoded(shown)),
        {"type": "image", "image": url},
        {"type": "image", "base64": data},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        {"type": "image", "data": data, "mimeType": "image/png"},
    ]
    for form in forms:
        source = media_part("x", form)
        assert isinstance(source, MediaSource)
        assert np.array_equal(decode(read_media(source, LIMITS)), np.asarray(shown)), form
