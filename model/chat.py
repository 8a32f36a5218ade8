"""How messages become token ids, in the ChatML format, by appending only.

What was sampled is never tokenised again: an episode is the ids of the prompt, the ids that the sampler returned, the ids that
close the turn, the ids of the next messages, and so on.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast

from transformers import PreTrainedTokenizerBase

from model.tokenizer import END_OF_TURN, START_OF_TURN

ToolsPrompt = Literal["none", "json"]

_TOOLS_PROMPT = """\
You can call tools. Each line between the tags describes one, with a JSON schema of its arguments:
<tools>
{tools}
</tools>
To call a tool, write one JSON object with its name and arguments between tags of this kind:
<tool_call>{{"name":"NAME","arguments":{{"KEY":"VALUE"}}}}</tool_call>"""


class ChatMessage(Protocol):
    """A message of a conversation; role is system, user, assistant or tool."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class ToolDescription(Protocol):
    """A tool that the agent may call; `parameters` is a JSON Schema object."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...


class ChatMLRenderer:
    """Renders conversations as `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`, turn after turn.

    The content of a message is encoded as plain text, so that one which spells `<|im_end|>` ends no turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools_prompt: ToolsPrompt) -> None:
        """tools_prompt: `json` lists the tools in the system message, `none` leaves them out.

        Raises ValueError when the tokenizer lacks one of the tokens that delimit turns.
        """
        vocabulary = tokenizer.get_vocab()
        missing = [token for token in (START_OF_TURN, END_OF_TURN) if token not in vocabulary]
        if missing:
            raise ValueError(
                f"the tokenizer must have the tokens {START_OF_TURN} and {END_OF_TURN}, it has no {' and no '.join(missing)}: "
                f"choose a model that was trained on ChatML"
            )
        self._tokenizer = tokenizer
        self.tools_prompt = tools_prompt
        self._start_id, self._end_id = vocabulary[START_OF_TURN], vocabulary[END_OF_TURN]
        self._newline_ids = self._encode("\n")
        self._heads: dict[str, list[int]] = {}

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sampled turn."""
        return (self._end_id,)

    def prompt_ids(self, messages: Sequence[ChatMessage], tools: Sequence[ToolDescription] = ()) -> list[int]:
        """Return the ids of all messages and of the head of the agent's next turn."""
        contents = [(message.role, message.content) for message in messages]
        if self.tools_prompt == "json" and tools:
            role, system = contents.pop(0) if contents and contents[0][0] == "system" else ("system", "")
            contents.insert(0, (role, f"{system}\n\n{_describe(tools)}".lstrip("\n")))
        return self._render(contents)

    def closing_ids(self, sampled_ids: Sequence[int]) -> list[int]:
        """Return the ids that close a sampled turn and were not sampled: the end of the turn too where the sample was cut."""
        was_cut = not sampled_ids or sampled_ids[-1] != self._end_id
        return [self._end_id, *self._newline_ids] if was_cut else list(self._newline_ids)

    def observation_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the ids of what the environment says after a closed turn, and of the head of the agent's next turn."""
        return self._render([(message.role, message.content) for message in messages])

    def turn_ids(self, text: str) -> list[int]:
        """Return the ids of a turn as the agent would sample it, its end included: for imitation, never for what was sampled."""
        return [*self._encode(text), self._end_id]

    def text(self, sampled_ids: Sequence[int]) -> str:
        """Return the text of a sampled turn, without the token that ended it."""
        ids = list(sampled_ids)
        if ids and ids[-1] == self._end_id:
            ids.pop()
        return cast(str, self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _render(self, contents: list[tuple[str, str]]) -> list[int]:
        ids: list[int] = []
        for role, content in contents:
            ids += [*self._head_ids(role), *self.turn_ids(content), *self._newline_ids]
        return ids + self._head_ids("assistant")

    def _head_ids(self, role: str) -> list[int]:
        # There are four roles, and a head stands before every message.
        if role not in self._heads:
            self._heads[role] = [self._start_id, *self._encode(f"{role}\n")]
        return self._heads[role]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def _describe(tools: Sequence[ToolDescription]) -> str:
    lines = [
        json.dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters}, ensure_ascii=False)
        for tool in tools
    ]
    return _TOOLS_PROMPT.format(tools="\n".join(lines))
