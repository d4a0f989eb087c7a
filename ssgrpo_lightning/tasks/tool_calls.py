"""Tool calls: a question, the tools at hand, and the calls that answer it."""

import json
from dataclasses import dataclass
from typing import Any

from ssgrpo_lightning.tasks.table import SAMPLES, Row, TableTask

_INTRODUCTION = """You may call these tools; the parameters of each are a JSON schema:
<tools>
{tools}
</tools>
Answer with one block for each call, and nothing else:
<tool_call>
{{"name": "the tool", "arguments": {{"the argument": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class ToolCalls(TableTask):
    """Rows with a question, a list of tools and the expected calls, judged by `ToolCall`.

    A tool is ``{"name", "description", "parameters"}``, its parameters a JSON schema; a wrapping
    ``{"type": "function", "function": …}`` is taken off. A call is ``{"name", "arguments"}``. Both
    columns hold JSON text, because a table gives every row of a structure the keys of all others.
    The tools stand in the system message, so that any chat template renders them.
    """

    train: str = SAMPLES + "tool_calls.jsonl[:32]"
    """Source of the training rows; by default the small sample that the package carries."""
    validation: str = SAMPLES + "tool_calls.jsonl[32:]"
    """Source of the validation rows."""
    prompt_column: str = "question"
    """Column that holds the question."""
    answer_column: str = "calls"
    """Column with the expected call, or a list of calls in order, as JSON text."""
    tools_column: str = "tools"
    """Column with the list of tools of the question, as JSON text."""
    chat: bool = True
    """Render prompts with the policy's chat template; must be true."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.chat or self.shots:
            raise ValueError(
                f"ToolCalls has chat {self.chat} and shots {self.shots}, must have chat true and "
                "shots 0: tools stand in the system message, and those of an example are not those "
                "of the question"
            )

    def columns(self) -> tuple[str, ...]:
        return (*super().columns(), self.tools_column)

    def answer(self, row: Row, where: str) -> str:
        calls = _read(row[self.answer_column], where, self.answer_column)
        names = [tool["name"] for tool in self._tools(row, where)]
        for call in calls:
            if set(call) != {"name", "arguments"} or call["name"] not in names:
                raise ValueError(
                    f"ToolCalls: {where} expects the call {call}, must have arguments and a name "
                    f"among {names}: mend or drop the row"
                )
        return json.dumps(calls, ensure_ascii=False)

    def opening(self, row: Row, where: str) -> str:
        tools = [json.dumps(tool, ensure_ascii=False) for tool in self._tools(row, where)]
        introduction = _INTRODUCTION.format(tools="\n".join(tools))
        return f"{self.system}\n\n{introduction}" if self.system else introduction

    def metadata(self, row: Row, where: str) -> dict[str, Any]:
        return {"tools": self._tools(row, where)}

    def _tools(self, row: Row, where: str) -> list[dict[str, Any]]:
        listed = _read(row[self.tools_column], where, self.tools_column)
        tools = [tool.get("function", tool) for tool in listed]
        for tool in tools:
            if "name" not in tool or not isinstance(tool.get("parameters"), dict):
                raise ValueError(
                    f"ToolCalls: {where} has the tool {tool}, must have a name and parameters that "
                    "are a JSON schema: mend or drop the row"
                )
        return tools


def _read(value: object, where: str, column: str) -> list[dict[str, Any]]:
    """A list of JSON objects, or one of them, from JSON text."""
    try:
        found = json.loads(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    found = [found] if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError(
            f"ToolCalls: {where} has {value!r} in column {column!r}, must be JSON text of an "
            "object or of a list of objects: write it with json.dumps"
        )
    return found
