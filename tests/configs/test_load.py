import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import ConfigError, dump_config, find_recipe, load_config, parse_overrides, recipe_names, valid_keys

MINIMAL = """
name = "tiny"
[model]
path = "builtin:ledger-start"
[env]
id = "cairn/Ledger-v0"
[learner]
num_steps = 2
"""


def write(tmp_path: Path, text: str = MINIMAL) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def problems_of(path: Path | str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


@pytest.mark.parametrize("name", ["quickstart", "quickstart_sync", "smoke", "smollm2_ledger"])
def test_a_shipped_recipe_loads_by_its_bare_name_and_survives_a_round_trip(name, tmp_path):
    config = load_config(name)

    assert load_config(write(tmp_path, dump_config(config))) == config


def test_recipe_names_lists_what_ships():
    assert recipe_names() == ["quickstart", "quickstart_sync", "smoke", "smollm2_ledger"]


def test_loading_every_recipe_imports_nothing_heavy():
    code = """
import sys
from configs.load import load_config, recipe_names
for name in recipe_names():
    load_config(name)
print([name for name in ("torch", "ray", "vllm", "numpy", "transformers") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def test_a_bare_name_with_suffix_finds_the_shipped_recipe_and_a_local_file_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("smoke.toml").parent.name == "recipes"

    (tmp_path / "smoke.toml").write_text(MINIMAL)

    assert load_config("smoke.toml").name == "tiny"


def test_overrides_are_read_as_toml_and_the_last_one_wins(tmp_path):
    config = load_config(write(tmp_path), ["learner.learning_rate=1e-3", "learner.learning_rate = 2e-5", "reward.shuffle=true"])

    assert (config.learner.learning_rate, config.reward.shuffle) == (2e-5, True)


def test_an_override_that_is_no_toml_is_a_bare_text(tmp_path):
    config = load_config(write(tmp_path), ["model.path=./my models/a#1", "output.folder=2026-01-02", "mode=sync"])

    assert (config.model.path, config.output.folder, config.mode) == ("./my models/a#1", "2026-01-02", "sync")


def test_an_override_makes_nested_optional_sections(tmp_path):
    config = load_config(
        write(tmp_path), ["mode=async", "asynchrony.max_staleness=4", "model.lora.rank=8", 'model.lora.target_modules=["q_proj"]']
    )

    assert config.asynchrony is not None
    assert config.model.lora is not None
    assert (config.asynchrony.max_staleness, config.model.lora.rank, config.model.lora.target_modules) == (4, 8, ("q_proj",))


def test_none_removes_an_optional_section_but_stays_a_word_elsewhere():
    config = load_config("quickstart", ["mode=sync", "asynchrony=none", "learner.advantage.baseline=none"])

    assert config.asynchrony is None
    assert config.learner.advantage.baseline == "none"


def test_environment_options_keep_their_types(tmp_path):
    config = load_config(write(tmp_path), ["env.options.level=2", "env.options.rate=2.0", "env.options.strict=true", "env.options.name=x"])

    assert [(value, type(value)) for value in config.env.options.values()] == [(2, int), (2.0, float), (True, bool), ("x", str)]


def test_overrides_alone_become_nested_values():
    assert parse_overrides(["level=2", "a.b=x", "a.c=true"]) == {"level": 2, "a": {"b": "x", "c": True}}


@pytest.mark.parametrize("override", ["learner.num_steps", "learner.num_steps=", "=3", "learner..num_steps=3", ""])
def test_a_malformed_override_is_named(tmp_path, override):
    (problem,) = problems_of(write(tmp_path), override)

    assert problem.startswith(f"an override must read section.key=value, got {override!r}")


def test_an_override_below_a_value_is_refused(tmp_path):
    assert problems_of(write(tmp_path), "name.first=x") == (
        "the override 'name.first=x' needs a section name, got the value \"tiny\" there",
    )


def test_a_line_break_in_an_override_adds_no_second_key(tmp_path):
    assert problems_of(write(tmp_path), "seed=1\nmode='async'") == ("seed must be a whole number, got \"1\\nmode='async'\"",)


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("learner.learning_rte=1e-5", "did you mean learner.learning_rate?"),
        ("learner.temperature=0.7", "did you mean rollout.temperature or evaluation.temperature?"),
        ("learner.clip_hi=0.3", "did you mean learner.clip_high?"),
        ("num_steps=3", "did you mean learner.num_steps?"),
        ("lerner.num_steps=3", "did you mean learner?"),
        ("model.lora.rnk=3", "did you mean model.lora.rank?"),
        ("reward.xyzzy=3", "the keys of [reward] are reward.success_weight, reward.compliance_weight, reward.shuffle"),
    ],
)
def test_an_unknown_key_is_named_in_full_with_the_nearest_valid_one(tmp_path, override, suggestion):
    key = override.split("=")[0]
    named = "lerner" if key.startswith("lerner") else key

    assert problems_of(write(tmp_path), override) == (f"{named} is not a key of a recipe: {suggestion}",)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("learner.num_steps=0", "learner.num_steps must be at least 1, got 0"),
        ("learner.num_steps=true", "learner.num_steps must be a whole number, got true"),
        ("learner.num_steps=3.5", "learner.num_steps must be a whole number, got 3.5"),
        ('learner.num_steps="3"', 'learner.num_steps must be a whole number, got "3"'),
        ("learner.learning_rate=-1", "learner.learning_rate must be greater than 0, got -1"),
        ("learner.learning_rate=inf", "learner.learning_rate must be a finite number, got inf"),
        ("learner.learning_rate=nan", "learner.learning_rate must be a finite number, got nan"),
        ("learner.clip_low=1", "learner.clip_low must be less than 1.0, got 1"),
        ("reward.shuffle=True", 'reward.shuffle must be true or false, got "True"'),
        ("model.path=3", "model.path must be a text in quotes, got 3"),
        ("model.lora=3", "model.lora must be a section with keys of its own, got 3"),
        ("model.lora.target_modules=q_proj", 'model.lora.target_modules must be a list in brackets, got "q_proj"'),
        ("mode=asynk", "mode must be one of 'sync' or 'async', got \"asynk\": did you mean async?"),
        ("env.options.levels=[1]", "env.options.levels must be a number, a text, true or false, got [1]"),
        (f"seed={10**30}", f"seed must fit into 64 bits, got {10**30}"),
    ],
)
def test_a_value_that_does_not_fit_says_what_must_hold_and_what_was_got(tmp_path, override, problem):
    assert problems_of(write(tmp_path), override) == (problem,)


def test_temperature_zero_is_refused_for_training_with_the_reason(tmp_path):
    (problem,) = problems_of(write(tmp_path), "rollout.temperature=0")

    assert problem.startswith("rollout.temperature must be greater than 0, got 0: greedy samples are all alike")
    assert load_config(write(tmp_path), ["evaluation.temperature=0"]).evaluation.temperature == 0


def test_a_missing_key_says_what_it_means(tmp_path):
    text = MINIMAL.replace("num_steps = 2", "").replace('[env]\nid = "cairn/Ledger-v0"', "")

    assert problems_of(write(tmp_path, text)) == (
        "env is missing: add the section [env]",
        "learner.num_steps is missing: add it. Optimiser stages of the run; the policy version grows by one each.",
    )


def test_contradicting_fields_are_both_named(tmp_path):
    (problem,) = problems_of(write(tmp_path), "asynchrony.max_staleness=1")

    assert problem == '[asynchrony] is only read with mode = "async", got mode = "sync": remove the section or change mode'


def test_all_problems_are_told_at_once(tmp_path):
    problems = problems_of(write(tmp_path), "seed=-1", "learner.num_stepz=1", "mode=fast")

    assert [problem.split()[0] for problem in problems] == ["seed", "mode", "learner.num_stepz"]


def test_invalid_toml_names_the_file_and_the_line(tmp_path):
    path = write(tmp_path, "a = 1\nb c\n")

    assert problems_of(path) == (f"{path} must be valid TOML, got: Expected '=' after a key in a key/value pair (at line 2, column 3)",)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xff\xfe")

    assert problems_of(path) == (f"{path} must be UTF-8 text, got other bytes at position 0: save it as UTF-8",)


def test_a_date_is_refused(tmp_path):
    path = write(tmp_path, MINIMAL.replace('"tiny"', "2026-01-02"))

    assert problems_of(path) == ("name must not be a date, got 2026-01-02: put it in quotes if a text is meant",)


def test_a_missing_recipe_suggests_the_nearest_shipped_one():
    assert problems_of("quikstart")[0].startswith("a recipe must exist, got quikstart: did you mean quickstart?")
    assert problems_of("elsewhere/zzz.toml")[0].startswith("a recipe must exist, got elsewhere/zzz.toml: name a TOML file")


def test_a_folder_is_no_recipe(tmp_path):
    assert problems_of(tmp_path) == (f"a recipe must be a TOML file, got the folder {tmp_path}: name a file in it",)


def test_valid_keys_are_dotted_and_hold_sections():
    assert {"model", "model.lora", "model.lora.rank", "learner.advantage.scale"} <= set(valid_keys())
