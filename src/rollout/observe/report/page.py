"""The page: one HTML file with its style, its script and its data, and nothing from elsewhere.

What a model wrote reaches it as JSON in which no ``<`` stands, and as base64; the script makes text
nodes of it. The policy in its head lets nothing but this very script and this very style run, and
no connection be made.
"""

from __future__ import annotations

import base64
import hashlib
import html
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: In the order in which they stand in the page: later ones use what earlier ones define.
SCRIPTS = ("elements", "data", "charts", "query", "table", "tokens", "trajectory", "app")


def page_pieces(title: str, report: object, blocks: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The page, piece by piece.

    Args:
        title: Of the window.
        report: What stands in the page as JSON.
        blocks: Packed data by their ids; see `rollout.observe.report.packing`.
    """
    style, script = _style(), _script()
    head, _, foot = _filled(
        _text("page.html"),
        {
            "@CSP@": _policy(style, script),
            "@TITLE@": html.escape(title),
            "@STYLE@": style,
            "@REPORT@": embedded(report),
            "@SCRIPT@": script,
        },
    ).partition("@BLOCKS@")
    yield head
    for name, packed in blocks:
        yield f'<script type="application/octet-stream" id="{name}">{packed}</script>\n'
    yield foot


def embedded(value: object) -> str:
    """JSON that can stand in a script element, whatever texts it holds."""
    text = msgspec.json.encode(value).decode()
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Each place once: what is put in may look like a place."""
    parts = []
    for place, value in values.items():
        before, _, text = text.partition(place)
        parts += [before, value]
    return "".join([*parts, text])


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _style() -> str:
    return _text("page.css")


@cache
def _script() -> str:
    parts = "\n".join(_text(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


@cache
def _text(name: str) -> str:
    return (files("rollout.observe.report") / "page" / name).read_text(encoding="utf-8")
