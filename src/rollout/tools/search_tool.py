"""Search by an HTTP retriever, such as the one of Search-R1."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from rollout.config.checks import is_http_url
from rollout.errors import ToolError
from rollout.tools.function_tools import FunctionTool
from rollout.tools.policy import ToolPolicy, TransientError
from rollout.tools.results import ToolResult

#: Bytes of an answer that are read.
MAX_ANSWER = 16 * 2**20


class SearchTool(FunctionTool[..., ToolResult]):
    """Answers a query with the passages of a retriever; `ToolResult.data` lists its documents.

    The retriever takes ``POST {"queries": [query], "topk": n, "return_scores": true}`` and answers
    ``{"result": [[{"document": {"id", "contents"}, "score"}, …]]}``, or with documents alone.

    Args:
        url: Of the retriever.
        name: What the model calls it.
        top_k: Passages where the model asks for no number.
        max_top_k: Most that it can ask for.
        description: What the model reads about it; None takes ours.
        timeout_s: Of one request; one that fails is made again, twice.

    Raises:
        ToolError: An argument is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "search",
        top_k: int = 3,
        max_top_k: int = 10,
        description: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        fault = "" if is_http_url(url) else f"url = {url!r}; expected an http or https URL"
        if not 1 <= top_k <= max_top_k:
            fault = f"top_k = {top_k}, max_top_k = {max_top_k}; expected 1 ≤ top_k ≤ max_top_k"
        if fault:
            raise ToolError(f"search tool {name!r}: {fault}")
        self.url, self.top_k, self.timeout_s = url, top_k, timeout_s
        query = {"type": "string", "description": "What to look for, in a few words."}
        count: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": max_top_k}
        count |= {"default": top_k, "description": "How many passages."}
        schema = {
            "name": name,
            "description": description or "Search for passages about the query, the best first.",
            "parameters": {
                "type": "object",
                "properties": {"query": query, "top_k": count},
                "required": ["query"],
            },
        }
        super().__init__(self.search, name=name, schema=schema, policy=ToolPolicy(retries=2))

    def search(self, query: str, top_k: int | None = None) -> ToolResult:
        """The passages that the retriever finds.

        Raises:
            TransientError: It does not answer.
            ToolError: It refuses, or its answer is none of a retriever.
        """
        body = {"queries": [query], "topk": top_k or self.top_k, "return_scores": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                found = list(json.loads(answer.read(MAX_ANSWER))["result"][0])
            passages = [_show_passage(each, number) for number, each in enumerate(found, 1)]
        except urllib.error.HTTPError as error:
            error.close()
            kind = TransientError if error.code >= 500 or error.code == 429 else ToolError
            raise kind(f"the retriever answered HTTP {error.code} {error.reason}") from None
        except OSError as error:
            raise TransientError(f"the retriever does not answer: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ToolError(f"the retriever gave no list of results ({error!r:.100})") from error
        return ToolResult("\n\n".join(passages) or "No passage was found.", data=found)


def _show_passage(found: dict[str, Any], number: int) -> str:
    document = found.get("document", found)
    title = f" {document['title']}" if document.get("title") else ""
    text = document.get("contents", document.get("text", ""))
    return f"[{document.get('id', number)}]{title}\n{text}"
