"""Gymnasium spaces of conversations: what an environment shows, and what an agent may answer."""

from typing import Any, get_args

from gymnasium import Space

from envs.messages import AssistantTurn, Json, Message, Observation, Role, ToolSchema, call_text, parse_turn

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class ObservationSpace(Space[Observation]):
    """All observations: any number of well-formed messages, with or without tools."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no flat array."""
        return False

    def contains(self, x: Any) -> bool:
        """Return whether `x` is an Observation made of messages and tool schemas."""
        return (
            isinstance(x, Observation)
            and isinstance(x.messages, tuple)
            and all(isinstance(m, Message) and m.role in get_args(Role) and isinstance(m.content, str) for m in x.messages)
            and isinstance(x.tools, tuple)
            and all(isinstance(schema, ToolSchema) for schema in x.tools)
        )

    def sample(self, mask: Any = None, probability: Any = None) -> Observation:
        """Return a random user message."""
        return Observation((Message("user", _word(self.np_random)),))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObservationSpace)

    __hash__ = None  # pyright: ignore - as every space: compared by value


class TurnSpace(Space["str | AssistantTurn"]):
    """All turns of an agent: any text, or a parsed turn."""

    def __init__(self, tools: tuple[ToolSchema, ...], seed: int | None = None) -> None:
        """tools: samples call these."""
        super().__init__(None, None, seed)
        self._tools = tools

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no flat array."""
        return False

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a text or an AssistantTurn."""
        return isinstance(x, (str, AssistantTurn))

    def sample(self, mask: Any = None, probability: Any = None) -> str | AssistantTurn:
        """Return a turn with one call of a random tool; random words and numbers as arguments. Without tools, an answer."""
        if not self._tools:
            return AssistantTurn(_word(self.np_random))
        schema = self._tools[int(self.np_random.integers(len(self._tools)))]
        properties = schema.parameters.get("properties", {})
        assert isinstance(properties, dict)
        arguments = {name: self._value(field) for name, field in properties.items()}
        return parse_turn(call_text(schema.name, arguments))

    def _value(self, schema: Json) -> Json:
        """Return a value of the schema's plain type; other kinds of schema get a word, which the tool may refuse."""
        kind = schema.get("type") if isinstance(schema, dict) else None
        if isinstance(schema, dict) and isinstance(choices := schema.get("enum"), list):
            return choices[int(self.np_random.integers(len(choices)))]
        samplers: dict[Json, Json] = {
            "integer": int(self.np_random.integers(1, 1000)),
            "number": float(self.np_random.uniform(1, 1000)),
            "boolean": bool(self.np_random.integers(2)),
            "array": [],
            "object": {},
            "null": None,
        }
        return samplers.get(kind, _word(self.np_random)) if isinstance(kind, str) else _word(self.np_random)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TurnSpace) and self._tools == other._tools

    __hash__ = None  # pyright: ignore - as every space: compared by value


def _word(generator: Any) -> str:
    return "".join(_LETTERS[int(index)] for index in generator.integers(len(_LETTERS), size=6))
