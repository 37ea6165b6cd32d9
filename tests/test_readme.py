"""The README is true of the tree: commands, verbs, modules, keys of a study."""

import re
import tomllib
from pathlib import Path

import pytest

from tuner import spec as specs
from tuner.cli import app
from tuner.dimensions import Part

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """Return the text under a heading of the second level."""
    return re.split(r"^## ", README.split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("heading", ["Run it", "Test it"])
def test_one_command_of_one_line_stands_under_the_heading(heading: str) -> None:
    """The two set-up commands are the only code blocks there; the file they name exists."""
    blocks = re.findall(r"(?:^    \S[^\n]*\n)+|^```.*?^```", section(heading), flags=re.MULTILINE | re.DOTALL)

    assert len(blocks) == 1
    words = blocks[0].split()
    assert blocks[0].count("\n") == 1
    assert (words[0], (ROOT / words[1]).is_file()) == ("python3", True)


def test_every_verb_is_explained() -> None:
    """The table of verbs and the command line agree."""
    told = set(re.findall(r"^\| `tune (\w+)", README, flags=re.MULTILINE))

    assert told == {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }


def test_every_module_is_on_the_map() -> None:
    """The map of the code names every module and room."""
    there = {p.stem for p in (ROOT / "tuner").glob("*.py")} - {"__init__", "__main__"}
    there |= {f"{p.parent.name}/" for p in (ROOT / "tuner").glob("*/__init__.py")}

    assert there == set(re.findall(r"`(\w+/?)`", section("Map of the code"))) & (there | {"x"})
    assert there <= set(re.findall(r"`(\w+/?)`", section("Map of the code")))


def test_every_benchmark_is_named_by_its_command() -> None:
    """Each package under benchmarks/ can be found and run from here."""
    there = {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}

    assert there == set(re.findall(r"`python -m benchmarks\.(\w+)", README))


def test_the_studies_shown_are_valid_and_show_every_key() -> None:
    """Each YAML of the README parses, and no key of a study is missing from them."""
    shown = re.findall(r"```yaml\n(.*?)```", section("The study file"), flags=re.DOTALL)

    assert [specs.parse(text, "README.md").name for text in shown] == ["chat", "split"]
    assert issubclass(specs.StudySpec, Part)
    for key in set(specs.StudySpec.model_fields) - {"sampler"}:
        assert re.search(rf"^{key}:", "\n".join(shown), flags=re.MULTILINE), key


def test_no_page_that_is_linked_is_missing() -> None:
    """Relative links lead somewhere."""
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_version_is_written_once() -> None:
    """The package and pyproject agree."""
    import tuner

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == tuner.__version__
