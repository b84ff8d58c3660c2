"""A tool written for verl, in a module of its own as its configuration names it."""

from __future__ import annotations

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Note(BaseTool):
    """Keeps notes, and counts them where verl's tools may leave something for the batch."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """One more note."""
        fields = kwargs["agent_data"].extra_fields
        fields["notes"] = fields.get("notes", 0) + 1
        return ToolResponse(text=f"kept {parameters['text']}"), 0.25, {}
