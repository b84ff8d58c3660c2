"""A retriever over HTTP: BM25 over passages, as `SearchTool` and the configuration's search ask it.

    python examples/local_search/retriever.py passages.jsonl 8765

Each line of the file is a passage: ``{"id": ..., "title": ..., "contents": ...}``.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Passage = dict[str, Any]
K1, B = 1.2, 0.75


class Bm25:
    """Ranks passages by the words that they share with a query, by Okapi BM25."""

    def __init__(self, passages: list[Passage]) -> None:
        self.passages = passages
        self.counts = [Counter(words(f"{p.get('title', '')} {p['contents']}")) for p in passages]
        self.mean = sum(map(Counter.total, self.counts)) / len(passages)
        self.spread = Counter(word for count in self.counts for word in count)

    def search(self, query: str, count: int) -> list[dict[str, Any]]:
        """The best passages with their scores, the best first."""
        scores = [self.score(words(query), each) for each in self.counts]
        best = sorted(range(len(scores)), key=lambda at: -scores[at])[:count]
        return [{"document": self.passages[at], "score": scores[at]} for at in best if scores[at]]

    def score(self, query: list[str], count: Counter[str]) -> float:
        """How well one passage answers the words of a query."""
        length = 1 - B + B * count.total() / self.mean
        total = 0.0
        for word in dict.fromkeys(query):
            rarity = math.log(1 + (len(self.counts) + 0.5) / (self.spread[word] + 0.5))
            total += rarity * count[word] * (K1 + 1) / (count[word] + K1 * length)
        return total


def words(text: str) -> list[str]:
    """The words of a text, without their case."""
    return re.findall(r"\w+", text.lower())


def serve(passages: list[Passage], port: int = 0) -> ThreadingHTTPServer:
    """A server that is ready for `serve_forever`; port 0 takes a free one."""
    index = Bm25(passages)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = [index.search(query, asked["topk"]) for query in asked["queries"]]
            body = json.dumps({"result": found}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    serve([json.loads(line) for line in lines], int(sys.argv[2])).serve_forever()
