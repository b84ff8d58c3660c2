"""Whatever a chat template looks at in contents, prompts and answers are what it would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chat_material import tokenizer
from rollout.chat import ChatTemplate
from rollout.chat.traced_text import Trace
from rollout.errors import TemplateError

HEAD = "{% for message in messages %}<|im_start|>{{ message.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
#: What a template does with a content, and one of which it makes something else.
LOOKS = {
    "by another name": (
        "{% set text = message.content %}{{ '[OFF]' if text == '/off' else text }}",
        "/off",
    ),
    "in a list": ("{{ '[OFF]' if message.content in ['/a', '/b'] else message.content }}", "/b"),
    "begins with one of": (
        "{% if message.content.startswith(('/a', '/b')) %}[C]{% endif %}{{ message.content }}",
        "/b x",
    ),
    "first letter": (
        "{% if message.content[0] == '/' %}[C]{% endif %}{{ message.content }}",
        "/b x",
    ),
    "a name for the flag": (
        "{% set flag = '/off' %}{{ message.content }}"
        "{% if flag in message.content %}[O]{% endif %}",
        "hi /off",
    ),
    "flags in a loop": (
        "{{ message.content }}{% for flag in ['/on', '/off'] %}"
        "{% if flag in message.content %}[O]{% endif %}{% endfor %}",
        "hi /off",
    ),
    "length": (
        "{% if message.content|length > 1000 %}[L]{% endif %}{{ message.content }}",
        "x" * 2000,
    ),
    "cut": ("{{ message.content[:1000] }}", "x" * 2000),
    "blank": (
        "{% if message.content|trim %}{{ message.content }}{% else %}(none){% endif %}",
        "  ",
    ),
    "in a macro": (
        "{% macro off(t) %}{{ '[O]' if t == '/off' else t }}{% endmacro %}"
        "{{ off(message.content) }}",
        "/off",
    ),
    "lower": ("{{ '[O]' if message.content|lower == '/off' else message.content }}", "/OFF"),
    "stripped": ("{{ '[O]' if message.content.strip() == '/off' else message.content }}", " /off"),
    "parts": ("{{ message.content.split('[SEP]')[-1] }}", "a[SEP]b"),
    "digits": ("{{ '[N]' if message.content.isdigit() else message.content }}", "123"),
    "upper": ("{{ '[U]' if message.content is upper else message.content }}", "ABC"),
    "selected": (
        "{% if messages|selectattr('content','equalto','/off')|list %}[O]{% endif %}"
        "{{ message.content }}",
        "/off",
    ),
    "joined": (
        "{% set said = '> ' + message.content %}{% if said == '> /off' %}[O]{% endif %}"
        "{{ message.content }}",
        "/off",
    ),
    "replaced": ("{{ message.content.replace('x', 'y') }}", "a x b"),
    "what a macro writes": (
        "{% macro said(c) %}{{ c }}{% endmacro %}{% set t = said(message.content) %}"
        "{% if t == '/off' %}[O]{% endif %}{{ t }}",
        "/off",
    ),
    "length of what a macro writes": (
        "{% macro said(c) %}{{ c }}{% endmacro %}{% set t = said(message.content) %}"
        "{% if t|length > 1000 %}[L]{% endif %}{{ t }}",
        "x" * 2000,
    ),
    "a block": (
        "{% set t %}{{ message.content }}{% endset %}{% if t == '/off' %}[O]{% endif %}{{ t }}",
        "/off",
    ),
    "number": ("{% if message.content|int > 5 %}[O]{% endif %}{{ message.content }}", "7"),
    "title": ("{% if message.content|title == 'Off' %}[O]{% endif %}{{ message.content }}", "off"),
    "length in JSON": (
        "{% if (messages|tojson)|length > 200 %}[L]{% endif %}{{ message.content }}",
        "x" * 300,
    ),
    "cut with its role": ("{{ (message.role ~ ': ' ~ message.content)[:100] }}", "x" * 300),
    "cut in a text": ("{{ ('Said: %s' % message.content)[:100] }}", "x" * 300),
    "length with its role": (
        "{% set t = [message.role, message.content]|join(': ') %}"
        "{% if t|length > 100 %}[L]{% endif %}{{ t }}",
        "x" * 300,
    ),
    "equal with its role": (
        "{% set t = message.role ~ ': ' ~ message.content %}"
        "{% if t == 'user: stop' %}[O]{% endif %}{{ t }}",
        "stop",
    ),
    "cut of what a macro writes": (
        "{% macro said(c) %}{{ c }}{% endmacro %}{{ said(message.content)[:100] }}",
        "x" * 300,
    ),
    "cut of a block": (
        "{% set t %}{{ message.content }}{% endset %}{{ t[:100] }}",
        "x" * 300,
    ),
    "cut in JSON": ("{{ (message.content|tojson)[:100] }}", "x" * 300),
    "length of what is safe": (
        "{% if message.content|safe|length > 100 %}[L]{% endif %}{{ message.content }}",
        "x" * 300,
    ),
    "length of all so far": (
        "{% set ns = namespace(all='') %}{% set ns.all = ns.all ~ message.content %}"
        "{% if ns.all|length > 100 %}[L]{% endif %}{{ message.content }}",
        "x" * 300,
    ),
    "letters": ("{% for each in message.content %}{{ each }}.{% endfor %}", "ab"),
}


def written(source: str, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """What our prompt says, and what the template writes."""
    own = tokenizer("qwen")
    template = ChatTemplate(own, chat_template=source)
    template.prompt_ids([{"role": "user", "content": "of the same pattern"}] * len(messages))
    said = template.decode(template.prompt_ids(messages))
    whole = own.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=True, tokenize=False
    )
    return said, str(whole)


@pytest.mark.parametrize("name", LOOKS)
def test_prompt_is_what_the_template_writes_whatever_it_looks_at(name: str) -> None:
    body, content = LOOKS[name]
    ours, theirs = written(HEAD + body + TAIL, [{"role": "user", "content": content}])
    assert ours == theirs


def test_prompt_of_messages_that_a_template_compares_is_what_it_writes() -> None:
    body = (
        "{{ message.content }}{% if not loop.first and message.content == "
        "messages[loop.index0 - 1].content %}[AGAIN]{% endif %}"
    )
    ours, theirs = written(HEAD + body + TAIL, [{"role": "user", "content": "x"}] * 2)
    assert ours == theirs
    assert "[AGAIN]" in ours


def test_answer_of_a_tool_is_what_the_template_writes_whatever_it_looks_at() -> None:
    body = "{% if message.content|length > 5 %}[LONG]{% endif %}{{ message.content }}"
    template = ChatTemplate(tokenizer("qwen"), chat_template=HEAD + body + TAIL)
    for content in ("short", "rather long"):
        said, _, _ = template.observation_text([{"role": "user", "content": content}])
        assert ("[LONG]" in said.text) == (len(content) > 5)
        assert content in said.text


@pytest.mark.parametrize("name", [name for name in LOOKS if name.startswith(("cut", "length"))])
def test_long_answer_of_a_tool_is_what_the_template_writes_however_it_cuts(name: str) -> None:
    body, content = LOOKS[name]
    own, source = tokenizer("qwen"), HEAD + body + TAIL
    template = ChatTemplate(own, chat_template=source)
    messages = [{"role": "tool", "content": content}]
    said = template.observation_text(messages)[0].text
    whole = own.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=True, tokenize=False
    )
    assert said.endswith(str(whole).partition("<|im_start|>")[2])


@pytest.mark.parametrize("count", [1, 3])
def test_tags_of_an_assistant_in_a_prompt_are_the_templates(count: int) -> None:
    own = tokenizer("qwen")
    template = ChatTemplate(own, chat_template=HEAD + "{{ message.content }}" + TAIL)
    tags = [
        each for each in template.encoder.specials if each.startswith("<") and "im_" not in each
    ]
    messages = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": f"a {tags[0]} b"},
        {"role": "user", "content": "ask again"},
    ] * count
    assert template.encoder.specials[tags[0]] in template.prompt_ids(messages)


def test_what_real_templates_look_at_is_known_so_that_they_are_not_asked_again() -> None:
    asked = 0
    for path in sorted(Path(__file__).parent.joinpath("chat_formats").glob("*.jinja")):
        source = path.read_text()
        options = {"bos_token": "<s>"}
        template = ChatTemplate(
            tokenizer("qwen"), chat_template=source, chat_template_kwargs=options
        )
        try:
            template.prompt_ids([{"role": "user", "content": "one"}])
        except TemplateError:
            continue
        render = template._renderer.render
        template._renderer.render = lambda *_a, _render=render: pytest.fail("asked")  # type: ignore[method-assign]
        template.prompt_ids([{"role": "user", "content": "another one"}])
        asked += 1
    assert asked >= 10


def test_traced_text_that_is_compared_with_another_one_is_lost() -> None:
    one, other = Trace(), Trace()
    assert one.text("a") == other.text("a")
    assert one.is_lost or other.is_lost


NAMES = {
    "trimmed": ("{{ message.name|trim }}: {{ message.content|trim }}", {"name": " Ann "}),
    "in JSON": (
        '{{ {"name": message.name or "", "content": message.content}|tojson }}',
        {"name": 'Ann "A"'},
    ),
    "id that is a number": (
        '{{ (message.tool_call_id or "")|tojson }}: {{ message.content }}',
        {"tool_call_id": 5},
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_written_as_the_template_writes_them(name: str) -> None:
    body, fields = NAMES[name]
    usual = dict.fromkeys(fields, "usual")
    own = tokenizer("qwen")
    template = ChatTemplate(own, chat_template=f"{HEAD}{body}{TAIL}")
    for role in ("user", "tool"):
        for given in (usual, fields):
            message = {"role": role, "content": "hi", **given}
            whole = own.apply_chat_template(
                [dict(message)],
                chat_template=f"{HEAD}{body}{TAIL}",
                add_generation_prompt=True,
                tokenize=False,
            )
            assert template.decode(template.prompt_ids([message])) == whole
            said = template.observation_text([message])[0].text
            assert said.endswith(whole.partition("<|im_start|>")[2])


@pytest.mark.parametrize(("at", "is_asked"), [("tool", True), ("system", False)])
def test_template_that_tells_the_time_is_asked_where_it_does(at: str, is_asked: bool) -> None:
    body = f"{{% if message.role == '{at}' %}}{{{{ strftime_now('%T') }}}}{{% endif %}}"
    own = tokenizer("qwen")
    template = ChatTemplate(own, chat_template=f"{HEAD}{body}{{{{ message.content }}}}{TAIL}")
    answer = [{"role": "tool", "content": "a"}]
    template.observation_text(answer)
    asked: list[object] = []
    rendering = own.apply_chat_template

    def render(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return rendering(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "apply_chat_template", render)
        template.observation_text(answer)
    assert bool(asked) is is_asked
