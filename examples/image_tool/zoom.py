"""A tool that shows a part of the picture in question, larger; and the reward of an answer."""

from typing import Any

import rollout
from rollout.tools import Tool, ToolContext, ToolResult, ToolSession

SIDE = 224

_NUMBER = {"type": "integer", "minimum": 0}
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Look at a part of the picture more closely.",
        "parameters": {
            "type": "object",
            "properties": {
                "left": {**_NUMBER, "description": "Its left edge in pixels."},
                "top": {**_NUMBER, "description": "Its upper edge in pixels."},
                "width": {**_NUMBER, "minimum": 1, "description": "Its width in pixels."},
                "height": {**_NUMBER, "minimum": 1, "description": "Its height in pixels."},
            },
            "required": ["left", "top", "width", "height"],
            "additionalProperties": False,
        },
    },
}


class ZoomTool(Tool):
    """Crops the picture that its prompt has in ``extra["image"]``, a PIL image."""

    name = "zoom"
    schema = _SCHEMA

    async def open(self, context: ToolContext) -> ToolSession:
        return _Zoom(context.extra["image"])


class _Zoom(ToolSession):
    def __init__(self, image: Any) -> None:
        self._image = image

    async def execute(self, call: rollout.ToolCall) -> ToolResult:
        left, top = call.arguments["left"], call.arguments["top"]
        box = (left, top, left + call.arguments["width"], top + call.arguments["height"])
        if box[2] > self._image.width or box[3] > self._image.height:
            size = f"{self._image.width} x {self._image.height}"
            return ToolResult(f"the picture has {size} pixels; {box} is outside", is_error=True)
        part = self._image.crop(box).resize((SIDE, SIDE))
        return ToolResult(f"{box} of the picture, enlarged", images=[part], metrics={"zooms": 1})


def reward(trajectory: rollout.Trajectory) -> float:
    """1 where the answer names the right colour and no other one, a tenth less for each zoom."""
    said = trajectory.answer.lower()
    named = [colour for colour in ("red", "green", "blue", "yellow") if colour in said]
    is_right = named == [trajectory.prompt.ground_truth]
    return max(0.0, is_right - 0.1 * trajectory.metrics.get("tools/zoom/zooms", 0.0))
