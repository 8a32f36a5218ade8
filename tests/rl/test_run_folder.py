import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import RunConfig
from rl.run_folder import RunFolderError, check_room, create_run_folder, open_run_folder, write_json_atomically

NOW = datetime(2026, 1, 2, 3, 4, 5)


def config_for(folder: Path) -> RunConfig:
    return load_config("smoke", [f"output.folder={folder}"])


def test_a_new_run_folder_is_named_by_recipe_and_time_and_holds_the_resolved_config(tmp_path):
    config = config_for(tmp_path / "a" / "runs")

    folder = create_run_folder(config, now=NOW)

    assert folder.path == tmp_path / "a" / "runs" / "smoke-20260102-030405"
    assert load_config(folder.config) == config
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", "config.toml", "environment.json", "trajectories"]


def test_the_environment_records_commit_versions_machine_and_command(tmp_path):
    environment = json.loads(create_run_folder(config_for(tmp_path)).environment.read_text())

    assert set(environment) == {"git", "packages", "python", "platform", "cpu_count", "usable_cpu_count", "command_line"}
    assert {"torch", "ray", "transformers"} <= set(environment["packages"])
    assert environment["git"] is None or set(environment["git"]) == {"commit", "is_dirty"}


def test_a_folder_is_never_used_twice(tmp_path):
    names = [create_run_folder(config_for(tmp_path), now=NOW).path.name for _ in range(3)]

    assert names == ["smoke-20260102-030405", "smoke-20260102-030405-2", "smoke-20260102-030405-3"]


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "runs").write_text("")

    for folder in (tmp_path / "runs", tmp_path / "runs" / "deeper"):
        with pytest.raises(RunFolderError, match=f"output.folder must be a folder, got {folder}, where a file is in the way"):
            create_run_folder(config_for(folder))


def test_a_folder_that_cannot_be_written_is_named():
    # /proc refuses new folders even to root, for whom permission bits mean nothing.
    with pytest.raises(RunFolderError, match="must be writable, got /proc/runs"):
        create_run_folder(config_for(Path("/proc/runs")))
    with pytest.raises(RunFolderError, match="/proc must be writable, got: "):
        check_room(Path("/proc"), needed_bytes=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user whom permission bits bind, not root")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)

    with pytest.raises(RunFolderError, match="must be writable"):
        create_run_folder(config_for(tmp_path))


def test_too_little_room_is_told_before_anything_is_made(tmp_path):
    with pytest.raises(RunFolderError, match=r"must have 600 MiB free, got 599 MiB: make room or choose another output.folder"):
        create_run_folder(config_for(tmp_path), estimated_bytes=100 * 2**20, measure_free_bytes=lambda _: 599 * 2**20)

    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_opens_again(tmp_path):
    folder = create_run_folder(config_for(tmp_path))

    assert open_run_folder(folder.path) == folder


def test_what_is_no_run_folder_is_told_with_the_newest_run_beside_it(tmp_path):
    with pytest.raises(RunFolderError, match=f"got {tmp_path}, which has no config.toml and environment.json: there is no run in"):
        open_run_folder(tmp_path)

    folder = create_run_folder(config_for(tmp_path), now=NOW)

    with pytest.raises(RunFolderError, match=f"which does not exist: the newest run in {tmp_path} is {folder.path}"):
        open_run_folder(tmp_path / "smoke-2")
    with pytest.raises(RunFolderError, match=f"the newest run in {tmp_path} is {folder.path}"):
        open_run_folder(tmp_path)
    with pytest.raises(RunFolderError, match=f"did you mean {folder.path}"):
        open_run_folder(folder.checkpoints)


def test_an_atomic_write_replaces_the_file_or_leaves_it(tmp_path):
    path = tmp_path / "a.json"
    write_json_atomically(path, {"x": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomically(path, {"x": float("nan")})

    assert json.loads(path.read_text()) == {"x": 1}
    assert [child.name for child in tmp_path.iterdir()] == ["a.json"]
