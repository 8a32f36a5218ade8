"""Spaces of conversations."""

from envs.messages import AssistantTurn, Message, Observation, ToolSchema
from envs.spaces import ObservationSpace, TurnSpace

SCHEMA = ToolSchema(
    "pick",
    "Pick.",
    {"type": "object", "properties": {"count": {"type": "integer"}, "kind": {"enum": ["a"]}, "name": {"type": "string"}}},
)


def test_an_observation_is_made_of_messages():
    space = ObservationSpace()
    assert Observation((Message("tool", "é\n{}"),)) in space
    assert Observation((), (SCHEMA,)) in space
    assert "text" not in space
    assert Observation(("text",)) not in space  # pyright: ignore - wrong on purpose
    assert Observation((Message("robot", "x"),)) not in space  # pyright: ignore - wrong on purpose


def test_a_turn_is_text_or_parsed():
    space = TurnSpace((SCHEMA,))
    assert "" in space
    assert AssistantTurn("Done.") in space
    assert 3 not in space
    assert None not in space


def test_samples_belong_to_their_space_and_follow_the_seed():
    for make in (ObservationSpace, lambda seed: TurnSpace((SCHEMA,), seed), lambda seed: TurnSpace((), seed)):
        samples = [make(4).sample() for _ in range(2)]
        assert samples[0] in make(0)
        assert samples[0] == samples[1]


def test_a_sampled_turn_fits_the_schema():
    turn = TurnSpace((SCHEMA,), seed=0).sample()
    assert isinstance(turn, AssistantTurn)
    arguments = turn.calls[0].arguments  # pyright: ignore - a well-formed call
    assert (type(arguments["count"]), arguments["kind"], type(arguments["name"])) == (int, "a", str)


def test_spaces_are_compared_by_value():
    assert ObservationSpace() == ObservationSpace()
    assert TurnSpace((SCHEMA,)) == TurnSpace((SCHEMA,))
    assert TurnSpace((SCHEMA,)) != TurnSpace(())
