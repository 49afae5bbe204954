"""Four folders of the root are packages of loong, and are nothing else. Tests have the same folders."""

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("kernels", "scheduler", "launcher", "workloads")
OF_THE_WHOLE = {"end_to_end", "exactness", "hardening", "support"}  # folders of tests


def python(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sources of a wheel, so that building leaves nothing in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("loong", *LINKED):
        copytree(ROOT / name, source / name, symlinks=True, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(target)!r})"
    built = python("-c", build, cwd=source)
    assert built.returncode == 0, built.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.mark.parametrize("name", LINKED)
def test_a_link_leads_to_the_folder_of_the_root_and_is_relative(name: str) -> None:
    link = ROOT / "loong" / name
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name
    assert link.is_dir()


@pytest.mark.parametrize("name", LINKED)
def test_the_package_is_the_same_files(name: str) -> None:
    found = importlib.import_module(f"loong.{name}").__file__
    assert found is not None
    assert Path(found).samefile(ROOT / name / "__init__.py")


@pytest.mark.parametrize("name", LINKED)
def test_no_folder_is_importable_by_its_bare_name(name: str, tmp_path: Path) -> None:
    tried = python("-c", f"import {name}", cwd=tmp_path)
    assert f"No module named '{name}'" in tried.stderr


def test_a_wheel_holds_each_file_once_and_under_loong(source: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    code = [name for name in names if ".dist-info/" not in name]
    folders = [source / "loong", *(source / "loong" / name for name in LINKED)]
    files = {path.relative_to(source) for folder in folders for path in folder.rglob("*.py")}
    pages = [Path("loong/server/dashboard/page"), Path("loong/runs/report/page")]
    parts = {page / part.name for page in pages for part in (source / page).iterdir()}
    assert {pages[0] / "index.html", pages[1] / "report.html.jinja"} <= parts
    assert set(map(Path, code)) == files | parts | {Path("loong/py.typed")}


def test_an_unpacked_wheel_is_importable_as_loong_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    names = "; ".join(f"print(loong.{name}.__file__)" for name in LINKED)
    shown = python("-c", f"import loong.{', loong.'.join(LINKED)}; {names}", cwd=tmp_path)
    assert shown.stdout.split() == [str(tmp_path / "loong" / name / "__init__.py") for name in LINKED]
    assert "No module named 'kernels'" in python("-c", "import kernels", cwd=tmp_path).stderr


def test_the_tests_mirror_the_packages() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    tested = {folder for folder in folders if folder.parts and folder.parts[0] not in OF_THE_WHOLE}
    assert {str(folder) for folder in tested if not (ROOT / "loong" / folder).is_dir()} == set()
