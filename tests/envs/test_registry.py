"""Environments by id, built-in and from plugins."""

import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

from envs.ledger.env import LedgerEnv
from envs.registry import EnvRecord, find_record, list_envs, load_plugins, make_env, register_env, split_seeds

PLUGIN = """
from envs import EnvRecord, ToolEnv, register_env, tool
from envs.messages import Message, Verification

class Lamp(ToolEnv):
    def __init__(self, *, is_bright: bool = False):
        super().__init__()
    def start(self, seed):
        self.is_on = False
        return (Message("user", "Switch lamp %d on." % seed),)
    @tool
    def switch(self, on: bool) -> str:
        "Switch the lamp."
        self.is_on = on
        return "ok"
    def verify(self):
        return Verification(self.is_on, {})

def register():
    register_env(EnvRecord("NAME/Lamp-v0", "NAME:Lamp", "NAME", "MIT", "A lamp.",
        {"train": range(0, 10), "validation": range(10, 12), "test": range(12, 14)}, has_oracle=False))
"""


def record(env_id: str, **changes) -> EnvRecord:
    splits = {"train": range(0, 10), "validation": range(10, 12), "test": range(12, 14)}
    values = {"entry_point": "envs.ledger.env:LedgerEnv", "package": "p", "licence": "MIT", "description": "d", "splits": splits}
    return EnvRecord(**{"id": env_id, **values, "has_oracle": False, **changes})


def install_plugin(folder: Path, name: str, source: str, entry_point: str) -> None:
    """Lay a package out as pip does."""
    (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[cairn.envs]\nx = {entry_point}\n")


def test_importing_the_package_loads_neither_torch_nor_ray_nor_the_environments():
    code = "import sys, envs, envs.registry; print([m for m in ('torch', 'ray', 'transformers', 'envs.ledger.env') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_ledger_is_listed_with_its_facts():
    (ledger,) = [record for record in list_envs() if record.id == "cairn/Ledger-v0"]
    assert (ledger.package, ledger.licence, ledger.has_oracle) == ("cairn-rl", "Apache-2.0", True)


def test_made_environments_carry_no_wrapper():
    env = make_env("cairn/Ledger-v0", {"max_calls": 3})
    assert type(env) is LedgerEnv
    assert env.spec is not None
    assert env.spec.id == "cairn/Ledger-v0"


def test_gymnasium_makes_it_too():
    env = gymnasium.make("cairn/Ledger-v0", max_calls=3)
    assert env.reset(seed=1)[0] == make_env("cairn/Ledger-v0", {"max_calls": 3}).reset(seed=1)[0]


def test_an_unknown_id_names_the_nearest():
    with pytest.raises(ValueError, match=r"cairn/Ledgr-v0 is not, did you mean cairn/Ledger-v0\?"):
        make_env("cairn/Ledgr-v0")


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ValueError, match=r"cairn/Ledger-v0 has no option max_call, did you mean max_calls\?"):
        make_env("cairn/Ledger-v0", {"max_call": 3})
    with pytest.raises(ValueError, match="has no option zzz, it has database, min_calls, max_calls"):
        make_env("cairn/Ledger-v0", {"zzz": 3})


def test_an_unknown_split_names_the_three():
    with pytest.raises(ValueError, match=r"a split must be one of train, validation, test, got tests, did you mean test\?"):
        split_seeds("cairn/Ledger-v0", "tests")


def test_the_splits_of_the_ledger_share_no_seed():
    train, validation, test = (split_seeds("cairn/Ledger-v0", split) for split in ("train", "validation", "test"))
    assert train.stop <= validation.start
    assert validation.stop <= test.start
    assert min(len(train), len(validation), len(test)) >= 1_000_000


def test_a_record_with_common_seeds_or_missing_splits_is_refused():
    with pytest.raises(ValueError, match="must not share a seed"):
        record("t/Overlap-v0", splits={"train": range(0, 10), "validation": range(9, 12), "test": range(12, 14)})
    with pytest.raises(ValueError, match="must have the splits train, validation, test"):
        record("t/Missing-v0", splits={"train": range(0, 10)})
    with pytest.raises(ValueError, match="not empty"):
        record("t/Empty-v0", splits={"train": range(0, 10), "validation": range(10, 10), "test": range(12, 14)})


def test_registering_again_does_nothing_and_another_record_is_refused():
    register_env(record("t/Twice-v0"))
    register_env(record("t/Twice-v0"))
    with pytest.raises(ValueError, match="t/Twice-v0 is already that of p"):
        register_env(record("t/Twice-v0", package="q"))


def test_an_id_with_a_module_imports_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "lamp_a.py").write_text(PLUGIN.replace("NAME", "lamp_a") + "\nregister()\n")
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env("lamp_a:lamp_a/Lamp-v0", {"is_bright": True})
    assert env.reset(seed=4)[0].messages[0].content == "Switch lamp 4 on."
    with pytest.raises(ImportError, match="no_such_module is none"):
        make_env("no_such_module:Lamp-v0")


def test_plugins_are_loaded_from_entry_points_that_are_functions_or_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install_plugin(tmp_path, "lamp_b", PLUGIN.replace("NAME", "lamp_b"), "lamp_b:register")
    install_plugin(tmp_path, "lamp_c", PLUGIN.replace("NAME", "lamp_c") + "\nregister()\n", "lamp_c")
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins()
    load_plugins()
    assert find_record("lamp_b/Lamp-v0").licence == "MIT"
    assert make_env("lamp_c/Lamp-v0").reset(seed=4)[0].tools[0].name == "switch"


def test_a_broken_plugin_is_skipped_and_named_when_an_id_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install_plugin(tmp_path, "lamp_d", "raise OSError('no bulb')", "lamp_d")
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins()
    with pytest.raises(ValueError, match=r"the plugin x \(lamp_d\) could not be loaded: OSError: no bulb"):
        find_record("lamp_d/Lamp-v0")
