"""Typed methods as tools: the schema that an agent sees, the strict reading of its arguments, and sync or async execution."""

import asyncio
import difflib
import inspect
import json
import re
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json
from typing_extensions import TypedDict

from envs.messages import Json, ToolSchema, json_problem, printable

MAX_QUOTE_CHARS = 60
"""A longer piece of the agent's own text is cut where an answer quotes it."""
MAX_PROBLEMS = 3
"""An answer names this many problems of one call."""

Function = TypeVar("Function", bound=Callable[..., Any])


class ToolError(Exception):
    """Raised by a tool to refuse a call for a reason that the agent should read; the state must be as before the call."""


class InvalidArgumentsError(Exception):
    """Arguments that do not fit the tool's schema; the text says what was wrong."""


def tool(function: Function) -> Function:
    """Mark a method of a `ToolEnv` as a tool of the agent.

    The schema comes from the signature: every parameter needs a type; `Annotated[int, Field(gt=0, description="...")]` adds
    bounds and a description. The docstring's first paragraph describes the tool, a line `name: text` describes a parameter.
    """
    function.__dict__["is_tool"] = True
    return function


@dataclass(frozen=True)
class Tool:
    """A method with its schema and the reader of its arguments."""

    schema: ToolSchema
    function: Callable[..., Any]
    reader: TypeAdapter[dict[str, Any]]

    def read(self, arguments: dict[str, Json]) -> dict[str, Any]:
        """Return the arguments as the method takes them, nothing coerced ("12" and true are no integers); raises InvalidArgumentsError."""
        problem = json_problem(arguments)
        if problem:
            raise InvalidArgumentsError(f"{self.schema.name}: {problem}")
        try:
            # Strict JSON, not strict Python: a date comes as a string and a tuple as a list.
            return self.reader.validate_json(json.dumps(arguments), strict=True)
        except ValidationError as error:
            raise InvalidArgumentsError(self._explain(error)) from error

    def _explain(self, error: ValidationError) -> str:
        name, properties = self.schema.name, self.schema.parameters["properties"]
        assert isinstance(properties, dict)
        problems = []
        for detail in error.errors(include_url=False, include_input=False, include_context=False)[:MAX_PROBLEMS]:
            where = ".".join(quote(str(part)) for part in detail["loc"]) or "argument list"
            if detail["type"] == "missing":
                problems.append(f"{name} needs the argument {where}")
            elif detail["type"] == "extra_forbidden":
                problems.append(f"{name} has no argument {where}{did_you_mean(where, properties)}")
            else:
                problems.append(f"{name} got a wrong {where}: {detail['msg'][0].lower()}{detail['msg'][1:]}")
        return "; ".join(problems)


def collect_tools(cls: type) -> dict[str, Tool]:
    """Return the tools of a class by name, in the order of their definition; raises TypeError where a method cannot be a tool."""
    functions: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if getattr(value, "is_tool", False):
                functions[name] = value
            else:
                functions.pop(name, None)
    return {name: _build_tool(name, function) for name, function in functions.items()}


def result_text(result: Any) -> str:
    """Return a tool's result as the agent reads it: a string as it is, all else as compact JSON."""
    return printable(result if isinstance(result, str) else to_json(result).decode())


def error_text(problem: str) -> str:
    """Return what an agent reads in place of a result: `{"error":"..."}`."""
    return json.dumps({"error": printable(problem)}, separators=(",", ":"), ensure_ascii=False)


def quote(text: str, max_chars: int = MAX_QUOTE_CHARS) -> str:
    """Return the agent's own text, cut to a length that may be repeated to it."""
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `, did you mean NEAREST?`, or nothing where no name is near."""
    nearest = difflib.get_close_matches(name[:MAX_QUOTE_CHARS], list(names), n=1)
    return f", did you mean {nearest[0]}?" if nearest else ""


class CoroutineThread:
    """Runs coroutines to their end in one thread with one event loop, started at the first use.

    One loop for all, so that what a tool keeps open (a session, a lock) stays usable; an own thread, so that a caller who
    has a running loop can use async tools too.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the coroutine's result; raises what it raises."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="env-tools")
        return self._executor.submit(self._runner.run, coroutine).result()

    def close(self) -> None:
        """Cancel what still runs in the loop and end the thread; may be called again."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.submit(self._runner.close).result()
            executor.shutdown()


class _WithoutTitles(GenerateJsonSchema):
    """Titles repeat the names and cost the policy tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _build_tool(name: str, function: Callable[..., Any]) -> Tool:
    description, parameter_docs = _read_docstring(function)
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"a tool takes named parameters only, {function.__qualname__} has {parameter}: name them one by one")
        if parameter.name not in hints:
            raise TypeError(f"every parameter of a tool must have a type, {function.__qualname__} has none for {parameter.name}: add it")
        annotation = hints[parameter.name]
        if parameter.name in parameter_docs:
            annotation = Annotated[annotation, Field(description=parameter_docs[parameter.name])]
        if parameter.default is not parameter.empty:
            annotation, defaults[parameter.name] = NotRequired[annotation], parameter.default
        fields[parameter.name] = annotation
    arguments = TypedDict(name, fields)  # pyright: ignore - the fields are only known now
    arguments.__pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # pyright: ignore
    reader: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)  # pyright: ignore
    parameters = reader.json_schema(schema_generator=_WithoutTitles)
    parameters.pop("title", None)
    for field, default in defaults.items():
        parameters["properties"][field]["default"] = json.loads(to_json(default))
    return Tool(ToolSchema(name, description, parameters), function, reader)


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the first paragraph on one line, and the text of each later line of the form `name: text`."""
    text = inspect.getdoc(function)
    if not text:
        raise TypeError(f"a tool must have a docstring, {function.__qualname__} has none: say in a sentence what it does")
    first, _, rest = text.partition("\n\n")
    return " ".join(first.split()), dict(re.findall(r"^\s*(\w+): (.+)$", rest, re.MULTILINE))
