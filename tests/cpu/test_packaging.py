"""Contents of the wheel and the sdist; metadata, README and ARCHITECTURE.md must agree with the code."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from lt_runtime.cli import doctor

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
KERNELS = {file.name for file in (ROOT / "cuda_src").iterdir()}


def build(target: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = directory.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel")))


def test_the_wheel_holds_the_package_with_the_kernels_inside_and_nothing_else(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    assert KERNELS
    assert {f"lt_runtime/cuda_src/{kernel}" for kernel in KERNELS} <= names
    assert {"lt_runtime/__init__.py", "lt_runtime/py.typed", "lt_runtime/presets.json"} <= names
    assert {name.split("/")[0] for name in names} == {"lt_runtime", f"lt_runtime-{PROJECT['version']}.dist-info"}


def test_the_wheel_holds_the_licence_and_the_command(wheel: zipfile.ZipFile):
    info = f"lt_runtime-{PROJECT['version']}.dist-info"
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "lt_runtime = lt_runtime.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_the_sdist_holds_what_the_wheel_is_built_from(tmp_path: Path):
    with tarfile.open(build("sdist", tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "docs/README.md", "lt_runtime/__init__.py"}
    assert needed | {f"cuda_src/{kernel}" for kernel in KERNELS} <= names


def test_the_doctor_prescribes_what_the_extra_installs():
    assert set(doctor.CUDA_REQUIREMENTS.values()) == set(PROJECT["optional-dependencies"]["cuda13"])


def test_the_doctor_looks_for_packages_that_are_required():
    assert set(doctor.PACKAGES) == {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]}


def test_readme_asks_for_the_pythons_that_the_metadata_names():
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert f"Python {named[0]} to {named[-1]}" in README


def test_readme_asks_for_the_gpus_that_the_doctor_accepts():
    major, minor = divmod(doctor.MIN_COMPUTE_CAPABILITY, 10)
    assert f"compute capability {major}.{minor}" in README
    assert f"driver {doctor.MIN_DRIVER}" in README


def test_the_architecture_page_is_shipped_and_what_it_names_exists(wheel: zipfile.ZipFile):
    page = wheel.read("lt_runtime/ARCHITECTURE.md").decode()
    named = set(re.findall(r"`((?:\w+/)+|[\w/]+\.(?:py|json|cuh?))`", page)) - {"_x.py"}
    assert {"ops/call.py", "kernels/", "cuda_src/activations.cuh", "tests/cpu/"} <= named
    assert [name for name in named if not ((ROOT / "lt_runtime" / name).exists() or (ROOT / name).exists())] == []


def test_the_architecture_page_names_every_room_and_functions_that_exist():
    page = (ROOT / "lt_runtime" / "ARCHITECTURE.md").read_text()
    rooms = {folder.name for folder in (ROOT / "lt_runtime").iterdir() if (folder / "__init__.py").exists()}
    assert [room for room in rooms if f"`{room}/`" not in page] == []
    code = "\n".join(path.read_text() for path in [*ROOT.glob("lt_runtime/**/*.py"), *ROOT.glob("benchmarks/*.py")])
    defined = set(re.findall(r"^\s*(?:def |class )?(\w+)\b(?=[(:\[]| = )", code, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", page)) - {"yield"} <= defined
