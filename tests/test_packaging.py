"""What is shipped: the wheel's contents, the type check's reach, and rules that every source file keeps."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]
MOVED = [folder for package, folder in FOLDERS.items() if package != folder]
CACHES = shutil.ignore_patterns("__pycache__", "*.egg-info")


def source_files(*suffixes: str, folders: tuple[str, ...] = ("scripts", "tests", "benchmarks")) -> list[Path]:
    """The files of the package and of `folders` that end in one of `suffixes`."""
    places = [ROOT / folder for folder in (*FOLDERS.values(), *folders)]
    return sorted(path for place in places for path in place.rglob("*") if path.suffix in suffixes)


def installed_name(path: Path) -> str:
    """The place inside the wheel of a source file of the package."""
    for package, folder in FOLDERS.items():
        if path.is_relative_to(ROOT / folder):
            return f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
    raise ValueError(f"{path} belongs to no package folder of pyproject.toml")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it, built from a copy so that nothing old is swept in."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=CACHES)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return out


@pytest.fixture(scope="session")
def wheel_names(built: Path) -> set[str]:
    """The paths inside the wheel."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


def test_wheel_holds_every_package_file(wheel_names: set[str]) -> None:
    expected = {installed_name(path) for path in source_files(".py", ".yaml", ".typed", ".css", ".jinja", folders=())}
    expected |= {installed_name(path) for path in (ROOT / "dspark_lightning" / "assets").rglob("*") if path.is_file()}
    assert expected - wheel_names == set()
    assert {"dspark_lightning/callbacks/__init__.py", "dspark_lightning/py.typed"} <= expected


def test_wheel_has_one_top_level_package(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name}
    assert tops == {"dspark_lightning"}


def test_sdist_holds_the_moved_folders(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "NOTICE", "pyproject.toml", *(f"{folder}/__init__.py" for folder in MOVED)} <= names


def test_every_package_folder_is_listed() -> None:
    with_code = {installed_name(path).rpartition("/")[0].replace("/", ".") for path in source_files(".py", folders=())}
    assert with_code == set(SETTINGS["tool"]["setuptools"]["packages"])


def test_constraints_pin_every_dependency_inside_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    extras = SETTINGS["project"]["optional-dependencies"].values()
    for text in [*SETTINGS["project"]["dependencies"], *(text for extra in extras for text in extra)]:
        requirement = Requirement(text)
        assert pins[requirement.name.lower()] in requirement.specifier, text


def test_hooks_run_the_commands_of_the_makefile() -> None:
    (source,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    makefile = (ROOT / "Makefile").read_text()
    recipes = re.findall(r"^(?:lint|types): \$\(STAMP\)\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    commands = [
        line.removeprefix("\t@").replace("$(BIN)", ".venv/bin") for each in recipes for line in each.splitlines()
    ]
    assert source["repo"] == "local"
    assert [hook["entry"] for hook in source["hooks"]] == commands and len(commands) == 3
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in source["hooks"])


def test_typecheck_reads_the_moved_folders(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "scripts" / "typecheck.py", tmp_path / "scripts")
    for folder in [*FOLDERS.values(), "benchmarks"]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text('"""Empty."""\n')
    for folder in MOVED:
        (tmp_path / folder / "planted.py").write_text('"""Wrong on purpose."""\n\nNUMBER: int = "text"\n')

    command = [sys.executable, str(tmp_path / "scripts" / "typecheck.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.returncode == 1, run.stdout + run.stderr
    seen = re.findall(r"^dspark_lightning/(\w+)/planted\.py:3: error: Incompatible types", run.stdout, re.MULTILINE)
    assert sorted(seen) == sorted(MOVED)


def imported_modules(path: Path) -> set[str]:
    """The dotted names that `path` imports; a relative import starts with a dot."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def test_imports_name_the_installed_package() -> None:
    """`import callbacks` works at the repository root only, and gives second copies of the classes."""
    for path in source_files(".py"):
        tops = {name.split(".")[0] for name in imported_modules(path)}
        assert not tops & {"", *MOVED}, path


def test_source_files_stay_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in source_files(".py")}
    assert {path: length for path, length in lengths.items() if length > 400} == {}


def test_nothing_names_a_folder_of_the_developers() -> None:
    names = (
        "Makefile",
        "NOTICE",
        "pyproject.toml",
        "constraints.txt",
        "mkdocs.yml",
        ".ci/run",
        ".pre-commit-config.yaml",
    )
    tops = [*(ROOT / name for name in names), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for path in [*tops, *source_files(".py", ".yaml", ".json", ".jinja", ".md")]:
        assert not re.search(r"/wo[r]k/|\.\./share[d]", path.read_text()), path


@pytest.fixture(scope="session")
def wheel_environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel, and this one's packages behind it in place of a download."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    paths = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    bin_folder = Path(sysconfig.get_path("scripts", vars=paths))
    command = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(next(built.glob("*.whl")))], check=True, env=_bare_environment())
    return bin_folder


def _bare_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _run(command: list[str], folder: Path) -> str:
    run = subprocess.run(
        command, cwd=folder, env=_bare_environment(), capture_output=True, text=True, check=False, timeout=240
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
def test_wheel_alone_has_every_package(wheel_environment: Path, tmp_path: Path) -> None:
    listed = SETTINGS["tool"]["setuptools"]["packages"]
    code = f"import importlib, sys; print(*(importlib.import_module(n).__file__ for n in {listed}), sep='\\n')"
    files = _run([str(wheel_environment / "python"), "-c", code], tmp_path).splitlines()
    assert len(files) == len(listed)
    assert all(Path(name).is_relative_to(wheel_environment.parent) for name in files), files


@pytest.mark.slow
def test_wheel_alone_leaves_the_users_own_names_free(wheel_environment: Path, tmp_path: Path) -> None:
    for folder in MOVED:
        (tmp_path / f"{folder}.py").write_text("MINE = True\n")
    code = f"import dspark_lightning, {', '.join(MOVED)}; print({' and '.join(f'{name}.MINE' for name in MOVED)})"
    assert _run([str(wheel_environment / "python"), "-c", code], tmp_path).strip() == "True"


@pytest.mark.slow
def test_wheel_alone_runs_the_command(wheel_environment: Path, tmp_path: Path) -> None:
    assert "fit" in _run([str(wheel_environment / "dspark"), "--help"], tmp_path)


@pytest.mark.slow
def test_wheel_alone_trains_the_quickstart(wheel_environment: Path, tmp_path: Path) -> None:
    (config,) = wheel_environment.parent.rglob("dspark_lightning/configs/quickstart.yaml")
    short = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1"]
    _run([str(wheel_environment / "dspark"), "fit", "--config", str(config), *short], tmp_path)
    assert list(tmp_path.rglob("model.safetensors"))
