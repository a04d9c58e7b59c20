"""What mybinder.org would build and run: its Dockerfile without a daemon, and its steps in a fresh environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"
QUICKSTART = "notebooks/00_quickstart.ipynb"
SCRIPTS = ["postBuild", "start"]
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"


@pytest.fixture(scope="module")
def dockerfile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What repo2docker renders of binder/. It copies the folder that it is given: here, only that part of it."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(BINDER, folder / "binder")
    user = ["--user-id", "1000", "--user-name", "jovyan"]
    rendered = subprocess.run(
        [sys.executable, "-m", "repo2docker", "--no-build", "--debug", *user, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert rendered.returncode == 0, rendered.stderr
    return rendered.stdout + rendered.stderr


def test_the_image_has_the_python_that_nbtrain_needs(dockerfile: str) -> None:
    built = re.search(r"conda environment for python=(\d+)\.(\d+)", dockerfile)
    assert built is not None
    oldest = _project()["requires-python"].removeprefix(">=").split(".")
    assert [int(part) for part in built.groups()] >= [int(part) for part in oldest]


def test_the_image_installs_then_copies_then_builds_then_starts(dockerfile: str) -> None:
    steps = [
        'pip install --no-cache-dir -r "binder/requirements.txt"',
        "COPY --chown=1000:1000 src/ ${REPO_DIR}/",
        "RUN ./binder/postBuild",
        'ENV R2D_ENTRYPOINT="${REPO_DIR}/binder/start"',
    ]
    places = [dockerfile.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash_and_may_run(name: str) -> None:
    script = BINDER / name
    assert script.read_text().startswith("#!/bin/bash\nset -euo pipefail\n")
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_start_hands_over_to_its_arguments() -> None:
    assert (BINDER / "start").read_text().splitlines()[-1] == 'exec "$@"'
    shown = subprocess.run(
        [str(BINDER / "start"), "printenv", "MALLOC_ARENA_MAX"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "2\n"


def test_requirements_are_those_of_the_project() -> None:
    project = _project()
    wanted = [*project["dependencies"], *project["optional-dependencies"]["lab"]]
    given = {found.name: found for found in map(Requirement, _requirements())}
    assert given.keys() == {Requirement(line).name for line in wanted}
    torch = given.pop("torch")
    (pin,) = torch.specifier
    assert pin.operator == "=="
    assert pin.version.endswith("+cpu")
    for line in wanted:
        asked = Requirement(line)
        if asked.name == "torch":
            assert asked.specifier.contains(pin.version)
        else:
            assert given[asked.name].specifier == asked.specifier


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_steps_run_in_a_fresh_environment(tmp_path: Path) -> None:
    """All that the Dockerfile runs, on one core, up to the quickstart's last cell."""
    repository, environment = _clone(tmp_path / "repository"), tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    local = tmp_path / "requirements.txt"
    local.write_text("\n".join(_requirements()))  # without the index of CPU builds, which tests don't reach
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JUPYTER", "IPYTHON"))},
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=repository, env=variables, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    run("python", "-m", "pip", "install", "--quiet", "--no-cache-dir", "-r", str(local))
    run("./binder/postBuild")
    run("python", "-m", "pip", "check")
    core = str(min(os.sched_getaffinity(0)))
    start = ["taskset", "--cpu-list", core, "./binder/start"]
    convert = ["jupyter", "nbconvert", "--to", "notebook", "--execute", "--stdout"]
    executed = json.loads(run(*start, *convert, QUICKSTART))
    assert any(cell.get("outputs") for cell in executed["cells"])


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _requirements() -> list[str]:
    """The lines that name packages; the one option must be the index of torch's CPU builds."""
    lines = [line.strip() for line in (BINDER / "requirements.txt").read_text().splitlines()]
    kept = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in kept if line.startswith("-")] == [CPU_INDEX]
    return [line for line in kept if not line.startswith("-")]


def _clone(folder: Path) -> Path:
    """The tracked files, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder
